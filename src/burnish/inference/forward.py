"""One forward pass over some rows: new tokens in, logits of the positions that are wanted out.

Three ways, of which ``probe.py`` takes the first that gives the logits which the model gives alone:

1. ``OverSlots``: all rows at once, over the slots' cache and a mask of ours (``cache.py``);
2. ``OwnCache``: one row, with the cache that the model makes itself (recurrent and hybrid layers);
3. ``WholeText``: one row, all of its tokens anew each time.
"""

# B rows, T new tokens of the longest row, V vocabulary, W width (positions that are looked at)

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from burnish.inference.cache import SlotCache, SlotPlaces
from burnish.kernels.probe import causal_lm
from burnish.models.images.masks import masks_of
from burnish.models.images.prompts import PromptImages, inputs_of_images, seen_blocks

STEP = 256
"""By so many positions the cache grows."""
_BOOLEAN = {"sdpa", "burnish"}
"""Attention that takes a mask of true and false. Eager attention adds its mask: there 0 is seen and -inf is not."""
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one row.

    Args:
        ids: at least one token.
        start: how many tokens of the row were read before.
        wanted: places among ``ids`` whose logits are wanted.
        images: of the prompt of this row.
    """

    ids: Sequence[int]
    start: int
    wanted: Sequence[int]
    images: PromptImages | None = None


class Forward(Protocol):
    """A way to request the model.

    Attributes:
        name: for a person.
        batches: whether several rows go through one pass.
        goes_back: whether a row may go on from any of its earlier positions.
        splits: whether a prompt may be read in pieces.
    """

    name: str
    batches: bool
    goes_back: bool
    splits: bool

    def run(self, first: int, rows: Sequence[NewTokens]) -> list[Tensor]:
        """Read new tokens of the slots from ``first`` on; per row (len(wanted), V) logits."""
        ...

    def free(self) -> None:
        """Let go of all keys and values."""
        ...

    def resize(self, slots: int) -> None: ...
    def copy_row(self, source: int, target: int, length: int) -> None: ...
    def swap_rows(self, a: int, b: int, length: int) -> None: ...
    @property
    def cache_bytes(self) -> int: ...


class OverSlots:
    """All rows in one pass."""

    name, batches, goes_back, splits = "slots", True, True, True

    def __init__(self, model: nn.Module, slots: int, capacity: int = STEP, precision: Precision = nullcontext) -> None:
        self.model = causal_lm(model)
        self.cache = SlotCache(slots, capacity)
        self.device = next(self.model.parameters()).device
        self.precision = precision
        self._keeps_some = "logits_to_keep" in signature(self.model.forward).parameters

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> list[Tensor]:
        longest = max(len(row.ids) for row in rows)
        starts = torch.tensor([row.start for row in rows])[:, None]
        lengths = torch.tensor([len(row.ids) for row in rows])[:, None]
        steps = torch.arange(longest)[None]
        width = int((starts + lengths).max())
        self.cache.grow(-(-int(starts.max() + longest) // STEP) * STEP)
        # A row that is shorter than the longest is filled up with tokens that stand behind its end, where nobody
        # looks before they are written over; what the model is told is the row's last position, which it does know.
        places, told = (starts + steps).to(self.device), (starts + torch.minimum(steps, lengths - 1)).to(self.device)
        ids = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows], device=self.device)
        kept = sorted({place for row in rows for place in row.wanted})
        self.cache.place = SlotPlaces(first, places, width)
        with self.precision():
            inputs = {"position_ids": told, **inputs_of_images(self.model, rows, told)}
            logits = self.model(
                input_ids=ids, attention_mask=self._mask(places, width, rows), past_key_values=self.cache,
                use_cache=True, **self._only(kept, longest), **inputs,
            ).logits  # fmt: skip
        columns = {place: column for column, place in enumerate(kept if self._keeps_some else range(longest))}
        return [logits[at, [columns[place] for place in row.wanted]] for at, row in enumerate(rows)]

    def _only(self, kept: list[int], longest: int) -> dict[str, Any]:
        """The head is asked for the positions that somebody wants; for one where nobody wants any."""
        if not self._keeps_some or len(kept) == longest:
            return {}
        return {"logits_to_keep": torch.tensor(kept or [0], device=self.device)}

    def _mask(self, places: Tensor, width: int, rows: Sequence[NewTokens]) -> Any:
        """(B, 1, T, W) of what each new token sees; by kind of layer where the model has several kinds."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - _KINDS:
            raise NotImplementedError(f"layers without full causal attention: {sorted(kinds - _KINDS)}")
        if not kinds:
            window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
            kinds = {"sliding_attention" if window else "full_attention"}
        both_ways = seen_blocks(rows, places, width)
        in_full = all(row.images.sees_in_full for row in rows if row.images)
        masks = {}
        for kind in kinds:
            blocks = both_ways if in_full or kind != "full_attention" else None
            masks[kind] = self._formatted(seen(places, width, kind, config, blocks))
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _formatted(self, sees: Tensor) -> Tensor:
        if self.model.config._attn_implementation in _BOOLEAN:
            return sees
        return torch.zeros(sees.shape, device=sees.device, dtype=self.model.dtype).masked_fill(~sees, -torch.inf)

    def free(self) -> None:
        self.cache.clear(STEP)

    def resize(self, slots: int) -> None:
        self.cache.resize(slots, self.cache.capacity)

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.cache.copy_row(source, target, length)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        self.cache.swap_rows(a, b, length)

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes


def seen(places: Tensor, width: int, kind: str, config: Any, blocks: Tensor | None = None) -> Tensor:
    """(B, 1, T, W) true where a token at ``places`` (B, T) sees a position.

    Args:
        blocks: (B, 1, T, W) true where it sees one behind it too (``models.images.prompts.seen_blocks``).
        kind: of the layer: all that is before it, the last ``sliding_window``, or those of its own chunk.
    """
    at, there = places[:, None, :, None], torch.arange(width, device=places.device)
    sees = there <= at if blocks is None else (there <= at) | blocks
    if kind == "sliding_attention":
        sees &= at - there < config.sliding_window
    elif kind == "chunked_attention":
        sees &= at // config.attention_chunk_size == there // config.attention_chunk_size
    return sees


class _OneRow:
    """Base of the ways that answer one request at a time."""

    batches, cache_bytes = False, 0

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        self.model = causal_lm(model)
        self.device = next(self.model.parameters()).device
        self.precision = precision

    def free(self) -> None: ...
    def resize(self, slots: int) -> None: ...
    def copy_row(self, source: int, target: int, length: int) -> None: ...
    def swap_rows(self, a: int, b: int, length: int) -> None: ...


class OwnCache(_OneRow):
    """One row, with what the model keeps of it itself."""

    name, goes_back, splits = "own cache", False, False

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        super().__init__(model, precision)
        self._kept: dict[str, Any] = {}

    def free(self) -> None:
        self._kept = {}

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> list[Tensor]:
        (row,) = rows
        if not row.start:
            self._kept = {}
        told = torch.arange(row.start, row.start + len(row.ids), device=self.device)[None]
        with self.precision():
            out = self.model(
                input_ids=torch.tensor([list(row.ids)], device=self.device), use_cache=True, **self._kept,
                **inputs_of_images(self.model, rows, told),
            )  # fmt: skip
        names = [name for name in ("past_key_values", "cache_params") if getattr(out, name, None) is not None]
        self._kept = {name: getattr(out, name) for name in names}
        return [out.logits[0, list(row.wanted)]]


class WholeText(_OneRow):
    """One row, read from its beginning each time."""

    name, goes_back, splits = "whole text", True, True

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        super().__init__(model, precision)
        self._ids: list[int] = []

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> list[Tensor]:
        (row,) = rows
        self._ids = [*self._ids[: row.start], *row.ids]
        if not row.wanted:
            return [torch.empty(0)]
        ids = torch.tensor([self._ids], device=self.device)
        inputs: dict[str, Any] = {}
        if row.images is not None:
            whole = NewTokens(self._ids, 0, (), row.images)
            inputs = inputs_of_images(self.model, [whole], torch.arange(len(self._ids), device=self.device)[None])
            if row.images.blocks:
                blocks = torch.zeros_like(ids)
                blocks[0, : len(row.images.blocks)] = torch.tensor(row.images.blocks)
                inputs["attention_mask"] = masks_of(self.model, torch.zeros_like(ids), blocks)
        with self.precision():
            out = self.model(input_ids=ids, use_cache=False, **inputs)
        return [out.logits[0, [row.start + place for place in row.wanted]]]
