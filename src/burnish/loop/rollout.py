"""Holds the step batches of a rollout (``Objective.rollout``) and the position in them.

A rollout samples responses with the current weights, so it cannot be repeated after a resume. If an objective returns
more than one step batch, the buffer is saved in each rank's part of the checkpoint, and a resumed run continues with
the next unused step batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from burnish.config.errors import UserError
from burnish.loop.types import StepBatch

Redistribute: TypeAlias = Callable[[Sequence[StepBatch], int, int], StepBatch]
"""(the parts of a step batch of all ranks, rank, number of ranks) -> the part of this rank."""


class RolloutBuffer:
    """The step batches of the current rollout.

    Args:
        world_size: number of ranks; each holds its own part of every step batch.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, redistribute: Redistribute | None = None) -> None:
        self.rank, self.world_size, self.redistribute = rank, world_size, redistribute
        self.batches: list[StepBatch] = []
        self.position = 0  # number of used step batches

    def fill(self, batches: Sequence[StepBatch]) -> None:
        """Store the step batches of a rollout. Only the last one advances the loader, to its cursor."""
        self.batches = [*(replace(batch, cursor=None) for batch in batches[:-1]), batches[-1]]
        self.position = 0

    def remaining(self) -> Iterator[StepBatch]:
        """Yield the unused step batches."""
        yield from self.batches[self.position :]

    def advance(self) -> None:
        """Mark one step batch as used. Clears the buffer after the last one."""
        self.position += 1
        if self.position >= len(self.batches):
            self.clear()

    def clear(self) -> None:
        self.batches, self.position = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "left": [_batch_state(batch) for batch in self.remaining()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer of this rank."""
        self.batches, self.position = _load_batches(state), 0

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the buffer from those of all ranks that saved it. Another number of ranks divides it again.

        Raises:
            UserError: if the objective cannot divide its step batches again.
        """
        if not any(state["left"] for state in states):
            self.clear()
        elif len(states) == self.world_size:
            self.load_state_dict(states[self.rank])
        elif self.redistribute is None:
            raise UserError(
                f"the checkpoint was saved in the middle of a rollout by {len(states)} processes, but this "
                f"run has {self.world_size}.",
                remedy="Resume with the same number of processes, or from a checkpoint between two rollouts.",
            )
        else:
            steps = zip(*(_load_batches(state) for state in states), strict=True)
            self.batches, self.position = [self.redistribute(parts, self.rank, self.world_size) for parts in steps], 0


# Checkpoints store the ``indices`` of a step batch as "items".


def _batch_state(batch: StepBatch) -> dict[str, Any]:
    fields = dict(vars(batch))
    fields["items"] = list(fields.pop("indices"))
    return fields


def _load_batches(state: Mapping[str, Any]) -> list[StepBatch]:
    """The step batches in a buffer's ``state_dict``."""
    return [
        StepBatch(**{"indices" if name == "items" else name: v for name, v in fields.items()})
        for fields in state["left"]
    ]
