"""Terminal input and output of a chat: lines with history, and output with visible control characters.

A model cannot move the cursor, change the title or write to the clipboard: an escape character in its text is shown as
``␛``.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Final, TextIO

from burnish.report.streams import say, visible

_COLORS: Final = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_HISTORY_LINES = 1000
_FENCE = "```"
_QUOTES = '"""'


def _wrapped_line(line: str) -> str:
    width = get_terminal_size().columns - 1
    column = len(line) - len(line.split("  ", 1)[-1].lstrip()) if "  " in line else 0
    indent = " " * (column if column < width // 2 else 4 if column else 0)
    return "\n".join(wrap(line, max(width, 20), subsequent_indent=indent, break_long_words=False)) if line else line


def is_typed() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


class Console:
    """A terminal, or a replacement for one.

    Args:
        history: file with the lines that were typed; None keeps none.
        out: output stream. Default: standard output.
    """

    def __init__(self, history: Path | None = None, out: TextIO | None = None) -> None:
        self.out: TextIO | None = out or sys.stdout  # None if the parent process closed it
        is_terminal = self.out is not None and self.out.isatty()
        self.has_colors = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._history = history
        self._in_fence = False
        self._line = ""
        if is_typed():
            self._begin_history()

    # --- output -------------------------------------------------------------------------------------------------------

    def say(self, text: str = "", color: str = "", end: str = "\n") -> None:
        say(self.colorize(visible(text), color), self.out, must=True, end=end)

    def print_wrapped(self, text: str, color: str = "") -> None:
        """Print text wrapped to the width of the terminal. Columns of tables are preserved."""
        self.say("\n".join(_wrapped_line(line) for line in text.splitlines()), color)

    def colorize(self, text: str, color: str) -> str:
        if not (color and text and self.has_colors):
            return text
        return f"\033[{_COLORS[color]}m{text}\033[0m"

    def stream(self, text: str, color: str = "") -> None:
        """Print a piece of a response as it arrives. Code fences are the only markup that is colored."""
        if color or not self.has_colors:
            self.say(text, color, end="")
            return
        for part in visible(text).splitlines(keepends=True):
            self._line += part
            is_code = self._in_fence or self._line.lstrip().startswith(_FENCE)
            say(self.colorize(part, "cyan") if is_code else part, self.out, must=True, end="")
            if part.endswith("\n"):
                self._in_fence ^= self._line.lstrip().startswith(_FENCE)
                self._line = ""

    def end_stream(self) -> None:
        self._in_fence, self._line = False, ""
        self.say()

    # --- input --------------------------------------------------------------------------------------------------------

    def ask(self, prompt: str, prefill: str = "") -> str:
        """Read a message. A backslash at the end continues the line; triple quotes enclose several lines.

        Args:
            prompt: prompt to print.
            prefill: initial text of the line, which can be edited.
        Raises:
            EOFError: at the end of the input.
            KeyboardInterrupt: for Ctrl-C.
        """
        line = self._read(prompt, prefill)
        if line.strip().startswith(_QUOTES):
            return self._quote(line.strip().removeprefix(_QUOTES))
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read("... ")
        return "\n".join([*lines, line])

    def _quote(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._read("... ")
        return "\n".join([*lines, line.rstrip().removesuffix(_QUOTES)]).strip("\n")

    def _read(self, prompt: str, prefill: str = "") -> str:
        if not prefill or not is_typed():
            return input(prompt)
        import readline

        readline.set_startup_hook(lambda: readline.insert_text(prefill.replace("\n", " ")))
        try:
            return input(prompt)
        finally:
            readline.set_startup_hook()

    def _begin_history(self) -> None:
        try:
            import readline
        except ImportError:  # not available on Windows
            return
        if self._history is not None:
            with suppress(OSError):
                readline.read_history_file(self._history)
        readline.set_history_length(_HISTORY_LINES)

    def keep_history(self) -> None:
        """Save the lines that were typed, readable by this user only."""
        if self._history is None or not is_typed():
            return
        with suppress(ImportError, OSError):
            import readline

            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._history.chmod(0o600)
            readline.write_history_file(self._history)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "burnish" / "chat_history"
