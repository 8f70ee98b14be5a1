"""Roll back after a loss spike: continue from the newest checkpoint without the rows of that step."""

from __future__ import annotations

from collections.abc import Callable

from burnish.config.errors import NonFiniteError
from burnish.loop.loop import Loop, TrainOutput
from burnish.loop.spikes import MAX_ROLLBACKS, SpikeError


def train_with_rollback(loop: Loop, warn: Callable[[str], None]) -> TrainOutput:
    """Train to the end. After a spike, continue from the newest checkpoint without the rows of the spike.

    Args:
        warn: called with a message for each spike.
    """
    for _ in range(MAX_ROLLBACKS):
        try:
            return loop.train()
        except SpikeError as spike:
            roll_back(loop, spike, warn)
    raise NonFiniteError(
        f"The run rolled back {MAX_ROLLBACKS} times because of loss spikes. Lower learning_rate, or check the data."
    )


def roll_back(loop: Loop, spike: SpikeError, warn: Callable[[str], None]) -> None:
    """Load the newest checkpoint and skip the rows of the spike from then on.

    Raises:
        NonFiniteError: if there is no checkpoint.
    """
    loop.checkpoints.wait()
    loop.parallel.barrier()  # rank 0 writes checkpoints
    newest, _ = loop.checkpoints.newest()
    indices = list(spike.indices)
    examples = loop.examples_sentence(indices)
    if newest is None:
        raise NonFiniteError(f"{spike}.{examples} There is no checkpoint to roll back to. Reduce save_steps.")
    warn(f"{spike}.{examples} Rolling back; the examples of this step are skipped from now on.")
    loop.drop_gradients()
    loop.load(newest)
    loop.loader.exclude(indices)
