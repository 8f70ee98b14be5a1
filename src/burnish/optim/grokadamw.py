"""GrokAdamW (https://github.com/cognitivecomputations/grokadamw): AdamW that amplifies the slow part of the gradients
(Lee et al. 2024, https://arxiv.org/abs/2405.20233). From the library grokadamw.

Two side effects of the library (0.1.2) are undone here. Its import configures the logging of the whole process. It
stores its moments in the parameter groups with the parameters as keys, but a checkpoint needs numbers as keys.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer

from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, adam_arguments


@OPTIMIZERS.register("grokadamw", library="grokadamw")
def grokadamw(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with amplified slow gradients (grokadamw)."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    from grokadamw import GrokAdamW

    root.handlers[:] = handlers
    root.setLevel(level)
    made: Optimizer = _number_state(GrokAdamW)(groups, **adam_arguments(options))
    return made


def _moments(group: dict[str, Any]) -> dict[str, Any]:
    """The group's moments by the index of their parameter. Empty before the first step."""
    if "state" not in group:
        return {}
    return {"state": {str(i): group["state"][p] for i, p in enumerate(group["params"]) if p in group["state"]}}


def _number_state(kind: Any) -> Any:
    """The library's class with a state dict that identifies moments by the index of their parameter in the group."""

    class NumberedGrokAdamW(kind):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = super().state_dict()
            groups = zip(state["param_groups"], self.param_groups, strict=True)
            return {**state, "param_groups": [{**saved, **_moments(group)} for saved, group in groups]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            for group in self.param_groups:
                if "state" in group:
                    group["state"] = {group["params"][int(i)]: own for i, own in group["state"].items()}

    return NumberedGrokAdamW
