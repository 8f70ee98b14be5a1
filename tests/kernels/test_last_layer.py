"""The feed-forward module of the last layer is computed only at positions that the loss uses; the result is
unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.kernels.last_layer import LAST_LAYER, find_last_layer
from burnish.kernels.probe import Head, find_head
from burnish.losses.reward import ScoringModel
from burnish.models.patches.capabilities import find_capabilities
from burnish.models.patches.fused import patch_forwards
from burnish.parallel.checkpointing import checkpoint_activations
from burnish.utils.patching import patches_of
from tiny_shapes import KEEPS_APART, tiny

DENSE = [family for family in KEEPS_APART if family not in ("opt", "mixtral", "qwen3_moe", "gpt_oss")]
"""Families whose last layer has a feed-forward module ``mlp`` without experts."""


def head_of(model: Any) -> Head:
    head = find_head(model)
    assert head is not None
    return head


@contextmanager
def rows_of(module: nn.Module) -> Iterator[list[int]]:
    """Collect the number of rows in each call of a linear layer inside of the last feed-forward module."""
    counts: list[int] = []
    layer = next(part for part in module.modules() if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
    handle = layer.register_forward_hook(lambda module, inputs, output: counts.append(inputs[0].shape[:-1].numel()))
    yield counts
    handle.remove()


def feed_forward(model: Any) -> nn.Module:
    decoder = model.get_decoder()
    feed_forward_module: nn.Module = (decoder.h if hasattr(decoder, "h") else decoder.layers)[-1].mlp
    return feed_forward_module


def gradients(model: Any, head: Head, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = head.hidden_at(positions, input_ids=tokens, use_cache=False)
    model.zero_grad()
    head.logits(hidden).square().mean().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_hidden_states_and_gradients_match_the_whole_layer(family: str, is_fused: bool) -> None:
    model = tiny(family)
    if is_fused:
        patch_forwards(model)
    head = head_of(model)
    tokens, positions = torch.randint(3, 97, (3, 17)), torch.tensor([2, 3, 4, 19, 33, 50])
    expected, plain = gradients(model, head, tokens, positions)
    capabilities = find_capabilities(model, padding_free=True, prefix_sharing=True, head_of=model)
    assert capabilities.head is not None
    with rows_of(feed_forward(model)) as counts:
        hidden, limited = gradients(model, capabilities.head, tokens, positions)
    assert set(counts) == {len(positions)} or is_fused  # a fused layer does not call its submodules
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    assert limited.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(limited[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_reward_model_computes_the_last_layer_at_scored_tokens() -> None:
    model, scored = tiny("llama"), nn.Linear(32, 1)
    only = find_capabilities(model, padding_free=True, prefix_sharing=True).only
    batch = {
        "input_ids": torch.randint(3, 97, (3, 17)), "target_positions": torch.tensor([16, 33, 50]),
        "owner": torch.tensor([1, 0, 2]),
    }  # fmt: skip
    expected = ScoringModel(model, nn.Sequential(scored, nn.Flatten(0)))(batch)
    with rows_of(feed_forward(model)) as counts:
        result = ScoringModel(model, nn.Sequential(scored, nn.Flatten(0)), only=only)(batch)
    assert counts == [3]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_whole_layer_is_computed_outside_of_the_loss_and_without_positions() -> None:
    model = tiny("llama")
    head = find_capabilities(model, padding_free=True, prefix_sharing=True, head_of=model).head
    assert head is not None
    tokens = torch.randint(3, 97, (1, 9))
    with rows_of(feed_forward(model)) as counts:
        head.hidden_at(torch.tensor([4]), input_ids=tokens, use_cache=False)
        head.hidden_at(torch.tensor([], dtype=torch.long), input_ids=tokens, use_cache=False)
        model(input_ids=tokens)
    assert counts == [1, 9, 9]


def test_whole_layer_is_computed_after_an_error() -> None:
    model = tiny("llama")
    last = find_last_layer(model)
    assert last is not None
    with pytest.raises(KeyError), last.only(torch.tensor([1])):
        raise KeyError
    with rows_of(feed_forward(model)) as counts:
        model(input_ids=torch.randint(3, 97, (1, 9)))
    assert counts == [9]


def test_whole_layer_is_computed_under_gradient_checkpointing() -> None:
    model = tiny("llama")
    head = find_capabilities(model, padding_free=True, prefix_sharing=True, head_of=model).head
    assert head is not None
    tokens, positions = torch.randint(3, 97, (1, 9)), torch.tensor([4, 5])
    _, plain = gradients(model, head, tokens, positions)
    checkpoint_activations(model, None)
    with rows_of(feed_forward(model)) as counts:
        _, checkpointed = gradients(model, head, tokens, positions)
    assert counts == [9, 9]
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "opt", "bloom"])
def test_experts_and_unknown_layers_are_not_limited(family: str) -> None:
    model = tiny(family)
    assert find_last_layer(model) is None
    assert not patches_of(model)


def test_layer_whose_result_depends_on_other_tokens_is_not_limited() -> None:
    class TokenMixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

    model = tiny("llama")
    model.model.layers[-1].mlp = TokenMixer()
    assert find_last_layer(model) is None
    assert not patches_of(model)


def test_last_layer_is_patched_once() -> None:
    model = tiny("llama")
    assert find_last_layer(model) is find_last_layer(model)
    assert [patch.why for patch in patches_of(model)] == [LAST_LAYER]


def test_option_computes_the_whole_layer() -> None:
    model = tiny("llama")
    capabilities = find_capabilities(model, padding_free=True, prefix_sharing=False, head_of=model)
    assert capabilities.head is not None
    assert LAST_LAYER not in [patch.why for patch in patches_of(model)]
