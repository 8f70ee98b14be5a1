"""The registry of optimizers, their parameter groups, and the learning rate scheduler.

Names such as ``optim: adamw_torch`` are transformers'. A member is a function ``(groups, options) ->
torch.optim.Optimizer``. ``groups`` are torch's parameter groups with names and weight decay, and with ``lr`` if it
differs from the run's learning rate. The optimizer's ``state_dict`` may contain tensors and plain data only
(checkpoint/snapshot.py).

Traits of a member: ``library``, the library that it requires; ``refused``, why a name of transformers is not supported,
and the alternative; ``leaves_out``, fields of ``OptimOptions`` that it does not use; ``switch``, its own option that
selects it (``when``); ``reads_model``: it is called with the model as well; ``compiles``: its first step compiles
kernels, so ``optim_args`` are not tried out in advance.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from burnish.config.checks import check, notes
from burnish.config.conversion import literal
from burnish.config.errors import MissingExtraError, Problem, UserError, argument_error_in_words
from burnish.config.options import changed_options, option, raise_if
from burnish.config.registry import Member, Registry
from burnish.loop.schedule import LRScheduleOptions, lr_factor, report_schedule_errors
from burnish.optim.arguments import fault_of_arguments

Groups: TypeAlias = list[dict[str, Any]]
OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer")
EXTRA = "optimizers"
"""The extra that installs the optimizers' libraries: ``pip install "burnish[optimizers]"``."""


@dataclass
class OptimOptions:
    """Optimizer."""

    optim: str = option(
        "adamw_torch_fused", "Optimizer, named as in transformers.", choices=OPTIMIZERS.names,
        refused=lambda: [member.name for member in OPTIMIZERS if "refused" in member.metadata],
    )  # fmt: skip
    optim_args: str | None = option(None, "Additional arguments of the optimizer: comma-separated name=value pairs.")
    learning_rate: float = option(
        5e-5,
        "Peak learning rate. Default for dpo and kto: 5e-6 for adapters, 5e-7 for full and freeze; for grpo, rloo and "
        "ppo: 1e-5 and 1e-6.",
        gt=0,
        lt=math.inf,
        aliases=("lr",),
    )
    weight_decay: float = option(0.0, "Decoupled weight decay; not applied to biases and normalization weights.", ge=0)
    adam_beta1: float = option(0.9, "Decay rate of Adam's first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay rate of Adam's second moment.", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "Epsilon of Adam, for numerical stability.", ge=0)


@check
def check_optimizer(options: OptimOptions) -> Iterator[Problem]:
    """Check, before a model is read, that the optimizer exists, is installed, and accepts ``optim_args``."""
    if options.optim not in OPTIMIZERS:
        return  # reported already, with similar names
    member = OPTIMIZERS.choose(options.optim, options)
    refused = member.metadata.get("refused")
    if refused:
        yield Problem(
            f'burnish does not support "optim" {options.optim}: {refused[0]}.', remedy=refused[1], option="optim"
        )
        return
    selected = list(dict.fromkeys(m.metadata.get("switch", m.name) for m in OPTIMIZERS if m.when and m.when(options)))
    if len(selected) > 1:
        yield Problem(
            f'"{selected[0]}" and "{selected[1]}" cannot be combined. Set one of them.', option=tuple(selected)
        )
        return
    try:
        optim_arguments(options)
    except UserError as error:
        yield from error.problems
        return
    yield from missing_library(member.name) or _argument_problems(member, options)


_MAX_PLAUSIBLE_RATE = 1.0


@notes
def optimizer_notes(options: OptimOptions) -> list[str]:
    """Notes on options that the selected optimizer does not use."""
    member = OPTIMIZERS.choose(options.optim, options)
    far = (
        [
            f"learning_rate {options.learning_rate:g} is far above the usual range (1e-6 to 1e-3 for AdamW), and the "
            "loss will probably diverge. Set learning_rate: 1e-5 for full fine-tuning, or 1e-4 for LoRA."
        ]
        if options.learning_rate >= _MAX_PLAUSIBLE_RATE
        else []
    )
    return far + _no_effect(member.name, OPTIMIZERS.unread(member, options)) + unused_option_notes(member.name, options)


def unused_option_notes(name: str, options: OptimOptions) -> list[str]:
    """Notes on changed fields of ``OptimOptions`` that the optimizer ``name`` does not use."""
    changed = changed_options(options)
    return _no_effect(
        name, [field for field in OPTIMIZERS.get(name).metadata.get("leaves_out", ()) if field in changed]
    )


def _no_effect(optimizer: str, unread: Iterable[str]) -> list[str]:
    return [f'"{name}" has no effect: optimizer {optimizer} does not use it.' for name in unread]


def missing_library(name: str) -> list[Problem]:
    """A problem if the library of the optimizer ``name`` is not installed."""
    library = OPTIMIZERS.get(name).metadata.get("library")
    if library is None or find_spec(library) is not None:
        return []
    return list(MissingExtraError(library, f'"optim" {name}', EXTRA, option="optim").problems)


def create_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], model: nn.Module, options: OptimOptions,
    learning_rates: Mapping[str, float] | None = None,
) -> Optimizer:  # fmt: skip
    """Create the optimizer of the run over the trainable parameters.

    Args:
        named_parameters: trainable and frozen parameters.
        model: the model, to recognize norms.
        options: the options of the optimizer.
        learning_rates: parameter name -> its own learning rate (LoRA+). Others use ``learning_rate``.

    Raises:
        UserError: for an unknown name, a missing library, or arguments that the optimizer does not accept.
    """
    raise_if(check_optimizer(options))
    groups = parameter_groups(named_parameters, model, options.weight_decay)
    if learning_rates:
        groups = split_by_rate(groups, learning_rates)
    member = OPTIMIZERS.choose(options.optim, options)
    try:
        return _create(member, groups, options, model)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not (options.optim_args or isinstance(error, TypeError)):
            raise
        raise UserError(_invalid_arguments(options, argument_error_in_words(error))) from error


def _create(
    member: Member[Callable[..., Optimizer]], groups: Groups, options: OptimOptions, model: nn.Module
) -> Optimizer:
    return member.value(groups, options, model) if "reads_model" in member.metadata else member.value(groups, options)


def _argument_problems(member: Member[Callable[..., Optimizer]], options: OptimOptions) -> list[Problem]:
    """A problem if the optimizer does not accept ``optim_args``."""
    if not options.optim_args or "compiles" in member.metadata:
        return []
    without = copy.copy(options)
    without.optim_args = None

    def create(model: nn.Module, with_arguments: bool) -> Optimizer:
        groups = parameter_groups(model.named_parameters(), model, options.weight_decay)
        return _create(member, groups, options if with_arguments else without, model)

    fault = fault_of_arguments(create, optim_arguments(options))
    return [] if fault is None else [_invalid_arguments(options, fault)]


def _invalid_arguments(options: OptimOptions, fault: str) -> Problem:
    what = f'invalid optim_args for optim "{options.optim}": {fault.rstrip(".")}.'
    return Problem(what, option=("optim_args", "optim"))


# Names of norms and biases across model families; the pattern is transformers' (trainer.py, get_decay_parameter_names).
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)", re.IGNORECASE)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], model: nn.Module, weight_decay: float
) -> Groups:
    """Two groups: with weight decay, and without it for biases and norms. Frozen parameters are omitted."""
    norms = {
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for leaf, _ in module.named_parameters(recurse=False)
    }
    decay: dict[str, nn.Parameter] = {}
    plain: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (plain if name in norms or _NO_DECAY.search(name) else decay)[name] = parameter
    return [
        {"params": list(part.values()), "param_names": list(part), "weight_decay": rate}
        for part, rate in ((decay, weight_decay), (plain, 0.0))
    ]


def split_by_rate(groups: Groups, learning_rates: Mapping[str, float]) -> Groups:
    """Split ``groups`` so that each has one learning rate: the run's own first, then the others, with ``lr``."""
    found: Groups = []
    for group in groups:
        by_rate: dict[float | None, dict[str, nn.Parameter]] = {}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            by_rate.setdefault(learning_rates.get(name), {})[name] = parameter
        for rate, part in by_rate.items():
            own = {} if rate is None else {"lr": rate}
            found.append({**group, "params": list(part.values()), "param_names": list(part), **own})
    return sorted(found, key=lambda group: "lr" in group)


@dataclass(frozen=True)
class Turns:
    """Describes an optimizer that trains a part of the weights at a time.

    Args:
        trained: number of weights that are trained during this run.
        active: maximum number of weights with gradients at a time.
        kept_bytes: memory of the optimizer, for moments, float32 copies and indices.
        lines: labels and texts for the user.
    """

    trained: int
    active: int
    kept_bytes: int
    lines: tuple[tuple[str, str], ...]


def keeps_load_precision(options: OptimOptions) -> bool:
    """Whether the optimizer keeps its own float32 copies."""
    return bool(OPTIMIZERS.choose(options.optim, options).metadata.get("keeps_load_precision"))


def planned_turns(sizes: Mapping[str, int], options: OptimOptions, max_steps: int, copies: bool) -> Turns | None:
    """Plan the turns of the weights. None if the optimizer trains all weights in every step.

    Args:
        sizes: parameter name -> number of elements.
        options: the options of the optimizer.
        max_steps: number of steps of the run.
        copies: whether float32 copies are needed, because the weights have another dtype.
    """
    plans = OPTIMIZERS.choose(options.optim, options).metadata.get("turns")
    return None if plans is None else plans(sizes, options, max_steps, copies)


def optim_arguments(options: OptimOptions) -> dict[str, Any]:
    """``optim_args`` as a dict: ``"momentum=0.9, nesterov=true"`` -> ``{"momentum": 0.9, "nesterov": True}``.

    Raises:
        UserError: for a part that is not a name=value pair, a duplicate name, or an argument with its own option.
    """
    found: dict[str, Any] = {}
    for pair in (options.optim_args or "").split(","):
        if not pair.strip():
            continue
        name, _, text = (part.strip() for part in pair.partition("="))
        if not (name and text):
            what = f'"optim_args" must be comma-separated name=value pairs. Received: "{pair.strip()}".'
            raise UserError(what, option="optim_args")
        if name in found:
            raise UserError(f'"optim_args" sets {name} twice.', remedy="Remove one of the two.", option="optim_args")
        if own := _SET_ELSEWHERE.get(name):
            raise UserError(f'"optim_args" cannot set {name}.', remedy=own, option="optim_args")
        found[name] = literal(text)
    return found


_NO_GRAPHS = "Remove it: steps are neither captured in CUDA graphs nor differentiated."
_SET_ELSEWHERE = {
    "lr": "Set learning_rate.",
    "weight_decay": "Set weight_decay.",
    "capturable": _NO_GRAPHS,
    "differentiable": _NO_GRAPHS,
}
"""Arguments that are set by the parameter groups, or not supported -> the remedy of the error."""


def adam_arguments(options: OptimOptions) -> dict[str, Any]:
    """Arguments of AdamW and its variants. Those in ``optim_args`` take precedence."""
    return {
        "lr": options.learning_rate,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
        **optim_arguments(options),
    }


ADAM_ONLY = ("adam_beta1", "adam_beta2", "adam_epsilon")
"""Options that an optimizer without Adam's moments does not use. Its own settings are in ``optim_args``."""


def switch_arguments(switch: str) -> dict[str, Any]:
    """Arguments of ``register`` for a member that is selected by its own option ``switch`` as well as by its name."""
    return {"switch": switch, "when": lambda options: bool(getattr(options, switch, False))}


def only_adamw(options: OptimOptions, switch: str, name: str) -> Iterator[Problem]:
    """A problem if ``switch`` selects ``name``, which is based on AdamW, and ``optim`` selects another optimizer."""
    if options.optim in ("adamw_torch", "adamw_torch_fused", name) or not getattr(options, switch):
        return
    what = f'"{switch}" is based on AdamW and cannot be combined with "optim" {options.optim}.'
    yield Problem(what, remedy=f"Remove optim or {switch}.", option=(switch, "optim"))


@OPTIMIZERS.register("adamw_torch_fused")
def adamw_fused(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with a fused kernel for all parameters."""
    return torch.optim.AdamW(groups, fused=True, **adam_arguments(options))


@OPTIMIZERS.register("adamw_torch")
def adamw(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with separate tensor operations."""
    return torch.optim.AdamW(groups, **adam_arguments(options))


@OPTIMIZERS.register("sgd", leaves_out=ADAM_ONLY)
def sgd(groups: Groups, options: OptimOptions) -> Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(groups, lr=options.learning_rate, **optim_arguments(options))


@OPTIMIZERS.register("adagrad", leaves_out=ADAM_ONLY)
def adagrad(groups: Groups, options: OptimOptions) -> Optimizer:
    """Adagrad."""
    return torch.optim.Adagrad(groups, lr=options.learning_rate, **optim_arguments(options))


@OPTIMIZERS.register("rmsprop", leaves_out=ADAM_ONLY)
def rmsprop(groups: Groups, options: OptimOptions) -> Optimizer:
    """RMSprop."""
    return torch.optim.RMSprop(groups, lr=options.learning_rate, **optim_arguments(options))


def create_scheduler(
    optimizer: Optimizer, options: LRScheduleOptions, max_steps: int, learning_rate: float, steps_per_rate: int = 1
) -> Any:
    """Make the scheduler: a ``LambdaLR`` over the curve of ``loop/schedule.py``, or one that follows a metric.

    Args:
        max_steps: length of the schedule.
        learning_rate: peak learning rate.
        steps_per_rate: optimizer steps per value of the schedule.
    """
    with report_schedule_errors(options):
        if options.lr_scheduler_type == "reduce_lr_on_plateau":
            return ReduceLROnPlateau(optimizer, **(options.lr_scheduler_kwargs or {}))
        if options.lr_scheduler_type == "greedy":
            from transformers.optimization import GreedyLR

            return GreedyLR(optimizer, **(options.lr_scheduler_kwargs or {}))
    factor = lr_factor(options, max_steps, learning_rate)
    return LambdaLR(optimizer, factor if steps_per_rate == 1 else lambda step: factor(step // steps_per_rate))
