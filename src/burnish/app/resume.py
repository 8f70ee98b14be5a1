"""How a run goes on where it stopped: from which checkpoint, with which batches, and when there is nothing left to do.

In: a plan, and ``output_dir``. Out: the checkpoint to continue from, and a run whose parts have its state.
Refuses: a checkpoint that is asked for and is not there or not whole; more steps than a finished run that kept no
checkpoint. Whether what lies there is this run's at all is ``core.comparison``' to say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.app.checks import FINISHED_NAME, trains
from burnish.app.plan import Plan
from burnish.core.checkpoint import Checkpoints, load, load_state, others_beside
from burnish.core.comparison import compare, compare_fingerprints
from burnish.core.errors import Problem, UserError
from burnish.core.manifest import faults, read_manifest
from burnish.core.options import raise_if
from burnish.core.schedule import StepPlan
from burnish.core.state import STATE_NAME, TrainerState
from burnish.core.types import Run
from burnish.report.console import note
from burnish.report.pace import counted


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Args:
        checkpoint: the one that it goes on from; None for step 0.
        notes: which checkpoints were passed over, and what has changed since this one, a sentence each.
        done: why there is nothing left to do; "" where there is.
    """

    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    done: str = ""


def start_of(plan: Plan, fingerprints: Callable[[], Mapping[str, Any]], steps: StepPlan) -> Start:
    """Where the run begins, as the options and ``output_dir`` say. Nothing is changed there.

    Args:
        fingerprints: called where there is a run to compare with.
    Raises:
        UserError: where a checkpoint is asked for that is not there or not whole, or is another run's.
    """
    options = plan.options
    found, notes = checkpoint_to_resume(options)
    if found is None:
        return Start(notes=tuple(notes), done=finished_before(options, fingerprints, steps))
    notes += compare_fingerprints(found, fingerprints(), options.resume_despite_changes)
    return Start(found, tuple(notes), nothing_left_to_do(Path(options.output_dir), found, steps))


def checkpoint_to_resume(options: Any) -> tuple[Path | None, list[str]]:
    """The checkpoint that the options ask for, or the newest whole one; and those that were passed over."""
    folder, asked = Path(options.output_dir), options.resume_from_checkpoint
    checkpoints = Checkpoints(folder)
    if isinstance(asked, str):
        raise_if(check_checkpoint(Path(asked), checkpoints))
        return Path(asked), []
    if not goes_on(options):
        return None, []
    found, skipped = checkpoints.newest()
    if found is None and (asked is True or options.resume == "must"):
        raise UserError(Problem(f'output_dir "{folder}" holds no whole checkpoint to resume from.'))
    return found, skipped


def goes_on(options: Any) -> bool:
    """Whether the run goes on with what it finds in ``output_dir``."""
    begins_anew = options.resume_from_checkpoint is False or options.resume == "never" or options.overwrite_output_dir
    return trains(options) and not begins_anew


def check_checkpoint(asked: Path, checkpoints: Checkpoints) -> list[Problem]:
    """Whether a folder that the options name is a checkpoint, and whole."""
    if not asked.is_dir():
        there = ", ".join(str(path) for path in checkpoints.all()) or "none"
        what = "is a file, not a folder" if asked.exists() else "is not there"
        remedy = f"Checkpoints in output_dir: {there}."
        return [Problem(f'resume_from_checkpoint "{asked}" {what}.', remedy=remedy)]
    wrong = faults(asked)
    return [Problem(f"{'; '.join(wrong[:3])}.", where=str(asked), remedy=others_beside(asked))] if wrong else []


def nothing_left_to_do(folder: Path, found: Path, steps: StepPlan) -> str:
    """Why the run that stands in ``folder`` need not go on, as a sentence; "" where it has to."""
    last = load_state(found).global_step
    if last > steps.max_steps:
        done = f"{found} has done {counted(last, 'step')}, and this run is to have {steps.max_steps}"
        return f"{done}: there is nothing to do."
    if not ((folder / "train_results.json").is_file() and (folder / STATE_NAME).is_file()):
        return ""
    state = load_state(folder)  # by its last step, or early
    if state.max_steps < steps.max_steps:
        return ""
    return f"{folder} holds this run, finished at step {state.global_step}: there is nothing to do."


def write_finished(folder: Path, state: TrainerState, fingerprints: Mapping[str, Any]) -> None:
    """That the run in ``folder`` is done, and what it depended on: all that is known where it kept no checkpoint."""
    done = {"global_step": state.global_step, "max_steps": state.max_steps, "fingerprints": dict(fingerprints)}
    (folder / FINISHED_NAME).write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")


def finished_before(options: Any, fingerprints: Callable[[], Mapping[str, Any]], steps: StepPlan) -> str:
    """Why a run without checkpoints has nothing left to do, as a sentence; "" where it has not begun.

    Raises:
        UserError: where it is another run, or is to go on after its last step.
    """
    folder = Path(options.output_dir)
    if not (goes_on(options) and (folder / FINISHED_NAME).is_file()):
        return ""
    done = json.loads((folder / FINISHED_NAME).read_text(encoding="utf-8"))
    compare(done["fingerprints"], fingerprints(), folder, options.resume_despite_changes)
    if done["max_steps"] < steps.max_steps:
        raise UserError(
            Problem(
                f"this run ended after {counted(done['global_step'], 'step')} and kept no checkpoint, so it cannot go "
                f"on to step {steps.max_steps}.",
                where=str(folder),
                remedy="Name another output_dir, or set overwrite_output_dir: true to train anew.",
            )
        )
    return f"{folder} holds this run, finished at step {done['global_step']}: there is nothing to do."


def resume(run: Run, found: Path) -> None:
    """Give every part its state back, then what the options say anew where it may change."""
    planned = {name: getattr(run.state, name) for name in
               ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
                "is_local_process_zero", "is_world_process_zero")}  # fmt: skip
    rates = (
        [group["initial_lr"] for group in run.optimizer.param_groups] if hasattr(run.scheduler, "lr_lambdas") else []
    )
    load(found, run.parts, run.engine.rank)
    for name, value in planned.items():
        setattr(run.state, name, value)
    if rates:
        apply_rates(run, rates)
    note(f"Continuing from {found}: step {run.state.global_step} of {run.state.max_steps}.")


def apply_rates(run: Run, rates: Sequence[float]) -> None:
    """The learning rates of the options at the step of the schedule; the same bits where nothing was changed."""
    run.scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(run.optimizer.param_groups, rates, run.scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(run.scheduler.last_epoch)


_LEFT_BY_A_RUN = (
    FINISHED_NAME, "trainer_log.jsonl", "trainer_state.json", "traceback.txt", "*_results.json", "adapter_config.json",
    "adapter_model.safetensors", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
)  # fmt: skip


def clear(folder: Path) -> None:
    """Remove what an earlier run left, which ``overwrite_output_dir`` asks for: an adapter beside the whole model of
    this run would be loaded in its place."""
    for path in Checkpoints(folder).all():
        shutil.rmtree(path)
    for pattern in _LEFT_BY_A_RUN:
        for path in folder.glob(pattern):
            path.unlink()


def accumulation_for(found: Path | None, options: Any, world_size: int) -> int:
    """Micro-batches per step. A run that goes on with another number of processes keeps the rows of a step."""
    if found is None:
        return int(options.gradient_accumulation_steps)
    before = read_manifest(found)["fingerprints"]
    rows = before.get("rows_per_step")
    if rows is None or before.get("world_size") == world_size:
        return int(options.gradient_accumulation_steps)
    across = options.per_device_train_batch_size * world_size
    if rows % across:
        raise UserError(
            Problem(
                f"{found.name} takes {rows} rows a step, which {world_size} processes of "
                f"{options.per_device_train_batch_size} rows cannot.",
                remedy=f"Choose a number of processes and per_device_train_batch_size whose product divides {rows}.",
            )
        )
    return int(rows // across)
