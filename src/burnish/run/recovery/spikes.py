"""Going back after a spike: from the newest checkpoint on, without the rows of that step. Both doors train by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from burnish.config.errors import NonFiniteError
from burnish.loop.loop import LoopChoices, TrainOutput, learned_from, train
from burnish.loop.run import Run
from burnish.loop.spikes import MOST, SpikeError, SpikeOptions, SpikeWatch


def watch_for_spikes(options: SpikeOptions) -> SpikeWatch | None:
    """The watch that the options ask for, a part of the run and of its checkpoints."""
    return SpikeWatch(options.spike_ratio) if options.on_spike == "go_back" else None


def train_on(run: Run, options: LoopChoices, load: Callable[[Path], None], tell: Callable[[str], None]) -> TrainOutput:
    """Train to the end; after a spike, from the newest checkpoint on, without the rows of the spike.

    Args:
        load: gives every part of the run the state that a checkpoint holds.
        tell: is given the sentence on each spike.
    """
    for _ in range(MOST):
        try:
            return train(run, options)
        except SpikeError as spike:
            _go_back(run, spike, load, tell)
    raise NonFiniteError(f"The run went back {MOST} times for spikes. Lower learning_rate, or look at the data.")


def _go_back(run: Run, spike: SpikeError, load: Callable[[Path], None], tell: Callable[[str], None]) -> None:
    run.checkpoints.wait()
    found, _ = run.checkpoints.newest()
    items = list(spike.items)
    named = learned_from(run, items)
    if found is None:
        raise NonFiniteError(f"{spike}.{named} There is no checkpoint to go back to: save earlier (save_steps).")
    tell(f"{spike}.{named} Going back; these rows are left out from there on.")
    run.optimizer.zero_grad()
    load(found)
    run.stream.leave_out(items)
