"""Keys and values of all seats: one tensor per layer, a row per seat.

In:  what attention layers hand over while a model runs: the keys and values of new tokens. Out: those of all tokens
     that these rows have seen, as a view; nothing is gathered or concatenated in a step.

A row's tokens stand at their own positions, 0 first, so rows of any lengths go on side by side without padding on the
left, and join and leave at any time. What lies behind a row's end is left over from before and is never seen: the mask
(``forward.py``) hides it, and it is written over before it is looked at.
"""

# S seats, C capacity (positions per seat), B rows of a pass, T new tokens per row, H key heads, D size of a head

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class Place:
    """The seats and positions of the rows of one forward pass.

    Args:
        first: the seat of row 0; the others follow it.
        positions: (B, T) of each new token in its row.
        width: positions that are looked at, from 0 on.
    """

    first: int
    positions: Tensor
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.positions))


class _Layer:
    """Keys (S, H, C, D) and values of one layer. Key and value heads may be of different sizes and formats."""

    def __init__(self, keys: Tensor, values: Tensor, seats: int, capacity: int) -> None:
        self.keys, self.values = (x.new_zeros(seats, x.shape[1], capacity, x.shape[3]) for x in (keys, values))

    def resized(self, seats: int, capacity: int) -> None:
        self.keys, self.values = (_resized(x, seats, capacity) for x in (self.keys, self.values))

    def copy_row(self, source: int, target: int, length: int) -> None:
        for x in (self.keys, self.values):
            x[target, :, :length] = x[source, :, :length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        for x in (self.keys, self.values):
            kept = x[a, :, :length].clone()
            x[a, :, :length] = x[b, :, :length]
            x[b, :, :length] = kept

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _resized(x: Tensor, seats: int, capacity: int) -> Tensor:
    new = x.new_zeros(seats, x.shape[1], capacity, x.shape[3])
    rows, length = min(seats, len(x)), min(capacity, x.shape[2])
    new[:rows, :, :length] = x[:rows, :, :length]
    return new


class SeatCache(Cache):  # type: ignore[misc]
    """transformers' cache, as its attention layers call it, over seats.

    Args:
        seats: rows.
        capacity: positions per row, to begin with.

    ``place`` is set before each forward pass. Layers make their tensors when they are met first, in the format in which
    their keys and values come.
    """

    def __init__(self, seats: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.seats, self.capacity = seats, capacity
        self.place: Place | None = None
        self._layers: dict[int, _Layer] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keep (B, H, T, D) keys and values of new tokens; all of their rows, (B, H, width, D), come back."""
        place = self._placed()
        layer = self._layers.get(layer_idx)
        if layer is None:
            layer = self._layers[layer_idx] = _Layer(key_states, value_states, self.seats, self.capacity)
        rows, row = place.rows, torch.arange(place.rows.start, place.rows.stop, device=key_states.device)[:, None]
        # Indexed with (B, 1) and (B, T) around a slice, the dimensions of the indices come first: (B, T, H, D).
        layer.keys[row, :, place.positions] = key_states.transpose(1, 2).to(layer.keys.dtype)
        layer.values[row, :, place.positions] = value_states.transpose(1, 2).to(layer.values.dtype)
        return layer.keys[rows, :, : place.width], layer.values[rows, :, : place.width]

    def _placed(self) -> Place:
        if self.place is None:
            raise RuntimeError("Nobody has said which seats this forward pass is of.")
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

    def grow(self, capacity: int) -> None:
        """Room for so many positions per seat."""
        self.resize(self.seats, max(capacity, self.capacity))

    def resize(self, seats: int, capacity: int) -> None:
        """Keep the first ``seats`` rows, or add empty ones, with room for ``capacity`` positions."""
        if (seats, capacity) == (self.seats, self.capacity):
            return
        for layer in self._layers.values():
            layer.resized(seats, capacity)
        self.seats, self.capacity = seats, capacity

    def copy_row(self, source: int, target: int, length: int) -> None:
        """The first ``length`` positions of one seat into another."""
        if length:
            for layer in self._layers.values():
                layer.copy_row(source, target, length)

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` positions of two seats."""
        if a != b and length:
            for layer in self._layers.values():
                layer.swap_rows(a, b, length)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())
