"""Managing runs: names, tags, notes, trash, reports, completions, and types of runs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from burnish.report.metadata import launch_record
from burnish.serve.page.runs.completions import completions
from burnish.serve.page.runs.listing import distinct_names
from burnish.serve.page.runs.log_columns import columns_of
from burnish.serve.page.runs.report import round_values
from burnish.serve.page.runs.runs import read_run
from burnish.serve.page.runs.series import downsample, series


def test_run_can_have_name_tags_and_notes_without_changing_its_folder(page, root) -> None:
    run, before = page.id_of("first"), sorted(str(path) for path in root.rglob("*"))
    status, _, text = page.send("PUT", f"/api/runs/{run}/label", {"name": " Baseline ", "tags": ["7b", "lora"]})
    assert (status, json.loads(text)) == (200, {"name": "Baseline", "tags": ["7b", "lora"], "notes": ""})
    assert page.send("PUT", f"/api/runs/{run}/label", {"notes": "good <b>"})[0] == 200
    result = page.get(f"/api/runs/{run}")
    assert (result["title"], result["name"], result["tags"], result["notes"]) == (
        "Baseline",
        "first",
        ["7b", "lora"],
        "good <b>",
    )
    _, _, html = page.send("GET", "/runs")
    assert "Baseline" in html
    assert "good &lt;b&gt;" in html
    assert sorted(str(path) for path in root.rglob("*")) == before
    for wrong in ({"name": 3}, {"tags": "a"}, {"tags": [""]}, {"tags": ["x"] * 99}, {"notes": "x" * 9000}):
        assert page.send("PUT", f"/api/runs/{run}/label", wrong)[0] == 422, wrong


def test_deleted_run_can_be_restored_until_the_trash_is_emptied(page, root) -> None:
    run, folder = page.id_of("first"), root / "saves/first"
    files = sorted(path.name for path in folder.iterdir())
    status, _, text = page.send("DELETE", f"/api/runs/{run}", {})
    assert status == 200
    assert not folder.exists()
    assert "first" not in [one["name"] for one in page.get("/api/runs")["runs"]]
    (deleted,) = page.get("/api/trash")["runs"]
    assert (deleted["id"], deleted["name"]) == (json.loads(text)["entry"], "first")
    assert page.send("POST", f"/api/trash/{deleted['id']}", {})[0] == 200
    assert sorted(path.name for path in folder.iterdir()) == files
    assert page.id_of("first") == run
    page.send("DELETE", f"/api/runs/{run}", {})
    folder.mkdir()
    (again,) = page.get("/api/trash")["runs"]
    assert page.send("POST", f"/api/trash/{again['id']}", {})[0] == 409  # a folder of the same name exists
    assert page.send("DELETE", "/api/trash", {})[0] == 200
    assert page.get("/api/trash") == {"runs": []}
    assert page.send("POST", "/api/trash/x", {})[0] == 404


def test_active_run_is_not_deleted_and_trash_entry_leads_to_no_other_folder(page, root) -> None:
    run = page.id_of("first")
    (root / "saves/first/outcome.json").unlink()
    (root / "saves/first/launch.json").write_text(json.dumps(launch_record([])))
    assert page.send("DELETE", f"/api/runs/{run}", {})[0] == 409
    entry = root / ".burnish-trash" / "aa"
    (entry / "run").mkdir(parents=True)
    (entry / "entry.json").write_text(json.dumps({"folder": str(root.parent / "elsewhere")}))
    assert page.send("POST", "/api/trash/aa", {})[0] == 404
    assert not (root.parent / "elsewhere").exists()


PREDICTS = "do_train: false\ndo_predict: true\n"


def test_predictions_and_evaluations_are_listed_by_type(page, root) -> None:
    for name, argv, options in (
        ("told", ["burnish", "predict", "saves/first"], ""),
        ("read", ["burnish", "train", "x.yaml"], PREDICTS),
        ("measured", ["burnish", "eval", "saves/first"], ""), ("begun", ["burnish", "train", "x.yaml"], "stage: sft\n"),
    ):  # fmt: skip
        folder = root / "saves" / name
        folder.mkdir()
        (folder / "launch.json").write_text(json.dumps({**launch_record([], argv=argv), "pid": 2**22 + 1}))
        (folder / "run.yaml").write_text(options)
        (folder / "predict_results.json").write_text('{"predict_rouge-1": 41.2, "odd": "x"}')
    kinds = {run["name"]: run["kind"] for run in page.get("/api/runs")["runs"]}
    assert {name: kinds[name] for name in ("told", "read", "measured", "begun", "first")} == {
        "told": "predict", "read": "predict", "measured": "eval", "begun": "train", "first": "train",
    }  # fmt: skip
    assert read_run(root / "saves/told").metrics == {"rouge-1": 41.2}
    _, _, html = page.send("GET", "/runs")
    assert "Predictions and evaluations" in html
    assert page.send("GET", f"/runs/{page.id_of('told')}")[0] == 200


def test_progress_of_a_prediction_is_read_from_its_file(page, root) -> None:
    folder = root / "saves" / "answers"
    folder.mkdir()
    (folder / "launch.json").write_text(json.dumps(launch_record([], argv=["burnish", "predict", "saves/first"])))
    row = {"time": time.time(), "done": 32, "total": 200, "left_s": 61.5}
    (folder / "progress.json").write_text(json.dumps(row))
    run = next(run for run in page.get("/api/runs")["runs"] if run["name"] == "answers")
    assert (run["step"], run["total"], run["left_s"]) == (32, 200, 61.5)
    (folder / "predict_results.json").write_text('{"predict_exact_match": 0.725}')
    report = page.send("GET", f"/api/runs/{run['id']}/report")[2]
    assert all(text in report for text in ("32 of 200", "exact_match", "0.725"))
    assert "Tokens/s" not in report
    assert "32 of 200" in page.send("GET", f"/runs/{run['id']}")[2]
    (folder / "progress.json").write_text('{"done": "x", "total": []}')
    assert (read_run(folder).step, read_run(folder).total) == (0, 0)


def test_throughput_of_a_run_is_measured_over_its_last_interval(tmp_path: Path) -> None:
    rows = [
        {"current_steps": 1, "loss": 2.0, "total_tokens": 100, "time": 50.0, "throughput": 5.0},
        {"current_steps": 2, "loss": 2.0, "total_tokens": 400, "time": 51.0, "throughput": 9.0},
    ]
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path).tokens_per_s == 300.0
    rows[1]["step_seconds"] = 0.5  # half of the second was an evaluation
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path).tokens_per_s == 600.0
    rows[1]["tokens_per_second"] = 450.0  # measured by the run
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path).tokens_per_s == 450.0
    assert series(tmp_path)[0]["rate"] == [None, 450.0]


def test_evaluations_of_several_sets_become_columns_and_are_kept() -> None:
    rows = [{"step": step, "loss": 1.0} for step in range(1, 200)]
    rows[99:99] = [{"step": 99, "eval_a_loss": 2.0}, {"step": 99, "eval_中文_loss": 3.0}]
    for columns in (columns_of(rows), downsample(columns_of(rows), 20)):
        assert [value for value in columns["eval_a_loss"] if value is not None] == [2.0]
        assert [value for value in columns["eval_中文_loss"] if value is not None] == [3.0]


def test_preference_and_rollout_metrics_become_columns() -> None:
    rows = [
        {"step": 1, "loss": 1.0, "rewards/margins": 0.5, "other": "x"},
        {"step": 2, "loss": 1.0, "reward": 0.25, "kl": 1e-3},
    ]
    columns = columns_of(rows)
    assert columns["rewards/margins"] == [0.5, None]
    assert (columns["reward"], columns["kl"]) == ([None, 0.25], [None, 1e-3])
    assert "other" not in columns


def test_completions_are_shown_by_step_and_record_newest_first(page, root) -> None:
    rows = [
        {"step": step, "record": record, "sample": sample, "completion": f"{step} {record}", "rewards": {"a": 1}}
        for step in (5, 10) for record in (3, 4) for sample in (0, 1)
    ]  # fmt: skip
    rows.append({"step": 15, "record": 5, "sample": 0, "completion": "", "rewards": {"a": None}})
    (root / "saves/first/completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 15')
    result = completions(root / "saves/first")
    records = [{"name": "5", "steps": [15]}, *({"name": name, "steps": [10, 5]} for name in "43")]
    assert (result["steps"], result["records"], result["rows"]) == ([15, 10, 5], records, [])
    shown = page.get(f"/api/runs/{page.id_of('first')}/completions?step=10&record=3")["rows"]
    assert [(one["completion"], one["sample"]) for one in shown] == [("10 3", 0), ("10 3", 1)]
    assert page.get(f"/api/runs/{page.id_of('trl')}/completions")["steps"] == []
    assert 'id="tab-completions"' in page.send("GET", f"/runs/{page.id_of('first')}")[2]


def test_many_completions_of_a_step_are_returned_in_parts(page, root) -> None:
    rows = [{"step": 1, "record": None, "sample": sample, "completion": "c",
             "advantage": None if sample == 9 else float(sample % 100)} for sample in reversed(range(150))]  # fmt: skip
    (root / "trl/completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"/api/runs/{page.id_of('trl')}/completions?step=1&record=None"
    parts = [page.get(f"{path}&offset={offset}") for offset in (0, 64, 128)]
    assert [(len(part["rows"]), part["count"]) for part in parts] == [(64, 150), (64, 150), (22, 150)]
    assert [row["sample"] for part in parts for row in part["rows"]] == list(range(150))
    best, worst = (page.get(f"{path}&order={order}")["rows"] for order in ("best", "worst"))
    assert [row["sample"] for row in (best[0], *worst[:4])] == [99, 0, 9, 100, 1]
    assert page.send("GET", f"{path}&offset=x")[0] == 422


def test_report_is_one_self_contained_file(page) -> None:
    status, headers, text = page.send("GET", f"/api/runs/{page.id_of('first')}/report")
    assert status == 200
    assert headers["content-disposition"] == 'attachment; filename="first.html"'
    assert text.count("<polyline") >= 3
    assert "learning_rate" in text
    assert not re.search(r"(src|href)=|<script|url\(|https?:", text)
    status, _, text = page.send("GET", f"/api/runs/{page.id_of('<img src=x onerror=alert(1)>')}/report")
    assert "<img src=x" not in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.3, 5.8, [1, 2, 3, 4, 5]), (8.6e-8, 5e-4, [1e-4, 2e-4, 3e-4, 4e-4, 5e-4]), (1, 120, [20, 40, 60, 80, 100, 120]),
     (-0.7, 0.2, [-0.6, -0.4, -0.2, 0, 0.2]), (2, 2, [2])],
)  # fmt: skip
def test_axes_of_a_report_have_round_values(low: float, high: float, expected: list[float]) -> None:
    assert round_values(low, high) == expected


def test_command_of_a_run_is_shown_as_it_is_typed(tmp_path: Path) -> None:
    for program, shown in (
        ("/x/burnish/__main__.py", "burnish"),
        ("/v/bin/burnish", "burnish"),
        ("train.py", "train.py"),
    ):
        (tmp_path / "launch.json").write_text(json.dumps({"argv": [program, "train", "a.yaml"], "time": 1.79e9}))
        run = read_run(tmp_path)
        assert run is not None
        assert run.launch["argv"] == [shown, "train", "a.yaml"]


@pytest.mark.parametrize(
    ("yaml", "kind"),
    [
        ("stage: sft", "train"),
        ("do_predict: true  # predict.yaml, line 9", "predict"),
        ("do_eval: true", "eval"),
        ("do_train: false\ndo_eval: true\ndo_predict: true", "predict"),
        ("do_train: true\ndo_predict: true", "train"),
    ],
)
def test_run_without_training_is_listed_by_its_kind(yaml: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(json.dumps({"argv": ["burnish", "train", "run.yaml"], "time": 1.79e9}))
    (tmp_path / "run.yaml").write_text(f"# written by burnish train\n{yaml}\n")
    run = read_run(tmp_path)
    assert run is not None
    assert run.kind == kind


def test_runs_of_the_same_name_are_shown_with_their_parents() -> None:
    folders = [Path(text) for text in ("/s/first", "/s/qwen/lora/sft", "/s/qwen/full/sft", "/s/llama/lora/sft")]
    assert list(distinct_names(folders).values()) == ["first", "qwen/lora/sft", "full/sft", "llama/lora/sft"]
