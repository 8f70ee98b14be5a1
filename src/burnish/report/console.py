"""Terminal output: notes, warnings, problems, and the live progress line of a run.

In a terminal, text is colored with rich (NO_COLOR disables colors). Elsewhere (pipe, file, CI log) the same words are
plain lines. Notes and progress go to standard output, warnings and problems to standard error. While a live line is
shown, everything that goes to the terminal is printed above it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from burnish.config.errors import Problem
from burnish.config.secrets import without_secrets
from burnish.report.streams import encodable, redirect_to_null, say, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from burnish.report.options import ReportOptions

_REFRESHES_PER_SECOND = 5
_live: Live | None = None


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether ``stream`` (default: standard output) is a terminal that supports cursor movement."""
    stream = stream or sys.stdout
    if stream is None or stream.closed:  # the parent process may have closed it
        return False
    if _live is not None:
        from rich.file_proxy import FileProxy

        if isinstance(stream, FileProxy):  # of a terminal with a live line; rich before 14.1 gives it no isatty
            return True
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_live() -> bool:
    """Return whether a live line is shown."""
    return _live is not None


def note(text: str) -> None:
    """Print a note. With several processes, only the main process prints it."""
    if is_main_process():
        _print(text, "", "", sys.stdout)


def warn(text: str) -> None:
    """Print a warning about a probable mistake. With several processes, only the main process prints it."""
    if is_main_process():
        _print(text, "warning", "yellow", sys.stderr)


FAILURE_FILE = "BURNISH_FAILURE_FILE"
"""Environment variable with which ``run/launch.py`` passes the file for a process's final error message."""
END_OF_PROBLEM = "\x1e"


def problem(found: Problem | str) -> None:
    """Print an error. The live line is removed first, so that the error is the last line.

    A process started by burnish writes the error to a file instead; the process that started it prints it once.
    """
    end_live()
    if FAILURE_FILE in os.environ:
        with open(os.environ[FAILURE_FILE], "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(without_secrets(f"{found}{END_OF_PROBLEM}"))
        return
    if not is_main_process():
        found = f"{found}\n  Process {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}."
    _print(str(found), "error", "red", sys.stderr)


def is_main_process() -> bool:
    """Return whether this process prints messages that all processes of the run have: rank 0 does."""
    return (os.environ.get("RANK") or "0") == "0"


def print_result(text: str, masks_secrets: bool = True) -> None:
    """Print the result of a command. Raises OSError if that is impossible, since the command has then failed.

    Args:
        text: the result.
        masks_secrets: false for JSON, whose values were masked, since masking its text might remove quotation marks.
    """
    say(text, sys.stdout, must=True, masks_secrets=masks_secrets)


def _print(text: str, label: str, color: str, stream: TextIO | None) -> None:
    """Print ``text`` if possible. A closed terminal is not an error: training continues without it."""
    text = visible(text)
    _record_line(f"{label}: {text}" if label else text)
    if stream is None or not is_terminal(stream):
        say(f"{label}: {text}" if label else text, stream)
        return
    try:
        _draw(encodable(without_secrets(text), stream), label, color, stream)
    except OSError:  # the terminal is gone
        end_live()
        redirect_to_null(stream)


def _draw(text: str, label: str, color: str, stream: TextIO) -> None:
    from rich.text import Text

    line = Text(f"{label}: ", style=f"bold {color}") if label else Text()
    first, newline, rest = text.partition("\n")
    line.append(first).append(newline + rest, style="dim" if label else "")
    # soft_wrap: the line reflows when the terminal is resized, and a path can be copied in one piece.
    _console(stream).print(line, soft_wrap=True, highlight=False)


def _console(stream: TextIO) -> Console:
    """Return the console of the live line, which prints above that line, or else one for ``stream``."""
    from rich.console import Console

    return _live.console if _live is not None else Console(file=stream)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich in a terminal, elsewhere a block of ``name: value`` lines per row."""
    if not is_main_process():
        return
    if not is_terminal():
        blocks = [
            "\n".join(f"  {name}: {_one_line(cell)}" for name, cell in zip(header, row, strict=True)) for row in rows
        ]
        note("\n".join([title, *blocks]))
        return
    from rich.table import Table

    drawn = Table(*header, title=title, title_justify="left", show_lines=True)
    for row in rows:
        drawn.add_row(*(encodable(without_secrets(visible(_one_line(cell))), sys.stdout) for cell in row))
    _console(sys.stdout).print(drawn, markup=False)


def _one_line(text: str, width: int = 200) -> str:
    """Return ``text`` with line breaks as \\n, shortened in the middle."""
    flat = text.replace("\n", "\\n")
    return flat if len(flat) <= width else f"{flat[: width // 2]} ... {flat[-width // 2 :]}"


GAP = "  "
_SHORTEST, _LONGEST = 5, 40


def bar(width: int, share: float, ascii_only: bool) -> list[Text]:
    """Return a progress bar of at most ``width`` columns, or nothing if that is too narrow.

    The two parts have different line styles, so that the bar is readable without color.

    Args:
        width: available columns.
        share: fraction done, in [0, 1].
        ascii_only: use ASCII characters.
    """
    from rich.text import Text

    width = min(width, _LONGEST)
    if width < _SHORTEST:
        return []
    done, to_do = ("#", "-") if ascii_only else ("━", "─")
    filled = round(width * min(share, 1.0))
    return [Text.assemble((done * filled, "green"), (to_do * (width - filled), "dim"))]


# --- live line --------------------------------------------------------------------------------------------------------


def begin_live(line: RenderableType) -> None:
    """Show ``line`` at the bottom of the terminal and redraw it several times a second, until ``end_live``."""
    global _live
    from rich.live import Live

    end_live()
    is_alike = sys.stderr is not None and is_terminal(sys.stderr)  # otherwise warnings stay in the file of 2> FILE
    try:
        _live = Live(line, refresh_per_second=_REFRESHES_PER_SECOND, transient=True, redirect_stderr=is_alike)
        _live.start()
    except OSError:  # the terminal is gone
        end_live()
        return
    # A user's script that fails never calls end_live, and the cursor would stay hidden.
    atexit.register(end_live)


def end_live() -> None:
    """Remove the live line, if there is one."""
    global _live
    live, _live = _live, None
    if live is not None:
        atexit.unregister(end_live)
        with suppress(OSError):  # the terminal is gone
            live.stop()


# --- log file of the run ----------------------------------------------------------------------------------------------

RUN_LOG = "run.log"
"""Log file in ``output_dir`` with every note, warning and problem of a run, with timestamps."""
_log_path: Path | None = None
_lines_before_log: deque[str] = deque(maxlen=200)
"""Messages printed before the log file was opened, during preparation of the run."""


@contextmanager
def tee_log(folder: Path) -> Iterator[None]:
    """Also write messages to the log file of the run inside the ``with`` block, preceded by earlier messages."""
    global _log_path
    _log_path = folder / RUN_LOG
    _write_log(_lines_before_log)
    _lines_before_log.clear()
    try:
        yield
    finally:
        _log_path = None


def _record_line(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {without_secrets(text)}\n"
    if _log_path is None:
        _lines_before_log.append(line)
    else:
        _write_log([line])


def _write_log(lines: Iterable[str]) -> None:
    assert _log_path is not None
    # A full disk must not stop the run.
    with suppress(OSError), _log_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)


# --- log messages of libraries ----------------------------------------------------------------------------------------

_LIBRARIES = {
    "burnish": "",
    "transformers": "TRANSFORMERS_VERBOSITY",
    "datasets": "DATASETS_VERBOSITY",
    "peft": "",
    "accelerate": "",
}
"""Library -> environment variable that sets its log level on import and overrides its logger."""
# On import, also by peft for a model that is not quantized, bitsandbytes (0.50) warns that the optional library
# kernels is not installed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# At every product with an 8-bit weight, it warns that the input is converted to float16.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


class _OwnNotes(logging.Handler):
    """Prints messages of burnish's own loggers as notes and warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else note)(record.getMessage())


_own_notes = _OwnNotes()


def set_log_levels(options: ReportOptions, is_main: bool, is_node_main: bool) -> None:
    """Apply ``log_level`` or ``log_level_replica``; "passive" changes nothing.

    The main process also prints the messages of burnish's own loggers.
    """
    if is_main:
        logging.getLogger("burnish").addHandler(_own_notes)  # adding the same handler again has no effect
    speaks = is_node_main if options.log_on_each_node else is_main
    level = options.log_level if speaks else options.log_level_replica
    if level == "passive":
        return
    for library, variable in _LIBRARIES.items():
        logging.getLogger(library).setLevel("DEBUG" if level == "detail" else level.upper())
        if variable:
            os.environ.setdefault(variable, level)
