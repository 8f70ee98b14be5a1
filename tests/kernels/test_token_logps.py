"""Per-token log-probabilities from hidden states: values and gradients equal those from logits."""

from dataclasses import replace

import pytest
import torch

from burnish.kernels import token_logps
from burnish.kernels.token_logps import LogpRules, linear_token_logps, plain_token_logps

H, V = 12, 37


def inputs(tokens=29, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in ((tokens, H), (V, H), (V,))
    )
    targets = torch.randint(V, (tokens,), generator=generator)
    upstream = torch.randn(tokens, generator=generator)
    return hidden, weight, bias, targets, upstream


def plain(hidden, weight, targets, rules, bias):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    return plain_token_logps(
        rules.softcap * torch.tanh(logits / rules.softcap) if rules.softcap else logits, targets, rules
    )


@pytest.fixture(params=[4, 10_000], ids=["many chunks", "one chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(token_logps, "chunk_length", lambda *_, **__: request.param)


@pytest.mark.parametrize(
    "rules", [LogpRules(), LogpRules(softcap=2.0), LogpRules(None, True, True, True), LogpRules(3.0, True, True, True)]
)
@pytest.mark.parametrize("trains", ["all", "head", "hidden"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_token_logps_and_gradients_match_full_logits(chunks, rules, trains, has_bias):
    hidden, weight, bias, targets, upstream = inputs()
    hidden.requires_grad_(trains != "head")
    weight.requires_grad_(trains != "hidden")
    bias = bias.requires_grad_(trains != "hidden") if has_bias else None
    trained = [tensor for tensor in (hidden, weight, bias) if tensor is not None and tensor.requires_grad]
    ours = linear_token_logps(hidden, weight, targets, rules, bias)
    theirs = plain(hidden, weight, targets, rules, bias)
    for name, actual, reference in zip(ours._fields, ours, theirs, strict=True):
        assert torch.allclose(actual.float(), reference.float(), atol=5e-6, rtol=5e-6), name
    expected = torch.autograd.grad(theirs.logps, trained, upstream)
    for actual, reference in zip(torch.autograd.grad(ours.logps, trained, upstream), expected, strict=True):
        assert torch.allclose(actual, reference, atol=1e-5)


def test_no_tokens_give_no_values_and_no_gradient():
    hidden, weight, _, targets, _ = inputs(tokens=0)
    result = linear_token_logps(hidden, weight, targets)
    result.logps.sum().backward()
    assert [len(values) for values in result] == [0, 0, 0, 0]
    assert not weight.grad.any()


def test_nothing_is_saved_without_gradients():
    hidden, weight, _, targets, _ = inputs()
    with torch.no_grad():
        assert linear_token_logps(hidden, weight, targets).logps.grad_fn is None


def test_half_precision_error_is_that_of_the_products():
    hidden, weight, _, targets, upstream = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_token_logps(hidden, weight, targets)
    exact = plain(hidden, weight, targets, LogpRules(), None)
    assert ours.logps.dtype == torch.float32
    assert torch.allclose(ours.logps, exact.logps, atol=0.1)
    (gradient,) = torch.autograd.grad(ours.logps, [hidden], upstream)
    (expected,) = torch.autograd.grad(exact.logps, [hidden], upstream)
    assert (gradient - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("rules", [LogpRules(None, True, True), LogpRules(2.0, True, True)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("trains", ["all", "hidden"])
def test_temperature_and_entropy_gradient_match_full_logits(chunks, rules, temperature, trains):
    hidden, weight, bias, targets, upstream = inputs()
    rules = replace(rules, temperature=temperature, entropy_gradient=True)
    for tensor in (weight, bias):
        tensor.requires_grad_(trains == "all")
    trained = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    ours = linear_token_logps(hidden, weight, targets, rules, bias)
    theirs = plain(hidden, weight, targets, rules, bias)
    assert torch.allclose(ours.entropy.float(), theirs.entropy.float(), atol=5e-6)
    expected = torch.autograd.grad([theirs.logps, theirs.entropy], trained, [upstream, upstream.flip(0)])
    result = torch.autograd.grad([ours.logps, ours.entropy], trained, [upstream, upstream.flip(0)])
    for actual, reference in zip(result, expected, strict=True):
        assert torch.allclose(actual, reference, atol=1e-5)


@pytest.mark.parametrize("rules", [LogpRules(), LogpRules(2.0, True, True, True, temperature=0.7)])
@pytest.mark.parametrize("is_as_expected", [True, False])
@pytest.mark.parametrize("trains", ["all", "head"])
def test_expected_gradient_is_computed_in_the_forward_pass(chunks, monkeypatch, rules, is_as_expected, trains):
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    hidden.requires_grad_(trains != "head")
    trained = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    received = -3.0 * upstream if is_as_expected else upstream.flip(0)
    plain_values = linear_token_logps(hidden, weight, targets, rules, bias)
    plain_gradients = torch.autograd.grad(plain_values.logps, trained, received)
    values = linear_token_logps(hidden, weight, targets, rules, bias, upstream)
    assert all(map(torch.equal, values, plain_values))
    if is_as_expected:
        monkeypatch.delattr(token_logps, "_chunks")  # the backward pass computes no logits
    for actual, reference in zip(torch.autograd.grad(values.logps, trained, received), plain_gradients, strict=True):
        assert torch.allclose(actual, reference, atol=1e-5)


def test_expected_gradient_of_zero_is_zero_or_recomputed():
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    for received in (torch.zeros(len(targets)), upstream):
        values, plain_values = (
            linear_token_logps(hidden, weight, targets, None, bias, known) for known in (0 * upstream, None)
        )
        result, expected = (
            torch.autograd.grad(result_values.logps, [weight], received)[0] for result_values in (values, plain_values)
        )
        assert torch.allclose(result, expected, atol=1e-5)
