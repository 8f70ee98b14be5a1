"""A held-out record as a question in the web UI's chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import burnish
from burnish.config.errors import UserError
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from burnish.serve.page import planner_process
from burnish.serve.page.planner_process import held_out_example, question_of

DEMO = Path(burnish.__file__).parent / "demo"
VALUES = {
    "model_name_or_path": str(DEMO / "model"), "dataset": "demo_train", "dataset_dir": str(DEMO / "data"),
    "output_dir": "saves/x", "val_size": "5", "max_samples": "50",
}  # fmt: skip


def test_record_is_one_that_the_run_holds_out() -> None:
    from burnish.run.plan.options import RunOptions

    result = held_out_example(VALUES, 3)
    options = RunOptions(**{**VALUES, "val_size": 5.0, "max_samples": 50, "dataset": ["demo_train"]})
    sets = load_datasets(options, options.seed, DataStats())
    record = sets.eval[""][2]
    assert (result["user"], result["answer"]) == tuple(message.content for message in record.messages)
    assert (result["number"], result["of"], result["place"]) == (3, 5, record.place)
    assert result["place"] not in {example.place for example in sets.train}
    assert held_out_example(VALUES)["number"] in range(1, 6)


def test_missing_held_out_record_is_rejected() -> None:
    with pytest.raises(UserError, match="val_size"):
        held_out_example({**VALUES, "val_size": "0"})
    for number in (0, 6):
        with pytest.raises(UserError, match="between 1 and 5"):
            held_out_example(VALUES, number)
    with pytest.raises(UserError, match="without a prompt"):
        question_of(Example(text="Once upon a time", source="a.txt", number=1))


def test_training_data_is_read_only_for_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = planner_process.load_datasets

    def load(options, *arguments, **settings):
        read.append(f"{options.dataset} {options.eval_dataset}")
        return original(options, *arguments, **settings)

    monkeypatch.setattr(planner_process, "load_datasets", load)
    with pytest.raises(UserError, match="val_size"):
        held_out_example({**VALUES, "val_size": "0"})
    assert read == []
    result = held_out_example({**VALUES, "val_size": "0", "eval_dataset": "demo_heldout"}, 1)
    assert result["place"].endswith("heldout.jsonl, record 1")
    assert read == ["None ['demo_heldout']"]


def test_records_are_read_again_only_if_a_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"instruction": f"q{number}", "output": "a"}) for number in range(10)]
    data.write_text("\n".join(lines), encoding="utf-8")
    values = {**VALUES, "dataset": str(data), "val_size": "2"}
    first = held_out_example(values, 1)
    with monkeypatch.context() as patch:
        patch.setattr(planner_process, "load_datasets", None)
        assert held_out_example(values, 1) == first
        assert held_out_example(values, 2)["user"] != first["user"]
    data.write_text("\n".join(lines).replace("q", "Q"), encoding="utf-8")
    assert held_out_example(values, 1)["user"] == first["user"].replace("q", "Q")


def test_conversation_with_calls_is_truncated_before_its_last_response() -> None:
    call = json.dumps([{"name": "add", "arguments": {"a": 1}}, {"name": "now"}])
    turns = ("user", "1+1"), ("function", call), ("observation", "2"), ("observation", "noon"), ("assistant", "2."), (
        "user", "Sure?"), ("assistant", "Yes.")  # fmt: skip
    example = Example(messages=tuple(Message(*turn) for turn in turns), tools='[{"name": "add"}]', system="Be brief.")
    result = question_of(example)
    assert (result["user"], result["answer"], result["system"], result["tools"]) == (
        "Sure?", "Yes.", "Be brief.", [{"name": "add"}],
    )  # fmt: skip
    assert [one["role"] for one in result["before"]] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = result["before"][1]["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == ['{"a": 1}', "{}"]
    assert [one["tool_call_id"] for one in result["before"][2:4]] == [one["id"] for one in calls]
    pair = Example(messages=(Message("user", "q"),), chosen="good", rejected="bad")
    assert question_of(pair)["answer"] == "good"
    assert question_of(Example(prompt="p", completion="c"))["answer"] == "c"


def test_page_uses_run_options_and_stays_within_its_roots(page, root, monkeypatch) -> None:
    requests = []

    async def whole(question):
        requests.append(question)
        return {"user": "q", "answer": "a"} if question["number"] else {"problems": [{"sentence": "No.", "remedy": ""}]}

    monkeypatch.setattr(page.site.planner, "whole", whole)
    shutil.copytree(DEMO / "data", root / "saves" / "data")
    launch = root / "saves/first/launch.json"
    launch.write_text(json.dumps({**json.loads(launch.read_text()), "folder": str(root / "saves")}))
    run = page.id_of("first")
    assert page.get(f"/api/runs/{run}/held-out?number=2") == {"user": "q", "answer": "a"}
    assert requests[0]["values"]["learning_rate"] == "0.0001"
    assert requests[0]["values"]["dataset_dir"] == str(root / "saves" / "data")
    assert page.send("GET", f"/api/runs/{run}/held-out")[0] == 422
    assert page.send("GET", f"/api/runs/{page.id_of('factory')}/held-out")[0] == 409
    (root / "saves/first/run.yaml").write_text("dataset: x\ndataset_dir: /etc\n")
    assert page.send("GET", f"/api/runs/{run}/held-out")[0] == 422
    assert len(requests) == 2
