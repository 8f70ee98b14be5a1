"""What a training from rewards adds to a measurement: the reward, the tokens drawn, and the time of drawing them.

In: the completions, as both libraries hand them to a reward function. Out: tokens of completions, counted the same way
for everyone, and processor seconds inside the function that draws. The model is one of random weights, so a completion
ends where chance has it: almost never, or after a number of tokens of a geometric distribution (``--ends``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gauge import WARM_UP, Gauge

REWARDED = ("grpo",)
_drawn: list[int] = []


def even_share(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """The share of even ids: a reward that takes no time, and differs between completions."""
    _drawn.append(sum(map(len, completion_ids)))
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class RewardedGauge(Gauge):
    """Counts the tokens that were drawn for a step as what it learned, and reads the clocks around the drawing."""

    def __init__(self) -> None:
        super().__init__()
        self.drawing: list[tuple[float, float]] = []  # processor seconds, wall seconds

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time(), time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.drawing.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))

        return timed

    def on_step_end(self) -> None:
        self.labels = sum(_drawn)
        super().on_step_end()

    def report(self, **more: Any) -> None:
        cpu_s, wall_s = (sum(each) for each in zip(*self.drawing[WARM_UP:], strict=True))
        super().report(drawn=sum(_drawn[WARM_UP:]), drawing_cpu_s=cpu_s, drawing_wall_s=wall_s, **more)


def trainer_of_trl(material: Path, model: Any, adapter: Any, given: dict[str, Any]) -> tuple[Any, Gauge]:
    """GRPOTrainer over the questions, as conversations."""
    from datasets import Dataset
    from gauge import as_callback
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gauge = RewardedGauge()
    records = json.loads((material / "conversations.json").read_text())
    prompts = [{"prompt": [{"role": "user", "content": record["instruction"]}]} for record in records]
    trainer = GRPOTrainer(
        model, reward_funcs=even_share, args=GRPOConfig(**given), train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(material / "model", padding_side="left"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, listens=False)],
    )  # fmt: skip
    trainer._generate = gauge.around(trainer._generate)
    return trainer, gauge
