"""The parts of a run that have several kinds, as the loop sees them: objective, engine, stream, adapter.

A class that names one of these protocols as its base has the answers that are written here, and gives the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from burnish.checkpoint.parts import Stateful
from burnish.loop.types import Batch, Loss, StepBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from burnish.checkpoint.parts import Part


class Objective(Protocol):
    """A training objective as the loop sees it. ``losses/base.py`` says how examples become rows and batches.

    A class that names this protocol as its base has the usual answers to all but ``num_items`` and ``loss``.
    """

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The objective's own parts of a checkpoint: a moving baseline, a reference that follows the policy."""
        return {}

    def module(self, model: nn.Module) -> nn.Module:
        """The model, and what else is trained with it (a value head), as one module: the one that the engine prepares,
        whose parameters the optimizer moves, and whose ``state_dict`` a checkpoint holds."""
        return model

    def setup(self, module: nn.Module) -> None:
        """Look at the module as the engine prepared it: once, before a checkpoint is loaded and a step is taken."""
        return

    @property
    def inner_steps(self) -> int:
        """The number of steps that are trained on each step batch of the stream; see ``rollout``."""
        return 1

    @property
    def rows_per_rank(self) -> int | None:
        """Rows of the stream that one rank gets for a step batch; None: those of its micro-batches."""
        return None

    def rollout(
        self,
        module: nn.Module,
        step_batch: StepBatch,
        engine: Engine,
        step: int,
        more: Iterator[StepBatch] | None = None,
    ) -> Sequence[StepBatch]:
        """The step batches to train on in place of ``step_batch``, ``inner_steps`` many: itself, or what was made of
        it, such as responses to its prompts. If they are several, a checkpoint holds those that are not used yet.

        Args:
            module: the policy. step: steps that are done.
            more: the step batches that follow in the epoch. Those that are taken are used up: the cursor is that of the
                last step batch returned.
        """
        return [step_batch]

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], engine: Engine) -> Sequence[Batch]:
        """Look at all micro-batches of a step on this rank before the first of them: add what is a function of the
        whole step (means, counts over ranks) or of another model (log-probabilities of a reference).

        Called once per step, before ``num_items``. Whoever computes here does it without gradient, in evaluation mode
        (``burnish.loop.modes.evaluating``).
        """
        return batches

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], engine: Engine) -> Iterator[Batch]:
        """The batches of an evaluation set, ready one by one; what is a function of a whole step is one of the set."""
        for batch in batches:
            yield from self.prepare_step(module, [engine.to_device(batch)], engine)

    def report(self, values: dict[str, float]) -> dict[str, float]:
        """Complete the metrics of a log or an evaluation with those that follow from others."""
        return values

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters that train beside the model's: those of a head."""
        return ()

    def num_items(self, batch: Batch) -> Tensor:
        """() the items of the batch that share the step's mean: label-bearing tokens, pairs, ..."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Compute the loss of one micro-batch as a sum over those items."""
        ...


class Engine(Protocol):
    """Processes, devices and precision of a run."""

    device: torch.device
    dtype: torch.dtype | None  # of the autocast around a forward pass; None for none
    rank: int
    world_size: int
    scales_loss: bool  # float16 with a loss scale that finds its own size: a skipped step is part of that

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The engine's own parts of a checkpoint, such as a loss scale."""
        ...

    frees_weights: bool  # weights are there within a forward pass of the module from ``prepare`` alone: ZeRO-3
    splits_weights: bool  # between two passes each rank holds a part of each weight: FSDP, ZeRO-3
    is_sharded: bool  # each rank holds a part of the weights, and all have to ask together for whole ones

    def sharded(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts of a run as a checkpoint takes them, where each rank holds a piece of their tensors."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A weight as one tensor, where each rank holds a part. All ranks ask for the same ones in the same order."""
        ...

    def pieces(self, model: nn.Module) -> list[Tensor]:
        """This rank's tensors from which weights that train are gathered: what is written to them is in the next pass,
        behind ``drop_gathered``. Called where ``splits_weights``."""
        ...

    def drop_gathered(self, model: nn.Module) -> None:
        """Let go of weights that were gathered for a pass."""
        ...

    def other_modules(self) -> AbstractContextManager[None]:
        """The context of passes that call other modules than a pass of training does, as where an adapter is off."""
        ...

    def generating(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context of answers that the bare model gives, outside of the module that ``prepare`` returned."""
        ...

    def place(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Give the weights that train their format, and all of them their device, before the optimizer is made, which
        may keep copies of them; or keep in mind to do so when ``prepare`` shards them."""
        ...

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]: ...
    def to_device(self, batch: Batch) -> Batch: ...
    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of forward and backward of one micro-batch: gradients are synced on the last of a step only."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: the autocast of the run."""
        ...

    def backward(self, loss: Tensor) -> None: ...
    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """() the gradient norm before clipping; ``max_norm`` 0 measures and does not clip."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, is_finite: Tensor) -> bool:
        """Apply the update unless ``is_finite`` () bool is false. Returns false where it is known, without a device
        read, that nothing was applied: the schedule stays where it is then."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """Concatenation over ranks along dimension 0, of which each may have any number of rows, padded with
        IGNORE_INDEX along the others where needed."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Plain data of every rank, in the order of the ranks."""
        ...

    def barrier(self) -> None: ...
    def unwrap(self, model: nn.Module) -> nn.Module: ...


class Stream(Stateful, Protocol):
    """The step batches of an epoch, from the cursor on, each with the cursor that follows it."""

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the step batches from the cursor to the end of the current epoch. May read ahead of the loop."""
        ...

    def advance(self, step_batch: StepBatch) -> None:
        """Move the cursor, which a checkpoint holds, behind ``step_batch``, if it has a cursor."""
        ...

    @property
    def is_used_up(self) -> bool:
        """Return whether the cursor stands behind the last step batch of its epoch."""
        ...

    def end_epoch(self) -> None:
        """Move the cursor to the start of the next epoch, wherever it stands in this one."""
        ...

    def leave_out(self, items: Sequence[int]) -> None:
        """Use these items, as step batches name them, in no step from the cursor on, nor in later epochs."""
        ...


class EvalSet(Protocol):
    """The batches of an evaluation set on this rank; can be gone through repeatedly."""

    num_rows: int  # over all ranks

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Adapter(Protocol):
    """A choice of the weights that are trained, and how: whole model, some layers, LoRA."""

    def attach(self, model: nn.Module) -> nn.Module: ...
    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The context in which the model computes as it did before training."""
        ...

    def save(self, model: nn.Module, folder: str) -> None: ...
