"""Sentences about a run, from its columns alone."""

from __future__ import annotations

import json

import pytest

from burnish.serve.page.runs.log_columns import columns_of
from burnish.serve.page.runs.remarks import Remark, remarks, room_for_checkpoints


def said(*losses: object, every: int = 10) -> dict[str, dict[str, object]]:
    """Remarks on evaluations, one each ten steps, that gave these losses."""
    rows = [{"current_steps": n * every, "eval_loss": loss} for n, loss in enumerate(losses, 1)]
    return {one.key: dict(one.values) for one in remarks(columns_of(rows))}


def test_an_evaluation_that_rises_is_said_with_the_step_since_when() -> None:
    assert said(2.0, 1.5, 1.2, 1.3, 1.4) == {"remark_rises": {"step": 30, "best": "1.2", "at": 30}}
    assert said(1.0, 2.0, 1.5, 1.6, 1.7) == {"remark_rises": {"step": 30, "best": "1", "at": 10}}
    assert said(2.0, 1.5, 1.2, 1.3) == {}  # once may be chance
    assert said(3.0, 2.0, 1.0, 0.5) == said(1.0) == said() == {}


def test_an_evaluation_that_gets_no_better_is_said_with_the_steps_since_its_best() -> None:
    assert said(2.0, 1.2, 1.4, 1.3, 1.4) == {"remark_no_better": {"steps": 30, "best": "1.2", "at": 20}}
    assert said(2.0, 1.2, 1.4, 1.3) == {}


def test_values_that_are_not_finite_do_not_hide_what_the_others_show() -> None:
    found = said(2.0, 1.2, float("nan"), 1.3, 1.4)
    assert found["remark_rises"]["step"] == 20
    assert found["remark_not_finite"] == {"count": 1, "step": 30}


def test_skipped_steps_a_rate_of_zero_and_a_full_disk_are_said() -> None:
    rows = [{"current_steps": step, "loss": 1.0, "lr": 0.0 if step > 4 else 1e-4} for step in range(1, 9)]
    columns, events = columns_of(rows), [{"kind": "skipped", "count": 3}, {"kind": "stage"}, {"kind": "skipped"}]
    assert list(remarks(columns, events, 20, 1.7)) == [
        Remark("remark_skipped", {"count": 4}), Remark("remark_rate_zero", {"step": 5}),
        Remark("remark_disk", {"count": 1}),
    ]  # fmt: skip
    assert list(remarks(columns, (), 8, 5.0)) == []  # a schedule ends at 0 with its run


def test_rows_that_were_dropped_are_counted() -> None:
    found = list(remarks(columns_of([]), rows={"seen": 1000, "dropped": 2}))
    assert [one.text("en") for one in found] == [
        "2 of 1000 examples were skipped. The log lists them with the reasons."
    ]
    assert list(remarks(columns_of([]), rows={"seen": 1000, "dropped": 0})) == []


def test_the_room_for_checkpoints_is_measured_by_the_newest(tmp_path) -> None:
    assert room_for_checkpoints(tmp_path) is None
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "weights").write_bytes(b"x" * 1000)
    assert room_for_checkpoints(tmp_path) > 2


@pytest.fixture
def rising(root):
    with (root / "saves/first/trainer_log.jsonl").open("a") as log:
        for step, loss in ((25, 0.4), (30, 0.6), (35, 0.7)):
            log.write(json.dumps({"current_steps": step, "total_steps": 40, "eval_loss": loss}) + "\n")
    return "The evaluation loss has been rising since step 25. Minimum: 0.4 at step 25."


def test_the_page_its_script_and_the_terminal_say_the_same(rising, page, root, capsys) -> None:
    from burnish.serve.page.runs.listing import runs

    run = page.id_of("first")
    assert rising in page.send("GET", f"/runs/{run}")[2]
    (remark,) = page.get(f"/api/runs/{run}/series")["remarks"]
    assert remark == {"key": "remark_rises", "values": {"step": 25, "best": "0.4", "at": 25}}
    runs([str(root)])
    assert f"first: {rising}" in capsys.readouterr().out
    runs([str(root), "--json"])
    listed = {run["name"]: run["remarks"] for run in map(json.loads, capsys.readouterr().out.splitlines())}
    assert listed["first"] == [rising]
    assert listed["factory"] == []
