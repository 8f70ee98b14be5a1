"""Options and paths that are forbidden to visitors, on every route that plans or starts a process."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config.options import specs
from burnish.report.metadata import launch_record, write_outcome
from burnish.run.plan.options import RunOptions
from burnish.serve.http.errors import APIError
from representative import representative_slow

OPTIONS = specs(RunOptions)
RISKY = {name: spec for name, spec in OPTIONS.items() if spec.risky}
PLACES = {name: spec for name, spec in OPTIONS.items() if spec.names_place and not spec.risky}
USUAL = {"model_name_or_path": "m", "dataset": "d"}


class _Ended:
    pid = 2**22 + 1

    def poll(self) -> int:
        return 0


@pytest.fixture
def started_commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that gets the command line of every process that the page starts."""
    argv: list[list[str]] = []
    monkeypatch.setattr(
        "burnish.serve.page.jobs.starting.start_burnish", lambda options, *_: argv.append(options) or _Ended()
    )
    return argv


def sent_run(root: Path, values: dict[str, Any], text: str = "") -> None:
    """Create the folder of a run received from someone else, below a root."""
    folder = root / "sent"
    folder.mkdir(exist_ok=True)
    launch = {**launch_record([]), "pid": 2**22 + 1, "folder": str(root)}
    (folder / "launch.json").write_text(json.dumps(launch))
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    (folder / "run.yaml").write_text(text or "\n".join(lines) + "\n")


def answers(page: Any, root: Path, values: dict[str, Any]) -> dict[str, tuple[int, str, str]]:
    """Call every route that accepts the values or the folder of a run. Return route -> status, code, option."""
    overrides = {**USUAL, "output_dir": "saves/new", **values}
    sent_run(root, {**USUAL, "output_dir": "sent", "val_size": 2, **values})
    run = page.id_of("sent")
    options = {
        "begin": page.send("POST", "/api/runs", {"values": overrides}),
        "queue": page.send("POST", "/api/runs", {"values": overrides, "when": "queue"}),
        "another": page.send("POST", "/api/runs", {"values": overrides, "folder": "another"}),
        "check": page.send("POST", "/api/check", {"values": overrides}),
        "continue": page.send("POST", f"/api/runs/{run}/continue", {}),
        "held-out": page.send("GET", f"/api/runs/{run}/held-out"),
    }
    errors = {name: (status, json.loads(text).get("error", {})) for name, (status, _, text) in options.items()}
    return {name: (status, error.get("code"), error.get("option")) for name, (status, error) in errors.items()}


def risky_value(name: str) -> Any:
    kind = str(OPTIONS[name].type)
    return True if kind == "<class 'bool'>" else ["somebody/elses"] if kind.startswith("list") else "somebody/elses"


def test_started_commands_are_listed_in_the_settings(page, root, started_commands) -> None:
    _, _, text = page.send("GET", "/settings")
    assert 'id="commands"' not in text
    for folder in ("saves/one", "saves/two & three"):
        page.send("POST", "/api/runs", {"values": {**USUAL, "output_dir": folder}})
    _, _, text = page.send("GET", "/settings")
    listed = re.findall(r'<small data-time="[0-9.]+"></small> <code>(.*?)</code>', text)
    assert [html.unescape(one) for one in listed] == [
        f"burnish train '{root}/saves/two & three/run.yaml'", f"burnish train {root}/saves/one/run.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(RISKY))
def test_risky_option_is_rejected_on_every_route(page, root, started_commands, name) -> None:
    for route, answer in answers(page, root, {name: risky_value(name)}).items():
        assert answer == (422, "not_allowed", name), route
    assert started_commands == []


@pytest.mark.parametrize(
    "text",
    ["trust_remote_code: yes", "trust_remote_code: ' TRUE '", "trust_remote_code: 1", "<<: {trust_remote_code: on}",
     "vllm_config: {trust-remote-code: true}", "report_to: [none, wandb]", "report_to: none, wandb"],
)  # fmt: skip
def test_risky_option_is_detected_in_every_spelling(page, root, started_commands, text) -> None:
    sent_run(root, {}, f"{text}\nmodel_name_or_path: m\noutput_dir: sent\n")
    status, _, answer = page.send("POST", f"/api/runs/{page.id_of('sent')}/continue", {})
    assert (status, json.loads(answer)["error"]["code"]) == (422, "not_allowed")
    assert started_commands == []


def test_harmless_values_of_risky_options_and_all_defaults_are_accepted(page, root, started_commands) -> None:
    harmless = {name: spec.harmless[0] for name, spec in RISKY.items() if spec.harmless}
    empty = {name: spec.default for name, spec in RISKY.items() if not spec.harmless}
    values = {**USUAL, "output_dir": "saves/new", **harmless, **empty, "report_to": "none"}
    status, _, text = page.send("POST", "/api/runs", {"values": values})
    assert status == 201, text
    assert len(started_commands) == 1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ("exact_match_reward", 201),
        ("exact_match_reward, think_format_reward", 201),
        ("rewards.py:mine", 422),
        ("os.system", 422),
        (["exact_match_reward", {"exact_match_reward": {}}], 422),
    ],
)
def test_only_built_in_reward_functions_can_be_set(page, root, started_commands, rewards, expected) -> None:
    values = {**USUAL, "stage": "grpo", "output_dir": "saves/new", "reward_funcs": rewards}
    assert page.send("POST", "/api/runs", {"values": values})[0] == expected
    assert len(started_commands) == (expected == 201)


def test_form_offers_the_built_in_reward_functions(page) -> None:
    form = json.loads(page.send("GET", "/api/form")[2])
    field = next(one for one in form["fields"] if one["name"] == "reward_funcs")
    assert "exact_match_reward" in field["choices"]
    assert "reward_funcs" not in form["risky"]


def test_resume_keeps_run_yaml_until_the_run_accepts_the_options(page, root, started_commands) -> None:
    sent_run(root, {**USUAL, "output_dir": "sent"})
    before = (root / "sent" / "run.yaml").read_text()
    values = {**USUAL, "output_dir": "sent", "learning_rate": 0.5}
    status, _, text = page.send("POST", "/api/runs", {"values": values, "folder": "resume"})
    assert status == 201, text
    assert (root / "sent" / "run.yaml").read_text() == before
    assert started_commands == [["train", str(root / "sent" / ".requested.yaml")]]
    assert "learning_rate: 0.5" in (root / "sent" / ".requested.yaml").read_text()


@pytest.mark.run
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("done", "done"),
        pytest.param("failed", "failed", marks=pytest.mark.slow),
        pytest.param(None, "failed", marks=pytest.mark.slow),
    ],
)
def test_finished_run_that_cannot_be_continued_stays_finished(page, root, before, after) -> None:
    sent_run(root, {**USUAL, "output_dir": "sent"})
    if before is not None:
        write_outcome(root / "sent", {"state": before}, 60)
    values = {**USUAL, "output_dir": "sent", "model_name_or_path": "missing"}
    status, _, text = page.send("POST", "/api/runs", {"values": values, "folder": "resume"})
    assert status == 201, text
    for child in page.site.starter._children:
        child.wait(60)
    outcome = json.loads((root / "sent/outcome.json").read_text())
    assert outcome["state"] == after
    assert outcome["step"] == (60 if before == "done" else 0)
    assert "missing" in outcome["sentence"]
    assert outcome["sentence"].startswith("The run was not resumed. ") == (before == "done")


def test_option_allowed_by_web_allow_is_accepted(root, tmp_path, started_commands) -> None:
    from web.page_thread import start_page as page_of

    with page_of(root, tmp_path / "home", "a-key-of-tests-0123456789", web_allow=["trust_remote_code"]) as page:
        sent_run(root, {**USUAL, "trust_remote_code": True, "output_dir": "sent"})
        assert page.send("POST", f"/api/runs/{page.id_of('sent')}/continue", {})[0] == 202


def test_member_of_another_package_is_a_risk(monkeypatch) -> None:
    from burnish.optim.builtin import OPTIMIZERS
    from burnish.serve.page.planner_process import field_of

    members = dict(OPTIMIZERS._members)
    exec(
        "@OPTIMIZERS.register('theirs')\ndef theirs(model, options): ...",
        {"__name__": "their_package", "OPTIMIZERS": OPTIMIZERS},
    )
    try:
        field = field_of(OPTIONS["optim"])
    finally:
        OPTIMIZERS._members = members
    assert field["risky"]
    assert "theirs" not in field["harmless"]
    assert "adamw_torch" in field["harmless"]
    assert not field_of(OPTIONS["optim"])["risky"]


def test_every_route_that_can_start_a_job_is_tested(page) -> None:
    from burnish.serve.page.api import Api

    effects = {f"{method} {path}" for method, path, _ in Api(page.site).routes() if method != "GET"}
    starting = {
        "POST /api/runs",
        "POST /api/runs/{id}/continue",
        "POST /api/engines",
        "POST /api/exports",
        "POST /api/evaluations",
    }
    assert effects - starting == {
        "POST /api/check", "POST /api/yaml", "PUT /api/presets/{id}", "DELETE /api/presets/{id}",
        "PUT /api/datasets/{id}", "POST /api/runs/{id}/stop", "DELETE /api/queue/{number:int}",
        "DELETE /api/engines/{id}", "POST /api/chat/{id}", "POST /api/chat/{id}/tokens", "PUT /api/chats/{id}",
        "DELETE /api/chats/{id}", "PUT /api/uploads/{name}",
        "PUT /api/runs/{id}/label", "DELETE /api/runs/{id}", "POST /api/trash/{id}", "DELETE /api/trash",
    }  # fmt: skip


def test_queue_written_by_others_is_checked_at_start(page, root, started_commands) -> None:
    values = {**USUAL, "output_dir": "saves/new", "trust_remote_code": "true"}
    page.site.home.write("queue.json", json.dumps([{"number": 1, "values": values, "folder": "new"}]))
    for name in ("factory", "trl"):
        (root / name).rename(root / f".{name}")  # otherwise they count as running
    with pytest.raises(Exception, match="trust_remote_code"):
        page.run(page.site.starter.next_of_queue([]))
    assert started_commands == []
    (refused,) = page.site.starter.queued_jobs()
    assert "trust_remote_code" in refused["error"]
    assert "trust_remote_code" in page.send("GET", "/runs")[2]
    page.run(page.site.starter.next_of_queue([]))  # it is not started again
    assert started_commands == []


# --- paths ------------------------------------------------------------------------------------------------------------


def spellings(name: str, outside: Path) -> list[Any]:
    """Return spellings of a path outside of the roots, alone or with one inside."""
    kind = str(OPTIONS[name].type)
    result: list[Any] = [str(outside), f"../{outside.name}", f"file://{outside}", "link/x.json", "~root/x"]
    if "list" in kind:
        result += [f"rows.json,{outside}", f"rows.json , {outside}", f"[{outside}]", f'["rows.json", "{outside}"]',
                   ["rows.json", str(outside)], [f"{outside}"], f"[rows.json, {outside}"]  # fmt: skip
    if "dict" in kind:
        result += [{"x": str(outside)}, f'{{"x": {{"file_name": "{outside}"}}}}', {"x": {"y": [str(outside)]}}]
    if name == "served_adapters":
        result = [value for value in result if isinstance(value, dict) or str(value).startswith("{")]
    return result


@pytest.mark.parametrize("name", sorted(PLACES))
def test_no_path_spelling_leaves_the_roots(page, root, started_commands, name) -> None:
    outside = root.parent / "secret.json"
    outside.write_text('[{"instruction": "q", "output": "SECRET"}]')
    (root / "rows.json").write_text('[{"instruction": "q", "output": "a"}]')
    (root / "link").symlink_to(root.parent)
    names = (name, *OPTIONS[name].aliases)
    for key in names:
        for value in spellings(name, outside):
            options = {**USUAL, "output_dir": "saves/new", key: value}
            for path, body in (("/api/check", {"values": options}), ("/api/runs", {"values": options})):
                status, _, text = page.send("POST", path, body)
                assert (status, json.loads(text)["error"]["option"]) == (422, name), (path, value, text)
                assert "SECRET" not in text
    assert started_commands == []


def test_comma_in_a_single_path_is_part_of_it(page, root, started_commands) -> None:
    (root / "a,b").mkdir()
    values = {"model_name_or_path": "a,b", "dataset": "d", "output_dir": "saves/c,d"}
    assert page.send("POST", "/api/runs", {"values": values})[0] == 201
    assert (root / "saves/c,d/run.yaml").is_file()


def test_relative_path_is_resolved_from_the_run_folder(page, root, started_commands) -> None:
    """The run was started in a folder below the root with a link to the outside."""
    deep = root / "deep"
    deep.mkdir()
    (root.parent / "secret").mkdir()
    (deep / "link").symlink_to(root.parent / "secret")
    sent_run(root, {"model_name_or_path": "link/model", "output_dir": "sent"})
    (root / "sent/launch.json").write_text(json.dumps({**launch_record([]), "pid": 2**22 + 1, "folder": str(deep)}))
    status, _, text = page.send("POST", f"/api/runs/{page.id_of('sent')}/continue", {})
    assert (status, json.loads(text)["error"]["option"]) == (422, "model_name_or_path")
    values = {"model_name_or_path": "m", "dataset": "link/x.json", "dataset_dir": "deep", "output_dir": "saves/y"}
    status, _, text = page.send("POST", "/api/runs", {"values": values})
    assert (status, json.loads(text)["error"]["option"]) == (422, "dataset")
    assert started_commands == []


@pytest.mark.run
@pytest.mark.parametrize(
    "described",
    representative_slow([{"x": {"file_name": "x.json"}}, {"x": {"cloud_file_name": "file://{}"}}, None], 1),
)
def test_link_or_dataset_info_in_data_opens_nothing_outside(page, root, described) -> None:
    outside = root.parent / "secret.json"
    outside.write_text('[{"instruction": "q", "output": "SECRET"}]')
    folder = root / "sets"
    folder.mkdir()
    (folder / "x.json").symlink_to(outside)
    if described:
        (folder / "dataset_info.json").write_text(json.dumps(described).replace("{}", str(outside)))
    values = {"model_name_or_path": "model", "dataset": "x" if described else "sets", "dataset_dir": "sets",
              "output_dir": "saves/z"}  # fmt: skip
    shutil.copytree(Path(burnish.__file__).parent / "demo/model", root / "model")
    _, _, text = page.send("POST", "/api/check", {"values": values})
    assert "SECRET" not in text
    assert "a different web_roots" in text


# --- content of received folders --------------------------------------------------------------------------------------


def test_oversized_run_yaml_stops_no_other_request(page, root) -> None:
    sent_run(root, {**USUAL, "output_dir": "sent", "val_size": 2})
    run = page.id_of("sent")
    with (root / "sent/run.yaml").open("wb") as file:
        file.truncate(2**40)
    for method, path in (("POST", f"/api/runs/{run}/continue"), ("GET", f"/api/runs/{run}/held-out")):
        status, _, text = page.send(method, path, {} if method == "POST" else None)
        assert (status, json.loads(text)["error"]["code"]) == (422, "invalid_value")
    assert page.send("GET", "/api/runs")[0] == 200


@pytest.mark.slow
@pytest.mark.run
def test_page_jobs_import_no_module_of_a_folder(page, root) -> None:
    """``python -m`` searches the current folder first, which launch.json determines."""
    sent_run(root, {**USUAL, "output_dir": "sent"})
    (root / "sent/launch.json").write_text(
        json.dumps({**launch_record([]), "pid": 2**22 + 1, "folder": str(root / "sent")})
    )
    code = f"open({str(root / 'PWNED')!r}, 'a').write(__file__)\nraise SystemExit(1)\n"
    for folder in (root, root / "sent"):
        for module in ("yaml", "torch", "burnish", "json", "numpy", "logging", "sitecustomize"):
            (folder / f"{module}.py").write_text(code)
    assert page.send("POST", f"/api/runs/{page.id_of('sent')}/continue", {})[0] == 202
    page.send("POST", "/api/check", {"values": {**USUAL, "output_dir": "saves/n"}})
    for child in page.site.starter._children:
        child.wait(60)
    assert (root / "sent/console.log").read_text()
    assert not (root / "PWNED").exists()


NAMES = ("run.yaml", "launch.json", "outcome.json", "events.jsonl", "trainer_log.jsonl", "console.log", "run.log",
         "trainer_state.json")  # fmt: skip


@pytest.mark.parametrize("name", representative_slow(NAMES, ("run.yaml",)))
def test_link_in_a_run_shows_nothing_outside_of_the_run(page, root, name) -> None:
    outside = root.parent / "outside.txt"
    row = '{"current_steps": 1, "loss": 0.123456, "state": "failed", "kind": "best", "text": "SECRET", "time": 2e9, '
    outside.write_text(
        row + '"sentence": "SECRET", "argv": ["SECRET"], "host": "SECRET", "log_history": []}\nSECRET: *x\n'
    )
    sent_run(root, {**USUAL, "output_dir": "sent"})
    (root / "sent" / name).unlink(missing_ok=True)
    (root / "sent" / name).symlink_to(outside)
    (root / "sent/trainer_log.jsonl").exists() or (root / "sent/trainer_log.jsonl").write_text('{"loss": 1.5}\n')
    run = page.id_of("sent")
    for path in (f"/runs/{run}", "/runs", "/api/runs", f"/api/runs/{run}", f"/api/runs/{run}/log",
                 f"/api/runs/{run}/series", f"/api/runs/{run}/held-out", f"/api/runs/{run}/download/{name}",
                 f"/api/poll?runs={run}&log=1&after={run}:0:0:0:"):  # fmt: skip
        text = page.send("GET", path)[2]
        assert "SECRET" not in text, path
        assert "0.123456" not in text, path
    assert "SECRET" not in page.send("POST", f"/api/runs/{run}/continue", {})[2]


@pytest.mark.parametrize("folder", ["a-file", "a-file/run"])
def test_folder_that_cannot_be_written_is_an_error_of_its_option(page, root, started_commands, folder) -> None:
    (root / "a-file").write_text("not a folder")
    values = {**USUAL, "output_dir": folder}
    status, _, text = page.send("POST", "/api/runs", {"values": values, "folder": "new"})
    assert (status, json.loads(text)["error"]["option"]) == (422, "output_dir")
    assert not started_commands


@pytest.mark.parametrize("devices", [[True], [-1], ["0"], 0, [1.0]])
def test_devices_of_a_run_must_be_indices(page, started_commands, devices) -> None:
    body = {"values": {**USUAL, "output_dir": "saves/new"}, "devices": devices}
    assert page.send("POST", "/api/runs", body)[0] == 422
    assert not started_commands


@pytest.mark.run
@pytest.mark.parametrize("choice", ["overwrite", "resume"])
def test_link_in_a_folder_is_not_written_through(page, root, monkeypatch, choice) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(
        "burnish.serve.http.child.subprocess.Popen",
        lambda argv, **rest: real([sys.executable, "-c", "print(1)"], **rest),
    )
    outside = root.parent / "outside.txt"
    outside.write_text("as it was")
    folder = root / "saves/linked"
    folder.mkdir(parents=True)
    written = ".requested.yaml" if choice == "resume" else "run.yaml"
    for name in (written, "launch.json", "outcome.json", "console.log"):
        (folder / name).symlink_to(outside)
    if choice == "resume":
        (folder / "run.yaml").write_text("max_steps: 1\n")
    values = {**USUAL, "output_dir": "saves/linked"}
    assert page.send("POST", "/api/runs", {"values": values, "folder": choice})[0] == 201
    for child in page.site.starter._children:
        child.wait(60)
    assert outside.read_text() == "as it was"
    assert "model_name_or_path" in (folder / written).read_text()
    assert not (folder / "console.log").is_symlink()


def test_path_set_beside_an_alias_is_checked(tmp_path) -> None:
    from burnish.serve.page.permissions import check_values
    from burnish.serve.page.places import Roots
    from burnish.serve.page.planner_process import field_of

    spec = next(spec for spec in OPTIONS.values() if spec.names_place and spec.aliases and not spec.risky)
    values = {spec.name: "/outside", spec.aliases[0]: "inside"}
    with pytest.raises(APIError, match="must be a path inside"):
        check_values(values, [field_of(spec)], (), Roots([str(tmp_path)]), tmp_path)
