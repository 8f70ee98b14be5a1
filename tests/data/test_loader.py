"""Row order depends only on seed and epoch, is resumed from two numbers, and is the same for any micro-batching and
number of ranks."""

import multiprocessing
import os
import signal
from itertools import chain, pairwise

import pytest
import torch

from burnish.data.batches.budget import Budget
from burnish.data.batches.loader import (
    EvalBatches,
    LoaderOptions,
    RowLoader,
    StepPartition,
    balance_over_ranks,
    idle_fraction,
)
from burnish.data.rows.row_set import ListedRows


def collate(items):
    ids = torch.tensor(items)[:, None]
    return {"input_ids": ids, "labels": ids.clone()}


def make_loader(num_items=21, batch_size=2, accumulation=2, world_size=1, rank=0, seed=7, **options):
    partition = StepPartition(batch_size, accumulation, world_size, rank, options.pop("drop_last", False))
    lengths = options.pop("lengths", None)
    return RowLoader(range(num_items), collate, partition, seed=seed, options=LoaderOptions(**options), lengths=lengths)


def items_of(group):
    return [i for batch in group.batches for i in batch["input_ids"].flatten().tolist() if batch["labels"].max() >= 0]


def steps_of_epoch(loader):
    groups = []
    for group in loader.step_batches():
        groups.append(items_of(group))
        loader.advance(group)
    loader.end_epoch()
    return groups


def test_epoch_uses_every_item_once_and_next_epoch_is_reshuffled():
    loader = make_loader()
    first, second = steps_of_epoch(loader), steps_of_epoch(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(21))
    assert first != second


def test_order_does_not_depend_on_global_generator():
    torch.manual_seed(1)
    first = steps_of_epoch(make_loader())
    torch.manual_seed(2)
    torch.rand(5)
    assert steps_of_epoch(make_loader()) == first


def test_order_matches_seedable_sampler_of_accelerate():
    from accelerate.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(range(21), data_seed=7)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert make_loader().order(epoch) == list(sampler)


@pytest.mark.parametrize("stop_after", [1, 3, 5, 6, 7])
def test_loader_resumes_from_its_state(stop_after):
    uninterrupted = make_loader()
    expected = steps_of_epoch(uninterrupted) + steps_of_epoch(uninterrupted)
    first = make_loader()
    recorded = []
    while len(recorded) < stop_after:
        for group in first.step_batches():
            recorded.append(items_of(group))
            first.advance(group)
            if len(recorded) == stop_after:
                break
        if first.is_exhausted:
            first.end_epoch()
    second = make_loader()
    second.load_state_dict(first.state_dict())
    rest = steps_of_epoch(second)
    if len(recorded) + len(rest) < len(expected):
        rest += steps_of_epoch(second)
    assert recorded + rest == expected


@pytest.mark.parametrize("num_steps", [1, 50, 5000])
def test_resumed_loader_reads_no_earlier_rows(num_steps):
    indices = []

    class Rows(list):
        def __getitem__(self, index):
            indices.append(index)
            return super().__getitem__(index)

    loader = RowLoader(Rows(range(40_000)), collate, StepPartition(2, 2), seed=7, options=LoaderOptions())
    loader.load_state_dict({"epoch": 0, "position": 4 * num_steps})
    expected = loader.order(0)[4 * num_steps : 4 * num_steps + 4]
    indices.clear()
    assert items_of(next(loader.step_batches())) == expected
    assert indices == expected


def test_prefetched_unused_batches_are_read_again_on_resume():
    loader = make_loader()
    groups = loader.step_batches()
    first = next(groups)
    loader.advance(first)
    next(groups)
    assert items_of(next(loader.step_batches())) == steps_of_epoch(make_loader())[1]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_items_of_a_step_do_not_depend_on_micro_batching(batch_size, accumulation):
    result = steps_of_epoch(make_loader(batch_size=batch_size, accumulation=accumulation))
    assert result == steps_of_epoch(make_loader(batch_size=8, accumulation=1))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_items_of_one_process_with_equal_micro_batch_counts(world_size):
    single = steps_of_epoch(make_loader(batch_size=2 * world_size, accumulation=2, num_items=29))
    ranks = [
        list(make_loader(batch_size=2, accumulation=2, num_items=29, world_size=world_size, rank=rank).step_batches())
        for rank in range(world_size)
    ]
    for index, items in enumerate(single):
        assert sorted(i for rank in ranks for i in items_of(rank[index])) == sorted(items)
        assert len({len(rank[index].batches) for rank in ranks}) == 1


def test_rank_without_items_gets_a_batch_without_weight():
    last = list(make_loader(num_items=5, batch_size=2, accumulation=1, world_size=2, rank=1).step_batches())[-1]
    assert (last.batches[0]["labels"] == -100).all()
    assert (last.num_rows, last.num_tokens) == (0, 0)


def test_rows_of_a_step_are_the_examples_in_its_packs():
    packs = ListedRows([{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [1] * n} for n in (1, 2, 3)])
    partition = StepPartition(micro_batch_size=2, accumulation=1)
    loader = RowLoader(packs, lambda rows: {}, partition, seed=0, num_examples=packs.num_examples)
    assert [step.num_rows for step in loader.step_batches()] == [
        sum(packs.num_examples[item] for item in loader.order(0)[at : at + 2]) for at in (0, 2)
    ]
    assert EvalBatches(packs, dict, 2, num_examples=packs.num_examples).num_rows == 6
    assert EvalBatches(packs, dict, 2).num_rows == 3


def test_drop_last_drops_items_of_an_incomplete_batch():
    assert sum(map(len, steps_of_epoch(make_loader(drop_last=True)))) == 20


def test_epoch_progress_counts_micro_batches_and_ends_on_an_integer():
    groups = list(make_loader().step_batches())
    assert [round(g.epoch * 11) for g in groups] == [2, 4, 6, 8, 10, 11]
    assert groups[-1].epoch == 1.0


def test_group_by_length_starts_with_longest_and_groups_similar_lengths():
    lengths = [(i * 37) % 101 for i in range(400)]
    order = make_loader(400, lengths=lengths, train_sampling_strategy="group_by_length").order(0)
    assert sorted(order) == list(range(400))
    assert lengths[order[0]] == max(lengths)
    gaps = [abs(lengths[a] - lengths[b]) for a, b in pairwise(order)]
    assert sum(gaps) / len(gaps) < 8


def test_disable_shuffling_is_sequential():
    for requested in ({"train_sampling_strategy": "sequential"}, {"disable_shuffling": True}):
        assert make_loader(9, **requested).order(1) == list(range(9))


def test_group_by_length_matches_transformers_order():
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = [(i * 37) % 101 for i in range(400)]
    theirs = get_length_grouped_indices(lengths, 4, generator=torch.Generator().manual_seed(7))
    for requested in ({"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}):
        assert make_loader(400, lengths=lengths, **requested).order(0) == theirs


@pytest.mark.run
def test_workers_give_the_same_batches_as_the_main_process():
    assert steps_of_epoch(make_loader(dataloader_num_workers=1)) == steps_of_epoch(make_loader())


@pytest.mark.run
def test_workers_survive_signals_that_stop_a_run():
    steps = make_loader(dataloader_num_workers=1).step_batches()
    first = [next(steps).indices]
    for worker in multiprocessing.active_children():  # terminals and schedulers signal all processes
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(worker.pid, number)
    assert first + [step.indices for step in steps] == [step.indices for step in make_loader().step_batches()]


def test_worker_options_are_passed_to_workers(monkeypatch):
    overrides = []

    def loader(items, batch_sampler, collate_fn, **settings):
        overrides.append((settings["num_workers"], settings["prefetch_factor"], settings["pin_memory"]))
        return [collate_fn(part) for part in batch_sampler]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.data, "DataLoader", loader)
    for pinned in (True, False):
        options = {"dataloader_prefetch_factor": 3, "dataloader_pin_memory": pinned}
        assert steps_of_epoch(make_loader(dataloader_num_workers=1, **options)) == steps_of_epoch(make_loader())
    assert overrides == [(1, 3, True), (1, 3, False)]


def test_evaluation_iterates_in_order_and_repeatedly():
    batches = EvalBatches(range(5), collate, batch_size=2)
    for _ in range(2):
        assert [b["input_ids"].flatten().tolist() for b in batches] == [[0, 1], [2, 3], [4]]


def test_evaluation_on_two_ranks_covers_every_item_once():
    ranks = [list(EvalBatches(range(5), collate, 2, world_size=2, rank=r)) for r in range(2)]
    assert [len(r) for r in ranks] == [2, 2]
    recorded = [i for r in ranks for b in r if b["labels"].max() >= 0 for i in b["input_ids"].flatten().tolist()]
    assert sorted(recorded) == list(range(5))


@pytest.mark.parametrize("pads", [False, True])
def test_token_budget_keeps_items_of_a_step_and_limits_micro_batches(pads):
    lengths = [1 + (7 * i) % 19 for i in range(21)]
    plain = steps_of_epoch(make_loader())
    partition = StepPartition(2, 2, budget=Budget(20, pads))
    groups = list(RowLoader(range(21), collate, partition, seed=7, lengths=lengths).step_batches())
    assert [sorted(items_of(group)) for group in groups] == [sorted(step) for step in plain]
    for group in groups:
        for batch in group.batches:
            batch_lengths = [lengths[i] for i in batch["input_ids"].flatten().tolist()]
            assert (len(batch_lengths) * max(batch_lengths) if pads else sum(batch_lengths)) <= 20


@pytest.mark.parametrize("pads", [False, True])
def test_image_patches_count_towards_the_budget(pads):
    lengths, patches = [5] * 8, [0, 0, 0, 0, 6, 6, 40, 0]
    parts = Budget(20, pads).micro_batches(range(8), lengths, patches)
    assert sorted(item for part in parts for item in part) == list(range(8))
    assert [6] in parts  # its patches alone exceed the budget
    costs = [sum(lengths[item] + patches[item] for item in part) for part in parts if part != [6]]
    assert max(costs) <= 20
    assert len(parts) == 4
    assert Budget(20, pads).micro_batches(range(8), lengths, [0] * 8) == Budget(20, pads).micro_batches(
        range(8), lengths
    )


def test_budget_merges_rows_of_several_micro_batches_that_fit():
    groups = list(
        RowLoader(
            range(12), collate, StepPartition(1, 6, budget=Budget(20, False)), seed=7, lengths=[5] * 12
        ).step_batches()
    )
    assert [len(group.batches) for group in groups] == [2, 2]


def steps_of_ranks(world_size, lengths, budget=None, items=21):
    """Return for each step the items of each rank, and the set of micro-batch counts."""
    ranks = []
    for rank in range(world_size):
        partition = StepPartition(2, 2, world_size, rank, budget=budget)
        ranks.append(list(RowLoader(range(items), collate, partition, seed=7, lengths=lengths).step_batches()))
    result = []
    for groups in zip(*ranks, strict=True):
        non_empty = [[batch for batch in group.batches if (batch["labels"] != -100).any()] for group in groups]
        shares = [[i for batch in batches for i in batch["input_ids"].flatten().tolist()] for batches in non_empty]
        result.append((shares, {len(group.batches) for group in groups}))
    return result


@pytest.mark.parametrize("budget", [None, Budget(6, False), Budget(6, True)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_items_of_a_step_once_with_equal_micro_batch_counts(world_size, budget):
    lengths = [1 + i % 5 for i in range(21)]
    plain = [sorted(step) for step in steps_of_epoch(RowLoader(
        range(21), collate, StepPartition(2, 2 * world_size), seed=7
    ))]  # fmt: skip
    for (shares, counts), expected in zip(steps_of_ranks(world_size, lengths, budget), plain, strict=True):
        assert sorted(item for share in shares for item in share) == expected
        assert len(counts) == 1


def test_known_lengths_balance_tokens_between_ranks():
    lengths = [1 + (i * 37) % 101 for i in range(160)]
    for shares, _ in steps_of_ranks(4, lengths, items=160):
        tokens = [sum(lengths[item] for item in share) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths) / 2
        assert {len(share) for share in shares} == {4}
    assert balance_over_ranks([0, 1, 2], [5, 1, 1], 2) == [[0], [1, 2]]
    assert idle_fraction([[0, 1]], [3, 1], 2) == pytest.approx(1 / 3)


def test_budget_applies_to_evaluation_batches():
    lengths = [8, 8, 8, 2, 2, 2, 2]
    batches = list(EvalBatches(range(7), collate, 4, budget=Budget(10, False), lengths=lengths))
    assert sorted(i for batch in batches for i in batch["input_ids"].flatten().tolist()) == list(range(7))
    assert max(sum(lengths[i] for i in batch["input_ids"].flatten().tolist()) for batch in batches) <= 10
    assert len(EvalBatches(range(7), collate, 4, budget=Budget(10, False), lengths=lengths)) == len(batches)
