"""Failures of a command: messages and exit status.

    2          an error in the user's input: options, data, models, folders
    1          a failure of the machine (disk, permissions, memory), a non-finite loss, or a bug in burnish
    3          the run finished, but an intermediate checkpoint could not be saved (run/recovery/saving.py)
    124        ended by max_train_seconds (run/recovery/interrupt.py)
    128 + n    ended by signal n: 130 after Ctrl-C

At most four lines (what, where, why, remedy) go to standard error. The traceback is written to a file, or to the
terminal with ``--debug``.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from burnish.config.errors import NonFiniteError, NotSavedError, Problem, UserError, causes, is_out_of_memory
from burnish.config.extensions import deepest_location
from burnish.config.secrets import without_secrets
from burnish.report import console
from burnish.report.metadata import is_of_this_process, write_failure
from burnish.report.streams import OutputError, redirect_to_null, say
from burnish.run.partial_results import partial_results_of
from burnish.utils.activity import Activity, interrupted_activity
from burnish.utils.environment import count_in
from burnish.utils.files import error_number

TRACEBACK_NAME = "traceback.txt"
"""Name of the file in ``output_dir`` with the traceback of a failure."""


def explain_failure(error: BaseException, output_dir: str | None, debug: bool = False) -> int:
    """Print an explanation of an error and return the exit status.

    Args:
        error: the exception that reached the command line.
        output_dir: ``output_dir`` of the run, if known: its newest checkpoint is named, and the traceback goes there.
        debug: also print the traceback.
    """
    console.end_live()
    if output_dir is not None and is_of_this_process(Path(output_dir)):
        write_failure(Path(output_dir), failure_problem(error, output_dir), error)
    if debug:
        say("".join(traceback.format_exception(error)), sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        return _report_interruption(error, output_dir)
    if isinstance(error, BrokenPipeError):
        redirect_to_null(sys.stdout)
        return 128 + signal.SIGPIPE  # for example, burnish explain | head: the reader is gone, no message is needed
    if isinstance(error, OutputError):
        console.problem(str(error))
        return 1
    explained = _known_cause(error, output_dir)
    if isinstance(explained, UserError):
        # All processes find the same error. With another launcher, one process per machine prints it.
        is_first = count_in(os.environ.get("LOCAL_RANK", "")) == 0 or count_in(os.environ.get("WORLD_SIZE", "")) < 2
        says = is_first or console.FAILURE_FILE in os.environ
        for problem in explained.problems if says else ():
            console.problem(problem)
        return 2
    is_not_permitted = any(error_number(cause) in _PERMISSION for cause in causes(error))
    where = "" if debug or is_not_permitted else write_traceback(error, output_dir)
    console.problem(f"{explained}\n  The traceback is in {where}; --debug prints it." if where else explained)
    return 1


def failure_problem(error: BaseException, output_dir: str | None) -> Problem:
    """Return the description of a failure as one problem."""
    explained = _known_cause(error, output_dir)
    return explained.problems[0] if isinstance(explained, UserError) else explained


def _known_cause(error: BaseException, output_dir: str | None) -> UserError | Problem:
    """Return the first known cause of an error: a user error, or the description of a machine failure."""
    for cause in causes(error):
        explained = cause if isinstance(cause, UserError) else failure_in_words(cause, output_dir)
        if explained is not None:
            return explained
    return _unexpected_error(error, output_dir)


def failure_in_words(error: BaseException, output_dir: str | None) -> Problem | None:
    """Return the description of a machine failure, or None for an unexpected error."""
    if isinstance(error, NotSavedError):
        return error.problem
    if isinstance(error, NonFiniteError):
        return Problem(str(error), why=newest_checkpoint_message(output_dir))
    number = error_number(error)
    if is_out_of_memory(error) or number == errno.ENOMEM:
        return _out_of_memory(error)
    if number in _PERMISSION:
        return _not_permitted(error, output_dir)
    if number not in _DISK:
        return None
    what, remedy = _DISK[number]
    safe = newest_checkpoint_message(output_dir)
    is_saved = safe.startswith(_SAVED_PREFIX)
    return Problem(
        what.format(place=_place(error, output_dir), reason=_reason(error)),
        why=safe,
        remedy=remedy.format(
            more=" or set save_total_limit: 1" if is_saved else "", rerun=_RESUME_HINT if is_saved else _RERUN_HINT
        ),
    )


# --- disk -------------------------------------------------------------------------------------------------------------


_RERUN_HINT = "run the same command again."
_RESUME_HINT = "run the same command again to resume."
_DISK_FULL = (
    "The disk is full: {place} could not be written.",
    "Free some disk space{more}, then {rerun}",
)
_PATH_CONFLICT = (
    "{place} cannot be written or read: {reason}.",
    "A different file or folder exists at this path: move it, then {rerun}",
)
_NO_MORE_FILES = (
    "This process cannot open more files: {place}.",
    "Raise the limit (ulimit -n), then {rerun}",
)
_IO_FAILURE = (
    "{place} cannot be written or read: {reason}.",
    "The disk or its connection failed: once it works again, {rerun}",
)
_TOO_LARGE = (
    "A file would exceed the file size limit: {place} could not be written.",
    "Raise the limit (ulimit -f), or write to another file system.",
)
_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _DISK_FULL),
    **dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EEXIST), _PATH_CONFLICT),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _NO_MORE_FILES),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV), _IO_FAILURE),
    errno.EFBIG: _TOO_LARGE,
}
"""errno -> (what is wrong, remedy)."""
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def _not_permitted(error: BaseException, output_dir: str | None) -> Problem:
    file = getattr(error, "filename", None)
    is_ours = output_dir is not None and (file is None or _is_within(str(file), output_dir))
    return Problem(
        f"{_place(error, output_dir)} cannot be {'written' if is_ours else 'opened'}: {_reason(error)}.",
        why=newest_checkpoint_message(output_dir) if is_ours else "",
        remedy="Change its permissions, or set a different output_dir." if is_ours else "Change its permissions.",
    )


def _is_within(file: str, folder: str) -> bool:
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))


def _place(error: BaseException, output_dir: str | None) -> str:
    file = getattr(error, "filename2", None) or getattr(error, "filename", None)  # of two, the target
    return f'"{file}"' if file else f'a file in "{output_dir}"' if output_dir else "a file"


def _reason(error: BaseException) -> str:
    message = str(getattr(error, "strerror", None) or error).partition(" (os error")[0]
    return message.rstrip(".").lower()


def newest_checkpoint_message(output_dir: str | None) -> str:
    """Name the newest complete checkpoint. A folder with a manifest is complete, so its files are not read."""
    if output_dir is None:
        return ""
    # Imported here because they load torch, and this module also handles a misspelled command.
    from burnish.checkpoint.checkpoint import Checkpoints
    from burnish.checkpoint.manifest import MANIFEST_NAME

    complete = [path for path in Checkpoints(output_dir).all() if (path / MANIFEST_NAME).is_file()]
    return f"{_SAVED_PREFIX}{complete[-1]}." if complete else "No checkpoint was saved."


_SAVED_PREFIX = "Safe: "


# --- memory -----------------------------------------------------------------------------------------------------------

_BYTES = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _out_of_memory(error: BaseException) -> Problem:
    needed, free = _requested_bytes(str(error)), _free(str(error))
    sizes = [f"{_size(needed)} requested" if needed else "", f"{_size(free)} free" if free else ""]
    figures = " and ".join(word for word in sizes if word)
    by, helps = _memory_advice(error)
    return Problem(
        f"Out of memory{by}{': ' + figures if figures else ''}.",
        why="Memory is used by weights, gradients, optimizer states and activations. Activations grow with the number "
        "of tokens in a batch.",
        remedy=helps,
    )


_SMALLER_BATCH = (
    "Try a smaller per_device_train_batch_size and more gradient_accumulation_steps (same effective batch size), "
    "gradient_checkpointing: true, a shorter cutoff_len, or finetuning_type: lora."
)
_ADVICE = {
    Activity.LOAD_MODEL: (
        "while the model was loaded",
        "Try quantization_bit: 4 with finetuning_type: lora, fsdp: full_shard over several devices, or a smaller "
        "model.",
    ),
    Activity.EVALUATE: (
        "during evaluation", "Try a smaller per_device_eval_batch_size, or max_tokens_per_batch.",
    ),
    Activity.PREDICT: (
        "during generation", "Try a smaller per_device_eval_batch_size, or a smaller max_new_tokens.",
    ),
    Activity.BACKWARD: ("in the backward pass of a micro-batch", _SMALLER_BATCH),
    Activity.FORWARD: ("in the forward pass of a micro-batch", _SMALLER_BATCH),
    Activity.UPDATE: (
        "in the optimizer's update, which creates its states in the first step",
        "Try finetuning_type: lora, an optimizer with smaller states (use_badam: true, optim: adafactor, "
        "adamw_8bit), or fsdp: full_shard.",
    ),
    Activity.SAVE: ("while a checkpoint was copied", "Try save_in_background: false."),
}  # fmt: skip
"""Activity -> (when memory ran out, settings that help)."""


def _memory_advice(error: BaseException) -> tuple[str, str]:
    """Return when memory ran out, with the size of the micro-batch, and settings that help."""
    interrupted = interrupted_activity(error)
    if interrupted is None:
        return "", _SMALLER_BATCH
    when, helps = _ADVICE[interrupted.activity]
    size = f" of {interrupted.num_tokens:,} tokens" if interrupted.num_tokens is not None else ""
    return f" {when}{size}", helps


def _requested_bytes(text: str) -> int | None:
    """Parse the bytes in ``you tried to allocate 4398046511104 bytes`` or ``Tried to allocate 20.00 GiB``."""
    return _amount(re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text))


def _free(text: str) -> int | None:
    """Parse the bytes in ``... of which 3.00 GiB is free``, or return the available memory of the system."""
    return _amount(re.search(r"of which ([\d.]+) (\w+) is free", text)) or available_bytes()


def _amount(match: re.Match[str] | None) -> int | None:
    if match is None or match[2] not in _BYTES:
        return None
    return int(float(match[1]) * _BYTES[match[2]])


def available_bytes() -> int | None:
    """Return the available bytes of host memory, or None if unknown: the minimum of the system's and the control
    group's."""
    import psutil  # not at the top: this module also handles a misspelled command

    try:
        free = int(psutil.virtual_memory().available)
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii")) for name in ("max", "current"))
    except (OSError, ValueError):  # no control groups, or no limit ("max")
        return free
    return min(free, max(0, limit - used))


def _size(count: int) -> str:
    for unit in ("TiB", "GiB", "MiB"):
        if count >= _BYTES[unit]:
            return f"{count / _BYTES[unit]:.1f} {unit}"
    return f"{count} bytes"


# --- signals and unexpected errors ------------------------------------------------------------------------------------


def _report_interruption(error: BaseException, output_dir: str | None) -> int:
    path = partial_results_of(error)
    if path is None and output_dir is not None:  # after the pass, while its results are written
        path = next(iter(sorted(Path(output_dir).glob("*.partial.jsonl"))), None)
    results = "" if path is None else f"The results so far are in {path}; run the same command again to resume."
    console.warn(f"Stopped by Ctrl-C. {results or newest_checkpoint_message(output_dir)}".strip())
    return 128 + signal.SIGINT


def _unexpected_error(error: BaseException, output_dir: str | None) -> Problem:
    """Return a problem with error type, first line of its message, location, and checkpoint."""
    first = next(iter(str(error).strip().splitlines()), "")
    shown = first if len(first) <= 300 else f"{first[:297]}..."
    what = f"{type(error).__name__}: {shown}" if first else type(error).__name__
    safe = newest_checkpoint_message(output_dir)
    remedy = f"{safe} Run the same command again to resume from it." if safe.startswith(_SAVED_PREFIX) else ""
    location = deepest_location(error)
    where = f"Raised in {location}." if location else ""
    return Problem(_sentence(what), why=where, remedy=remedy)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def write_traceback(error: BaseException, output_dir: str | None) -> str:
    """Write the traceback to ``output_dir`` if it exists, otherwise to a new temporary file. No link is followed.

    Returns:
        Its path, or "" if it cannot be written.
    """
    text = without_secrets("".join(traceback.format_exception(error)))
    is_there = output_dir and os.path.isdir(output_dir)  # false if the name is too long
    if output_dir and is_there and console.is_main_process():
        path = Path(output_dir, TRACEBACK_NAME)
        with suppress(OSError):  # this disk may have failed; the temporary folder may be on another disk
            path.unlink(missing_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return str(path)
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(f"-{TRACEBACK_NAME}", "burnish-")  # readable by this user only
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return name
    return ""
