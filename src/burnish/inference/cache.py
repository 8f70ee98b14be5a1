"""Key-value cache of all slots: one tensor per layer, one row per slot.

Attention layers pass the keys and values of new tokens and get those of all tokens of their rows, as a view. No step
gathers or concatenates.

The tokens of a row are stored from position 0 on. Rows of any lengths can therefore be processed together without left
padding, and can join and leave at any time. Stale values after the end of a row are never read: the mask
(``forward.py``) hides them until they are overwritten.
"""

# S slots, C capacity (positions per slot), B rows of a pass, T new tokens per row, H key heads, D head size

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
    """Slots and positions of the rows of a forward pass.

    Args:
        first: slot of row 0; the others follow it.
        positions: (B, T) position of each new token in its row.
        width: number of positions that are read, from 0 on.
    """

    first: int
    positions: Tensor
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.positions))


def _resize(x: Tensor, slots: int, capacity: int) -> Tensor:
    new = x.new_zeros(slots, x.shape[1], capacity, x.shape[3])
    rows, length = min(slots, len(x)), min(capacity, x.shape[2])
    new[:rows, :, :length] = x[:rows, :, :length]
    return new


def _stored_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class SlotCache(Cache):
    """A transformers ``Cache`` over slots.

    Args:
        slots: number of rows.
        capacity: initial number of positions per row.

    ``place`` is set before each forward pass. A layer's keys and values, (S, H, C, D) each, are allocated on its first
    call in the dtype of its input, or in autocast's, to which attention would convert them for each token. Keys and
    values may have different head sizes and dtypes.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.place: SlotPlaces | None = None
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values (B, H, T, D) of new tokens. Returns those of all tokens, (B, H, width, D)."""
        place = self._places()
        new = (key_states, value_states)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = tuple(
                x.new_zeros(self.slots, x.shape[1], self.capacity, x.shape[3], dtype=_stored_dtype(x)) for x in new
            )
        rows, row = place.rows, torch.arange(place.rows.start, place.rows.stop, device=key_states.device)[:, None]
        # Indexing with (B, 1) and (B, T) around a slice moves the indexed dimensions to the front: (B, T, H, D).
        for stored, states in zip(self._layers[layer_idx], new, strict=True):
            stored[row, :, place.positions] = states.transpose(1, 2).to(stored.dtype)
        return tuple(stored[rows, :, : place.width] for stored in self._layers[layer_idx])

    def _places(self) -> SlotPlaces:
        if self.place is None:
            raise RuntimeError("No cache slots were set for this forward pass.")
        return self.place

    def get_seq_length(self, layer_idx: int = 0) -> int:
        place = self._places()
        return place.width - place.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._places().width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    @property
    def is_compileable(self) -> bool:
        return False

    def clear(self, capacity: int) -> None:
        """Release all keys and values. The next pass allocates ``capacity`` positions per slot."""
        self._layers, self.capacity = {}, capacity

    def grow(self, capacity: int) -> None:
        """Ensure room for ``capacity`` positions per slot."""
        self.resize(self.slots, max(capacity, self.capacity))

    def resize(self, slots: int, capacity: int) -> None:
        """Keep the first ``slots`` rows, or add empty ones, with room for ``capacity`` positions."""
        if (slots, capacity) == (self.slots, self.capacity):
            return
        for number, layer in self._layers.items():  # layer by layer, to avoid holding two copies of all layers
            self._layers[number] = tuple(_resize(x, slots, capacity) for x in layer)
        self.slots, self.capacity = slots, capacity

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for x in self._tensors():
            x[target, :, :length] = x[source, :, :length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Swap the first ``length`` positions of two slots."""
        for x in self._tensors() if a != b else ():
            copy = x[a, :, :length].clone()
            x[a, :, :length] = x[b, :, :length]
            x[b, :, :length] = copy

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        return chain.from_iterable(self._layers.values())
