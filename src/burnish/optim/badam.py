"""BAdam: full-parameter training with the memory of a few layers (Luo et al. 2024, https://arxiv.org/abs/2404.02827).

The parameters are divided into blocks, one per transformer layer. AdamW trains one block for ``badam_switch_interval``
updates while all others are frozen (algorithm 1), then the next block with new moments. Only the active block has
gradients, moments and, if the model is not in float32, a float32 copy of its weights. For a model of 8 equal layers
training adds a fifth of the memory that full AdamW adds (bench/badam_memory.py, docs/notebook.md).

``badam_mode: ratio`` instead trains a fraction of the entries of every tensor, and keeps moments for those entries
only.

In:  torch's parameter groups with names. Out: an optimizer whose state (block, counter, moments, copies) is in the
checkpoint, so that a run resumes exactly within a block.
Not trained: parameters outside of the layers, that is embeddings, the last norm and the head (so tied embeddings need
no special case). Refuses: LoRA and freezing, more than one process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import changed_options, option
from burnish.optim.builtin import (
    OPTIMIZERS,
    Groups,
    OptimOptions,
    Turns,
    adam_arguments,
    only_adamw,
    switch_arguments,
)
from burnish.parallel.options import ParallelOptions

logger = logging.getLogger(__name__)
_LAYER_PREFIX = re.compile(r"^(.*?\.\d+)\.")
_UNUSED_OPTIONS_BY_MODE = {
    "layer": ("badam_update_ratio", "badam_mask_mode"),
    "ratio": ("badam_start_block", "badam_switch_mode", "badam_verbose"),
}
"""Mode -> options that it does not use."""


@dataclass
class BadamOptions:
    """BAdam."""

    use_badam: bool = option(
        False,
        "Use BAdam: train one block of layers at a time with AdamW, with gradients and states of that block only.",
    )
    badam_mode: str = option(
        "layer",
        "Unit that is trained at a time: one layer (layer), or a fraction of every tensor (ratio).",
        choices=("layer", "ratio"),
    )
    badam_start_block: int | None = option(
        None, "Index of the first block. Default: determined by badam_switch_mode.", ge=0
    )
    badam_switch_mode: str = option(
        "ascending", "Order of the blocks.", choices=("ascending", "descending", "random", "fixed")
    )
    badam_switch_interval: int = option(50, "Number of updates per block. -1: never switch.", unit="steps", ge=-1)
    badam_update_ratio: float = option(
        0.05, "Fraction of the entries of each tensor that are updated in ratio mode.", gt=0, le=1
    )
    badam_mask_mode: str = option(
        "adjacent",
        "Positions of the entries that are updated in ratio mode: adjacent, or scattered.",
        choices=("adjacent", "scatter"),
    )
    badam_verbose: int = option(
        0,
        "What to log at each switch: nothing (0), the block (1), or the block and its parameters (2).",
        choices=(0, 1, 2),
    )


class BadamChoices(OptimOptions, BadamOptions, ParallelOptions):
    """Options of AdamW and of its blocks."""

    finetuning_type: str


@check
def check_badam(options: BadamChoices) -> Iterator[Problem]:
    if not _is_chosen(options):
        return
    yield from only_adamw(options, "use_badam", "badam")
    if options.finetuning_type != "full":
        what = (
            f'use_badam trains the whole model, block by block. Received: finetuning_type "{options.finetuning_type}".'
        )
        yield Problem(what, remedy="Set finetuning_type: full.", option=("use_badam", "finetuning_type"))
    if options.badam_switch_interval == 0:
        yield Problem(
            '"badam_switch_interval" must be at least 1, or -1 to never switch. Received: 0.',
            option="badam_switch_interval",
        )


@notes
def badam_notes(options: BadamChoices) -> list[str]:
    """Notes on options of the other mode of BAdam."""
    if not _is_chosen(options):
        return []  # reported for the whole group
    unread = [name for name in changed_options(options) if name in _UNUSED_OPTIONS_BY_MODE[options.badam_mode]]
    return [f'"{name}" has no effect with badam_mode {options.badam_mode}.' for name in unread]


def _is_chosen(options: BadamChoices) -> bool:
    return bool(options.use_badam) or options.optim == "badam"


# --- what a run will train --------------------------------------------------------------------------------------------


def plan_turns(sizes: Mapping[str, int], options: BadamChoices, max_steps: int, copies: bool) -> Turns:
    """Plan which weights a run trains, and the memory it needs.

    Args:
        sizes: parameter name -> number of elements.
        options: the options of BAdam.
        max_steps: number of steps of the run.
        copies: whether float32 copies are needed, because the weights have another dtype.
    """
    blocks = {prefix: sum(sizes[name] for name in names) for prefix, names in blocks_of(list(sizes)).items()}
    rounds = 1 if options.badam_switch_interval < 1 else max(1, -(-max_steps // options.badam_switch_interval))
    planned = _turns_of_entries if options.badam_mode == "ratio" else _turns_of_blocks
    found = planned(sizes, blocks, options, rounds, copies)
    outside = [name for name in sizes if not _LAYER_PREFIX.match(name)]
    shown = ", ".join(outside[:4]) + (f" and {len(outside) - 4:,} more" if len(outside) > 4 else "")
    never = f"{sum(sizes[name] for name in outside):,}, outside the layers: {shown}"
    return replace(found, lines=(*found.lines, ("never trained", never))) if outside else found


def _turns_of_blocks(
    sizes: Mapping[str, int], blocks: Mapping[str, int], options: BadamChoices, rounds: int, copies: bool
) -> Turns:
    check_start_block(len(blocks), options)
    order = [block_at(options, len(blocks), number) for number in range(min(rounds, len(blocks)))]
    names, counts = list(blocks), [list(blocks.values())[place] for place in dict.fromkeys(order)]
    shown = ", ".join(map(str, order[:8])) + (", ..." if rounds > min(len(order), 8) else "")
    idle = len(blocks) - len(counts)
    how = (
        f"{len(blocks)}, {names[0]} to {names[-1]}, {options.badam_switch_mode}: {shown}; "
        + _switching_in_words(rounds, options.badam_switch_interval)
        + (f"; {idle} {'is' if idle == 1 else 'are'} not trained in this run" if idle else "")
    )
    most = max(counts)
    return Turns(sum(counts), most, most * (12 if copies else 8), (("blocks", how),))


def _turns_of_entries(
    sizes: Mapping[str, int], blocks: Mapping[str, int], options: BadamChoices, rounds: int, copies: bool
) -> Turns:
    inside = [name for name in sizes if _LAYER_PREFIX.match(name)]
    moved = sum(max(1, round(sizes[name] * options.badam_update_ratio)) for name in inside)
    switching = _switching_in_words(rounds, options.badam_switch_interval)
    how = f"{moved:,} entries at a time, {options.badam_mask_mode}; {switching}"
    how += "; in total at most the number of trainable parameters above" if rounds > 1 else ""
    total = sum(blocks.values())
    # AdamW's two moments and the float32 copy have 4 bytes each, the index of an entry has 8.
    return Turns(min(total, rounds * moved), total, moved * (8 + 4 + 8), (("entries", how),))


def _switching_in_words(rounds: int, interval: int) -> str:
    return (
        f"switched {'after each update' if interval == 1 else f'every {interval:,} updates'}, {rounds:,} times"
        if rounds > 1
        else "the same for the whole run"
    )


@OPTIMIZERS.register(
    "badam", options=BadamOptions, keeps_load_precision=True, turns=plan_turns, **switch_arguments("use_badam")
)
def badam(groups: Groups, options: BadamChoices) -> Optimizer:
    """AdamW on one block of layers at a time."""
    made = _LayerAdam if options.badam_mode == "layer" else _RatioAdam
    return made(groups, options)


class _BlockAdam(Optimizer):
    """Base of both modes: AdamW over the currently active float32 tensors, which change at every switch.

    Subclasses define these tensors (``_activate``), and how gradients and weights are copied from and to the model.
    """

    changes_what_trains = True
    """The set of weights with gradients changes during the run, so a backend must not cache it."""

    def __init__(self, groups: Groups, options: BadamChoices) -> None:
        super().__init__(groups, {"lr": options.learning_rate, "weight_decay": 0.0})
        self.options = options
        self.round = 0  # number of switches
        self.updates = 0  # number of updates of the active block
        self.inner: AdamW

    def _activate(self) -> None:
        raise NotImplementedError

    def _gradients_in(self) -> None:
        raise NotImplementedError

    def _copy_weights_to_model(self) -> None:
        raise NotImplementedError

    def _start(self, per_group: Sequence[Sequence[Tensor]]) -> None:
        """Create an AdamW with new moments for the active tensors, with each group's weight decay."""
        self.inner = AdamW(
            [
                {"params": list(tensors), "weight_decay": group["weight_decay"], "lr": group["lr"]}
                for tensors, group in zip(per_group, self.param_groups, strict=True)
            ],
            **adam_arguments(self.options),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for inner, outer in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner["lr"] = outer["lr"]
        self._gradients_in()
        self.inner.step()
        self._copy_weights_to_model()
        self.updates += 1
        if self.updates == self.options.badam_switch_interval:
            self.updates = 0
            self.round += 1
            self._activate()

    def state_dict(self) -> dict[str, Any]:
        active = [tensor for group in self.inner.param_groups for tensor in group["params"]]
        return {
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
            "round": self.round,
            "updates": self.updates,
            "active": dict(enumerate(t.detach() for t in active)),
            "inner": self.inner.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        self.round, self.updates = state["round"], state["updates"]
        self._activate()
        active = [tensor for group in self.inner.param_groups for tensor in group["params"]]
        for index, tensor in enumerate(active):
            tensor.copy_(state["active"][index])
        self.inner.load_state_dict(dict(state["inner"]))
        self._copy_weights_to_model()


class _LayerAdam(_BlockAdam):
    """Mode ``layer``: trains one layer after another."""

    def __init__(self, groups: Groups, options: BadamChoices) -> None:
        super().__init__(groups, options)
        self.blocks = blocks_of([name for group in groups for name in group["param_names"]])
        check_start_block(len(self.blocks), options)
        self._activate()

    @property
    def block(self) -> int:
        """Index of the active block."""
        return block_at(self.options, len(self.blocks), self.round)

    def _activate(self) -> None:
        prefix = list(self.blocks)[self.block]
        names = self.blocks[prefix]
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []  # the model's parameter, the float32 tensor for AdamW
        per_group = []
        for group in self.param_groups:
            moved = []
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.requires_grad_(name in names)
                if name in names:
                    moved.append(parameter if parameter.dtype == torch.float32 else parameter.detach().float())
                    self._pairs.append((parameter, moved[-1]))
                else:
                    parameter.grad = None
            per_group.append(moved)
        self._start(per_group)
        if self.options.badam_verbose:
            logger.setLevel(logging.INFO)  # badam_verbose prints at any log level
            logger.info("BAdam: the active block is %s.", prefix)
        if self.options.badam_verbose == 2:
            logger.info("BAdam: its parameters are %s.", ", ".join(sorted(names)))

    def _gradients_in(self) -> None:
        for parameter, moved in self._pairs:
            if moved is not parameter:
                moved.grad = None if parameter.grad is None else parameter.grad.float()

    def _copy_weights_to_model(self) -> None:
        for parameter, moved in self._pairs:
            if moved is not parameter:
                parameter.copy_(moved)
                moved.grad = None


def check_start_block(num_blocks: int, options: BadamChoices) -> None:
    """Raise UserError if there are no blocks, or if the start block does not exist."""
    start = options.badam_start_block
    if not num_blocks:
        raise UserError("BAdam found no layers: no parameter is in a numbered block such as model.layers.0.")
    if start is not None and start >= num_blocks:
        raise UserError(
            f'"badam_start_block" must be below {num_blocks}, the number of layers. Received: {start}.',
            option="badam_start_block",
        )


def block_at(options: BadamChoices, count: int, number: int) -> int:
    """Index of the active block after ``number`` switches. With random order, each pass over the blocks has its own
    order, a function of (seed, pass).
    """
    mode, start = options.badam_switch_mode, options.badam_start_block
    if mode == "fixed":
        return start or 0
    if mode == "descending":
        return int(((count - 1 if start is None else start) - number) % count)
    if mode == "ascending":
        return int(((start or 0) + number) % count)
    generator = torch.Generator().manual_seed(options.seed + number // count)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    if start is not None and number < count:
        order.remove(start)
        order.insert(0, start)
    return order[number % count]


class _RatioAdam(_BlockAdam):
    """Mode ``ratio``: trains a fraction of the entries of every tensor in a layer. ``entries`` index the flattened
    tensor."""

    def __init__(self, groups: Groups, options: BadamChoices) -> None:
        super().__init__(groups, options)
        in_layers = {
            name for names in blocks_of([n for g in groups for n in g["param_names"]]).values() for name in names
        }
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.requires_grad_(name in in_layers)
        self._activate()

    def _activate(self) -> None:
        generator = torch.Generator().manual_seed(self.options.seed + self.round)
        # parameter, entries (K,), their float32 values (K,)
        self._parts: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        per_group = []
        for group in self.param_groups:
            moved = []
            for parameter in group["params"]:
                if parameter.requires_grad:
                    entries = self._entries(parameter.numel(), generator).to(parameter.device)
                    moved.append(parameter.detach().flatten()[entries].float())
                    self._parts.append((parameter, entries, moved[-1]))
            per_group.append(moved)
        self._start(per_group)

    def _entries(self, count: int, generator: torch.Generator) -> Tensor:
        """(K,) indices of the entries that are trained until the next switch."""
        size = max(1, round(count * self.options.badam_update_ratio))
        if self.options.badam_mask_mode == "scatter":
            return torch.randperm(count, generator=generator)[:size]
        start = int(torch.randint(count, (), generator=generator))
        return (torch.arange(size) + start) % count

    def _gradients_in(self) -> None:
        for parameter, entries, moved in self._parts:
            moved.grad = None if parameter.grad is None else parameter.grad.flatten()[entries].float()

    def _copy_weights_to_model(self) -> None:
        for parameter, entries, moved in self._parts:
            parameter.view(-1)[entries] = moved.to(parameter.dtype)
            moved.grad = None


def blocks_of(names: Sequence[str]) -> dict[str, set[str]]:
    """Layer prefix (``model.layers.3``) -> names of its parameters, in order of the layers."""
    blocks: dict[str, set[str]] = {}
    for name in names:
        match = _LAYER_PREFIX.match(name)
        if match:
            blocks.setdefault(match[1], set()).add(name)
    return dict(
        sorted(blocks.items(), key=lambda item: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", item[0])])
    )
