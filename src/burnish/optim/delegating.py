"""An optimizer that delegates its step to other optimizers: base class of combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from burnish.optim.builtin import Groups


class Delegating(Optimizer):
    """An optimizer whose parameters are updated by the optimizers in ``inner``. Schedule and clipping use its own
    groups.

    The groups of ``inner``, in order, correspond to its own groups, and their learning rates follow.
    """

    def __init__(self, groups: Groups, learning_rate: float, inner: Sequence[Optimizer] = ()) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self.inner = list(inner)

    def inner_groups(self) -> Groups:
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for own, followed in zip(self.inner_groups(), self.param_groups, strict=True):
            if isinstance(own["lr"], Tensor):
                own["lr"].fill_(followed["lr"])
            else:
                own["lr"] = followed["lr"]
        for optimizer in self.inner:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
            "inner": [optimizer.state_dict() for optimizer in self.inner],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        for optimizer, saved in zip(self.inner, state["inner"], strict=True):
            optimizer.load_state_dict(dict(saved))


def copy_groups(groups: Groups, keep: Sequence[str] = ("lr", "weight_decay")) -> Groups:
    """Copy groups for an inner optimizer, because torch adds its settings to the dicts."""
    return [{"params": list(g["params"])} | {name: g[name] for name in keep if name in g} for g in groups]
