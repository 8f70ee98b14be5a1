"""Check the values of ``optim_args`` against the optimizer's signature, and by one step of a small layer.

An optimizer often accepts a value of a wrong type, and fails or uses another value in its first step, when the model
is loaded: ``beta1=abc``, ``nesterov=no``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from burnish.config.conversion import members
from burnish.config.errors import argument_error_in_words

_WIDTH = 64  # a matrix of 64 x 64 is the smallest that the 8-bit libraries quantize
_EXPECTED: dict[type, tuple[str, tuple[type, ...]]] = {
    float: ("a number", (int, float)), int: ("an integer", (int,)), bool: ("true or false", (bool,)),
    str: ("text", (str,)),
}  # fmt: skip
_BY_NAME = {kind.__name__: kind for kind in _EXPECTED}  # annotations are text with ``from __future__``


def fault_of_arguments(create: Callable[[nn.Module, bool], Optimizer], arguments: Mapping[str, Any]) -> str | None:
    """Return a clause about the first value that the optimizer does not accept, or None.

    Args:
        create: called with a small model and whether to pass the arguments; returns the optimizer.
        arguments: name -> value.

    Returns:
        None also if the optimizer does not update a small model without the arguments, so that nothing is known.
    """
    try:
        optimizer = _after_a_step(create, False)
    except Exception:
        return None
    for name, value in arguments.items():
        if (fault := _fault_of_type(optimizer, name, value)) is not None:
            return fault
    try:
        _after_a_step(create, True)
    except Exception as error:
        return argument_error_in_words(error)
    return None


def _after_a_step(create: Callable[[nn.Module, bool], Optimizer], with_arguments: bool) -> Optimizer:
    """Return an optimizer that has updated a small model once. The state of the random number generators is kept."""
    with torch.random.fork_rng(devices=[]):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(_WIDTH, _WIDTH)])})
        optimizer = create(model, with_arguments)
        if callable(switch := getattr(optimizer, "train", None)):  # schedule-free optimizers
            switch()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def _fault_of_type(optimizer: Optimizer, name: str, value: Any) -> str | None:
    """Return a clause if the type of ``value`` is not that of the parameter ``name``. None for an unknown name."""
    for parameter in _parameters(optimizer, name):
        if isinstance(parameter.default, tuple):
            return f"{name} has several values, which optim_args cannot set"
        kinds = _kinds(parameter) or (float, bool)
        if not any(type(value) in _EXPECTED[kind][1] for kind in kinds) or value != value:
            return f"{name} must be {' or '.join(_EXPECTED[kind][0] for kind in kinds)}. Received: {value}"
    return None


def _parameters(optimizer: Any, name: str) -> Iterator[inspect.Parameter]:
    inner = getattr(optimizer, "inner", [])
    for one in (optimizer, *(inner if isinstance(inner, list) else [inner])):
        parameters = inspect.signature(type(one).__init__).parameters
        if name in parameters:
            yield parameters[name]


def _kinds(parameter: inspect.Parameter) -> tuple[type, ...]:
    """Return the types of values that a parameter is declared with, or that its default has."""
    declared = [_BY_NAME.get(one, one) for one in members(parameter.annotation) if one is not type(None)]
    if found := tuple(kind for kind in declared if kind in _EXPECTED):
        return found
    of_default = type(parameter.default)
    return (float if of_default is int else of_default,) if of_default in _EXPECTED else ()
