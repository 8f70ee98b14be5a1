"""Preference data tokenized during the run, and mismatched responses from the same step."""

import json

import pytest

from burnish.config.errors import UserError
from burnish.data.rows.mismatched import RowsWithMismatched
from burnish.data.rows.row_set import ListedRows
from burnish.run.plan.plan import plan
from pair_runs import losses, make_pair_workspace, pairs, run_options
from representative import representative_slow
from small_run import WORDS

pytestmark = pytest.mark.run


def labelled_examples(count=12):
    return [
        {"instruction": f"Repeat: {WORDS[i % 10]}", "output": " ".join([WORDS[(i + i % 2) % 10]] * (1 + i % 3)),
         "label": bool(i % 2)}
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    make_pair_workspace(tmp_path)
    (tmp_path / "unpaired.json").write_text(json.dumps(labelled_examples()))
    return tmp_path


def kto_options(workspace, **more):
    columns = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
    return {"stage": "kto", "dataset": str(workspace / "unpaired.json"), "train_sampling_strategy": "sequential",
            "columns": json.dumps(columns), **more}  # fmt: skip


def test_streamed_kto_examples_train_like_loaded_ones(workspace, monkeypatch):
    stored = losses(workspace, monkeypatch, **kto_options(workspace))
    assert losses(workspace, monkeypatch, **kto_options(workspace, streaming=True, buffer_size=64)) == stored


def test_invalid_streamed_record_is_not_used_as_neighbor(workspace, monkeypatch):
    records = labelled_examples()
    records[3]["label"] = "perhaps"
    (workspace / "unpaired.json").write_text(json.dumps(records))
    bad = {"on_bad_record": "drop"}
    stored = losses(workspace, monkeypatch, **kto_options(workspace, **bad))
    streamed = losses(workspace, monkeypatch, **kto_options(workspace, streaming=True, **bad))
    assert (
        streamed[0] == stored[0]
    )  # the rows of later steps differ, because the invalid record has a position in the order


@pytest.mark.parametrize("stage", ["dpo", "rm", "kto"])
def test_micro_batch_without_rows_is_blank(workspace, monkeypatch, stage):
    records = pairs() if stage != "kto" else labelled_examples()
    for record in records[:2]:  # the entire first micro-batch of the first step
        record |= {"label": 3} if stage == "kto" else {"rejected": ""}
    (workspace / "pairs.json").write_text(json.dumps(records))
    more = {"streaming": True, "on_bad_record": "drop", "stage": stage, "train_sampling_strategy": "sequential",
            "dataset": str(workspace / "pairs.json")}  # fmt: skip
    if stage == "kto":
        more["columns"] = kto_options(workspace)["columns"]
    assert len(losses(workspace, monkeypatch, **more)) == 3


# --- mismatched responses of a step -----------------------------------------------------------------------------------

GROUP = {"kl_pairing": "group"}


def as_row(prompt, answer):
    return {"input_ids": [*prompt, *answer], "labels": [-100] * len(prompt) + answer, "tag": True}


def test_each_row_of_a_step_uses_preceding_different_response():
    rows = RowsWithMismatched(ListedRows([as_row([1, 2], [7]), as_row([3], [8, 9]), as_row([4], [8, 9]), None]), 4)
    keys = rows.keys_of_step([2, 0, 1, 3])
    assert keys == {2: (2, 0), 0: (0, 2), 1: (1, 0), 3: (3, 1)}
    fetched = rows.__getitems__([keys[item] for item in (2, 0, 1, 3)])
    assert [row and row.get("kl_input_ids") for row in fetched] == [[4, 7], [1, 2, 8, 9], [3, 7], None]
    assert fetched[1]["kl_labels"] == [-100, -100, 8, 9]
    assert RowsWithMismatched(rows.rows, 3).__getitems__([(0, 2)])[0]["kl_input_ids"] == [1, 2, 8]
    assert rows.keys_of_step([1]) == {1: (1, None)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "cut",
    representative_slow(
        [{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, {"streaming": True},
         {"padding_free": False}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}], 2,
    ),
    ids=lambda cut: next(iter(cut)),
)  # fmt: skip
def test_step_mismatched_responses_do_not_depend_on_micro_batching(workspace, monkeypatch, cut):
    options = kto_options(workspace, model_name_or_path="other", ref_model="model", **GROUP)
    whole = losses(workspace, monkeypatch, **options)
    assert losses(workspace, monkeypatch, **{**options, **cut}) == pytest.approx(whole, rel=1e-5)
    assert whole != losses(workspace, monkeypatch, **{**options, "kl_pairing": "neighbour"})


def test_evaluation_uses_neighbors_of_its_dataset(workspace, monkeypatch):
    more = {"eval_dataset": str(workspace / "unpaired.json"), "eval_strategy": "steps", "eval_steps": 3}
    assert losses(workspace, monkeypatch, **kto_options(workspace, **GROUP, **more))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"precompute_ref_log_probs": True}, "kl_pairing"), ({"max_tokens_per_batch": 512}, "kl_pairing")],
)
def test_options_that_prevent_step_pairing_are_rejected(workspace, change, message):
    with pytest.raises(UserError, match=message):
        plan(run_options(workspace, **kto_options(workspace, **GROUP, **change)))


@pytest.mark.parametrize("changes", [{"stage": "dpo"}, {"stage": "kto", "kto_loss": "apo_zero_unpaired"}], ids=str)
def test_pairing_without_baseline_has_no_effect_and_is_reported(workspace, changes):
    notes = plan(run_options(workspace, **GROUP, **changes)).notes
    assert any("kl_pairing" in note and "no effect" in note for note in notes)
