"""The last feed-forward part answers for the positions that are learned, and the gradients do not notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.models.fused import patch_forwards
from burnish.objectives.lm import LmOptions, ModelWithLoss
from burnish.ops.probe import Head, find_head
from tiny_models import tiny_model

FAMILIES = ["qwen2", "llama", "gemma", "gpt2", "mixtral"]


def batch(model: torch.nn.Module, learned: int, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Rows of which the last ``learned`` tokens are learned."""
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, : length - learned] = -100
    return {"input_ids": ids, "labels": labels}


def outcome(model: torch.nn.Module, head: Head | None, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    total = ModelWithLoss(model, head, False, LmOptions()).eval()(given).total
    total.backward()
    return {"loss": total.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_plain_way(family: str) -> None:
    model = tiny_model(family)
    patch_forwards(model)
    given = batch(model, learned=5)
    head = find_head(model)
    assert head is not None
    assert head.last is not None
    ours, plain = outcome(model, head, given), outcome(model, None, given)
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("learned", "seen"), [(5, 10), (12, 24)])
def test_only_learned_positions_go_through_the_last_part_unless_nearly_all_are(learned: int, seen: int) -> None:
    model = tiny_model("llama")
    head = find_head(model)
    assert head is not None
    assert head.last is not None
    counts: list[int] = []
    head.last.part.down_proj.register_forward_hook(lambda module, inputs, output: counts.append(output[..., 0].numel()))
    outcome(model, head, batch(model, learned))
    assert counts == [seen]
    assert model(**batch(model, learned)).logits.isfinite().all()  # asked otherwise, the part answers at all positions


def test_a_layer_that_is_computed_again_answers_for_all_positions() -> None:
    model = tiny_model("llama")
    plain = outcome(model, None, batch(model, 5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    head = find_head(model)
    assert head is not None
    model.train()
    module = ModelWithLoss(model, head, False, LmOptions())
    model.zero_grad()
    module(batch(model, 5)).total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], atol=2e-6, rtol=1e-5, msg=name)


def test_a_part_whose_positions_do_meet_is_left_alone() -> None:
    model = tiny_model("llama")
    part = model.model.layers[-1].mlp
    alone = part.forward
    part.forward = lambda x: alone(x) + x.mean(1, keepdim=True)
    head = find_head(model)
    assert head is not None
    assert head.last is None
