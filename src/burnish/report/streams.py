"""Writing text to a terminal, a pipe or a file, which may lack characters, be full, or be gone.

    say(text, stream)             writes if it can: training goes on when its terminal has gone
    say(text, stream, must=True)  raises where it cannot: the text is the whole result of the command

Characters that the stream's encoding lacks are replaced by ones that it has. Secrets are replaced too.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from burnish.config.secrets import without_secrets

_PLAIN = str.maketrans(
    {"⟦": "[[", "⟧": "]]", "↵": "\\n", "…": "...", "→": "->", "·": ".", "×": "x", "─": "-", "━": "#",
     "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#"}
)  # fmt: skip


class OutputError(OSError):
    """Raised where the result of a command cannot be printed: standard output is full, for example. Its message is
    meant for the user."""


def say(text: str, stream: TextIO | None, *, must: bool = False, end: str = "\n", blots: bool = True) -> None:
    """Write a line, or with another ``end`` a piece of one.

    Args:
        stream: None where the parent process closed it; then nothing is written.
        blots: replace secrets. Without it a server shows the key that it made, which nobody knows otherwise.
    Raises:
        BrokenPipeError: under ``must``, where the reader has gone.
        OutputError: under ``must``, where it cannot be written for another reason.
    """
    if stream is None or stream.closed:
        return
    try:
        print(encodable(without_secrets(text) if blots else text, stream), end=end, file=stream, flush=True)
    except OSError as error:
        let_go(stream)
        if must and isinstance(error, BrokenPipeError):
            raise
        if must:
            name = "Standard output" if stream is sys.stdout else "Standard error"
            raise OutputError(f"{name} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def encodable(text: str, stream: TextIO) -> str:
    """Return ``text`` in characters that the stream's encoding has; others become plain characters or escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


def can_draw(stream: TextIO) -> bool:
    """Return whether the stream's encoding has the characters for bars and marks."""
    return encodable("⟦▁█⟧", stream) == "⟦▁█⟧"


def let_go(stream: TextIO | None) -> None:
    """Redirect a broken stream to the null device, or Python complains again when it flushes the stream at exit."""
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    except (OSError, ValueError):  # no file behind it, or no file may be opened any more
        return
