"""Noise on the input embeddings during training (NEFTune), which reduces overfitting on small datasets.

    embedding + u,  u uniform in ±alpha / sqrt(L * H)    (Jain et al. 2023, algorithm 1, https://arxiv.org/abs/2310.05914)

L is the length of the token's own sequence, so the noise of a row does not depend on other rows of the batch or on
padding. (transformers uses the padded length of the batch, which is the same for rows of equal length.)
"""

# B rows, T tokens in a row, S sequences in a flat row, L tokens of one sequence, H hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from burnish.loop.types import Batch
from burnish.utils.patching import Reason, hook

NOISE = Reason("embedding with noise", "neftune_noise_alpha is set")


class EmbeddingNoise:
    """Adds noise to the output of an embedding, only inside ``around(batch)``.

    Args:
        embedding: ids -> (B, T, H).
        alpha: noise scale.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Tensor | None = None
        hook(embedding, "forward", self._add, NOISE)

    @contextmanager
    def around(self, batch: Batch) -> Iterator[None]:
        self._lengths = sequence_lengths(batch)
        try:
            yield
        finally:
            self._lengths = None

    def _add(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self._lengths is None:
            return None
        noise = torch.empty_like(output).uniform_(-1, 1)  # from torch's global generator
        return output + noise * (self.alpha / (self._lengths * output.shape[-1]).sqrt()).to(output.dtype)


def sequence_lengths(batch: Batch) -> Tensor:
    """(B, T, 1) or (B, 1, 1): length of the sequence that a token belongs to."""
    if "cu_seq_lens_q" in batch:
        lengths: Tensor = batch["cu_seq_lens_q"].diff()
        return lengths.repeat_interleave(lengths, output_size=batch["input_ids"].numel()).view(1, -1, 1)
    mask: Tensor = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    return mask.sum(-1).clamp(min=1).view(-1, 1, 1)
