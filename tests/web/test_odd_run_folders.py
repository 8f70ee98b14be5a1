"""An unreadable run folder is one line in lists, on the page and in ``burnish runs``; other runs are unaffected."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.cli import main
from burnish.report.metadata import launch_record
from burnish.serve.http.child import send_signal
from burnish.serve.page.runs import runs as found_runs
from burnish.serve.page.runs.runs import KnownRuns, find, read_run

HUGE = "9" * 400
ALIVE = {**launch_record([]), "time": 1.79e9}
DONE = {"state": "done", "time": 1.8e9, "sentence": "", "step": 3}


def writer_of(**files: Any) -> Callable[[Path], None]:
    """Return a function that writes files: text unchanged, other values as JSON; ``launch_json`` is launch.json."""

    def write(folder: Path) -> None:
        for name, content in files.items():
            stem, _, suffix = name.rpartition("_")
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")

    return write


def made(*work: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda folder: [one(folder) for one in work] and None


def log(*rows: str) -> Callable[[Path], None]:
    return writer_of(trainer_log_jsonl="".join(row + "\n" for row in rows))


def events(*rows: str) -> Callable[[Path], None]:
    return writer_of(launch_json=ALIVE, events_jsonl="".join(row + "\n" for row in rows))


def deep(folder: Path) -> None:
    (folder / "launch.json").write_text('{"a":' * 90_000 + "1" + "}" * 90_000)


def unreadable(folder: Path) -> None:
    (folder / "launch.json").mkdir()
    (folder / "trainer_log.jsonl").mkdir()


VALID_ROW = '{"current_steps": 3, "total_steps": 9, "loss": 1.5}'
ODD: dict[str, Callable[[Path], None]] = {
    "nan in a log": log('{"current_steps": 3, "loss": NaN, "eval_loss": NaN, "epoch": NaN, "throughput": -Infinity}'),
    "nan in a state": writer_of(trainer_state_json='{"max_steps": NaN, "log_history": [{"step": 1, "loss": NaN}]}'),
    "infinity by exponent": log('{"current_steps": 1e999, "loss": 1e999, "total_steps": 1e400}'),
    "huge whole numbers": log(f'{{"current_steps": {HUGE}, "loss": {HUGE}, "total_steps": {HUGE}, "epoch": {HUGE}, '
                              f'"throughput": {HUGE}}}', '{"current_steps": 1, "loss": 2.5, "lr": 0.5}'),
    "huge times": writer_of(launch_json=f'{{"pid": {HUGE}, "time": {HUGE}, "start_ticks": {HUGE}, "boot_id": {HUGE}}}'),
    "launch is a list": made(writer_of(launch_json=[1, 2]), log(VALID_ROW)),
    "launch is a list and nothing else": writer_of(launch_json=[1, 2]),
    "launch is torn": writer_of(launch_json='{"pid": 1'),
    "launch of other types": writer_of(launch_json={key: [{"a": None}] for key in ALIVE}),
    "launch without a command": writer_of(launch_json={**ALIVE, "argv": None}),
    "launch whose command is a number": writer_of(launch_json={**ALIVE, "argv": 3}),
    "launch of texts": writer_of(launch_json=dict.fromkeys([*ALIVE, "rows"], "\x1b[31mred\n")),
    "launch nested too deep": deep,
    "launch far in the future": writer_of(launch_json={**ALIVE, "time": 1e300}),
    "launch of another host": made(writer_of(launch_json={**ALIVE, "host": "x"}),
                                   log('{"current_steps": 1, "loss": 1, "step_seconds": "soon"}')),
    "outcome of other types": writer_of(launch_json=ALIVE, outcome_json={"state": ["done"], "time": "now", "step": "x",
                                                                       "sentence": {"a": 1}, "remedy": 3}),
    "outcome is a text": writer_of(launch_json=ALIVE, outcome_json='"done"'),
    "outcome without a time": writer_of(launch_json=ALIVE, outcome_json={"state": "done", "time": None}),
    "outcome nan": writer_of(launch_json=ALIVE, outcome_json='{"state": "failed", "time": NaN, "step": NaN}'),
    "events of other types": events(
        '{"kind": ["stage"], "text": [1]}', '{"kind": "stage", "text": {"a": 1}}', '{"kind": "best"}',
        '{"kind": "best", "text": 3}', '{"kind": "skipped", "count": "many"}', '{"kind": "skipped", "count": null}',
        "[1]", "7",
    ),
    "events with nan": events('{"kind": "x", "text": NaN, "run": "another", "n": 1e999}'),
    "events of another run": events('{"run": {"a": 1}, "kind": "best", "text": "b"}'),
    "checkpoints of odd names": made(log(VALID_ROW), *((lambda folder, n=n: (folder / f"checkpoint-{n}").mkdir())
                                                      for n in ("²", "٣", "-1", "", "1e3", "9" * 200, "7"))),
    "state of other types": writer_of(trainer_state_json={"log_history": [{"step": {}, "loss": []}, 3, None, "x"]}),
    "state whose history is a text": writer_of(trainer_state_json={"log_history": "none", "max_steps": []}),
    "state that is a number": writer_of(trainer_state_json="3"),
    "rows of other types": log('{"loss": [1], "current_steps": {}, "eval_loss": "low", "epoch": true, "lr": [2]}',
                               '{"loss": null}', '{"loss": {"a": 1}, "remaining_time": 3, "percentage": "x"}'),
    "rows with odd times": log('{"current_steps": 1, "loss": 1, "remaining_time": "999999999999 days, 1:00:00"}',
                               f'{{"current_steps": 2, "loss": 1, "remaining_time": "{HUGE}:00:00", "time": {HUGE}}}'),
    "half characters": log('{"current_steps": 1, "loss": 1, "note": "\\ud800"}'),
    "sentence of half characters": writer_of(launch_json=ALIVE, outcome_json='{"state": "failed", "time": 1.8e9, '
                                           '"sentence": "\\ud83d broken \\u001b[2J", "remedy": "\\udfff"}'),
    "folders in the place of files": unreadable,
    "links in a circle": lambda folder: os.symlink("launch.json", folder / "launch.json"),
    "given is a folder": made(log(VALID_ROW), lambda folder: (folder / "run.yaml").mkdir()),
    "state with a number of too many digits": writer_of(
        trainer_state_json='{"log_history": [{"step": ' + "9" * 4400 + ', "loss": "nan"}, {"step": true}]}'),
    "outcome is torn": writer_of(launch_json={**ALIVE, "pid": 2**30}, outcome_json='{"state": "do'),
    "launch without a host": made(writer_of(launch_json={k: v for k, v in ALIVE.items() if k != "host"}),
    log(VALID_ROW)), "rows of a data report": writer_of(launch_json={**ALIVE, "rows": {"dropped": "x", "seen": 1e400}}),
    "bytes": lambda folder: (folder / "launch.json").write_bytes(b"\xff\xfe\x00" * 100),
}  # fmt: skip


@pytest.fixture
def odd(root: Path) -> dict[str, Path]:
    """Add all odd folders to the valid runs of ``root``."""
    assert len(ODD) >= 20
    folders = {name: root / "odd" / name for name in ODD}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        ODD[name](folder)
    (root / "odd" / os.fsdecode(b"\xff\xfe not text")).mkdir()
    (root / "odd" / os.fsdecode(b"\xff\xfe not text") / "trainer_log.jsonl").write_text(VALID_ROW + "\n")
    assert socket.gethostname() != "x"
    return folders


def strict(text: str) -> Any:
    """Parse JSON without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_every_list_works_with_a_damaged_run(page: Any, odd: dict[str, Path]) -> None:
    status, _, text = page.send("GET", "/api/runs")
    assert status == 200
    runs = {run["name"]: run for run in strict(text)["runs"]}
    assert {"first", "factory", "trl"} <= set(runs)
    assert runs["first"]["state"] == "done"
    for name in ODD:
        assert name in runs, name
    assert runs["launch is torn"]["state"] == "unreadable"
    assert "launch.json" in runs["launch is torn"]["sentence"]
    assert runs["checkpoints of odd names"]["checkpoint"] == 7
    for path in ("/api/poll", "/runs", "/compare", "/api/models", "/api/datasets"):
        status, _, text = page.send("GET", path)
        assert status == 200, (path, text)
    strict(page.send("GET", "/api/poll")[2])


def test_every_view_of_a_damaged_run_works(page: Any, odd: dict[str, Path]) -> None:
    for run in page.get("/api/runs")["runs"]:
        for path in (f"/api/runs/{run['id']}", f"/api/runs/{run['id']}/series", f"/api/runs/{run['id']}/log",
                     f"/api/poll?runs={run['id']}&log=1&after={run['id']}:0:0:0:"):  # fmt: skip
            status, _, text = page.send("GET", path)
            assert status == 200, (run["name"], path, text)
            result = strict(text)
        assert all(message["data"]["run"] == run["id"] for message in result["messages"] if message["event"] == "event")
        for path in (f"/runs/{run['id']}", f"/api/runs/{run['id']}/report"):
            assert page.send("GET", path)[0] == 200, (run["name"], path)


@pytest.mark.parametrize("as_json", [False, True])
def test_runs_command_lists_damaged_runs(root: Path, odd: dict[str, Path], as_json: bool, capfd: Any) -> None:
    assert main(["runs", str(root), *(["--json"] if as_json else [])]) == 0
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert "\x1b[" not in out
    for name in (*ODD, "first", "factory", "trl"):
        assert name in out
    if as_json:
        for line in out.splitlines():
            strict(line)
    else:
        assert "unreadable" in out


def test_run_named_like_a_checkpoint_is_listed(root: Path, capfd: Any) -> None:
    for name in ("checkpoint-best", "checkpoint-3"):
        (root / name).mkdir()
        log(VALID_ROW)(root / name)
    assert main(["runs", str(root)]) == 0
    out = capfd.readouterr().out
    assert "checkpoint-best" in out
    assert "checkpoint-3" not in out


def test_internal_error_in_one_folder_is_one_line(root: Path, monkeypatch: Any, capfd: Any) -> None:
    from burnish.serve.page.runs import runs as module

    def fails(folder: Path) -> list[int]:
        if folder.name == "first":
            raise ZeroDivisionError("not foreseen")
        return []

    monkeypatch.setattr(module, "checkpoints", fails)
    assert main(["runs", str(root)]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "first" in line]
    assert any("unreadable" in line for line in lines)
    assert any("ZeroDivisionError" in line for line in lines)


def test_run_is_read_again_after_a_change_and_an_active_one_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        made(log(VALID_ROW), writer_of(launch_json=ALIVE, outcome_json=DONE))(_folder(tmp_path / name))
    active = _folder(tmp_path / "active")
    made(log(VALID_ROW), writer_of(launch_json={**ALIVE, "host": "elsewhere"}))(active)
    read: list[str] = []
    monkeypatch.setattr(found_runs, "read_run", lambda folder: read.append(folder.name) or read_run(folder))
    clock = [100.0]
    monkeypatch.setattr(found_runs.time, "monotonic", lambda: clock[0])
    known: KnownRuns = {}
    assert len(find([tmp_path], known)) == 3
    read.clear()
    assert len(find([tmp_path], known)) == 3
    assert read == []  # several windows may follow a run
    clock[0] += 2.0
    assert len(find([tmp_path], known)) == 3
    assert read == ["active"]
    with (tmp_path / "second" / "trainer_log.jsonl").open("a", encoding="utf-8") as file:
        file.write(VALID_ROW.replace("3", "4") + "\n")
    clock[0] += 2.0
    read.clear()
    assert {run.name: run.step for run in find([tmp_path], known)} == {"first": 3, "second": 4, "active": 3}
    assert read == ["active", "second"]
    shutil.rmtree(tmp_path / "first")
    assert len(find([tmp_path], known)) == len(known) == 2


def test_a_token_as_the_name_of_a_column_is_masked(page: Any, root: Path) -> None:
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345"
    log(json.dumps({"current_steps": 1, "loss": 1.0, token: 2.0}))(_folder(root / "named"))
    status, _, text = page.send("GET", f"/api/runs/{page.id_of('named')}/series")
    assert status == 200
    assert token not in text


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_reason_of_an_unreadable_folder_is_shown(root: Path, odd: dict[str, Path]) -> None:
    read = {name: read_run(odd[name]) for name in odd}
    state, torn = read["state with a number of too many digits"], read["outcome is torn"]
    assert state is not None
    assert state.state == "unreadable"
    assert "trainer_state.json" in state.sentence
    assert torn is not None
    assert "outcome.json has an invalid format" in torn.sentence
    without_host = read["launch without a host"]
    assert without_host is not None
    assert without_host.state != "elsewhere"


def test_resumed_run_is_not_in_the_last_stage_of_its_earlier_start(root: Path) -> None:
    folder = _folder(root / "resumed")
    event = {"time": ALIVE["time"] - 1, "step": 30, "kind": "stage", "text": "saving"}
    writer_of(launch_json=ALIVE, events_jsonl=json.dumps(event) + "\n")(folder)
    run = read_run(folder)
    assert run is not None
    assert run.state == "starting"


@pytest.mark.parametrize("pid", [2**31, 2**70, -1, 0, 1, "12", None])
def test_process_id_of_a_damaged_run_gets_no_signal(pid: Any) -> None:
    assert not send_signal({"pid": pid}, signal.SIGTERM, lambda launch: True)
