"""Holds the step batches of a rollout (``Objective.rollout``) and the position in them.

A rollout samples responses with the current weights, so it cannot be repeated after a resume. If an objective returns
more than one step batch, the buffer is saved in each rank's part of the checkpoint, and a resumed run continues with
the next unused step batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from burnish.config.errors import UserError
from burnish.loop.types import StepBatch


class RolloutBuffer:
    """The step batches of the current rollout.

    Args:
        world_size: number of ranks; each holds its own part of every step batch.
    """

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.batches: list[StepBatch] = []
        self.position = 0  # number of used step batches

    def fill(self, batches: Sequence[StepBatch]) -> None:
        """Store the step batches of a rollout. Only the last one advances the stream, to its cursor."""
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
        left = list(self.remaining())
        return {"world_size": self.world_size, "left": [{**vars(batch), "items": list(batch.items)} for batch in left]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer.

        Raises:
            UserError: if the saved buffer is not empty and was saved by another number of processes.
        """
        if state["left"] and state["world_size"] != self.world_size:
            raise UserError(
                f"the checkpoint was saved inside a rollout by {state['world_size']} processes, and this run has "
                f"{self.world_size}.",
                remedy="Resume with the same number of processes, or from a checkpoint between two rollouts.",
            )
        self.batches, self.position = [StepBatch(**fields) for fields in state["left"]], 0
