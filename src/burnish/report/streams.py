"""Write text to a terminal, a pipe or a file, which may lack characters, be full, or be closed.

    say(text, stream)             ignores failures: training continues when its terminal is gone
    say(text, stream, must=True)  raises on failure: the text is the result of the command

Characters that the stream's encoding lacks are replaced, and secrets are masked.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from burnish.config.secrets import without_secrets

_ASCII_REPLACEMENTS = str.maketrans(
    {"⟦": "[[", "⟧": "]]", "↵": "\\n", "…": "...", "→": "->", "·": ".", "×": "x", "─": "-", "━": "#",
     "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#"}
)  # fmt: skip

_CONTROL_CHARACTERS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys((*range(128, 160), 0x202A, 0x202B, 0x202D, 0x202E, *range(0x2066, 0x206A)), 0xFFFD)
)


class OutputError(OSError):
    """Raised if the result of a command cannot be printed, for example because standard output is full.

    The message is meant for the user.
    """


def say(text: str, stream: TextIO | None, *, must: bool = False, end: str = "\n", masks_secrets: bool = True) -> None:
    """Write a line, or with another ``end`` a part of one.

    Args:
        text: text to write.
        stream: output stream; None, if the parent process closed it, writes nothing.
        must: raise an error if the text cannot be written.
        end: text after it.
        masks_secrets: mask secrets. A server disables this to show the key that it generated.
    Raises:
        BrokenPipeError: with ``must``, if the reader is gone.
        OutputError: with ``must``, if the text cannot be written for another reason.
    """
    if stream is None or stream.closed:
        return
    try:
        print(encodable(without_secrets(text) if masks_secrets else text, stream), end=end, file=stream, flush=True)
    except OSError as error:
        redirect_to_null(stream)
        if must and isinstance(error, BrokenPipeError):
            raise
        if must:
            name = "Standard output" if stream is sys.stdout else "Standard error"
            raise OutputError(f"{name} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def visible(text: str) -> str:
    """Return ``text`` with control characters replaced by visible symbols, except line breaks and tabs.

    Text from a file or a model could otherwise move the cursor, clear the screen or reorder what is shown.
    """
    return text.translate(_CONTROL_CHARACTERS)


def encodable(text: str, stream: TextIO) -> str:
    """Return ``text`` with characters that the stream's encoding lacks replaced by plain characters or escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_ASCII_REPLACEMENTS).encode(encoding, "backslashreplace").decode(encoding)


def can_draw(stream: TextIO) -> bool:
    """Return whether the stream's encoding has the characters for bars and markers."""
    return encodable("⟦▁█⟧", stream) == "⟦▁█⟧"


def redirect_to_null(stream: TextIO | None) -> None:
    """Redirect a broken stream to the null device; otherwise Python reports an error when flushing it at exit."""
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    except (OSError, ValueError):  # the stream has no file, or no more files may be opened
        return
