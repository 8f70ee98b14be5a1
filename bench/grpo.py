"""Measurements of GRPO: the reward, the number of generated tokens, and the time of generation.

Both libraries pass the completions to the reward function, where their tokens are counted in the same way. Processor
seconds are measured inside the function that generates. The model has random weights, so completions almost never end,
or after a number of tokens with a geometric distribution (``--ends``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gauge import WARM_UP, Gauge

GRPO_STAGES = ("grpo",)
_generated: list[int] = []


def even_share(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Return the share of even ids: a reward that takes no time and differs between completions."""
    _generated.append(sum(map(len, completion_ids)))
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class GRPOGauge(Gauge):
    """Counts the generated tokens of a step as labels, and measures the time of generation."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: list[tuple[float, float]] = []  # processor seconds, wall seconds

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a measurement of its time."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.generations.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))

        return wrapper

    def on_step_end(self) -> None:
        self.labels = sum(_generated)
        super().on_step_end()

    def report(self, **more: Any) -> None:
        cpu_s, wall_s = (sum(each) for each in zip(*self.generations[WARM_UP:], strict=True))
        super().report(generated=sum(_generated[WARM_UP:]), generation_cpu_s=cpu_s, generation_wall_s=wall_s, **more)


def make_trl_trainer(material: Path, model: Any, adapter: Any, arguments: dict[str, Any]) -> tuple[Any, Gauge]:
    """Return a GRPOTrainer with the prompts as conversations."""
    from datasets import Dataset
    from gauge import as_callback
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gauge = GRPOGauge()
    records = json.loads((material / "conversations.json").read_text())
    prompts = [{"prompt": [{"role": "user", "content": record["instruction"]}]} for record in records]
    trainer = GRPOTrainer(
        model, reward_funcs=even_share, args=GRPOConfig(**arguments), train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(material / "model", padding_side="left"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, counts_labels=False)],
    )  # fmt: skip
    trainer._generate = gauge.timed(trainer._generate)
    return trainer, gauge
