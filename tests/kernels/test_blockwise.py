"""Blockwise attention over queries matches the formula, with no larger error than the plain implementation."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from burnish.kernels import attention
from burnish.kernels.cpu.blockwise import blockwise_attention
from burnish.models.patches.attention import attend

SCALE = 0.3


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return 4 query heads, 2 key and value heads, and an upstream gradient."""
    torch.manual_seed(length)
    return [torch.randn(heads, length, size).to(dtype) for heads, size in ((4, 16), (2, 16), (2, 12), (4, 12))]


def formula(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool = True) -> Tensor:
    key, value = (x.repeat_interleave(2, 0) for x in (key, value))
    is_later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool).triu(1) & is_causal
    return (query @ key.transpose(1, 2) * scale).masked_fill(is_later, float("-inf")).softmax(-1) @ value


def output_and_gradients(
    function, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, is_causal=True
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    mixed = function(*leaves, SCALE, is_causal)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream)]


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_blockwise_attention_and_gradients_match_formula(length, is_causal):
    tensors = inputs(length, torch.float32)
    exact_results = output_and_gradients(formula, *(x.double() for x in tensors), is_causal)
    for ours, exact in zip(output_and_gradients(blockwise_attention, *tensors, is_causal), exact_results, strict=True):
        assert (ours - exact).abs().max() < 1e-6 * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_bfloat16_gradients_are_as_accurate_as_plain_attention(is_causal):
    tensors = inputs(600, torch.bfloat16)
    exact_results = output_and_gradients(formula, *(x.double() for x in tensors), is_causal)
    plain = output_and_gradients(formula, *tensors, is_causal)
    for ours, reference, exact in zip(
        output_and_gradients(blockwise_attention, *tensors, is_causal), plain, exact_results, strict=True
    ):
        assert (ours - exact).abs().mean() < 1.1 * (reference - exact).abs().mean()


def test_no_tensor_of_score_size_is_saved():
    sizes: list[int] = []
    tensors = inputs(512, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        blockwise_attention(*(x.requires_grad_() for x in tensors[:3]), SCALE)
    assert sum(sizes) == sum(x.numel() for x in tensors[:3])


@pytest.mark.parametrize(("length", "dtype", "uses_blocks"), [
    (300, torch.bfloat16, True), (100, torch.bfloat16, False), (300, torch.float32, False),
])  # fmt: skip
def test_long_rows_of_a_vision_tower_are_computed_blockwise(length, dtype, uses_blocks, monkeypatch):
    """The fast and the plain path of ``attend``, for two rows with as many key heads as query heads."""
    torch.manual_seed(0)
    rows = [torch.randn(2, 4, length, 16).to(dtype) for _ in range(3)]
    calls = []
    monkeypatch.setattr(
        attention, "blockwise_attention", lambda *args, **kw: calls.append(1) or blockwise_attention(*args, **kw)
    )
    tower = SimpleNamespace(is_causal=False)
    ours, _ = attend(tower, *rows, None, scaling=SCALE)
    assert len(calls) == 2 * uses_blocks
    exact, _ = attend(tower, *(x.double() for x in rows), None, scaling=SCALE)
    assert ours.shape == exact.shape == (2, length, 4, 16)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() < 0.02 * exact.abs().max()
    calls.clear()
    mask = torch.ones(2, 1, length, length, dtype=torch.bool)
    attend(tower, *rows, mask, scaling=SCALE)
    attend(tower, *rows, None, scaling=SCALE, is_causal=True)
    assert not calls


@pytest.mark.parametrize("length", [300, 600])
def test_memory_layout_of_keys_and_values_does_not_change_the_result(length):
    """In a vision tower, keys and values are views of a tensor of shape (length, heads, size)."""
    tensors = [x.to(torch.bfloat16) for x in inputs(length, torch.bfloat16)]
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    results = (output_and_gradients(blockwise_attention, *arguments, False) for arguments in (tensors, transposed))
    for result, expected in zip(*results, strict=True):
        assert torch.equal(result, expected)
