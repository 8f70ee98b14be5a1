"""A place in a model where adapters, by name, can be switched; and the simplest of them, a module trained whole.

Several adapters may live in one place: the active ones speak; ``rows`` gives each row of a batch an adapter of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BASE = "__base__"
"""In ``rows``: the row that gets no adapter."""


class AdapterModule(nn.Module):
    """A module in which adapters, by name, can be switched."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[str] = []
        self.is_disabled = False
        self.rows: Sequence[str] | None = None

    @property
    def adapters(self) -> Iterable[str]:
        raise NotImplementedError

    def state(self, name: str) -> dict[str, Tensor]:
        """What a file holds of an adapter, under peft's names."""
        raise NotImplementedError

    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def trainable(self, name: str) -> list[nn.Parameter]:
        raise NotImplementedError

    def merge(self) -> None:
        """Put the active adapters into the base weight; ``unmerge`` gives back the very weight that was there."""

    def unmerge(self) -> None: ...

    @property
    def is_merged(self) -> bool:
        return False

    def bare(self) -> nn.Module:
        """The module without adapters around it, with what is merged or trained inside it."""
        raise NotImplementedError

    def _row_by_row(self, x: Tensor, forward: Callable[[Tensor, str], Tensor]) -> Tensor:
        """Each row of ``x`` (B, ...) through the adapter that ``rows`` names for it."""
        rows = self.rows or []
        if len(rows) != len(x):
            raise ValueError(f"{len(rows)} adapter names were given for a batch of {len(x)} rows.")
        taken = [torch.tensor([i for i, row in enumerate(rows) if row == name]) for name in dict.fromkeys(rows)]
        parts = [forward(x[index.to(x.device)], rows[int(index[0])]) for index in taken]
        return torch.cat(parts)[torch.cat(taken).argsort().to(x.device)]


class TrainedCopy(AdapterModule):
    """A module that is trained whole beside the adapter, and saved with it: peft's ``modules_to_save``."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict()

    @property
    def adapters(self) -> Iterable[str]:
        return self.modules_to_save

    def add(self, name: str) -> None:
        self.modules_to_save[name] = copy.deepcopy(self.original_module)

    @property
    def in_use(self) -> nn.Module:
        named = [] if self.is_disabled else [name for name in self.active if name in self.modules_to_save]
        return self.modules_to_save[named[-1]] if named else self.original_module

    @property
    def weight(self) -> Tensor:
        return self.in_use.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.in_use, "bias", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.rows is not None and not self.is_disabled:
            x, *more = args
            return self._row_by_row(x, lambda part, name: self._named(name)(part, *more, **kwargs))
        return self.in_use(*args, **kwargs)  # attention takes its input by name

    def _named(self, name: str) -> nn.Module:
        return self.modules_to_save[name] if name in self.modules_to_save else self.original_module  # noqa: SIM401

    def state(self, name: str) -> dict[str, Tensor]:
        return dict(self.modules_to_save[name].state_dict(keep_vars=True))

    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.modules_to_save[name].load_state_dict(state)

    def trainable(self, name: str) -> list[nn.Parameter]:
        return list(self.modules_to_save[name].parameters())

    def bare(self) -> nn.Module:
        return self.in_use
