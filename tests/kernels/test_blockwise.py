"""Blockwise attention over queries matches the formula, with no larger error than the plain implementation."""

import pytest
import torch
from torch import Tensor

from burnish.kernels.cpu.blockwise import blockwise_attention

SCALE = 0.3


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """4 query heads on 2 keys, and an upstream gradient."""
    torch.manual_seed(length)
    return [torch.randn(heads, length, size).to(dtype) for heads, size in ((4, 16), (2, 16), (2, 12), (4, 12))]


def written_down(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = (x.repeat_interleave(2, 0) for x in (key, value))
    ahead = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool).triu(1)
    return (query @ key.transpose(1, 2) * scale).masked_fill(ahead, float("-inf")).softmax(-1) @ value


def outcome(function, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor) -> list[Tensor]:
    options = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    mixed = function(*options, SCALE)
    return [mixed.detach(), *torch.autograd.grad(mixed, options, upstream)]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_blockwise_attention_and_gradients_match_formula(length):
    tensors = inputs(length, torch.float32)
    truth = outcome(written_down, *(x.double() for x in tensors))
    for ours, exact in zip(outcome(blockwise_attention, *tensors), truth, strict=True):
        assert (ours - exact).abs().max() < 1e-6 * exact.abs().max().clamp(min=1)


def test_bfloat16_gradients_are_as_accurate_as_plain_attention():
    tensors = inputs(600, torch.bfloat16)
    truth = outcome(written_down, *(x.double() for x in tensors))
    plain = outcome(written_down, *tensors)
    for ours, defaults, exact in zip(outcome(blockwise_attention, *tensors), plain, truth, strict=True):
        assert (ours - exact).abs().mean() < 1.1 * (defaults - exact).abs().mean()


def test_no_tensor_of_score_size_is_saved():
    sizes: list[int] = []
    tensors = inputs(512, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        blockwise_attention(*(x.requires_grad_() for x in tensors[:3]), SCALE)
    assert sum(sizes) == sum(x.numel() for x in tensors[:3])
