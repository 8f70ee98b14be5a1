"""The check of ``output_dir``: it is set and writable, and contains nothing that the run would overwrite."""

from __future__ import annotations

import re
from pathlib import Path

from burnish.checkpoint.manifest import MANIFEST_NAME
from burnish.config.checks import check
from burnish.config.errors import Problem, few
from burnish.loop.state import STATE_NAME
from burnish.report.console import RUN_LOG
from burnish.report.jsonl import LOG_NAME
from burnish.report.metadata import METADATA_NAMES
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.recovery.clearing import EARLIER_RUN, problems_of_sources
from burnish.run.recovery.failure import TRACEBACK_NAME
from burnish.utils.files import is_endless, problems_of_folder, special_file_kind

FINISHED_NAME = ".finished.json"
"""File that marks a finished run and stores its fingerprints, so that the same command recognizes it."""
_CHECKPOINTS = "checkpoint-*"
_FILES_BEFORE_FIRST_CHECKPOINT = re.compile(
    rf"\.lock|\.incomplete-.*|\..+\.incomplete|runs|completions\.jsonl|{LOG_NAME}|{RUN_LOG}|{TRACEBACK_NAME}|"
    rf"{'|'.join(METADATA_NAMES)}"
)
"""Files of a run that ended before its first checkpoint. The same command starts over and overwrites them."""
_DIFFERENT_FOLDER_REMEDY = "Set a different output_dir."


@check
def check_output_dir(options: RunOptions) -> list[Problem]:
    """Check that ``output_dir`` is set and writable, and contains nothing that the run would overwrite."""
    if options.output_dir is None or not options.output_dir.strip():
        remedy = "Set it to the folder for checkpoints and logs, for example output_dir: saves/first"
        return [_problem("output_dir is missing.", remedy)]
    folder = Path(options.output_dir)
    try:
        return _check_folder(folder, options)
    except OSError as error:  # for example, a name that is too long, or a link to itself
        return [_problem(f'output_dir "{folder}" cannot be created: {error.strerror}.')]


def _problem(what: str, remedy: str = _DIFFERENT_FOLDER_REMEDY, why: str = "") -> Problem:
    return Problem(what, why=why, remedy=remedy, option="output_dir")


def _check_folder(folder: Path, options: RunOptions) -> list[Problem]:
    if problems := problems_of_folder(folder, "output_dir"):
        return problems
    model = Path(options.model_name_or_path or "")
    if options.model_name_or_path and folder.is_dir() and model.is_dir() and folder.samefile(model):
        return [_problem(f'output_dir "{folder}" is also model_name_or_path, and the base model would be overwritten.')]
    if folder.is_dir() and (odd := [path for path in sorted(folder.iterdir()) if is_endless(path)]):
        what = f'output_dir "{folder}" contains {special_file_kind(odd[0])} instead of a file: {odd[0].name}.'
        return [_problem(what, "Remove it, or set a different output_dir.", why="Writing to it would block forever.")]
    if not folder.is_dir():
        return []
    return (problems_of_sources(options) if trains(options) else []) or _check_contents(folder, options)


def _is_foreign(folder: Path) -> bool:
    """Whether neither the folder nor a checkpoint in it has a file that only burnish writes."""
    is_run = any((folder / name).is_file() for name in (FINISHED_NAME, *METADATA_NAMES))
    return not is_run and not any(folder.glob(f"{_CHECKPOINTS}/{MANIFEST_NAME}"))


def _check_contents(folder: Path, options: RunOptions) -> list[Problem]:
    inside = sorted(path.name for path in folder.iterdir() if not _FILES_BEFORE_FIRST_CHECKPOINT.fullmatch(path.name))
    if not inside or options.overwrite_output_dir or options.resume_from_checkpoint or not trains(options):
        return []
    has_checkpoints = any(folder.glob(_CHECKPOINTS))
    if has_checkpoints and _is_foreign(folder):
        names = few(sorted(path.name for path in folder.glob(_CHECKPOINTS)))
        what = f'output_dir "{folder}" contains checkpoints that were not written by burnish: {names}.'
        why = "The run cannot be resumed from them, and would overwrite them."
        return [_problem(what, "Set a different output_dir, or set overwrite_output_dir: true.", why)]
    if (has_checkpoints or FINISHED_NAME in inside) and options.resume != "never":
        return []  # the run resumes or is finished; whether it is the same run is checked when the checkpoint is read
    shown = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
    is_a_run = has_checkpoints or (folder / STATE_NAME).is_file() or EARLIER_RUN in inside
    what = f'output_dir "{folder}" already contains {"an earlier run" if is_a_run else "other files"}: {shown}.'
    return [_problem(what, "Set a different output_dir, or set overwrite_output_dir: true to overwrite it.")]
