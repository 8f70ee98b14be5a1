"""Select the backend of ``forward.py`` by comparing its logits with those of the plain model.

The first backend whose logits match a forward pass without a cache is used. A note is returned if it is not the one
with batched slots.
"""

# T tokens, V vocabulary size

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from burnish.config.errors import is_out_of_memory
from burnish.inference.forward import Forward, ModelCache, NewTokens, NoCache, Precision, SlotForward
from burnish.kernels.probe import REFUSALS, unwrap_peft

_LENGTHS = (7, 12, 5)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_PRECISION_TOLERANCE = 3e-2
"""Tolerance relative to the largest logit, for 16-bit dtypes."""


def select_backend(model: nn.Module, slots: int, precision: Precision = nullcontext) -> tuple[Forward, str]:
    """Return the backend, and a note for the user ("" for batched slots)."""
    candidates: tuple[Callable[[], Forward], ...] = (
        lambda: SlotForward(model, len(_LENGTHS), precision=precision),
        lambda: ModelCache(model, precision),
    )
    name = type(unwrap_peft(model)).__name__
    for create in candidates:
        try:
            backend = create()
            if agrees(model, backend, precision):
                backend.resize(slots)
                note = f"{name} uses a custom cache; batched generation is disabled."
                return backend, "" if backend.is_batched else note
        except REFUSALS as error:
            if is_out_of_memory(error):
                raise
            continue
    note = (
        f"{name} gives different logits with a KV cache than without; generation runs without the cache and is slower."
    )
    return NoCache(model, precision), note


def agrees(model: nn.Module, backend: Forward, precision: Precision = nullcontext) -> bool:
    """Return whether rows of different lengths, read in parts and batched, match single passes without a cache."""
    vocabulary = unwrap_peft(model).config.get_text_config().vocab_size
    drawn = torch.Generator().manual_seed(1)
    texts = [torch.randint(vocabulary, (length,), generator=drawn).tolist() for length in _LENGTHS]
    texts = texts if backend.is_batched else texts[:1]
    for text, logits in zip(texts, _in_chunks(backend, texts), strict=True):
        alone = _logits_of_one_sequence(model, text, precision)
        bound = _TOLERANCE.get(alone.dtype, _HALF_PRECISION_TOLERANCE) * float(alone.float().abs().max())
        # Written so that NaN counts as a mismatch.
        if not float((alone.float() - logits.float()).abs().max()) <= bound:
            return False
    return True


def _in_chunks(backend: Forward, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return (T, V) logits of each text: all but its last two tokens at once, then one by one, as in generation."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for begin, end in ((None, -2), (-2, -1), (-1, None)):
        chunks = [text[begin:end] for text in texts]
        starts = [0 if begin is None else len(text) + begin for text in texts]
        rows = [NewTokens(ids, start, range(len(ids))) for ids, start in zip(chunks, starts, strict=True)]
        logits_of_rows = torch.split(backend.run(0, rows), [len(row.wanted) for row in rows])
        for logits, each in zip(logits_of_rows, found, strict=True):
            each.append(logits)
    return [torch.cat(chunks) for chunks in found]


@torch.no_grad()
def _logits_of_one_sequence(model: nn.Module, text: Sequence[int], precision: Precision) -> Tensor:
    with precision():
        inner = unwrap_peft(model)
        logits: Tensor = inner(input_ids=torch.tensor([list(text)], device=inner.device), use_cache=False).logits[0]
        return logits
