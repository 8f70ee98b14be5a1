"""One gradient for tied embedding and head weights: the sum that autograd computes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.kernels.cpu import buffer_pool
from burnish.kernels.cross_entropy import linear_cross_entropy
from burnish.kernels.probe import find_head
from burnish.kernels.tied import TIED, TiedWeight
from burnish.losses.lm import ModelWithLoss
from burnish.utils.patching import patches_of
from tiny_models import tiny_model

VOCABULARY, WIDTH = 50, 8


def gradients(is_tied: bool, padding_id: int | None, uses_head: bool = True) -> list[Tensor]:
    """Return the gradients of the weight and of a factor of the embeddings, accumulated over two steps."""
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random).requires_grad_()
    scale = torch.randn(WIDTH, generator=random).requires_grad_()
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (2, 6), generator=random)
        tied = TiedWeight(weight, padding_id) if is_tied else None
        rows = tied.look_up(ids) if tied else F.embedding(ids, weight, padding_id)
        hidden = (rows * scale).tanh().flatten(0, 1)
        head = tied.joined if tied else weight
        loss = linear_cross_entropy(hidden, head, ids.flatten().flip(0)).total if uses_head else hidden.square().sum()
        loss.backward()
    assert weight.grad is not None
    assert scale.grad is not None
    return [weight.grad, scale.grad]


@pytest.mark.parametrize("padding_id", [None, 3])
@pytest.mark.parametrize("uses_head", [True, False])
def test_gradient_of_both_uses_matches_autograd(padding_id: int | None, uses_head: bool) -> None:
    ours, plain = (gradients(is_tied, padding_id, uses_head) for is_tied in (True, False))
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_model_gradients_match_plain_path_with_tied_or_untied_embedding(is_tied: bool) -> None:
    from burnish.losses.lm import LmOptions

    model = tiny_model("qwen2", tie_word_embeddings=is_tied)
    ids = torch.randint(model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(5))
    result = []
    for head in (find_head(model), None):
        model.zero_grad()
        ModelWithLoss(model, head, False, LmOptions()).train()({"input_ids": ids, "labels": ids}).total.backward()
        result.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert result[0].keys() == result[1].keys() == dict(model.named_parameters()).keys()
    for name, plain in result[1].items():
        torch.testing.assert_close(result[0][name], plain, atol=1e-6, rtol=1e-5, msg=name)
    assert [patch.why for patch in patches_of(model)].count(TIED) == int(is_tied)


def test_modified_embedding_lookup_is_not_replaced() -> None:
    from burnish.kernels.tied import is_plain_lookup

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    assert is_plain_lookup(nn.Embedding(4, 2))
    unsupported = (nn.Embedding(4, 2, max_norm=1.0), nn.Embedding(4, 2, sparse=True), Scaled(4, 2), nn.Linear(4, 2))
    assert not any(map(is_plain_lookup, unsupported))


def test_buffer_is_reused_only_after_its_last_tensor_is_freed() -> None:
    shape, cpu = (2**20, 3), torch.device("cpu")
    first, second = (buffer_pool.empty(shape, torch.float32, cpu) for _ in range(2))
    pointers = {first.data_ptr(), second.data_ptr()}
    assert len(pointers) == 2
    assert first.shape == shape
    assert first.is_contiguous()
    view = first.view(3, -1)[1]
    pointer = first.data_ptr()
    del first
    third = buffer_pool.empty(shape, torch.float32, cpu)
    assert third.data_ptr() not in pointers  # a view still uses the first buffer
    del view
    fourth = buffer_pool.empty(shape, torch.float32, cpu)
    assert fourth.data_ptr() == pointer
    assert torch.equal(
        buffer_pool.cast(fourth.fill_(1.5), torch.bfloat16), torch.full(shape, 1.5, dtype=torch.bfloat16)
    )


@pytest.mark.run
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_forked_process_has_its_own_buffers() -> None:
    buffer = buffer_pool.empty((2**20, 2), torch.float32, torch.device("cpu")).fill_(1)
    child = os.fork()
    if child == 0:
        buffer.numpy()[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert bool((buffer == 1).all())
