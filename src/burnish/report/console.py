"""The one place that writes to the terminal: notes, warnings, problems, and the live line of a run.

In a terminal rich draws and colours (NO_COLOR turns colours off); anywhere else (a pipe, a file, a CI log) the same
words are plain lines. Notes and progress go to standard output, warnings and problems to standard error. While a live
line stands on the screen everything is printed above it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

from burnish.core.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from burnish.report.options import ReportOptions

_REFRESHES_PER_SECOND = 5
_live: Live | None = None


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at ``stream`` (standard output): one that can move its cursor."""
    if _live is not None:  # drawn nowhere else, and the stream that rich before 14.1 lays over it does not say so
        return True
    stream = stream or sys.stdout
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def note(text: str) -> None:
    """Something worth knowing."""
    _print(text, "", "", sys.stdout)


def warn(text: str) -> None:
    """Something that is probably not meant."""
    _print(text, "warning", "yellow", sys.stderr)


def problem(found: Problem | str) -> None:
    """Something that is wrong. What is drawn live ends first: an error is the last word."""
    end_live()
    _print(str(found), "error", "red", sys.stderr)


def _print(text: str, label: str, colour: str, stream: TextIO) -> None:
    if not is_terminal(stream):
        print(f"{label}: {text}" if label else text, file=stream, flush=True)
        return
    from rich.text import Text

    line = Text(f"{label}: ", style=f"bold {colour}") if label else Text()
    first, newline, rest = text.partition("\n")
    line.append(first).append(newline + rest, style="dim" if label else "")
    # soft_wrap: a terminal that is made wider reflows the line, and a path can be copied whole.
    _console(stream).print(line, soft_wrap=True, highlight=False)


def _console(stream: TextIO) -> Console:
    """While a live line is drawn, its console: it knows to print above the line."""
    from rich.console import Console

    return _live.console if _live is not None else Console(file=stream)


# --- the live line ----------------------------------------------------------------------------------------------------


def begin_live(line: RenderableType) -> None:
    """Keep ``line`` at the foot of the terminal, drawn anew some times a second, until ``end_live``."""
    global _live
    from rich.live import Live

    end_live()
    _live = Live(line, refresh_per_second=_REFRESHES_PER_SECOND, transient=True)
    _live.start()
    # A run that fails under Python alone never reaches the end of the line, and would leave the cursor hidden.
    atexit.register(end_live)


def end_live() -> None:
    """Take the live line away, if there is one."""
    global _live
    live, _live = _live, None
    if live is not None:
        atexit.unregister(end_live)
        live.stop()


# --- what libraries say -----------------------------------------------------------------------------------------------

_LIBRARIES = {
    "burnish": "",
    "transformers": "TRANSFORMERS_VERBOSITY",
    "datasets": "DATASETS_VERBOSITY",
    "peft": "",
    "accelerate": "",
}
"""Library -> the environment variable from which it takes its level when it is imported, which overrides its logger."""


class _OwnNotes(logging.Handler):
    """What burnish's own loggers say, as notes and warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else note)(record.getMessage())


_own_notes = _OwnNotes()


def set_log_levels(options: ReportOptions, is_main: bool, is_node_main: bool) -> None:
    """Apply ``log_level`` or ``log_level_replica``; "passive" leaves every level as it is. What burnish's own parts log
    is shown by the main process."""
    if is_main:
        logging.getLogger("burnish").addHandler(_own_notes)  # the same one again changes nothing
    speaks = is_node_main if options.log_on_each_node else is_main
    level = options.log_level if speaks else options.log_level_replica
    if level == "passive":
        return
    for library, variable in _LIBRARIES.items():
        logging.getLogger(library).setLevel(level.upper())
        if variable:
            os.environ.setdefault(variable, level)
