"""Show completions to the user: ``completions.jsonl``, a table in the terminal, and notes on common problems.

    {"step": 12, "generation": 11, "record": "train.jsonl, record 7", "sample": 0, "prompt": "...", "completion": "...",
     "tokens": 18, "ended": true, "rewards": {"exact": 1.0}, "extra": {}, "advantage": 0.87}

``step`` is the first step that trains on the completion. Lines of prompts with images have ``images``, their paths. A
resumed run continues the file: lines after its checkpoint are removed first, because those completions are generated
again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data.images.image_file import files_of
from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import note, table
from burnish.report.progress import EvenlySpacedEvents
from burnish.report.results import write_text_atomically
from burnish.rollouts.options import RolloutOptions
from burnish.rollouts.samples import ScoredCompletion

JOURNAL_NAME = "completions.jsonl"
_TABLES = 8
"""Maximum number of tables of a run, spread over its steps."""


def lines_of(
    samples: Sequence[ScoredCompletion], names: Sequence[str], step: int, generation: int
) -> list[dict[str, Any]]:
    """Return a line of the file for each completion."""
    return [
        {
            "step": step, "generation": generation, "record": each.place, "sample": each.number,
            "prompt": each.prompt_text, "completion": each.text, "tokens": len(each.ids), "ended": each.is_ended,
            "rewards": dict(zip(names, each.rewards, strict=True)), "extra": each.extra, "advantage": each.advantage,
            **({"images": [file.path for file in files_of({"images": each.images})]} if each.images else {}),
        }
        for each in samples
    ]  # fmt: skip


class CompletionsCallback(TrainerCallback):
    """Writes completions to the file, and prints some completions of the latest generation at each log.

    Args:
        folder: folder of the file; None to write none.
        has_advantages: whether the stage compares the completions of a prompt; otherwise advantages are not printed.
    """

    def __init__(self, options: RolloutOptions, folder: Path | None, has_advantages: bool = True) -> None:
        self.has_advantages = has_advantages
        self.options, self.path = options, None if folder is None else folder / JOURNAL_NAME
        self.newest: list[dict[str, Any]] = []
        self._tables = EvenlySpacedEvents(_TABLES)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.path is None or not state.is_world_process_zero:
            return
        # Split at \n only: a completion may contain other line separators. The last line may be incomplete.
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n") if self.path.is_file() else []
        lines = [line for line in lines if _step_of(line) <= state.global_step] if state.global_step else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def add(self, samples: Sequence[ScoredCompletion], names: Sequence[str], step: int, generation: int) -> None:
        """Add a generation batch. Called on the main process."""
        self.newest = lines_of(samples, names, step, generation)
        if self.path is not None:
            text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in self.newest)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}) or not self.newest or not state.is_world_process_zero:
            return
        if self._tables.is_due(state.global_step, state.max_steps):
            self.print_newest()
        self.newest = []

    def print_newest(self) -> None:
        """Print a table of completions of the latest generation."""
        lines = self.newest
        if self.options.log_unique_prompts:
            lines = [line for line in lines if line["sample"] == lines[0]["sample"]]
        most = self.options.num_completions_to_print
        if not (chosen := _select_lines(lines, most)):
            return
        names = list(chosen[0]["rewards"])
        rows = [
            [line["prompt"], line["completion"], *(_format_reward(line["rewards"][name]) for name in names),
             *([f"{line['advantage']:+.2f}"] if self.has_advantages else [])]
            for line in chosen
        ]  # fmt: skip
        title = f"Completions for step {chosen[0]['step']}"
        table(title, ["prompt", "completion", *names, *(["advantage"] if self.has_advantages else [])], rows)


def _step_of(line: str) -> int:
    """Return the step of a line; a value above all steps for a truncated line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 60


def _select_lines(lines: list[dict[str, Any]], most: int | None) -> list[dict[str, Any]]:
    """Return up to ``most`` lines, first the best and the worst completion of a prompt with different rewards."""
    if most is None or most >= len(lines):
        return lines
    shown = next((line["record"] for line in lines if line["advantage"]), lines[0]["record"])
    of_first = [line for line in lines if line["record"] == shown]
    by_advantage = sorted(of_first, key=lambda line: -line["advantage"])
    ends = [by_advantage[0], by_advantage[-1]] if len(by_advantage) > 1 else by_advantage
    rest = [line for line in lines if all(line is not end for end in ends)]
    return [*ends, *rest][:most]


def _format_reward(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.2f}"


# --- notes ------------------------------------------------------------------------------------------------------------

_ZERO_VARIANCE_LOGS = 10
"""Number of generations without differing rewards in any group after which a note is printed."""
_MANY, _FAR, _LITTLE = 0.9, 10.0, 0.1
_REWARD_DROP_LOGS = 5
"""Number of consecutive logs with a lower reward than the first after which a note is printed."""


class RolloutNotesCallback(TrainerCallback):
    """Prints notes on the most common problems of such runs, each once, with values.

    Args:
        has_advantages: whether the loss is weighted by advantages, which sum to 0 for each prompt.
    """

    def __init__(self, options: RolloutOptions, has_advantages: bool = True) -> None:
        self.options, self.has_advantages = options, has_advantages
        self._reported: set[str] = set()
        self._num_zero_variance = self._below = 0
        self._first: dict[str, float] = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        for name in ("reward", "entropy"):
            if name in logs and not math.isnan(logs[name]):
                self._first.setdefault(name, logs[name])
        for name, sentence in self._notes_of(logs).items():
            if sentence and name not in self._reported:
                self._reported.add(name)
                note(sentence)

    def _notes_of(self, logs: Mapping[str, float]) -> dict[str, str]:
        """Return the name of a note -> its text, "" if it does not apply."""
        found: dict[str, str] = {}
        zero_std, longest = logs.get("frac_reward_zero_std"), self.options.max_completion_length
        if self.has_advantages and zero_std is not None:
            found["loss"] = (
                "The loss stays near 0 by construction, because the advantages of a group sum to 0. Watch reward "
                "instead."
            )
        if "reward" in logs:
            self._num_zero_variance = self._num_zero_variance + 1 if zero_std == 1 else 0
            self._below = self._below + 1 if logs["reward"] < self._first.get("reward", 0.0) else 0
            found |= self._of_rewards(logs)
        if logs.get("grad_norm") == 0 and zero_std == 1 and logs.get("reward_std", 0.0) > 0:
            found["between"] = (
                f"grad_norm is 0 although reward_std is {logs['reward_std']:.2f}: rewards differ between prompts "
                "but not between the completions of a prompt, so "
                f"{'all advantages are 0' if self.has_advantages else 'there are no pairs'}."
            )
        if (cut := logs.get("completions/clipped_ratio", 0.0)) >= _MANY:
            # PPO has LLaMA-Factory's option, which sets the default of the other.
            is_ppo = getattr(self.options, "stage", "") == "ppo"
            is_set = is_ppo and getattr(self.options, "max_new_tokens", 0) == longest
            limit = "max_new_tokens" if is_set else "max_completion_length"
            found["cut"] = (
                f"{cut:.0%} of the completions were truncated at {limit} {longest}. Raise it, or check "
                "that the tokenizer and the template have an EOS or end-of-turn token."
            )
        if (kl := logs.get("kl", 0.0)) > _FAR:
            found["kl"] = (
                f"The KL divergence from the reference is {kl:.1f} per token: the policy has drifted far. Raise "
                "beta, or lower learning_rate."
            )
        entropy, first = logs.get("entropy", math.inf), self._first.get("entropy", 0.0)
        if entropy < _LITTLE * first:
            found["entropy"] = (
                f"The entropy has fallen from {first:.3g} to {entropy:.3g}: completions barely differ. Set "
                "epsilon_high: 0.28 (as in DAPO) or entropy_coef, or lower learning_rate."
            )
        return found

    def _of_rewards(self, logs: Mapping[str, float]) -> dict[str, str]:
        """Return the notes on a sequence of logs with rewards. Only the first log of a generation has them."""
        found: dict[str, str] = {}
        if self._num_zero_variance >= _ZERO_VARIANCE_LOGS:
            means = ", ".join(f"{name} {value:.2f}" for name, value in logs.items() if name.endswith("/mean"))
            found["alike"] = (
                f"In the last {_ZERO_VARIANCE_LOGS} logs, all completions of each prompt had the same reward, so "
                f"nothing was learned{f' ({means})' if means else ''}. Use easier or harder prompts, a more "
                "fine-grained reward, or a higher temperature."
            )
        if self._below >= _REWARD_DROP_LOGS:
            found["reward"] = (
                f"The reward {logs['reward']:.3g} has been below its first value {self._first['reward']:.3g} for "
                f"{_REWARD_DROP_LOGS} logs. Lower learning_rate, or use more completions per step."
            )
        return found
