"""Rows of preference data equal TRL's, token for token (tests/golden/preference.json)."""

import pytest
from datasets import Dataset, disable_progress_bars
from golden_run import golden
from trl_runs import tokenizer

from burnish import DPOConfig, KTOConfig, RewardConfig, UserError
from burnish.trainer.trl.preferences.rows import (
    preference_rows,
    template_of,
    unpaired_row,
    with_kl_answers,
)
from representative import representative

disable_progress_bars()
KINDS = {"DPOTrainer": (DPOConfig, "pairs"), "KTOTrainer": (KTOConfig, "unpaired"),
         "RewardTrainer": (RewardConfig, "scores")}  # fmt: skip


def rows_of(records, trainer="DPOTrainer", max_length=1024, chat_template=None, **options):
    config, kind = KINDS[trainer]
    made = tokenizer()
    made.chat_template = chat_template or golden()["rows"]["trl"]["chat_template"]
    args = config("unused", use_cpu=True, max_length=max_length, **options)
    template = template_of(args, made, kind)
    encode = template.encode_unpaired if kind == "unpaired" else template.encode_pairs
    return preference_rows(Dataset.from_list(records), "train", args, kind, encode, template)


def truncated(row, limit):
    """Return a row truncated as by TRL's collator."""
    at = len(row.get("prompt_ids", []))
    sides = {name: row[name][: limit - at] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row}
    return {**{name: row[name] for name in ("prompt_ids", "label", "margin") if name in row}, **sides}


CASES = golden().get("rows", {}).get("trl", {}).get("encoded", [])


def expected_rows(case):
    """Return the golden rows without pairs whose responses are equal after truncation, which burnish drops."""
    rows = [truncated(row, case["max_length"]) for row in case["rows"]]
    return [row for row in rows if "rejected_ids" not in row or row["chosen_ids"] != row["rejected_ids"]]


def joined_rows(rows):
    """Return prompts with their responses, wherever the responses begin."""
    return [
        [row.get("prompt_ids", []) + row[name] for name in row if name.endswith("_ids") and name != "prompt_ids"]
        for row in rows
    ]


@pytest.mark.parametrize(
    "case", representative(CASES, 6), ids=lambda case: f"{case['set']}-{case['trainer']}-{case['max_length']}"
)
def test_rows_match_trl(case):
    expected, records = expected_rows(case), golden()["rows"]["trl"]["records"][case["set"]]
    if not expected:
        with pytest.raises(UserError, match="No examples of the train dataset are left"):
            rows_of(records, case["trainer"], case["max_length"])
        return
    rows = [{name: row[name] for name in expected[0]} for row in rows_of(records, case["trainer"], case["max_length"])]
    if case["set"] == "implicit_text":  # there, "blue" and "black" are truncated to "bl"
        assert joined_rows(rows) == joined_rows(expected)
        rows, expected = rows[::2], expected[::2]
    assert rows == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["trainer"] == "KTOTrainer"],
    ids=lambda case: f"{case['set']}-{case['max_length']}",
)  # fmt: skip
def test_mismatched_response_is_that_of_the_preceding_record(case):
    limit, records = case["max_length"], golden()["rows"]["trl"]["records"][case["set"]]
    rows = rows_of(records, "KTOTrainer", limit)
    if len({*map(tuple, rows["completion_ids"])}) == 1:
        with pytest.raises(UserError, match="All completions of the train dataset are identical"):
            with_kl_answers(rows, "train")
        return
    rows = list(with_kl_answers(rows, "train"))
    for place, (row, theirs) in enumerate(zip(rows, case["rows"], strict=True)):
        other = unpaired_row(row, limit)["kl_input_ids"][len(row["prompt_ids"]) :]
        assert other == rows[place - 1]["completion_ids"][: limit - len(row["prompt_ids"])]
        if (
            place % 2 and case["set"] != "implicit_text"
        ):  # TRL rotates within blocks of two, so the first record gets the second one's response
            assert other == theirs["KL_completion_ids"][: limit - len(row["prompt_ids"])]
