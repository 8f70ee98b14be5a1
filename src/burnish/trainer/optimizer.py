"""The Trainer's optimizer.

It is burnish's (``optim/``), with transformers' names and values. If a script selects its class, or a subclass
overrides a part of transformers' procedure, that procedure is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from burnish.optim.builtin import parameter_groups


def optimizer_of(kind: Any, arguments: dict[str, Any], model: nn.Module, groups: Any) -> Any:
    """Create an optimizer from a class, or from a factory that takes the whole model.

    Args:
        kind: the class or factory.
        arguments: its arguments. GaLore, LOMO and layer-wise optimizers include their parameters here.
        model: the model, for factories.
        groups: the parameter groups, unless they are in ``arguments``.
    """
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        created = kind()  # a factory
        return created(model, **arguments) if callable(created) else created
    arguments = dict(arguments)
    for instead in ("params", "model", "optimizer_dict"):
        groups = arguments.pop(instead, groups)
    return kind(groups, **arguments)


def two_groups(model: nn.Module, decaying: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters with weight decay, and those without."""
    names = set(decaying)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]


def decaying_names(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: all except biases and norms."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameter_groups(model.named_parameters(), model, 1.0)[0]["params"]]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    if optimizer is None:
        raise ValueError("Trainer optimizer is None, please make sure you have setup the optimizer before.")
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def group_with(optimizer: Any, parameter: Any) -> Any:
    """The group that contains ``parameter``; by default the parameters of all groups."""
    groups = groups_of(optimizer)
    holding = (group for group in groups if any(parameter is other for other in group["params"]))
    return next(holding, [group["params"] for group in groups])
