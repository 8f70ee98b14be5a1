"""GaLore and APOLLO: full training with low-rank moments.

The gradient of a matrix is projected onto a few directions. AdamW (for GaLore also Adafactor or 8-bit AdamW) keeps its
moments only for this small matrix:

    R = Pᵀ G  or  R = G Qᵀ,    r rows or columns        (the directions change every ``update_interval`` updates)
    GaLore   W -= lr * scale * (N projected back)       Zhao et al. 2024, algorithm 2, https://arxiv.org/abs/2403.03507
    APOLLO   W -= lr * sqrt(scale) * s G,  s = ‖N‖/‖R‖  Zhu et al. 2024, algorithm 1, https://arxiv.org/abs/2412.05270

where N is the step that the inner optimizer computes for R. The inner optimizer updates a small matrix of zeros with
the gradient R at a learning rate of 1. This works with any optimizer whose step depends on gradients only.

In:  the parameter groups. Matrices in numbered layers are projected (``all``), or those whose name contains a target.
Out: an optimizer whose state (directions, moments, counter) a checkpoint can hold.
Refuses: targets that match no matrix, an ``optim`` that cannot update the small matrices.
"""

# m, n the sides of a weight, r rank; G (m, n) gradient, P (m, r), Q (r, n), R (r, n), (m, r) or (r, r)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import option
from burnish.optim.builtin import (
    OPTIMIZERS,
    Groups,
    OptimOptions,
    missing_library,
    optim_arguments,
    switch_arguments,
    unused_option_notes,
)
from burnish.optim.delegating import Delegating, copy_groups

INNER_OPTIMIZERS = {
    "adamw_torch": "adamw_torch", "adamw_torch_fused": "adamw_torch", "adafactor": "adafactor",
    "adamw_bnb_8bit": "adamw_bnb_8bit", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit",
    "galore_adamw": "adamw_torch", "galore_adafactor": "adafactor", "galore_adamw_8bit": "adamw_bnb_8bit",
    "apollo_adamw": "adamw_torch",
}  # fmt: skip
"""``optim`` -> the optimizer of the small matrices."""
_GALORE_CHOICES = {"proj_type": ("std", "reverse_std", "right", "left", "full")}
_APOLLO_CHOICES = {
    "proj_type": ("std", "reverse_std", "right", "left"),
    "proj": ("svd", "random"),
    "scale_type": ("channel", "tensor"),
}
_NUMBERS = {"rank": "a positive integer", "update_proj_gap": "a positive integer", "scale": "a positive number"}
"""Arguments that transformers accepts in ``optim_args``, with their values."""
GROWTH_LIMIT = 1.01  # Fira, Chen et al. 2024, section 3.3, https://arxiv.org/abs/2410.01623
_TARGETS = ("optim_target_modules", "galore_target", "apollo_target")
_IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass
class LowRankOptions:
    """GaLore and APOLLO."""

    use_galore: bool = option(
        False, "Use GaLore: project gradients to low rank. optim selects the optimizer in that space."
    )
    galore_target: list[str] = option(["all"], "Names of the layers to apply GaLore to. all: every linear layer.")
    galore_rank: int | None = option(None, "Rank of GaLore. Default: 16; 128 with optim: galore_*.", ge=1)
    galore_update_interval: int = option(
        200, "Number of steps between updates of the GaLore projection.", ge=1, unit="steps"
    )
    galore_scale: float | None = option(
        None, "Scale of the GaLore update. Default: 2; 0.25 with optim: galore_*.", gt=0
    )
    galore_proj_type: str = option(
        "std",
        "Side of the GaLore projection: the shorter (std), the longer (reverse_std), right, left, or both (full).",
        choices=("std", "reverse_std", "right", "left", "full"),
    )  # fmt: skip
    use_apollo: bool = option(
        False, "Use APOLLO: SGD with gradients scaled as in AdamW, by factors computed in a low-rank space."
    )
    apollo_target: list[str] = option(["all"], "Names of the layers to apply APOLLO to. all: every linear layer.")
    apollo_rank: int | None = option(None, "Rank of APOLLO. Default: 16; 128 with optim: apollo_adamw.", ge=1)
    apollo_update_interval: int = option(
        200, "Number of steps between updates of the APOLLO projection.", ge=1, unit="steps"
    )
    apollo_scale: float | None = option(
        None, "Scale of the APOLLO update; its square root is applied. Default: 32; 1 with optim: apollo_adamw.", gt=0
    )
    apollo_proj: str = option(
        "random", "APOLLO projection: random, or by the SVD of the gradient.", choices=("svd", "random")
    )
    apollo_proj_type: str = option("std", "Side of the APOLLO projection.", choices=("std", "right", "left"))
    apollo_scale_type: str = option(
        "channel", "Granularity of the scale: one per channel, or one per matrix.", choices=("channel", "tensor")
    )
    apollo_scale_front: bool = option(False, "Apply the square root of apollo_scale before the norm-growth limiter.")
    optim_target_modules: str | list[str] | None = option(
        None, "Layers for optim: galore_* and apollo_*: names, a regular expression, or all-linear."
    )


class LowRankChoices(OptimOptions, LowRankOptions):
    """Options of a low-rank optimizer."""

    finetuning_type: str


@check
def check_low_rank(options: LowRankChoices) -> Iterator[Problem]:
    if not (options.use_galore or options.use_apollo):
        return
    switch = "use_galore" if options.use_galore else "use_apollo"
    yield from _check_inner_optimizer(options, switch)
    if options.finetuning_type == "lora":
        what = f'"{switch}" projects full matrices, but "finetuning_type" lora trains low-rank ones.'
        yield Problem(
            what, remedy=f"Set finetuning_type: full, or remove {switch}.", option=(switch, "finetuning_type")
        )


@notes
def low_rank_notes(options: OptimOptions) -> list[str]:
    """Notes on options that the optimizer of the small matrices does not use."""
    member = OPTIMIZERS.choose(options.optim, options)
    return unused_option_notes(INNER_OPTIMIZERS[options.optim], options) if member.options is LowRankOptions else []


def _check_inner_optimizer(options: LowRankChoices, switch: str) -> Iterator[Problem]:
    """Check that ``optim`` can update the small matrices."""
    able = [name for name, within in INNER_OPTIMIZERS.items() if options.use_galore or within == "adamw_torch"]
    if options.optim not in able:
        yield Problem(
            f'"{switch}" requires one of the optimizers {", ".join(able)}. Received: "{options.optim}".',
            option=(switch, "optim"),
        )
        return
    yield from missing_library(INNER_OPTIMIZERS[options.optim])


class Method(NamedTuple):
    """The settings of a low-rank method."""

    targets: str | list[str]
    rank: int
    interval: int
    scale: float
    side: str  # std, reverse_std, right, left, full
    directions: str  # svd, random
    growth: str = ""  # "" for GaLore; for APOLLO, one scale per "channel" or per "tensor"
    scale_front: bool = False


@OPTIMIZERS.register("galore_adamw", "galore_adafactor", options=LowRankOptions, **switch_arguments("use_galore"))
def galore(groups: Groups, options: LowRankChoices) -> Optimizer:
    """GaLore: moments for the largest directions of the gradient."""
    return LowRank(groups, options, _galore_method(options))


# A separate name, because only this one needs a library.
OPTIMIZERS.register("galore_adamw_8bit", options=LowRankOptions, library="bitsandbytes")(galore)


@OPTIMIZERS.register("apollo_adamw", options=LowRankOptions, **switch_arguments("use_apollo"))
def apollo(groups: Groups, options: LowRankChoices) -> Optimizer:
    """APOLLO: the gradient, scaled by factors that AdamW gives in a low-rank space."""
    return LowRank(groups, options, _apollo_method(options))


def _galore_method(options: LowRankChoices) -> Method:
    """Settings of GaLore from LLaMA-Factory's options or, for ``optim: galore_*``, transformers' ``optim_args``."""
    arguments, is_named = _read_arguments(options, _GALORE_CHOICES), not options.use_galore
    return Method(
        targets=options.galore_target if options.optim_target_modules is None else options.optim_target_modules,
        rank=arguments.get("rank", options.galore_rank or (128 if is_named else 16)),
        interval=arguments.get("update_proj_gap", options.galore_update_interval),
        scale=arguments.get("scale", options.galore_scale or (0.25 if is_named else 2.0)),
        side=arguments.get("proj_type", options.galore_proj_type),
        directions="svd",
    )


def _apollo_method(options: LowRankChoices) -> Method:
    arguments, is_named = _read_arguments(options, _APOLLO_CHOICES), not options.use_apollo
    return Method(
        targets=options.apollo_target if options.optim_target_modules is None else options.optim_target_modules,
        rank=arguments.get("rank", options.apollo_rank or (128 if is_named else 16)),
        interval=arguments.get("update_proj_gap", options.apollo_update_interval),
        scale=arguments.get("scale", options.apollo_scale or (1.0 if is_named else 32.0)),
        side=arguments.get("proj_type", options.apollo_proj_type),
        directions=arguments.get("proj", options.apollo_proj),
        growth=arguments.get("scale_type", options.apollo_scale_type),
        scale_front=options.apollo_scale_front,
    )


def _read_arguments(options: OptimOptions, choices: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Read ``optim_args``. Raises TypeError for an unknown name, as other optimizers do, and ValueError for a value."""
    arguments = optim_arguments(options)
    for name, value in arguments.items():
        if name in choices:
            expected, is_valid = f"one of {', '.join(choices[name])}", value in choices[name]
        elif name in _NUMBERS:
            is_number = type(value) is int or (type(value) is float and name == "scale")
            expected, is_valid = _NUMBERS[name], is_number and 0 < value < math.inf
        else:
            raise TypeError(f"unknown argument {name}; known: {', '.join([*_NUMBERS, *choices])}")
        if not is_valid:
            raise ValueError(f"{name} must be {expected}. Received: {value}")
    return arguments


class LowRank(Delegating):
    """Applies an optimizer such as AdamW to small matrices for projected parameters, and directly to all others.

    ``inner`` has first the groups without projection, with their own parameters, then the projected groups, with small
    matrices for their parameters. It is created at the first step, when the model is on its device.
    """

    def __init__(self, groups: Groups, options: OptimOptions, method: Method) -> None:
        projected, plain = split_groups(groups, lambda name, parameter: is_target(name, parameter, method.targets))
        if not projected:
            raise UserError(
                "optim_target_modules, galore_target or apollo_target matches no trainable matrix. "
                f"Received: {method.targets}.",
                remedy='Set the target to "all" for the linear layers.',
                option=_TARGETS,
            )
        super().__init__([*plain, *projected], options.learning_rate)
        self.options, self.method = options, method
        self.num_plain = len(plain)
        self.updates = 0
        self.small: list[Tensor] = []  # per projected parameter: zeros with the projected gradient
        self.sides: dict[int, list[Tensor | None]] = {}  # index of a projected parameter -> P and Q, or one of them
        self.lengths: dict[int, Tensor] = {}  # APOLLO: index of a projected parameter -> () norm of its last step

    def projected_parameters(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Every projected parameter with its group."""
        return [(p, group) for group in self.param_groups[self.num_plain :] for p in group["params"]]

    def _make_inner(self) -> None:
        plain = copy_groups(self.param_groups[: self.num_plain])
        self.small = []
        for parameter, _ in self.projected_parameters():
            (m, n), (left, right) = parameter.shape, sides_of(parameter.shape, self.method.side)
            rank = min(self.method.rank, m, n)
            zeros = torch.zeros(rank if left else m, rank if right else n, device=parameter.device)
            self.small.append(zeros)
        remaining = iter(self.small)
        small: Groups = [
            {"params": [next(remaining) for _ in group["params"]], "weight_decay": 0.0, "lr": 1.0}
            for group in self.param_groups[self.num_plain :]
        ]
        within = OPTIMIZERS[INNER_OPTIMIZERS[self.options.optim]]
        self.inner = [within([*plain, *small], _InnerOptions(self.options))]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.inner:
            self._make_inner()
        self._project()
        for own, followed in zip(self.inner_groups()[: self.num_plain], self.param_groups, strict=False):
            own["lr"] = followed["lr"]
        self._set_epsilon()
        self.inner[0].step()
        self.updates += 1
        for index, (parameter, group) in enumerate(self.projected_parameters()):
            if parameter.grad is not None:
                step = self._galore_step(index) if not self.method.growth else self._apollo_step(index, parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(step.to(parameter.dtype), alpha=group["lr"])
            self.small[index].zero_()
            self.small[index].grad = None

    def _set_epsilon(self) -> None:
        """Add epsilon before the bias correction, as the authors' AdamW does. torch's adds it afterwards."""
        correction = math.sqrt(1 - self.options.adam_beta2 ** (self.updates + 1))
        for group in self.inner_groups() if isinstance(self.inner[0], AdamW) else []:
            group["eps"] = self.options.adam_epsilon / correction

    def _project(self) -> None:
        """Set the gradient R of every small matrix, with new directions at the interval."""
        is_time = self.updates % self.method.interval == 0
        for index, (parameter, _) in enumerate(self.projected_parameters()):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            if is_time or index not in self.sides:
                self.sides[index] = self._directions(gradient, index)
            left, right = self.sides[index]
            small = gradient if left is None else left.t() @ gradient
            self.small[index].grad = small if right is None else small @ right.t()

    def _directions(self, gradient: Tensor, index: int) -> list[Tensor | None]:
        method = self.method
        has_left, has_right = sides_of(gradient.shape, method.side)
        if method.directions == "random":
            # Depends on the parameter and the update only, so every rank draws the same directions.
            generator = torch.Generator().manual_seed(1_000_003 * index + self.updates // method.interval)
            (m, n), rank = gradient.shape, min(method.rank, *gradient.shape)
            left = torch.randn(m, rank, generator=generator).to(gradient.device) / math.sqrt(rank)
            right = torch.randn(rank, n, generator=generator).to(gradient.device) / math.sqrt(rank)
        else:
            u, _, v = torch.linalg.svd(gradient, full_matrices=False)
            left, right = u[:, : method.rank].contiguous(), v[: method.rank].contiguous()
        return [left if has_left else None, right if has_right else None]

    def _galore_step(self, index: int) -> Tensor:
        """(m, n) the step of the small matrix, projected back."""
        left, right = self.sides[index]
        step = self.small[index] if left is None else left @ self.small[index]
        return (step if right is None else step @ right) * self.method.scale

    def _apollo_step(self, index: int, gradient: Tensor) -> Tensor:
        """(m, n) the gradient with its channels scaled as in AdamW's step, with limited growth.

        As in the authors' code, the growth is measured without Adam's bias correction.
        """
        method, small = self.method, self.small[index]
        beta1, beta2 = self.options.adam_beta1, self.options.adam_beta2  # moments start at zero
        correction = math.sqrt(1 - beta2**self.updates) / (1 - beta1**self.updates)
        along = None if method.growth == "tensor" else 1 if self.sides[index][0] is None else 0
        assert small.grad is not None
        norm, before = (torch.linalg.vector_norm(x, dim=along, keepdim=along is not None) for x in (small, small.grad))
        step = gradient.float() * (norm / correction / (before + 1e-8))
        root = math.sqrt(method.scale)
        step = self._limit_growth(index, step * root) if method.scale_front else self._limit_growth(index, step) * root
        return -correction * step

    def _limit_growth(self, index: int, step: Tensor) -> Tensor:
        """``step``, limited to 1.01 times the norm of the previous step."""
        length = torch.linalg.vector_norm(step)
        if index in self.lengths:
            excess = (length / (self.lengths[index] + 1e-8)).clamp(min=GROWTH_LIMIT) / GROWTH_LIMIT
            step, length = step / excess, length / excess
        self.lengths[index] = length
        return step

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates, "sides": self.sides, "lengths": self.lengths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        if state["inner"]:
            self._make_inner()
        super().load_state_dict(state)
        devices = [parameter.device for parameter, _ in self.projected_parameters()]
        self.lengths = {int(i): length.to(devices[int(i)]) for i, length in state["lengths"].items()}
        self.sides = {
            int(i): [None if side is None else side.to(devices[int(i)]) for side in pair]
            for i, pair in state["sides"].items()
        }


class _InnerOptions:
    """Options of the inner optimizer, without ``optim_args``, which belong to the projection."""

    def __init__(self, options: OptimOptions) -> None:
        self._options = options
        self.optim_args = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)


def in_layers(name: str, parameter: nn.Parameter) -> bool:
    """Whether this is a matrix inside a numbered layer, not an embedding, the head or a norm."""
    return parameter.ndim == 2 and _IN_A_LAYER.search(name) is not None


def is_target(name: str, parameter: nn.Parameter, targets: str | list[str]) -> bool:
    """Whether ``name`` is that of a matrix and contains one of the targets, or a match of one as a regular expression.

    Raises:
        UserError: for a target that is not a regular expression.
    """
    each = [targets] if isinstance(targets, str) else targets
    if len(each) == 1 and each[0] in ("all", "all-linear", "all_linear"):
        return in_layers(name, parameter)
    try:
        return parameter.ndim == 2 and any(target in name or re.search(target, name) for target in each)
    except re.error as error:
        what = f"Expected names or regular expressions as targets. Received: {targets} ({error})."
        raise UserError(what, remedy="Write .* for any text.", option=_TARGETS) from None


def split_groups(groups: Groups, is_wanted: Callable[[str, nn.Parameter], bool]) -> tuple[Groups, Groups]:
    """Split groups by name and parameter into selected and other groups. Empty groups are omitted."""
    selected: Groups = []
    rest: Groups = []
    for group in groups:
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        for target, answer in ((selected, True), (rest, False)):
            part = [pair for pair in pairs if is_wanted(*pair) is answer]
            if part:
                target.append({**group, "params": [p for _, p in part], "param_names": [n for n, _ in part]})
    return selected, rest


def sides_of(shape: torch.Size, side: str) -> tuple[bool, bool]:
    """Whether P, and whether Q, projects a matrix of that shape."""
    is_tall = shape[0] >= shape[1]
    left = {"std": not is_tall, "reverse_std": is_tall, "left": True, "right": False, "full": True}[side]
    return left, side == "full" or not left
