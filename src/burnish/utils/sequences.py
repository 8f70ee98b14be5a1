"""Sequences whose items are created on access, with indexing and slicing; and the common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


def shared_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class LazySequence(Sequence[T_co]):
    """A sequence that creates its items on access. Subclasses implement ``__len__`` and ``item``."""

    def item(self, index: int, /) -> T_co:
        """Create the item at ``index``, from 0 to ``len(self) - 1``."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int], /) -> list[T_co]:
        """Create several items. Subclasses may override it with a faster implementation."""
        return [self.item(index) for index in indices]

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return self.item(range(len(self))[index])
