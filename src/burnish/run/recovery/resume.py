"""Resume a run: find the checkpoint, keep the rows per step, and detect that nothing is left to do.

``RunLoop.load`` loads the checkpoint that is found. Errors: a requested checkpoint that does not exist or is
incomplete; more steps for a finished run that kept no checkpoint. Whether a checkpoint belongs to this run is decided
in ``checkpoint/comparison.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.checkpoint.checkpoint import (
    Checkpoints,
    later_checkpoints_note,
    output_folder,
    valid_checkpoints_beside,
)
from burnish.checkpoint.comparison import AFTER_THE_END, compare_fingerprints, compare_with_checkpoint
from burnish.checkpoint.manifest import integrity_errors, read_manifest
from burnish.config.errors import Problem, UserError
from burnish.config.options import raise_if, specs
from burnish.loop.schedule import StepPlan
from burnish.loop.state import STATE_NAME, TrainerState, load_state
from burnish.report.pace import format_count
from burnish.report.results import write_text_atomically
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.output_dir import FINISHED_NAME
from burnish.run.plan.plan import Plan
from burnish.run.recovery.fingerprints import may_change, post_training_options, values_of
from burnish.utils.files import check_folder_below_roots
from burnish.utils.json_files import read_object


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Args:
        checkpoint: checkpoint to resume from; None to begin at step 0.
        notes: messages about skipped checkpoints and about what has changed since this one.
        done: why nothing is left to do; "" if there are steps left.
    """

    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    done: str = ""


def start_of(plan: Plan, fingerprints: Callable[[], Mapping[str, Any]], steps: StepPlan) -> Start:
    """Determine where the run begins, from the options and ``output_dir``. Nothing is modified.

    Args:
        fingerprints: called if there is a run to compare with.
        steps: steps of the run.
    Raises:
        UserError: if a requested checkpoint is missing, incomplete or of another run.
    """
    options = plan.options
    newest, notes = checkpoint_to_resume(options)
    if newest is None:
        return Start(notes=tuple(notes), done=finished_message_without_checkpoints(options, fingerprints, steps))
    notes += compare_with_checkpoint(newest, fingerprints(), options.resume_despite_changes, may_change(options))
    return Start(newest, tuple(notes), nothing_left_to_do(options, newest, fingerprints, steps))


def checkpoint_to_resume(options: RunOptions) -> tuple[Path | None, list[str]]:
    """Return the requested checkpoint or the newest complete one (or None), and notes about skipped ones."""
    folder, requested = output_folder(options), options.resume_from_checkpoint
    checkpoints = Checkpoints(folder)
    if isinstance(requested, str):
        check_folder_below_roots(Path(requested))
        raise_if(check_checkpoint(Path(requested), checkpoints))
        is_own = Path(requested).resolve().parent == folder.resolve()
        note = later_checkpoints_note(Path(requested)) if is_own else ""
        return Path(requested), [note] if note else []
    if not is_resuming(options):
        return None, []
    newest, skipped = checkpoints.newest()
    if newest is None and (requested is True or options.resume == "must"):
        raise UserError(f'output_dir "{folder}" contains no complete checkpoint to resume from.', option="output_dir")
    if newest is not None:
        check_folder_below_roots(newest)
    return newest, skipped


def refuse_changed_options(options: RunOptions) -> None:
    """Raise UserError if an option was changed that makes it another run than the one in ``output_dir``.

    ``start_of`` finds the same and more, but only after the data were encoded. This reads no hash of a file's content.
    """
    folder = output_folder(options)
    if not is_resuming(options) or isinstance(options.resume_from_checkpoint, str) or options.resume_despite_changes:
        return
    saved = (path for path in reversed(Checkpoints(folder).all()) if not integrity_errors(path, contents=False))
    if (newest := next(saved, None)) is None:
        return
    known = specs(RunOptions)
    values = {name: value for name, value in values_of(options).items() if not known[name].names_place}
    compare_with_checkpoint(newest, values, may_change=may_change(options))


def is_resuming(options: RunOptions) -> bool:
    """Return whether the run resumes from what it finds in ``output_dir``."""
    begins_anew = options.resume_from_checkpoint is False or options.resume == "never" or options.overwrite_output_dir
    return trains(options) and not begins_anew


def check_checkpoint(requested: Path, checkpoints: Checkpoints) -> list[Problem]:
    """Return problems of a requested checkpoint: it does not exist, is not a folder, or is incomplete."""
    if not requested.is_dir():
        there = ", ".join(str(path) for path in checkpoints.all()) or "none"
        what = "is a file, not a folder" if requested.exists() else "does not exist"
        remedy = f"Checkpoints in output_dir: {there}."
        return [
            Problem(f'resume_from_checkpoint "{requested}" {what}.', remedy=remedy, option="resume_from_checkpoint")
        ]
    wrong = integrity_errors(requested)
    return (
        [Problem(f"{'; '.join(wrong[:3])}.", where=str(requested), remedy=valid_checkpoints_beside(requested))]
        if wrong
        else []
    )


def nothing_left_to_do(
    options: RunOptions, newest: Path, fingerprints: Callable[[], Mapping[str, Any]], steps: StepPlan
) -> str:
    """Return a message why the run in ``output_dir`` is finished, or "" if there are steps left.

    Raises:
        UserError: if the command asks for something that the finished run did not do.
    """
    folder, last = output_folder(options), load_state(newest).global_step
    state = finished_state(folder)
    if last > steps.max_steps or (state is not None and state.max_steps > steps.max_steps):
        raise UserError(_fewer_steps(folder, last, steps))
    if state is None:
        return ""
    done = read_finished(folder)
    if has_stopped_early(done):
        before, now = done["fingerprints"]["early_stopping_steps"], options.early_stopping_steps
        if now is None or now > before:
            return ""
        if state.max_steps < steps.max_steps:
            raise UserError(_early_stopping_problem(folder, state.global_step))
    elif state.max_steps < steps.max_steps:
        return ""
    refuse_changes_after_the_end(options, done, fingerprints())
    return finished_message(folder, done)


def has_stopped_early(done: Mapping[str, Any]) -> bool:
    """Return whether early stopping ended a finished run. Another callback may have ended it as well."""
    stops_early = done["fingerprints"].get("early_stopping_steps") is not None
    return stops_early and bool(done["global_step"] < done["max_steps"])


def _early_stopping_problem(folder: Path, step: int) -> Problem:
    return Problem(
        f"early stopping ended this run at step {step}, so more steps have no effect.",
        where=str(folder),
        remedy="To train further, increase early_stopping_steps or remove it. To start over, set a different "
        "output_dir, or set overwrite_output_dir: true.",
        option=("max_steps", "num_train_epochs", "early_stopping_steps"),
    )


def refuse_changes_after_the_end(options: RunOptions, done: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the command of a finished run was changed so that the result would differ."""
    folder, allows_changes = output_folder(options), options.resume_despite_changes
    compare_fingerprints(done["fingerprints"], now, folder, allows_changes, AFTER_THE_END)
    before, work = done.get("work", {}), post_training_options(options)
    changed = [name for name in work if name in before and before[name] != work[name]]
    if changed and not allows_changes:
        what = "; ".join(
            f"{name} changed from {json.dumps(before[name])} to {json.dumps(work[name])}" for name in changed
        )
        raise UserError(
            f"the folder contains a finished run with other options: {what}.",
            where=str(folder),
            remedy=f"burnish eval {folder} and burnish predict {folder} use the trained model. To train again, set "
            "a different output_dir, or set overwrite_output_dir: true.",
            option=tuple(changed),
        )


def _fewer_steps(folder: Path, last: int, steps: StepPlan) -> Problem:
    return Problem(
        f"the run has already completed {format_count(last, 'step')}, but max_steps or num_train_epochs requests "
        f"{steps.max_steps}.",
        where=str(folder),
        remedy="Set a different output_dir, or set overwrite_output_dir: true to start over.",
        option=("max_steps", "num_train_epochs"),
    )


def finished_message_without_checkpoints(
    options: RunOptions, fingerprints: Callable[[], Mapping[str, Any]], steps: StepPlan
) -> str:
    """Return a message why a run without checkpoints is finished, or "" if it has not begun.

    Raises:
        UserError: if it is another run, or should continue after its last step.
    """
    folder = output_folder(options)
    if not (is_resuming(options) and (folder / FINISHED_NAME).is_file()):
        return ""
    done = read_finished(folder)
    if done["max_steps"] > steps.max_steps:
        raise UserError(_fewer_steps(folder, done["global_step"], steps))
    if done["max_steps"] == steps.max_steps:
        refuse_changes_after_the_end(options, done, fingerprints())
    compare_fingerprints(
        done["fingerprints"], fingerprints(), folder, options.resume_despite_changes, may_change(options)
    )
    if lost := lost_files(folder, done):
        raise UserError(_missing_files_problem(folder, lost))
    if done["max_steps"] < steps.max_steps:
        raise UserError(
            f"this run ended after {format_count(done['global_step'], 'step')} and kept no checkpoint, so it cannot "
            f"be extended to step {steps.max_steps}.",
            where=str(folder),
            remedy="Set a different output_dir, or set overwrite_output_dir: true to start over.",
            option="max_steps",
        )
    return finished_message(folder, done)


def _missing_files_problem(folder: Path, lost: Sequence[str]) -> Problem:
    return Problem(
        f"this run is finished, but {'; '.join(lost[:3])}.",
        where=str(folder),
        why="It kept no checkpoint from which the model could be restored.",
        remedy="Restore the file, or set overwrite_output_dir: true to start over.",
    )


def accumulation_for(newest: Path | None, options: RunOptions, world_size: int) -> int:
    """Return the micro-batches per step. With another number of processes, a resumed run keeps its rows per step."""
    if newest is None:
        return int(options.gradient_accumulation_steps)
    before = read_manifest(newest)["fingerprints"]
    rows = before.get("rows_per_step")
    if rows is None or before.get("world_size") == world_size:
        return int(options.gradient_accumulation_steps)
    across = options.per_device_train_batch_size * world_size
    if rows % across:
        raise UserError(
            f"{newest.name} was saved with {rows} examples per step, which {world_size} processes with "
            f"{options.per_device_train_batch_size} examples each cannot produce.",
            remedy=f"Choose a number of processes and per_device_train_batch_size whose product divides {rows}.",
            option="per_device_train_batch_size",
        )
    return int(rows // across)


# --- finished runs ----------------------------------------------------------------------------------------------------

_MODEL = ("*.safetensors", "model.safetensors.index.json", "config.json", "adapter_config.json", "tokenizer.json")
_REMEDY = "Set overwrite_output_dir: true to start over, or set a different output_dir."


def write_finished(folder: Path, state: TrainerState, fingerprints: Mapping[str, Any], work: Mapping[str, Any]) -> None:
    """Write the mark of a finished run: its steps, its fingerprints, and the names and sizes of the model's files.

    A run whose model files are lost counts as unfinished: it resumes from its last checkpoint and writes them again.
    """
    done = {
        "global_step": state.global_step, "max_steps": state.max_steps, "files": _sizes(folder),
        "fingerprints": dict(fingerprints), "work": dict(work),
    }  # fmt: skip
    write_text_atomically(folder / FINISHED_NAME, json.dumps(done, indent=2) + "\n")


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for pattern in _MODEL for path in sorted(folder.glob(pattern)) if path.is_file())
    return {path.name: path.stat().st_size for path in files}


def read_finished(folder: Path) -> dict[str, Any]:
    """Return the mark of a finished run. Raises UserError if the file is damaged."""
    needed = [("global_step", int), ("max_steps", int), ("fingerprints", dict)]
    return read_object(folder / FINISHED_NAME, _REMEDY, needed)


def lost_files(folder: Path, done: Mapping[str, Any]) -> list[str]:
    """Return descriptions of model files that are missing or incomplete."""
    sizes = _sizes(folder)
    lost = []
    for name, size in dict(done.get("files") or {}).items():
        if name not in sizes:
            lost.append(f"its {name} is missing")
        elif sizes[name] != size and name.endswith(".safetensors"):  # other files may be edited by hand
            lost.append(f"its {name} has {sizes[name]:,} bytes instead of {size:,}")
    return lost


def finished_state(folder: Path) -> TrainerState | None:
    """Return the final state of the run in ``folder``; None if it is unfinished or its model is incomplete."""
    if not ((folder / FINISHED_NAME).is_file() and (folder / STATE_NAME).is_file()):
        return None
    try:
        if lost_files(folder, read_finished(folder)):
            return None
        return TrainerState.load_from_json(str(folder / STATE_NAME))
    except UserError:  # damaged: reported again after resuming from the checkpoint
        return None


def finished_message(folder: Path, done: Mapping[str, Any]) -> str:
    limits = "early_stopping_steps" if has_stopped_early(done) else "num_train_epochs or max_steps"
    return (
        f"{folder} contains this run, which finished at step {done['global_step']}: there is nothing to do.\n"
        f"  To train further, increase {limits}. For a run with other settings, set a different output_dir, or set "
        "overwrite_output_dir: true."
    )
