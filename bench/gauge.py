"""Reads the operating system's clocks and memory inside a training, the same way for every trainer.

In: the events of a trainer (the callbacks that transformers named, which all of them fire) and the labels of each
micro-batch. Out: one line of JSON on standard output, which begins with ``MARK`` so that it is found among a trainer's
own words.

Time is processor time of the whole process: on a machine that others use too, it varies by a few percent where wall
time varies by factors. The first step is not counted: it allocates memory and chooses kernels.
"""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "GAUGE "
ENDS_AT_FIRST_STEP = "BENCH_ENDS_AT_FIRST_STEP"
"""In the environment of a process of which only the start is measured."""
WARM_UP = 1
PREFERENCES = {"dpo": "pairs", "rm": "pairs", "kto": "verdicts"}
"""Stage -> its records in the material."""
ANSWERS = {"per_device_eval_batch_size": 8, "max_new_tokens": 32}
"""Options of answers, in burnish's words; the likeliest token each time, and none that ends an answer sooner."""
LIBRARIES = ("burnish", "trl", "transformers", "llamafactory", "torch", "accelerate")


class Gauge:
    """Readings of a training, as a callback; ``as_callback`` makes it one of the class that a trainer insists on.

    Args:
        rows_per_step: pairs or records, where these are counted instead of labels.
    """

    def __init__(self, rows_per_step: int = 0) -> None:
        self.rows_per_step = rows_per_step
        self.labels = 0
        self.steps: list[tuple[float, float, int, float]] = []  # processor seconds, wall seconds, labels, waited so far
        self.save_waits_s: list[float] = []
        self.save_waits_cpu_s: list[float] = []  # of the thread that trains
        self.step_ended_cpu_s = 0.0
        self.trained_cpu_s = 0.0
        self.ready: dict[str, float] = {}  # when the first step begins
        self.more: dict[str, Any] = {}

    def count(self, labels: Any) -> None:
        """Labels of a micro-batch, before a model sees them; -100 is none."""
        if self.rows_per_step:
            return
        self.labels += int((labels != -100).sum())

    def on_step_begin(self) -> None:
        if self.ready:
            return
        wall_s = time.time() - float(os.environ.get("BENCH_STARTED_S", "nan"))
        self.ready = {"ready_cpu_s": time.process_time(), "ready_wall_s": wall_s,
                      "ready_bytes": resident_bytes("VmRSS"), "ready_peak_bytes": peak_bytes()}  # fmt: skip
        if ENDS_AT_FIRST_STEP in os.environ:
            self.report()
            raise SystemExit

    def on_step_end(self) -> None:
        self.labels += self.rows_per_step
        self.steps.append((time.process_time(), time.perf_counter(), self.labels, waited_s()))
        self.more["steps_peak_bytes"] = peak_bytes()
        self.step_ended_cpu_s = time.thread_time()

    def on_log(self, logs: dict[str, float]) -> None:
        """The mean loss of the first pass over the rows; the other passes are there for the clock alone."""
        if "loss" in logs:
            self.more.setdefault("loss", float(logs["loss"]))

    def on_train_end(self) -> None:
        self.more["peak_bytes"] = peak_bytes()
        self.more["ends_s"] = time.perf_counter() - self.steps[-1][1] if self.steps else 0.0
        forget_peak()
        self.trained_cpu_s = time.process_time()

    def on_evaluate(self) -> None:
        self._since_training("evaluation")

    def on_predict(self, new_tokens: int) -> None:
        self._since_training("prediction")
        self.more["new_tokens"] = new_tokens

    def _since_training(self, what: str) -> None:
        self.more[f"{what}_cpu_s"] = time.process_time() - self.trained_cpu_s
        self.more[f"{what}_peak_bytes"] = peak_bytes()

    def on_save(self) -> None:
        self.save_waits_s.append(time.perf_counter() - self.steps[-1][1])
        self.save_waits_cpu_s.append(time.thread_time() - self.step_ended_cpu_s)

    def listen(self, model: Any) -> None:
        """Count the labels that are handed to a model of transformers as the argument ``labels``."""

        def note(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            if module.training and "labels" in named:
                self.count(named["labels"])

        model.register_forward_pre_hook(note, with_kwargs=True)

    def watch(self, trainer: Any) -> None:
        """Count the labels of each batch that ``training_step`` is handed: burnish's classes leave labels out of what a
        model gets, and watch for hooks that would see the batch."""
        step = trainer.training_step

        def counted(model: Any, inputs: dict[str, Any], **named: Any) -> Any:
            self.count(inputs["labels"])
            return step(model, inputs, **named)

        trainer.training_step = counted

    def report(self, **more: Any) -> None:
        assert self.ready
        say(**self.ready, **self._of_steps(), **self.more, **more)

    def _of_steps(self) -> dict[str, Any]:
        if not self.steps:
            return {}
        first, last = self.steps[WARM_UP - 1], self.steps[-1]
        cpu, wall, labels, waited = (later - sooner for sooner, later in zip(first, last, strict=True))
        return {
            "labels": labels, "cpu_s": cpu, "wall_s": wall, "waited_s": waited,
            "steps": len(self.steps) - WARM_UP, "save_waits_s": self.save_waits_s,
            "save_waits_cpu_s": self.save_waits_cpu_s,
        }  # fmt: skip


def rows_counted(stage: str) -> int:
    """Rows of a step, where they are what is counted: pairs, or records with a verdict."""
    return common("")["per_device_train_batch_size"] if stage in PREFERENCES else 0


def say(**figures: Any) -> None:
    """The line that ``measuring.py`` reads, with the versions, and what the process took, its children too."""
    print(MARK + json.dumps({**figures, "versions": versions(), "process_cpu_s": sum(os.times()[:4])}), flush=True)


def as_callback(gauge: Gauge, base: type, listens: bool = True) -> Any:
    """``gauge`` as a callback of a library whose callbacks are of the class ``base``.

    Args:
        listens: whether it counts the labels that the model is handed.
    """

    class Callback(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if listens:
                gauge.listen(kwargs["model"])

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_step_begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_step_end()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_log(kwargs["logs"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_train_end()

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_evaluate()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gauge.on_save()

    return Callback()


def waited_s() -> float:
    """Seconds in which this thread neither ran nor was ready to run, since its clock began; only differences mean
    something. In a step of a training it is what is waited for other processes (``run_delay`` in
    https://docs.kernel.org/scheduler/sched-stats.html)."""
    ready_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - time.thread_time() - ready_ns / 1e9


def peak_bytes() -> int:
    """The largest resident memory of this process, since it began or since ``forget_peak``."""
    return resident_bytes("VmHWM")


def resident_bytes(which: str) -> int:
    """Memory of this process, by its name in the system's status of it: VmRSS is what it holds, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def forget_peak() -> None:
    """Begin the peak anew, at what is resident now (proc(5), /proc/pid/clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def common(output: str) -> dict[str, Any]:
    """Arguments that all trainers are given, in transformers' words.

    Eight rows to a step, one pass over the rows, AdamW, no file written but where checkpoints are measured. One log:
    the mean loss of a pass.
    """
    return {
        "output_dir": output, "per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-4,
        "logging_strategy": "epoch", "logging_first_step": False, "report_to": "none", "use_cpu": True,
        "save_strategy": "no",
    }  # fmt: skip
