"""Protocols of the components of a run that the loop uses: objective, backend, loader, evaluation set.

A class may inherit from one of these protocols: methods with a body are defaults, those with ``...`` must be
implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from burnish.checkpoint.parts import Stateful
from burnish.loop.types import Batch, Loss, StepBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from burnish.checkpoint.parts import Part


class Objective(Protocol):
    """A training objective as the loop sees it. ``losses/base.py`` adds how examples become rows and batches.

    A subclass only has to implement ``num_items`` and ``loss``; all other methods have defaults.
    """

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The objective's own parts of a checkpoint, such as a moving baseline or a moving reference."""
        return {}

    def module(self, model: nn.Module) -> nn.Module:
        """The model and everything trained with it (a value head, for example) as one module.

        The backend prepares this module, the optimizer updates its parameters, and a checkpoint stores its
        ``state_dict``.
        """
        return model

    def setup(self, module: nn.Module) -> None:
        """Called once with the prepared module, before a checkpoint is loaded and before the first step."""
        return

    @property
    def inner_steps(self) -> int:
        """Number of optimizer steps per step batch of the loader; see ``rollout``."""
        return 1

    @property
    def counts_rollouts(self) -> bool:
        """Whether ``max_steps`` and the schedule count rollouts of ``inner_steps`` steps."""
        return False

    @property
    def rows_per_rank(self) -> int | None:
        """Rows of the loader per rank and step batch. None: the rows of the micro-batches."""
        return None

    def rollout(
        self,
        module: nn.Module,
        step_batch: StepBatch,
        parallel: Parallel,
        step: int,
        more: Iterator[StepBatch] | None = None,
    ) -> Sequence[StepBatch]:
        """The ``inner_steps`` step batches to train on in place of ``step_batch``.

        By default ``step_batch`` itself. An objective may generate new ones from it, such as responses to its prompts.
        If there are several, a checkpoint stores those that are not used yet.

        Args:
            module: the policy.
            step_batch: one step batch of the loader.
            parallel: for operations over ranks.
            step: number of completed steps.
            more: the following step batches of the epoch. Step batches taken from it count as used; the loader
                continues after the last returned batch.
        """
        return [step_batch]

    @property
    def redistribute(self) -> Callable[[Sequence[StepBatch], int, int], StepBatch] | None:
        """Divides a step batch of ``rollout`` among another number of ranks (``RolloutBuffer``). None: not possible."""
        return None

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        """Prepare all micro-batches of a step on this rank, before the first forward pass.

        Adds what depends on the whole step (means, counts over ranks) or on another model (log-probabilities of a
        reference). Called once per step, before ``num_items``. Forward passes in here run without gradients and in
        evaluation mode (``burnish.loop.modes.evaluating``).
        """
        return batches

    def end_step(self) -> None:
        """Called after each step, once the weights are updated, so that a reference can follow the policy."""
        return

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        """Yield the batches of an evaluation set one by one, each prepared as if it were a whole step."""
        for batch in batches:
            yield from self.prepare_step(module, [parallel.to_device(batch)], parallel)

    def report(self, values: dict[str, float]) -> dict[str, float]:
        """Add metrics that are computed from other metrics of a log or an evaluation."""
        return values

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trained parameters that do not belong to the model, such as those of a head."""
        return ()

    def num_items(self, batch: Batch) -> Tensor:
        """() number of items of the batch, over which the loss of a step is averaged: trained tokens, pairs, ..."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Compute the loss of one micro-batch as a sum over those items."""
        ...


class Parallel(Protocol):
    """The backend of a run: its processes, devices and precision."""

    device: torch.device
    dtype: torch.dtype | None  # autocast dtype of forward passes; None without autocast
    rank: int
    world_size: int
    scales_loss: bool  # float16 with a dynamic loss scale, which skips steps while it adjusts
    frees_weights: bool  # weights exist only within a forward pass of the module from ``prepare``: ZeRO-3
    shards_weights: bool  # between two passes each rank holds a shard of each weight: FSDP, ZeRO-3
    is_sharded: bool  # each rank holds a shard of the weights; gathering them is a collective operation

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The backend's own parts of a checkpoint, such as a loss scale."""
        ...

    def sharded_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts of a run in the form that a checkpoint stores if each rank holds a shard of their tensors."""
        ...

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A weight as one tensor, gathered if it is sharded. Collective: all ranks call it in the same order."""
        ...

    def local_shards(self, model: nn.Module) -> list[Tensor]:
        """This rank's tensors from which trained weights are gathered, if ``shards_weights``.

        Values written to them take effect in the next forward pass, after ``reshard``.
        """
        ...

    def reshard(self, model: nn.Module) -> None:
        """Free weights that were gathered for a forward pass."""
        ...

    def other_modules(self) -> AbstractContextManager[None]:
        """Context for passes that call other modules than a training pass, for example with the adapter disabled."""
        ...

    def generating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context for generation with the bare model, outside of the module that ``prepare`` returned."""
        ...

    def move_model(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Convert trained weights to ``trained_in`` and move all weights to their device.

        Called before the optimizer is created, because it may copy the weights. A backend that shards may do this in
        ``prepare`` instead.
        """
        ...

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]: ...
    def to_device(self, batch: Batch) -> Batch: ...
    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of one micro-batch. Gradients are synced on the last one of a step only."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """Context for a forward pass: the autocast of the run."""
        ...

    def backward(self, loss: Tensor) -> None: ...
    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradients. Returns their norm () before clipping. ``max_norm`` 0 measures without clipping."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, is_valid: Tensor) -> bool:
        """Apply the update unless ``is_valid`` () bool is false: the step is not finite, or has no items.

        Returns:
            False if the update was skipped and the backend knows it; the schedule is not advanced then. A fused
            optimizer on a GPU skips the update by itself, and the result is True.
        """
        ...

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank. Collective."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate over ranks along dimension 0, where sizes may differ. Other dimensions are padded with
        IGNORE_INDEX if needed.
        """
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """JSON-like data of every rank, in the order of the ranks."""
        ...

    def barrier(self) -> None: ...
    def unwrap(self, model: nn.Module) -> nn.Module: ...


class Loader(Stateful, Protocol):
    """Yields the step batches of an epoch from the cursor on, each with the cursor after it."""

    is_in_epoch: bool  # whether a step was taken since the last ``on_epoch_end``
    is_ended_early: bool  # whether a callback has ended the current epoch; ``end_epoch`` resets it
    has_short_epochs: bool  # whether a callback has ended an epoch of the run
    epoch: int  # index of the epoch of the cursor

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the step batches from the cursor to the end of the current epoch. May prefetch."""
        ...

    def advance(self, step_batch: StepBatch) -> None:
        """Move the cursor, which a checkpoint stores, to the position after ``step_batch``, if it has a cursor."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether the cursor is at the end of its epoch."""
        ...

    def end_epoch(self) -> None:
        """Move the cursor to the start of the next epoch."""
        ...

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Additional parts of a checkpoint, such as the random generators of each rank."""
        ...

    def exclude(self, indices: Sequence[int]) -> None:
        """Exclude these rows (indices in the training set) from all following steps and epochs."""
        ...


class EvalSet(Protocol):
    """The batches of an evaluation set on this rank. Can be iterated repeatedly."""

    num_rows: int  # over all ranks

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
