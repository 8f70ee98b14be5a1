"""Measure one training with burnish: ``burnish train`` with measurements at its events.

    python bench/train_burnish.py MATERIAL OUTPUT [name=value ...]

Takes the folder of ``material.py`` and options of burnish; ``without=name,name`` disables optimizations of
``optimizations.py``. Prints the line of ``gauge.py`` with ``loop_share``, the share of the training's processor time
spent outside of model, loss, gradients and optimizer, and ``plain``, the parts of the model without a patch of burnish.
With ``eval_dataset``, that dataset is evaluated after training; with ``do_predict``, responses are generated.
"""

# ruff: noqa: E402 (the garbage collector is configured before imports)
from __future__ import annotations

import gc

gc.set_threshold(100_000, 50, 100)  # as the command line does before other imports; RunLoop.train resets it

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimizations
from gauge import PREFERENCES, Gauge, common_arguments, counted_rows_per_step
from grpo import GRPO_STAGES, GRPOGauge
from material import make_preference_datasets, read_facts

from burnish.kernels.probe import find_head, unwrap_peft
from burnish.models.patches.attention import NAME as BURNISH_ATTENTION
from burnish.parallel.create import create_parallel
from burnish.run.build import build_loop
from burnish.run.plan.config_files import merge, read_arguments
from burnish.run.plan.plan import aliases, plan
from burnish.run.predictions import predict
from burnish.run.predictions.answers import bare_model
from burnish.run.prepare import prepare


class Stopwatch:
    """Sums the processor time of functions that do not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a measurement of its time."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begin

        return wrapper


def make_gauge(stage: str) -> Gauge:
    return GRPOGauge() if stage in GRPO_STAGES else Gauge(counted_rows_per_step(stage))


def connect(gauge: Gauge, loop: Any) -> None:
    """Connect ``gauge`` to the events. A callback would not work: the loop waits for the checkpoint before it calls a
    custom callback, which may read it. The time that an update waits for copies of a checkpoint is added to that of the
    save."""
    fire, wait = loop.callbacks.fire, loop.checkpoints.wait_for_copies

    def fire_and_measure(event: str, **details: Any) -> Any:
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

    def wait_and_measure() -> None:
        begin = time.perf_counter()
        wait()
        if gauge.save_waits_s:
            gauge.save_waits_s[-1] += time.perf_counter() - begin

    loop.callbacks.fire, loop.checkpoints.wait_for_copies = fire_and_measure, wait_and_measure


def run(material: Path, output: str, arguments: list[str]) -> None:
    """Train and print the measurements."""
    defaults = {
        "model_name_or_path": material / "model", "dataset": material / "conversations.json", "template": "chatml",
        "finetuning_type": "full", "cutoff_len": read_facts(material)["longest"], "overwrite_output_dir": True,
        "overwrite_cache": True, **common_arguments(output),
    }  # fmt: skip
    without = [
        name for item in arguments if item.startswith("without=") for name in item.split("=")[1].split(",") if name
    ]
    optimizations.disable(without)
    options = [f"--{item}" for item in arguments if not item.startswith("without=")]
    if any(option.startswith("--stage=") and option[8:] in PREFERENCES for option in options):
        del defaults["dataset"]
        defaults["dataset_dir"] = material
        make_preference_datasets(material)
    file, flags = read_arguments([*(f"--{name}={value}" for name, value in defaults.items()), *options])
    planned = plan(merge(file, flags, aliases()))
    prepared, gauge, stopwatch = prepare(planned), make_gauge(planned.options.stage), Stopwatch()
    loop = build_loop(planned, prepared, create_parallel(planned.options), None)
    connect(gauge, loop)
    if isinstance(gauge, GRPOGauge):
        objective: Any = loop.objective
        objective.source.complete = gauge.timed(objective.source.complete)
    else:
        loop.model.register_forward_pre_hook(lambda module, batch: gauge.count(batch[0]["labels"]))
    for owner, name in (
        (loop.objective, "loss"), (loop.parallel, "backward"), (loop.parallel, "clip"), (loop.parallel, "step"),
        (loop.optimizer, "zero_grad"),
    ):  # fmt: skip
        setattr(owner, name, stopwatch.timed(getattr(owner, name)))
    begin = time.process_time()
    loop.train()
    loop_share = 1 - stopwatch.seconds / (time.process_time() - begin)
    if planned.options.do_predict:
        generate(gauge, loop, prepared, planned)
    elif loop.eval_sets:
        loop.evaluate()
    plain = plain_parts(loop.model.model) if loop.parallel.world_size == 1 else []
    gauge.report(loop_share=loop_share, plain=plain)


def generate(gauge: Gauge, loop: Any, prepared: Any, planned: Any) -> None:
    """Generate responses and count their tokens; all have the same number of tokens."""
    num_tokens, functions = [0], vars(predict)
    answer_all = functions["answer_all"]
    bare_model(loop).generation_config.min_new_tokens = planned.options.max_new_tokens

    def counted(*args: Any) -> list[list[int]]:
        answers: list[list[int]] = answer_all(*args)
        num_tokens[0] += sum(map(len, answers))
        return answers

    functions["answer_all"] = counted
    predict.predict_all(loop, prepared, planned)
    gauge.on_predict(num_tokens[0])


def plain_parts(model: Any) -> list[str]:
    """Return the kinds of modules that run the model's own code although burnish has a faster one for other models."""
    inner = unwrap_peft(model)
    kinds = {type(module).__name__ for module in inner.modules() if "forward" not in vars(module)}
    plain = sorted(kind for kind in kinds if kind.endswith(("Norm", "MLP")))
    plain += [] if inner.config._attn_implementation == BURNISH_ATTENTION else ["attention"]
    return plain + ([] if find_head(inner) else ["loss"])


def main(arguments: list[str]) -> None:
    run(Path(arguments[0]), arguments[1], arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
