"""Keys and values of all slots: one tensor per layer, a row per slot.

In:  what attention layers hand over while a model runs: the keys and values of new tokens. Out: those of all tokens
     that these rows have seen, as a view; nothing is gathered or concatenated in a step.

A row's tokens stand at their own positions, 0 first, so rows of any lengths go on side by side without padding on the
left, and join and leave at any time. What lies behind a row's end is left over from before and is never seen: the mask
(``forward.py``) hides it, and it is written over before it is looked at.
"""

# S slots, C capacity (positions per slot), B rows of a pass, T new tokens per row, H key heads, D size of a head

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class SlotPlaces:
    """The slots and positions of the rows of one forward pass.

    Args:
        first: the slot of row 0; the others follow it.
        positions: (B, T) of each new token in its row.
        width: positions that are looked at, from 0 on.
    """

    first: int
    positions: Tensor
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.positions))


def _resized(x: Tensor, slots: int, capacity: int) -> Tensor:
    new = x.new_zeros(slots, x.shape[1], capacity, x.shape[3])
    rows, length = min(slots, len(x)), min(capacity, x.shape[2])
    new[:rows, :, :length] = x[:rows, :, :length]
    return new


class SlotCache(Cache):
    """transformers' cache, as its attention layers call it, over slots.

    Args:
        slots: rows.
        capacity: positions per row, to begin with.

    ``place`` is set before each forward pass. A layer's two tensors, keys and values (S, H, C, D), are made when it is
    met first, in the format in which they come; heads of keys and of values may be of different sizes and formats.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.place: SlotPlaces | None = None
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keep (B, H, T, D) keys and values of new tokens; all of their rows, (B, H, width, D), come back."""
        place = self._placed()
        new = (key_states, value_states)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = tuple(x.new_zeros(self.slots, x.shape[1], self.capacity, x.shape[3]) for x in new)
        rows, row = place.rows, torch.arange(place.rows.start, place.rows.stop, device=key_states.device)[:, None]
        # Indexed with (B, 1) and (B, T) around a slice, the dimensions of the indices come first: (B, T, H, D).
        for kept, states in zip(self._layers[layer_idx], new, strict=True):
            kept[row, :, place.positions] = states.transpose(1, 2).to(kept.dtype)
        return tuple(kept[rows, :, : place.width] for kept in self._layers[layer_idx])

    def _placed(self) -> SlotPlaces:
        if self.place is None:
            raise RuntimeError("No slots were set for this forward pass.")
        return self.place

    def get_seq_length(self, layer_idx: int = 0) -> int:
        place = self._placed()
        return place.width - place.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._placed().width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    @property
    def is_compileable(self) -> bool:
        return False

    def clear(self, capacity: int) -> None:
        """Let go of all keys and values; there is room for ``capacity`` positions per slot when a pass comes next."""
        self._layers, self.capacity = {}, capacity

    def grow(self, capacity: int) -> None:
        """Room for so many positions per slot."""
        self.resize(self.slots, max(capacity, self.capacity))

    def resize(self, slots: int, capacity: int) -> None:
        """Keep the first ``slots`` rows, or add empty ones, with room for ``capacity`` positions."""
        if (slots, capacity) == (self.slots, self.capacity):
            return
        for number, layer in self._layers.items():  # one after another: both sizes of all would be too much
            self._layers[number] = tuple(_resized(x, slots, capacity) for x in layer)
        self.slots, self.capacity = slots, capacity

    def copy_row(self, source: int, target: int, length: int) -> None:
        """The first ``length`` positions of one slot into another."""
        for x in self._tensors():
            x[target, :, :length] = x[source, :, :length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        for x in self._tensors() if a != b else ():
            kept = x[a, :, :length].clone()
            x[a, :, :length] = x[b, :, :length]
            x[b, :, :length] = kept

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        return chain.from_iterable(self._layers.values())
