"""Completions in the format of TRL's trainers: a Parquet file for each log, besides burnish's ``completions.jsonl``."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import pyarrow  # type: ignore[import-untyped, unused-ignore]
from pyarrow import parquet  # type: ignore[import-untyped, unused-ignore]

from burnish.loop.state import TrainerControl, TrainerState
from burnish.rollouts.journal import CompletionsCallback
from burnish.rollouts.samples import ScoredCompletion


def empty_logs(size: int) -> dict[str, Any]:
    """Return TRL's ``_logs`` without completions. Args: size: completions of a generation batch."""
    return {
        "images": deque(maxlen=size), "prompt": deque(maxlen=size), "completion": deque(maxlen=size),
        "rewards": defaultdict(lambda: deque(maxlen=size)), "advantages": deque(maxlen=size),
        "extra": defaultdict(lambda: deque(maxlen=size)),
    }  # fmt: skip


def fill_logs(logs: dict[str, Any], samples: Sequence[ScoredCompletion], names: Sequence[str]) -> None:
    """Add a generation batch to ``logs``. Args: names: the reward functions."""
    logs["prompt"].extend(sample.prompt_text for sample in samples)
    logs["completion"].extend(sample.text for sample in samples)
    logs["advantages"].extend(sample.advantage for sample in samples)
    for at, name in enumerate(names):
        rewards = [sample.rewards[at] for sample in samples]
        logs["rewards"][name].extend(float("nan") if reward is None else reward for reward in rewards)
    for column in sorted({column for sample in samples for column in sample.extra}):
        logs["extra"][column].extend(sample.extra.get(column) for sample in samples)


class CompletionTablesCallback(CompletionsCallback):
    """Writes ``completions/completions_00010.parquet``: step, prompt, completion, a column per reward function, the
    columns of ``log_extra``, and advantage, for the last generation before a log."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        lines = self.newest if "loss" in (logs or {}) and state.is_world_process_zero else []
        super().on_log(args, state, control, logs, **kwargs)
        if not lines or self.path is None:
            return
        rows = [
            {"step": state.global_step, "prompt": line["prompt"], "completion": line["completion"],
             **line["rewards"], **line["extra"], "advantage": line["advantage"]}
            for line in lines
        ]  # fmt: skip
        folder = self.path.parent / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"completions_{state.global_step:05d}.parquet")
