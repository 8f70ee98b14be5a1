"""From rows to micro-batches: no row is lost or added, and rows do not attend to each other."""

import json
import random
import tracemalloc
from collections import Counter

import pytest
import torch

from burnish.config.options import union
from burnish.data.batches.batching import (
    BatchingOptions,
    check_batching,
    collate_padded,
    collate_padding_free,
    collator,
    lengths_of,
    pack,
    pack_best_fit,
    packs_rows,
    sequences_of,
    splits_rows,
)
from burnish.data.options import DataOptions
from burnish.data.origins import Origins
from burnish.data.rows.row_set import ListedRows, pack_rows
from burnish.data.sets.examples import ListedExamples
from burnish.loop.types import IGNORE_INDEX, Example

Options = union("Options", BatchingOptions, DataOptions)


def row(start, length, prompt=1):
    ids = list(range(start, start + length))
    return {"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]}


def golden(folder, name):
    cases = json.loads((folder / "truncation_packing_pretrain.json").read_text())
    return [case for case in cases if case["fn"] == name]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_right_padding_is_neither_attended_to_nor_trained_on():
    batch = collate_padded([row(10, 3), row(20, 5)], pad_id=7)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 7, 7], [20, 21, 22, 23, 24]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, -100], [-100, 21, 22, 23, 24]]


def test_padding_reaches_requested_multiple():
    assert collate_padded([row(10, 3), row(20, 9)], 0, pad_to_multiple_of=8)["input_ids"].shape == (2, 16)
    assert collate_padded([row(10, 8)], 0, pad_to_multiple_of=8)["input_ids"].shape == (1, 8)


def test_padding_has_labels_only_on_request():
    options = BatchingOptions(padding_free=False, ignore_pad_token_for_loss=False)
    batch = collator(options, pad_id=7, is_padding_free=False)([row(10, 2), row(20, 4)])
    assert batch["labels"][0].tolist() == [-100, 11, 7, 7]


def test_padding_free_rows_are_concatenated_with_positions_from_zero():
    batch = collate_padding_free([row(10, 3, prompt=0), row(20, 2, prompt=0), row(30, 1, prompt=0)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 30]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert "attention_mask" not in batch


def test_first_token_of_flat_sequence_is_not_predicted_from_neighbor():
    batch = collate_padding_free([row(10, 3, prompt=0), row(20, 2, prompt=0)])
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21]]


def test_pack_becomes_padding_free_sequences():
    rows = [row(10, 3), row(20, 2), row(30, 4)]
    (packed,) = pack(rows, 9)
    flat, separate = collate_padding_free([packed]), collate_padding_free([rows[2], rows[0], rows[1]])
    assert all(torch.equal(torch.as_tensor(flat[name]), torch.as_tensor(separate[name])) for name in separate)


def test_pack_is_split_for_a_model_that_requires_padding():
    (packed,) = pack([row(10, 3), row(20, 2)], 5)
    batch = collator(BatchingOptions(packing=True), pad_id=0, is_padding_free=False)([packed])
    assert batch["input_ids"].tolist() == [[10, 11, 12], [20, 21, 0]]


def test_loss_weights_follow_their_tokens_and_default_to_one():
    weighted = {**row(10, 2), "loss_weights": [0.5, 2.0]}
    flat = collate_padding_free([row(20, 1), weighted])
    assert flat["loss_weights"].tolist() == [[1.0, 0.5, 2.0]]
    padded = collate_padded([row(20, 3), weighted], 0)
    assert padded["loss_weights"].tolist() == [[1, 1, 1], [0.5, 2.0, 1.0]]
    assert "loss_weights" not in collate_padding_free([row(20, 1)])


# --- packs ------------------------------------------------------------------------------------------------------------


def test_best_fit_packing_matches_golden_results(golden_folder):
    for case in golden(golden_folder, "greedy_knapsack"):
        lengths, capacity = case["args"]
        packs = [[lengths[index] for index in indices] for indices in pack_best_fit(lengths, capacity)]
        assert packs == case["out"]


def test_every_row_is_in_exactly_one_pack_within_capacity():
    generator = random.Random(5)
    for capacity in (16, 100, 4096):
        lengths = [generator.randint(1, capacity) for _ in range(500)]
        packs = pack_best_fit(lengths, capacity)
        assert sorted(index for indices in packs for index in indices) == list(range(500))
        assert max(sum(lengths[index] for index in indices) for indices in packs) <= capacity


def test_row_goes_to_the_pack_with_least_remaining_space():
    # 6 and 5 open two packs of 10; 4 fits both and fills the first; 5 then fills the second.
    assert pack_best_fit([5, 6, 4, 5], 10) == [[1, 2], [0, 3]]


def test_memory_of_packing_does_not_grow_with_the_capacity():
    tracemalloc.start()
    assert pack_best_fit([5, 6, 4], 10**9) == [[1, 0, 2]]
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_best_fit_is_close_to_minimum_number_of_packs():
    generator = random.Random(7)
    lengths = [generator.randint(20, 900) for _ in range(2000)]
    minimum = -(-sum(lengths) // 1024)
    assert len(pack_best_fit(lengths, 1024)) <= 1.02 * minimum


def test_row_longer_than_a_pack_is_rejected_or_split():
    with pytest.raises(ValueError, match="12 tokens does not fit in a packed sequence of 8"):
        pack([row(0, 12)], 8)
    packs = pack([row(0, 12), row(50, 4)], 8, "bfd_split")
    assert [lengths_of(p) for p in packs] == [[8], [4, 4]]
    assert packs[0]["input_ids"] + packs[1]["input_ids"][:4] == list(range(12))


def test_wrapped_packs_hold_all_text_and_document_boundaries():
    rows = [row(0, 5, prompt=0), row(100, 9, prompt=0), row(200, 2, prompt=0)]
    packs = pack(rows, 6, "wrapped")
    assert [lengths_of(p) for p in packs] == [[5, 1], [6], [2, 2]]
    assert [token for p in packs for token in p["input_ids"]] == [token for r in rows for token in r["input_ids"]]
    assert len(pack(rows, 6, "wrapped", drop_incomplete=True)) == 2


def test_pretraining_blocks_match_llamafactory(golden_folder):
    texts = {
        case["template"]: case["out"]["input_ids"] for case in golden(golden_folder, "pretrain") if not case["packing"]
    }
    blocks = {
        case["template"]: case["out"]["input_ids"] for case in golden(golden_folder, "pretrain") if case["packing"]
    }
    for template, expected in blocks.items():
        size = len(expected[0])
        # Unpacked rows are truncated to cutoff_len; the rest of the second is in the block.
        first = texts[template][0]
        second = (expected[0] + expected[1])[len(first) :]
        packs = pack([{"input_ids": ids, "labels": ids} for ids in (first, second)], size, "wrapped", True)
        assert [p["input_ids"] for p in packs] == expected


def test_packs_match_llamafactory_in_number_and_rows(golden_folder):
    for case in golden(golden_folder, "packed"):
        if not case["neat"]:
            continue
        theirs = list(zip(case["out"]["input_ids"], case["out"]["attention_mask"], strict=True))
        rows = [ids for tokens, segments in theirs for ids in _split(tokens, segments)]
        packs = pack([{"input_ids": ids, "labels": ids} for ids in rows], case["cutoff_len_used"])
        assert len(packs) <= len(theirs)
        assert Counter(str(s["input_ids"]) for p in packs for s in sequences_of(p)) == Counter(map(str, rows))


def _split(ids, segments):
    """Return the documents of a packed golden row, whose mask numbers them from 1; 0 is padding."""
    return [[t for t, s in zip(ids, segments, strict=True) if s == n] for n in range(1, max(segments) + 1)]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "default", "expected"),
    [
        ({}, None, False),
        ({}, "wrapped", True),
        ({"packing": False}, "wrapped", False),
        ({"neat_packing": True}, None, True),
    ],
)
def test_rows_are_packed_on_request_or_for_pretraining(options, default, expected):
    assert packs_rows(Options(**options), default) is expected


def test_evaluation_packs_like_training_by_default():
    assert packs_rows(Options(packing=True), None, is_eval=True)
    assert not packs_rows(Options(packing=True, eval_packing=False), None, is_eval=True)


def test_pretraining_splits_long_text_and_fine_tuning_keeps_rows_whole():
    rows = ListedRows([row(0, 5), row(10, 4)])
    assert [lengths_of(p) for p in pack_rows(rows, Options(), "wrapped", 6)] == [[5, 1], [3]]
    assert [lengths_of(p) for p in pack_rows(rows, Options(packing=True), None, 6)] == [[5], [4]]
    assert pack_rows(rows, Options(), None, 6) is rows


class CountedRows(ListedRows):
    """Rows whose lengths are known without reading them. They have no images."""

    lengths, has_images = (), False

    def __init__(self, rows):
        super().__init__(rows)
        self.lengths, self.num_read = [len(each["input_ids"]) for each in rows], 0

    def item(self, index):
        self.num_read += 1
        return super().item(index)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packs_are_assembled_when_they_are_read(strategy):
    rows = CountedRows([row(10 * n, 1 + n % 8) for n in range(40)])
    packs = pack_rows(rows, Options(packing=True, packing_strategy=strategy), None, 8)
    assert packs.lengths
    assert packs.sequence_lengths
    assert packs.num_examples
    assert rows.num_read == 0
    assert list(packs) == pack(rows.rows, 8, strategy)
    assert list(packs.lengths) == [len(each["input_ids"]) for each in packs]
    assert list(packs.sequence_lengths) == [length for each in packs for length in lengths_of(each)]
    assert list(packs.num_examples) == [len(lengths_of(each)) for each in packs]


def test_memory_of_packs_does_not_depend_on_their_tokens():
    rows = CountedRows([row(0, 10_000)] * 1000)
    tracemalloc.start()
    packs = pack_rows(rows, Options(), "wrapped", 2048)
    assert sum(packs.lengths) == 10_000_000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_records_of_a_pack_are_found_without_packing_again():
    examples = ListedExamples([Example(source="a.json", number=n + 1) for n in range(6)])
    rows = CountedRows([row(10 * n, length) for n, length in enumerate((5, 6, 4, 5, 2, 1))])
    packs = pack_rows(rows, Options(packing=True), None, 10)
    origins = Origins(examples, rows, packs.plan)
    assert origins([1]) == ["a.json, record 1", "a.json, record 4"]
    assert origins([0, 0]) == ["a.json, record 2", "a.json, record 3"]
    assert rows.num_read == 0


@pytest.mark.parametrize(
    ("options", "default", "expected"),
    [
        ({}, "wrapped", True),
        ({}, None, False),
        ({"packing": True}, None, False),
        ({"packing_strategy": "bfd"}, "wrapped", False),
    ],
)
def test_rows_are_not_truncated_if_packing_splits_them(options, default, expected):
    assert splits_rows(Options(**options), default) is expected


def test_contradictory_packing_options_are_named():
    problems = list(check_batching(Options(ignore_pad_token_for_loss=False, neat_packing=True, packing=False)))
    assert len(problems) == 2
    assert not list(check_batching(Options()))
