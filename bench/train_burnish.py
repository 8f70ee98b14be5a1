"""One training by burnish, measured: what ``burnish train`` does, with clocks that are read at its events.

    python bench/train_burnish.py MATERIAL OUTPUT [name=value ...]

In: the folder that ``material.py`` made; options of burnish, and ``without=name,name`` of what ``ways.py`` can take
out. Out: the line of ``gauge.py``, with ``loop_share``: the share of the training's processor time that was spent
outside of model, loss, gradients and optimizer, and ``plain``: the parts of the model that burnish has no code of its
own for. With an ``eval_dataset`` the set is evaluated after the training, with ``do_predict`` it is answered.
"""

# ruff: noqa: E402 (the search for garbage falls into imports)
from __future__ import annotations

import gc

gc.set_threshold(100_000, 50, 100)  # as the command line does, before anything is imported

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ways
from gauge import PREFERENCES, Gauge, common, rows_counted
from material import facts_of, preference_sets
from rewarded import REWARDED, RewardedGauge

from burnish.kernels.probe import causal_lm, find_head
from burnish.models.patches.attention import NAME as OWN_ATTENTION
from burnish.parallel.create import create_parallel
from burnish.run import predict
from burnish.run.build import build_loop
from burnish.run.plan.config_files import merge, read_arguments
from burnish.run.plan.plan import aliases, plan
from burnish.run.prepare import prepare


class Stopwatch:
    """Processor time inside of functions that do not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.process_time() - begin

        return timed


def gauge_of(stage: str) -> Gauge:
    return RewardedGauge() if stage in REWARDED else Gauge(rows_counted(stage))


def listen(gauge: Gauge, made: Any) -> None:
    """Give ``gauge`` the events. Not by a callback: one of someone else's makes the loop wait for the whole checkpoint,
    because it may read it. What an update waits for a checkpoint's copies is added to the wait."""
    fire, settle = made.callbacks.fire, made.checkpoints.wait_for_copies

    def heard(event: str, **details: Any) -> Any:
        if event == "on_step_begin":
            gauge.on_step_begin()
        control = fire(event, **details)
        if event == "on_step_end":
            gauge.on_step_end()
        if event == "on_log":
            gauge.on_log(details["logs"])
        if event == "on_train_end":
            gauge.on_train_end()
        if event == "on_evaluate":
            gauge.on_evaluate()
        if event == "on_save":
            gauge.on_save()
        return control

    def settled() -> None:
        begin = time.perf_counter()
        settle()
        if gauge.save_waits_s:
            gauge.save_waits_s[-1] += time.perf_counter() - begin

    made.callbacks.fire, made.checkpoints.wait_for_copies = heard, settled


def run(material: Path, output: str, words: list[str]) -> None:
    given = {
        "model_name_or_path": material / "model", "dataset": material / "conversations.json", "template": "chatml",
        "finetuning_type": "full", "cutoff_len": facts_of(material)["longest"], "overwrite_output_dir": True,
        "overwrite_cache": True, **common(output),
    }  # fmt: skip
    without = [name for word in words if word.startswith("without=") for name in word.split("=")[1].split(",") if name]
    ways.take_out(without)
    options = [f"--{word}" for word in words if not word.startswith("without=")]
    if any(word.startswith("--stage=") and word[8:] in PREFERENCES for word in options):
        del given["dataset"]
        given["dataset_dir"] = material
        preference_sets(material)
    file, flags = read_arguments([*(f"--{name}={value}" for name, value in given.items()), *options])
    planned = plan(merge(file, flags, aliases()))
    prepared, gauge, watch = prepare(planned), gauge_of(planned.options.stage), Stopwatch()
    made = build_loop(planned, prepared, create_parallel(planned.options), None)
    listen(gauge, made)
    if isinstance(gauge, RewardedGauge):
        made.objective.source.complete = gauge.around(made.objective.source.complete)
    else:
        made.model.register_forward_pre_hook(lambda module, batch: gauge.count(batch[0]["labels"]))
    for owner, name in (
        (made.objective, "loss"), (made.parallel, "backward"), (made.parallel, "clip"), (made.parallel, "step"),
        (made.optimizer, "zero_grad"),
    ):  # fmt: skip
        setattr(owner, name, watch.around(getattr(owner, name)))
    begin = time.process_time()
    made.train()
    loop_share = 1 - watch.seconds / (time.process_time() - begin)
    if planned.options.do_predict:
        answer(gauge, made, prepared, planned)
    elif made.eval_sets:
        made.evaluate()
    plain = plain_parts(made.model.model) if made.parallel.world_size == 1 else []
    gauge.report(loop_share=loop_share, plain=plain)


def answer(gauge: Gauge, made: Any, prepared: Any, planned: Any) -> None:
    """Answer the set, and count the tokens that the model made for it: as many for each prompt, whatever it says."""
    made_tokens, answer_all = [0], predict.answer_all
    predict.bare_model(made).generation_config.min_new_tokens = planned.options.max_new_tokens

    def counted(*arguments: Any) -> list[list[int]]:
        answers = answer_all(*arguments)
        made_tokens[0] += sum(map(len, answers))
        return answers

    predict.answer_all = counted
    predict.predict_all(made, prepared, planned)
    gauge.on_predict(made_tokens[0])


def plain_parts(model: Any) -> list[str]:
    """Modules that ran the model's own code, where burnish has a faster one for other models."""
    inner = causal_lm(model)
    kinds = {type(module).__name__ for module in inner.modules() if "forward" not in vars(module)}
    found = sorted(kind for kind in kinds if kind.endswith(("Norm", "MLP")))
    found += [] if inner.config._attn_implementation == OWN_ATTENTION else ["attention"]
    return found + ([] if find_head(inner) else ["loss"])


def main(words: list[str]) -> None:
    run(Path(words[0]), words[1], words[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
