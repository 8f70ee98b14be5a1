"""How an explanation looks: calm columns in a terminal, the same words as plain lines anywhere else.

In: the sections and samples of ``explain.py``. Out: text on standard output. In a terminal a trained token is bold and
green; without colours it stands between ⟦ and ⟧.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from burnish.report.console import is_terminal

if TYPE_CHECKING:
    from rich.text import Text

_LABEL_WIDTH = 17
_WIDEST = 118
_OPEN, _CLOSE = "⟦", "⟧"
_LONGEST_PIECE = 600
"""Characters of one piece of a sample that are shown; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Line:
    """One thing that is known. ``where`` says who set it."""

    label: str
    text: str
    where: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """One row. ``pieces``: text, and whether it is trained."""

    title: str
    pieces: list[tuple[str, bool]]


def show(sections: Sequence[Section], samples: Sequence[Sample]) -> None:
    """Print it all."""
    if is_terminal(sys.stdout):
        from rich.console import Console

        screen = Console()
        screen.print(drawn(sections, samples, screen.width), soft_wrap=True, highlight=False)
    else:
        print(plain(sections, samples))


def plain(sections: Sequence[Section], samples: Sequence[Sample], width: int = 100) -> str:
    """Without colours."""
    blocks = ["\n".join([section.title, *_section_lines(section, width)]) for section in sections]
    blocks += [
        f"{sample.title}, what is trained in {_OPEN} {_CLOSE}\n{_indented(_marked(sample))}" for sample in samples
    ]
    return "\n\n".join(blocks)


def _section_lines(section: Section, width: int) -> Iterator[str]:
    for line in section.lines:
        where = f"  ({line.where})" if line.where else ""
        yield from _wrapped(line.label, line.text + where, width)


def _wrapped(label: str, text: str, width: int) -> Iterator[str]:
    """``label   text``, its further lines under the text. A long label has a line of its own."""
    indent = 2 + _LABEL_WIDTH if label else 2
    room = max(30, min(width, _WIDEST) - indent)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    if len(label) >= _LABEL_WIDTH:
        yield f"  {label}"
        yield " " * indent + lines[0]
    else:
        yield f"  {label:<{indent - 2}}{lines[0]}"
    yield from (" " * indent + line for line in lines[1:])


def _marked(sample: Sample) -> str:
    return "".join(f"{_OPEN}{_short(text)}{_CLOSE}" if trained else _short(text) for text, trained in sample.pieces)


def _short(text: str) -> str:
    if len(text) <= _LONGEST_PIECE:
        return text
    half = _LONGEST_PIECE // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip("\n"), "  ", lambda line: True)


# --- colours ----------------------------------------------------------------------------------------------------------


def drawn(sections: Sequence[Section], samples: Sequence[Sample], width: int) -> Text:
    """With colours: titles bold, labels and places dim, what is trained green."""
    from rich.text import Text

    text = Text()
    for section in sections:
        text.append(f"\n{section.title}\n", style="bold")
        for line in section.lines:
            text.append_text(_drawn_line(line, width))
    for sample in samples:
        text.append(f"\n{sample.title}", style="bold").append(", what is trained in ").append(
            "green", style="bold green"
        )
        text.append("\n").append_text(_drawn_sample(sample)).append("\n")
    return text


def _drawn_line(line: Line, width: int) -> Text:
    """The line as ``plain`` lays it out, coloured by where its parts fall."""
    from rich.text import Text

    where = f"  ({line.where})" if line.where else ""
    text = Text("\n".join(_wrapped(line.label, line.text + where, width)) + "\n")
    text.stylize("cyan", 2, 2 + len(line.label))
    if where:
        begin = text.plain.rfind("(")
        text.stylize("dim", begin)
    return text


def _drawn_sample(sample: Sample) -> Text:
    from rich.text import Text

    text = Text("  ")
    for piece, trained in sample.pieces:
        shown = _short(piece).replace("\n", "\n  ")
        text.append(shown, style="bold green" if trained else "dim")
    return text
