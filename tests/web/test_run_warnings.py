"""Warnings about a run that are derived from its log."""

from __future__ import annotations

import json

import pytest

from burnish.serve.page.runs.log_columns import columns_of
from burnish.serve.page.runs.run_warnings import RunWarning, find_warnings, room_for_checkpoints


def warnings_for(*losses: object, every: int = 10) -> dict[str, dict[str, object]]:
    """Return the warnings for evaluations with these losses, one every ten steps."""
    rows = [{"current_steps": n * every, "eval_loss": loss} for n, loss in enumerate(losses, 1)]
    return {one.key: dict(one.values) for one in find_warnings(columns_of(rows))}


def test_rising_evaluation_loss_is_reported_with_its_first_step() -> None:
    assert warnings_for(2.0, 1.5, 1.2, 1.3, 1.4) == {"warning_eval_loss_rising": {"step": 30, "best": "1.2", "at": 30}}
    assert warnings_for(1.0, 2.0, 1.5, 1.6, 1.7) == {"warning_eval_loss_rising": {"step": 30, "best": "1", "at": 10}}
    assert warnings_for(2.0, 1.5, 1.2, 1.3) == {}  # a single increase may be noise
    assert warnings_for(3.0, 2.0, 1.0, 0.5) == warnings_for(1.0) == warnings_for() == {}


def test_evaluation_without_improvement_is_reported_with_the_steps_since_the_best() -> None:
    assert warnings_for(2.0, 1.2, 1.4, 1.3, 1.4) == {
        "warning_eval_loss_not_improving": {"steps": 30, "best": "1.2", "at": 20}
    }
    assert warnings_for(2.0, 1.2, 1.4, 1.3) == {}


def test_values_that_are_not_finite_do_not_hide_other_warnings() -> None:
    result = warnings_for(2.0, 1.2, float("nan"), 1.3, 1.4)
    assert result["warning_eval_loss_rising"]["step"] == 20
    assert result["warning_not_finite"] == {"count": 1, "step": 30}


def test_skipped_steps_a_learning_rate_of_zero_and_a_full_disk_are_reported() -> None:
    rows = [{"current_steps": step, "loss": 1.0, "lr": 0.0 if step > 4 else 1e-4} for step in range(1, 9)]
    columns, events = columns_of(rows), [{"kind": "skipped", "count": 3}, {"kind": "stage"}, {"kind": "skipped"}]
    assert list(find_warnings(columns, events, 20, 1.7)) == [
        RunWarning("warning_skipped", {"count": 4}), RunWarning("warning_learning_rate_zero", {"step": 5}),
        RunWarning("warning_disk", {"count": 1}),
    ]  # fmt: skip
    assert list(find_warnings(columns, (), 8, 5.0)) == []  # a schedule ends at 0 with its run


def test_skipped_examples_are_counted() -> None:
    result = list(find_warnings(columns_of([]), rows={"seen": 1000, "dropped": 2}))
    assert [one.text("en") for one in result] == [
        "2 of 1000 examples were skipped. The log lists them with the reasons."
    ]
    assert list(find_warnings(columns_of([]), rows={"seen": 1000, "dropped": 0})) == []


def test_checkpoint_space_is_computed_from_the_latest_size(tmp_path) -> None:
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


def test_page_api_and_terminal_show_the_same_warnings(rising, page, root, capsys) -> None:
    from burnish.serve.page.runs.listing import runs

    run = page.id_of("first")
    assert rising in page.send("GET", f"/runs/{run}")[2]
    (warning,) = page.get(f"/api/runs/{run}/series")["warnings"]
    assert warning == {"key": "warning_eval_loss_rising", "values": {"step": 25, "best": "0.4", "at": 25}}
    runs([str(root)])
    assert f"first: {rising}" in capsys.readouterr().out
    runs([str(root), "--json"])
    listed = {run["name"]: run["warnings"] for run in map(json.loads, capsys.readouterr().out.splitlines())}
    assert listed["first"] == [rising]
    assert listed["factory"] == []
