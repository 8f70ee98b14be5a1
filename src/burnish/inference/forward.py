"""Forward passes: new tokens of some rows -> logits at the requested positions.

There are three backends. ``probe.py`` selects the first one whose logits match those of the plain model:

1. ``SlotForward``: all rows at once, with the slots' cache and an attention mask (``cache.py``);
2. ``ModelCache``: one row, with the cache that the model creates itself (recurrent and hybrid layers);
3. ``NoCache``: one row without a cache; all of its tokens are recomputed each time.
"""

# B rows, T new tokens of the longest row, V vocabulary size, W width (positions that are read)

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from burnish.inference.cache import SlotCache, SlotPlaces
from burnish.kernels.probe import unwrap_peft
from burnish.models.generate import cache_argument
from burnish.models.images.masks import masks_of
from burnish.models.images.prompts import PromptImages, bidirectional_blocks, inputs_of_images

STEP = 256
"""Number of positions by which the cache grows."""
_BOOLEAN = {"sdpa", "burnish"}
"""Attention implementations with a boolean mask. Eager attention adds its mask: 0 is visible and -inf is not."""
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in the output of a forward pass, since transformers 5.24 and before."""

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one row.

    Args:
        ids: at least one token.
        start: number of tokens of the row that were read before.
        wanted: indices into ``ids`` whose logits are needed.
        images: images of the row's prompt.
    """

    ids: Sequence[int]
    start: int
    wanted: Sequence[int]
    images: PromptImages | None = None


class Forward(Protocol):
    """A backend that runs the model.

    Attributes:
        name: name for messages.
        is_batched: whether several rows can be processed in one pass.
        can_rewind: whether a row can continue from any of its earlier positions.
        splits_prompts: whether a prompt can be read in several parts.
    """

    name: str
    is_batched: bool
    can_rewind: bool
    splits_prompts: bool

    def run(self, first: int, rows: Sequence[NewTokens]) -> Tensor:
        """Process new tokens of the slots from ``first`` on. Returns the wanted logits (W, V), row after row."""
        ...

    def free(self) -> None:
        """Release all keys and values."""
        ...

    def resize(self, slots: int) -> None: ...
    def copy_row(self, source: int, target: int, length: int) -> None: ...
    def swap_rows(self, a: int, b: int, length: int) -> None: ...
    @property
    def cache_bytes(self) -> int: ...


class SlotForward:
    """All rows in one pass, with the slots' cache."""

    name, is_batched, can_rewind, splits_prompts = "slots", True, True, True

    def __init__(self, model: nn.Module, slots: int, capacity: int = STEP, precision: Precision = nullcontext) -> None:
        self.model = unwrap_peft(model)
        self.cache = SlotCache(slots, capacity)
        self.device = next(self.model.parameters()).device
        self.precision = precision
        self._keeps_some = "logits_to_keep" in signature(self.model.forward).parameters
        self._cache_name = cache_argument(self.model) or "past_key_values"

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> Tensor:
        longest = max(len(row.ids) for row in rows)
        starts = torch.tensor([row.start for row in rows])[:, None]
        lengths = torch.tensor([len(row.ids) for row in rows])[:, None]
        steps = torch.arange(longest)[None]
        width = int((starts + lengths).max())
        self.cache.grow(-(-int(starts.max() + longest) // STEP) * STEP)
        # Shorter rows are padded with tokens after their end, which are overwritten before they are read. The model is
        # given the row's last position for them, which is always valid.
        places, position_ids = (
            (starts + steps).to(self.device),
            (starts + torch.minimum(steps, lengths - 1)).to(self.device),
        )
        ids = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows], device=self.device)
        positions = sorted({place for row in rows for place in row.wanted})
        self.cache.place = SlotPlaces(first, places, width)
        with self.precision():
            inputs = {"position_ids": position_ids, **inputs_of_images(self.model, rows, position_ids)}
            logits: Tensor = self.model(
                input_ids=ids, attention_mask=self._mask(places, width, rows), use_cache=True,
                **{self._cache_name: self.cache}, **self._only(positions, longest), **inputs,
            ).logits  # fmt: skip
        if longest == 1 and all(len(row.wanted) == 1 for row in rows):
            return logits[:, 0]
        columns = {place: column for column, place in enumerate(positions if self._keeps_some else range(longest))}
        places_of_logits = [(at, columns[place]) for at, row in enumerate(rows) for place in row.wanted]
        at, column = torch.tensor(places_of_logits, dtype=torch.long, device=self.device).reshape(-1, 2).T
        return logits[at, column]

    def _only(self, positions: list[int], longest: int) -> dict[str, Any]:
        """Return arguments that restrict the output layer to the needed positions, or to one if none are needed."""
        if not self._keeps_some or len(positions) == longest:
            return {}
        return {"logits_to_keep": torch.tensor(positions or [0], device=self.device)}

    def _mask(self, places: Tensor, width: int, rows: Sequence[NewTokens]) -> Any:
        """Return the mask (B, 1, T, W) of positions visible to each new token; by layer type if there are several."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - _KINDS:
            raise NotImplementedError(f"layers without full causal attention: {sorted(kinds - _KINDS)}")
        if not kinds:
            window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
            kinds = {"sliding_attention" if window else "full_attention"}
        bidirectional = bidirectional_blocks(rows, places, width)
        in_full = all(row.images.bidirectional_in_full_attention for row in rows if row.images)
        masks = {}
        for kind in kinds:
            blocks = bidirectional if in_full or kind != "full_attention" else None
            masks[kind] = self._attention_mask(attention_mask(places, width, kind, config, blocks))
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _attention_mask(self, may_attend: Tensor) -> Tensor:
        if self.model.config._attn_implementation in _BOOLEAN:
            return may_attend
        return torch.zeros(may_attend.shape, device=may_attend.device, dtype=self.model.dtype).masked_fill(
            ~may_attend, -torch.inf
        )

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


def attention_mask(places: Tensor, width: int, kind: str, config: Any, blocks: Tensor | None = None) -> Tensor:
    """Return (B, 1, T, W), true where a token at ``places`` (B, T) may attend to a position.

    Args:
        places: (B, T) positions of the tokens.
        width: W.
        kind: type of the layer: full attention, the last ``sliding_window`` positions, or the token's own chunk.
        config: config of the text model.
        blocks: (B, 1, T, W), true where it may also attend to a later position (``bidirectional_blocks``).
    """
    at, there = places[:, None, :, None], torch.arange(width, device=places.device)
    may_attend = there <= at if blocks is None else (there <= at) | blocks
    if kind == "sliding_attention":
        may_attend &= at - there < config.sliding_window
    elif kind == "chunked_attention":
        may_attend &= at // config.attention_chunk_size == there // config.attention_chunk_size
    return may_attend


class _OneRow:
    """Base class of backends that process one request at a time."""

    is_batched, cache_bytes = False, 0

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        self.model = unwrap_peft(model)
        self.device = next(self.model.parameters()).device
        self.precision = precision

    def free(self) -> None: ...
    def resize(self, slots: int) -> None: ...
    def copy_row(self, source: int, target: int, length: int) -> None: ...
    def swap_rows(self, a: int, b: int, length: int) -> None: ...


class ModelCache(_OneRow):
    """One row, with the cache that the model creates itself."""

    name, can_rewind, splits_prompts = "own cache", False, False

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        super().__init__(model, precision)
        self._cache: dict[str, Any] = {}

    def free(self) -> None:
        self._cache = {}

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> Tensor:
        (row,) = rows
        if not row.start:
            self._cache = {}
        position_ids = torch.arange(row.start, row.start + len(row.ids), device=self.device)[None]
        with self.precision():
            out = self.model(
                input_ids=torch.tensor([list(row.ids)], device=self.device), use_cache=True, **self._cache,
                **inputs_of_images(self.model, rows, position_ids),
            )  # fmt: skip
        name = next((name for name in _CACHES if getattr(out, name, None) is not None), None)
        self._cache = {} if name is None else {name: getattr(out, name)}
        logits: Tensor = out.logits[0, list(row.wanted)]
        return logits


class NoCache(_OneRow):
    """One row without a cache: all tokens are recomputed each time."""

    name, can_rewind, splits_prompts = "whole text", True, True

    def __init__(self, model: nn.Module, precision: Precision = nullcontext) -> None:
        super().__init__(model, precision)
        self._ids: list[int] = []

    @torch.no_grad()
    def run(self, first: int, rows: Sequence[NewTokens]) -> Tensor:
        (row,) = rows
        self._ids = [*self._ids[: row.start], *row.ids]
        if not row.wanted:
            return torch.empty(0, self.model.config.get_text_config().vocab_size)
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
        logits: Tensor = out.logits[0, [row.start + place for place in row.wanted]]
        return logits
