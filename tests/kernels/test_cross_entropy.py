"""The output head and its loss in chunks: equal to the plain path, with less memory."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from burnish.kernels import cross_entropy
from burnish.kernels.cross_entropy import TokenLoss, linear_cross_entropy, plain_cross_entropy
from burnish.kernels.probe import Head
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.targets import Targets, sums_of_hidden
from largest_tensor import LargestTensor

N, H, V = 37, 12, 53


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Seven tokens per chunk and five rows per tile, so that the last ones are incomplete."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 7 * V * 4)
    monkeypatch.setattr(cross_entropy, "_MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(cross_entropy, "_TILE_BYTES", 5 * H * 4)


def inputs(n=N, bias=False, weights=False, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(n, H, requires_grad=True)
    weight = (torch.randn(V, H) * 0.5).requires_grad_()
    head_bias = torch.randn(V, requires_grad=True) if bias else None
    token_weights = torch.rand(n) * 2 if weights else None
    return hidden, weight, head_bias, torch.randint(0, V, (n,)), token_weights


def plain(hidden, weight, bias, targets, token_weights, rules):
    logits = F.linear(hidden, weight, bias)
    if rules.softcap:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    return plain_cross_entropy(logits, targets, rules, token_weights)


CASES = {
    "plain": TokenLoss(),
    "smoothed": TokenLoss(label_smoothing=0.1),
    "capped": TokenLoss(softcap=3.0),
    "dft": TokenLoss(factor="dft", softcap=3.0, accuracy=True, entropy=True),
    "eaft": TokenLoss(factor="eaft", eaft_alpha=1.7, label_smoothing=0.1),
    "all": TokenLoss(label_smoothing=0.2, softcap=2.0, accuracy=True, entropy=True),
}


@pytest.mark.parametrize("rules", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("bias", "weights"), [(False, False), (True, True)], ids=["bare", "bias and weights"])
@pytest.mark.parametrize("n", [N, 7, 1], ids=["many chunks", "one chunk", "one token"])
def test_sums_and_gradients_match_plain_path(rules, bias, weights, n):
    hidden, weight, head_bias, targets, token_weights = inputs(n, bias, weights)
    ours = linear_cross_entropy(hidden, weight, targets, rules, head_bias, token_weights)
    theirs = plain(hidden, weight, head_bias, targets, token_weights, rules)
    for actual, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(actual, reference, rtol=1e-6, atol=1e-6)
    leaves = [leaf for leaf in (hidden, weight, head_bias) if leaf is not None]
    actual = torch.autograd.grad(ours.total * 0.3, leaves)
    reference = torch.autograd.grad(theirs.total * 0.3, leaves)
    for a, b in zip(actual, reference, strict=True):
        assert (a - b).abs().max() < 1e-6 * max(1.0, b.abs().max())


def test_plain_sum_matches_torch_cross_entropy():
    hidden, weight, _, targets, _ = inputs()
    logits = hidden @ weight.t()
    assert torch.allclose(plain_cross_entropy(logits, targets).total, F.cross_entropy(logits, targets, reduction="sum"))


def test_label_smoothing_matches_transformers():
    from transformers.trainer_pt_utils import LabelSmoother

    hidden, weight, _, targets, _ = inputs()
    ours = linear_cross_entropy(hidden, weight, targets, TokenLoss(label_smoothing=0.15)).total
    logits = (hidden @ weight.t()).unsqueeze(0)
    theirs = LabelSmoother(epsilon=0.15)({"logits": logits}, targets.unsqueeze(0))
    assert torch.allclose(ours / N, theirs, rtol=1e-6)


def reference_factors(logits, targets, alpha):
    """Return for each token, in NumPy, the probability of its target, and (entropy of the twenty most likely tokens /
    3) ^ alpha."""
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    top = np.sort(probabilities, -1)[:, -20:]
    top /= top.sum(-1, keepdims=True)
    return probabilities[np.arange(len(targets)), targets], (-(top * np.log(top)).sum(-1) / 3) ** alpha


def test_dft_and_eaft_scale_loss_as_in_papers_without_gradient_through_scale():
    logits = torch.randn(N, V, generator=torch.manual_seed(1)).mul(2).requires_grad_()
    targets = torch.randint(0, V, (N,))
    dft_factors, eaft_factors = reference_factors(logits.detach().double().numpy(), targets.numpy(), 1.5)
    for rules, factors in (
        (TokenLoss(factor="dft"), dft_factors),
        (TokenLoss(factor="eaft", eaft_alpha=1.5), eaft_factors),
    ):
        expected = (F.cross_entropy(logits, targets, reduction="none") * torch.from_numpy(factors).float()).sum()
        ours = plain_cross_entropy(logits, targets, rules).total
        assert torch.allclose(ours, expected, rtol=1e-5)
        actual, reference = (torch.autograd.grad(total, logits)[0] for total in (ours, expected))
        assert torch.allclose(actual, reference, atol=1e-6)


def test_correct_tokens_and_entropy_are_counted():
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]]) + 1e-3 * torch.rand(3, 3)
    sums = linear_cross_entropy(logits, torch.eye(3), torch.tensor([0, 1, 0]), TokenLoss(accuracy=True, entropy=True))
    assert sums.correct == 2
    assert torch.allclose(sums.entropy, torch.distributions.Categorical(logits=logits).entropy().sum(), rtol=1e-3)


def test_unrequested_values_are_zero():
    hidden, weight, _, targets, _ = inputs()
    sums = linear_cross_entropy(hidden, weight, targets)
    assert sums.correct == sums.entropy == 0
    assert not sums.correct.requires_grad


def test_loss_without_tokens_is_exact_zero_with_a_graph():
    hidden, weight, _, _, _ = inputs()
    total = linear_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.long)).total
    total.backward()
    assert total == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_gradients_are_computed_only_where_required(frozen):
    tensors = list(inputs()[:2])
    tensors[frozen] = tensors[frozen].detach()
    linear_cross_entropy(*tensors, inputs()[3]).total.backward()
    assert tensors[frozen].grad is None
    assert tensors[1 - frozen].grad is not None


def test_full_logits_are_never_allocated():
    hidden, weight, _, targets, _ = inputs(n=400)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, targets, CASES["all"]).total.backward()
    assert largest.numel <= max(400 * H, V * H, 7 * V)


def test_evaluation_computes_no_gradients():
    hidden, weight, _, targets, _ = inputs()
    with torch.no_grad(), LargestTensor() as without:
        linear_cross_entropy(hidden, weight, targets)
    with LargestTensor() as with_gradients:
        linear_cross_entropy(hidden, weight, targets)
    assert without.calls < with_gradients.calls


def test_autocast_error_is_within_spread_of_two_plain_orders():
    hidden, weight, _, targets, _ = inputs(n=400)
    exact = plain(*(t.double() for t in (hidden, weight)), None, targets, None, TokenLoss())
    exact_gradients = torch.autograd.grad(exact.total, (hidden, weight))
    spread = []
    for order in (torch.arange(400), torch.randperm(400)):
        with torch.autocast("cpu", torch.bfloat16):
            total = F.cross_entropy((hidden[order] @ weight.t()).float(), targets[order], reduction="sum")
        spread.append(torch.autograd.grad(total, (hidden, weight)))
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets).total
    assert ours.dtype == torch.float32
    for actual, truth, *plain_gradients in zip(
        torch.autograd.grad(ours, (hidden, weight)), exact_gradients, *spread, strict=True
    ):
        assert actual.dtype == torch.float32
        assert (actual - truth).norm() < 1.1 * max(
            (plain_gradient - truth).norm() for plain_gradient in plain_gradients
        )


def test_infinite_loss_stays_infinite():
    hidden, weight, _, targets, _ = inputs()
    with_nan = torch.where(torch.arange(N)[:, None] == 3, torch.nan, hidden)
    assert not torch.isfinite(linear_cross_entropy(with_nan, weight, targets).total)


def test_second_backward_pass_raises():
    hidden, weight, _, targets, _ = inputs()
    total = linear_cross_entropy(hidden, weight, targets).total * 2
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_each_micro_batch_accumulates_its_gradient():
    hidden, weight, _, targets, _ = inputs()
    for begin, end in pairwise((0, 10, 11, N)):
        linear_cross_entropy(hidden[begin:end], weight, targets[begin:end]).total.backward()
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), targets, reduction="sum"), weight)[0]
    assert (weight.grad - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("n", "lengths"), [(0, []), (7, [7]), (8, [4, 4]), (23, [6, 6, 6, 5])])
def test_tokens_are_split_evenly_into_fewest_chunks(n, lengths, monkeypatch):
    result, logits = [], cross_entropy.logits_into

    def recorded_logits_into(hidden, *rest):
        result.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(cross_entropy, "logits_into", recorded_logits_into)
    hidden, weight, _, targets, _ = inputs(n)
    linear_cross_entropy(hidden, weight, targets)
    assert result == lengths


def test_large_vocabulary_chunks_are_efficient_on_cpu(monkeypatch):
    monkeypatch.undo()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert cross_entropy.chunk_length(151_936, cpu) == 256
    assert cross_entropy.chunk_length(32_000, cpu) == 2**26 // (4 * 32_000)
    assert cross_entropy.chunk_length(151_936, gpu) == 2**29 // (4 * 151_936)
    assert cross_entropy.logits_bytes(5, V, gpu) == 4 * 5 * V
    chunk = cross_entropy.logits_bytes(10**6, 151_936, gpu)
    assert cross_entropy.logits_bytes(10**6, 151_936, cpu) < chunk < 4 * 10**6 * 151_936


def test_token_without_label_counts_nothing_and_has_no_gradient():
    hidden, weight, _, targets, _ = inputs()
    head = Head(torch.nn.Identity(), torch.nn.Linear(H, V, bias=False))
    masked_targets = targets.clone()
    masked_targets[3] = IGNORE_INDEX
    positions, has_label = torch.arange(N), masked_targets != IGNORE_INDEX
    total = sums_of_hidden(hidden, head, Targets(positions, masked_targets), TokenLoss(), weight).total
    rest = sums_of_hidden(
        hidden[has_label], head, Targets(positions[has_label], masked_targets[has_label]), TokenLoss(), weight
    ).total
    assert torch.allclose(total, rest)
    assert not torch.autograd.grad(total, hidden)[0][3].any()
