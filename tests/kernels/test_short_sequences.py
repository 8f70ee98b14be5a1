"""Attention over short sequences in shared matrix products equals attention over each alone."""

import random
from functools import partial

import pytest
import torch

from burnish.kernels.attention import Scores, Sequences, _attend_one_sequence, _band_mask, flat_attention
from burnish.kernels.cpu.short import buckets_of, short_attention

MANY = [random.Random(5).randint(1, 70) for _ in range(40)]
CASES = {
    "many": MANY,
    "one": [17],
    "equal lengths": [32, 32, 32],
    "one token each": [1, 1, 1],
    "different lengths": [40, 3, 300, 41],
}


def inputs(lengths, heads=6, keys=2, dtype=torch.float32):
    torch.manual_seed(4)
    shapes = [(heads, 8), (keys, 8), (keys, 12)]
    return [torch.randn(sum(lengths), *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def compute_jointly(tensors, lengths, window=None, dropout=0.0):
    dtype = tensors[0].dtype
    create_mask = partial(_band_mask, window=window, dtype=dtype, device=torch.device("cpu"))
    return short_attention(*tensors, without_prefixes(lengths), 0.3, dropout, create_mask)


def without_prefixes(lengths):
    return tuple((length, 0) for length in lengths)


def compute_separately(tensors, lengths, window=None):
    parts = zip(*(torch.split(tensor.transpose(0, 1), lengths, 1) for tensor in tensors), strict=True)
    return torch.cat([_attend_one_sequence(q, k, v, Scores(0.3, window)).transpose(0, 1) for q, k, v in parts])


def with_gradients(mixed, tensors):
    torch.manual_seed(6)
    return [mixed, *torch.autograd.grad(mixed, tensors, torch.randn_like(mixed))]


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("keys", [6, 2, 1])
def test_each_sequence_matches_its_single_result(lengths, window, keys):
    tensors = inputs(lengths, keys=keys)
    ours = with_gradients(compute_jointly(tensors, lengths, window), tensors)
    for x, expected in zip(ours, with_gradients(compute_separately(tensors, lengths, window), tensors), strict=True):
        assert (x - expected).abs().max() < 1e-6 * max(1, expected.abs().max())


def test_bfloat16_is_as_accurate_as_a_call_per_sequence():
    fused_inputs = inputs(MANY, dtype=torch.bfloat16)
    exact_results = with_gradients(compute_separately([x.double() for x in fused_inputs], MANY), fused_inputs)
    plain_inputs = [x.detach().requires_grad_() for x in fused_inputs]
    plain = with_gradients(compute_separately(plain_inputs, MANY), plain_inputs)
    for x, y, true in zip(
        with_gradients(compute_jointly(fused_inputs, MANY), fused_inputs), plain, exact_results, strict=True
    ):
        assert (x - true).abs().mean() < 1.05 * (y - true).abs().mean()


def test_sequence_is_not_affected_by_its_neighbors():
    tensors = [x.detach() for x in inputs([4, 30, 9])]
    before = compute_jointly(tensors, [4, 30, 9])
    for x in tensors:
        x[4:34] = float("nan")
    after = compute_jointly(tensors, [4, 30, 9])
    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[34:], before[34:])


def test_dropout_gradient_uses_the_remaining_weights():
    tensors = [x.double().detach().requires_grad_() for x in inputs([3, 5], heads=2, keys=1)]

    def with_fixed_dropout(*args):
        torch.manual_seed(9)
        return compute_jointly(args, [3, 5], dropout=0.4)

    assert torch.autograd.gradcheck(with_fixed_dropout, tensors)
    assert not torch.equal(with_fixed_dropout(*tensors), compute_jointly(tensors, [3, 5]))


def test_sequences_of_similar_length_share_a_bucket():
    layout = buckets_of(without_prefixes((300, 20, 290, 18, 19)), heads=6).tokens
    assert layout.buckets == ((2, 320), (3, 32))
    assert sorted(layout.places.tolist()) == sorted(set(layout.places.tolist()))


def test_sequences_of_equal_length_are_not_reordered():
    assert buckets_of(without_prefixes((32, 32)), heads=6).tokens.places is None


def test_only_short_16_bit_sequences_use_short_attention(monkeypatch):
    recorded = []
    original = short_attention
    monkeypatch.setattr("burnish.kernels.attention.short_attention", lambda *a: recorded.append(a[3]) or original(*a))
    lengths = [4, 9, 400, 7, 3]
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        flat_attention(*inputs(lengths, dtype=dtype), Sequences.alone(begins, 400), Scores())
    assert recorded == [without_prefixes((4, 9)), without_prefixes((7, 3))]
