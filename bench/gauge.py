"""Measure processor time and memory of a training, in the same way for every library.

Inputs are the trainer's callback events (transformers' names, which all of these libraries use) and the labels of each
micro-batch. The output is one line of JSON on standard output; it starts with ``MARK``, to be found among other output.

Time is processor time of the process: on a shared machine it varies by a few percent, while wall time varies by
factors. On a GPU it is wall time, and the device is waited for before the first and after the last counted step. The
first step is not counted, because it allocates memory and selects kernels.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "GAUGE "
ENDS_AT_FIRST_STEP = "BENCH_ENDS_AT_FIRST_STEP"
"""Environment variable of processes that stop at their first step."""
WARM_UP = int(os.environ.get("BENCH_WARM_UP", "1"))
"""Number of steps that are not counted."""
LOCK = "BENCH_LOCK"
"""Environment variable: a file that a process locks from its first step until it ends, so that trainings that start
while another one runs do not share the GPU with it."""
PREFERENCES = {"dpo": "pairs", "rm": "pairs", "kto": "examples"}
"""Stage -> name of its dataset in the material."""
GENERATION_OPTIONS = {"per_device_eval_batch_size": 8, "max_new_tokens": 32}
"""burnish's options for generation: greedy, with a fixed number of tokens."""
LIBRARIES = ("burnish", "trl", "transformers", "llamafactory", "torch", "accelerate")


class Gauge:
    """Measurements of a training. ``as_callback`` wraps it in a callback of a given class.

    Args:
        rows_per_step: number of pairs or examples of a step, if these are counted instead of labels.
    """

    def __init__(self, rows_per_step: int = 0) -> None:
        self.rows_per_step = rows_per_step
        self.labels = 0
        # Totals after each step: processor seconds, wall seconds, labels, seconds blocked.
        self.steps: list[tuple[float, float, int, float]] = []
        self.save_waits_s: list[float] = []
        self.save_waits_cpu_s: list[float] = []  # of the training thread
        self.step_ended_cpu_s = 0.0
        self.trained_cpu_s = 0.0
        self.ready: dict[str, float] = {}  # measured when the first step begins
        self.more: dict[str, Any] = {}

    def count(self, labels: Any) -> None:
        """Add the labels of a micro-batch, before the model modifies them; -100 is ignored."""
        if self.rows_per_step:
            return
        self.labels += int((labels != -100).sum())

    def on_step_begin(self) -> None:
        if self.ready:
            return
        if LOCK in os.environ:
            self.lock = os.open(os.environ[LOCK], os.O_WRONLY | os.O_CREAT)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        wall_s = time.time() - float(os.environ.get("BENCH_STARTED_S", "nan"))
        self.ready = {"ready_cpu_s": time.process_time(), "ready_wall_s": wall_s,
                      "ready_bytes": resident_bytes("VmRSS"), "ready_peak_bytes": peak_bytes()}  # fmt: skip
        if ENDS_AT_FIRST_STEP in os.environ:
            self.report()
            raise SystemExit

    def on_step_end(self) -> None:
        self.labels += self.rows_per_step
        if len(self.steps) == WARM_UP - 1:
            synchronize()
        self.steps.append((time.process_time(), time.perf_counter(), self.labels, blocked_s()))
        self.more["steps_peak_bytes"] = peak_bytes()
        self.step_ended_cpu_s = time.thread_time()

    def on_log(self, logs: dict[str, float]) -> None:
        """Store the mean loss of the first epoch; the other epochs only serve to measure time."""
        if "loss" in logs:
            self.more.setdefault("loss", float(logs["loss"]))

    def on_train_end(self) -> None:
        if self.steps and synchronize():
            cpu_s, _, labels, waited_s = self.steps[-1]
            self.steps[-1] = cpu_s, time.perf_counter(), labels, waited_s
            self.more["gpu_peak_bytes"] = sys.modules["torch"].cuda.max_memory_allocated()
        self.more["peak_bytes"] = peak_bytes()
        self.more["ends_s"] = time.perf_counter() - self.steps[-1][1] if self.steps else 0.0
        reset_peak()
        self.trained_cpu_s = time.process_time()

    def on_evaluate(self) -> None:
        self._since_training("evaluation")

    def on_predict(self, new_tokens: int) -> None:
        self._since_training("prediction")
        self.more["new_tokens"] = new_tokens

    def _since_training(self, phase: str) -> None:
        self.more[f"{phase}_cpu_s"] = time.process_time() - self.trained_cpu_s
        self.more[f"{phase}_peak_bytes"] = peak_bytes()

    def on_save(self) -> None:
        self.save_waits_s.append(time.perf_counter() - self.steps[-1][1])
        self.save_waits_cpu_s.append(time.thread_time() - self.step_ended_cpu_s)

    def count_model_labels(self, model: Any) -> None:
        """Count the labels that a transformers model receives as the argument ``labels``."""

        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if module.training and "labels" in kwargs:
                self.count(kwargs["labels"])

        model.register_forward_pre_hook(hook, with_kwargs=True)

    def count_trainer_labels(self, trainer: Any) -> None:
        """Count the labels of micro-batches. burnish's classes do not pass labels to the model, and a replaced public
        method is an override, with which they pad and compute all logits."""
        loss = trainer._loss

        def counted(model: Any, inputs: dict[str, Any]) -> Any:
            self.count(inputs["labels"])
            return loss(model, inputs)

        trainer._loss = counted

    def report(self, **more: Any) -> None:
        """Print all measurements."""
        assert self.ready
        print_measurements(**self.ready, **self._of_steps(), **self.more, **more)

    def _of_steps(self) -> dict[str, Any]:
        if not self.steps:
            return {}
        first, last = self.steps[WARM_UP - 1], self.steps[-1]
        cpu, wall, labels, blocked = (after - before for before, after in zip(first, last, strict=True))
        return {
            "labels": labels, "cpu_s": cpu, "wall_s": wall, "waited_s": blocked,
            "steps": len(self.steps) - WARM_UP, "save_waits_s": self.save_waits_s,
            "save_waits_cpu_s": self.save_waits_cpu_s,
        }  # fmt: skip


def counted_rows_per_step(stage: str) -> int:
    """Return the number of rows per step if rows are counted (pairs or labelled examples), else 0."""
    return common_arguments("")["per_device_train_batch_size"] if stage in PREFERENCES else 0


def print_measurements(**figures: Any) -> None:
    """Print the line that ``measuring.py`` reads, with versions and the processor time of the process and its
    children."""
    print(MARK + json.dumps({**figures, "versions": versions(), "process_cpu_s": sum(os.times()[:4])}), flush=True)


def as_callback(gauge: Gauge, base: type, counts_labels: bool = True) -> Any:
    """Return ``gauge`` as a callback that inherits from ``base``, the callback class of a library.

    Args:
        counts_labels: whether to count the labels that the model receives.
    """

    class Callback(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if counts_labels:
                gauge.count_model_labels(kwargs["model"])

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


def blocked_s() -> float:
    """Return the seconds in which this thread neither ran nor was ready to run, since an arbitrary start; use
    differences. Within a training step this is the time spent waiting for other processes (``run_delay`` in
    https://docs.kernel.org/scheduler/sched-stats.html)."""
    ready_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - time.thread_time() - ready_ns / 1e9


def synchronize() -> bool:
    """Wait for the GPU, if this process uses one. Returns whether it does."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    torch.cuda.synchronize()
    return True


def peak_bytes() -> int:
    """Return the peak resident memory of this process, since its start or since ``reset_peak``."""
    return resident_bytes("VmHWM")


def resident_bytes(name: str) -> int:
    """Return a memory field of /proc/self/status in bytes: VmRSS for resident memory, VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    """Reset the peak to the memory that is resident now (proc(5), /proc/pid/clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries of ``LIBRARIES``."""
    installed = {}
    for library in LIBRARIES:
        try:
            installed[library] = version(library)
        except PackageNotFoundError:
            continue
    return installed


def common_arguments(output: str) -> dict[str, Any]:
    """Return arguments that all trainers get, with transformers' names.

    Eight rows per step, one epoch, AdamW, no checkpoints unless they are measured. One log: the mean loss of an epoch.
    """
    return {
        "output_dir": output, "per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-4,
        "logging_strategy": "epoch", "logging_first_step": False, "report_to": "none", "use_cpu": True,
        "save_strategy": "no",
    }  # fmt: skip
