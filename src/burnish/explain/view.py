"""Print an explanation: columns and colors in a terminal, the same text in plain lines elsewhere.

In: the sections and samples of ``explain.py``. Out: text on standard output. Trained tokens are bold and green in a
terminal, and between ⟦ and ⟧ without colors.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from burnish.config.secrets import without_secrets
from burnish.report.console import is_terminal, print_result
from burnish.report.streams import can_draw, visible

if TYPE_CHECKING:
    from rich.text import Text

_LABEL_WIDTH = 17
_WIDEST_LABEL = 32
_WIDEST = 118
_OPEN, _CLOSE = "⟦", "⟧"
_LONGEST_PIECE = 600
"""Maximum number of characters of a sample's piece. The middle of a longer one is omitted."""


@dataclass(frozen=True)
class Line:
    """One line of an explanation. ``where`` is the location of the option's value."""

    label: str
    text: str
    where: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """One row. ``title``: its name and the meaning of marks; ``pieces``: text, and whether it is marked."""

    title: str
    pieces: list[tuple[str, bool]]


def show(sections: Sequence[Section], samples: Sequence[Sample]) -> None:
    """Print everything. Raises OSError if standard output cannot be written."""
    if is_terminal(sys.stdout) and can_draw(sys.stdout):
        from rich.console import Console

        screen = Console()
        screen.print(styled_text(sections, samples, screen.width), soft_wrap=True, highlight=False)
    else:
        print_result(without_colors(sections, samples))


def without_colors(sections: Sequence[Section], samples: Sequence[Sample], width: int = 100) -> str:
    """The text without colors."""
    blocks = ["\n".join([section.title, *_section_lines(section, width)]) for section in sections]
    blocks += [f"{sample.title} in {_OPEN} {_CLOSE}\n{_indent(_mark_sample(sample))}" for sample in samples]
    return "\n\n".join(blocks)


def _section_lines(section: Section, width: int) -> Iterator[str]:
    for line in section.lines:
        yield from _wrap_line(line, width, label_width(section))


def label_width(section: Section) -> int:
    """Width of the label column of a section. The same in all sections without long labels."""
    longest = max((len(line.label) for line in section.lines), default=0)
    return min(max(_LABEL_WIDTH, longest + 2), _WIDEST_LABEL) if longest else 0


def _wrap_line(line: Line, width: int, labels: int) -> Iterator[str]:
    """Wrap ``label   text  (where)``. Continuation lines are aligned with the text. A label that is too long gets
    its own line."""
    width_left = max(30, min(width, _WIDEST) - labels - 2)
    text = visible(without_secrets(line.text))
    lines = textwrap.wrap(text, width_left, break_long_words=False, break_on_hyphens=False) or [""]
    if line.where:
        place = f"({_short_place(line.where)})"
        fits = len(lines[-1]) + 2 + len(place) <= width_left
        lines[-1:] = [f"{lines[-1]}  {place}"] if fits else [lines[-1], place]
    if len(line.label) >= labels > 0:
        yield f"  {line.label}"
        lines.insert(0, "")
    else:
        yield f"  {line.label:<{labels}}{lines[0]}"
    yield from (f"  {'':<{labels}}{further}" for further in lines[1:])


def _short_place(where: str) -> str:
    """Shorten the location of a value to the file's name: ``demo.yaml, line 5``."""
    return re.sub(r"[^\s]*/([^/\s]+, line \d+)", r"\1", where)


def _mark_sample(sample: Sample) -> str:
    return "".join(
        f"{_OPEN}{_visible(text, trained)}{_CLOSE}" if trained else _visible(text, trained)
        for text, trained in sample.pieces
    )


def _visible(text: str, trained: bool) -> str:
    """Mask secrets, shorten a long piece in the middle, and make control characters and trained line breaks visible."""
    text = without_secrets(text)
    if len(text) > _LONGEST_PIECE:
        half = _LONGEST_PIECE // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    text = visible(text)
    return text.replace("\n", "↵\n") if trained else text


def _indent(text: str) -> str:
    return textwrap.indent(text.rstrip("\n"), "  ", lambda line: True)


# --- colors ----------------------------------------------------------------------------------------------------------


def styled_text(sections: Sequence[Section], samples: Sequence[Sample], width: int) -> Text:
    """The text with colors: bold titles, cyan labels, dim locations, green trained tokens."""
    from rich.text import Text

    text = Text()
    for section in sections:
        text.append(f"\n{section.title}\n", style="bold")
        for line in section.lines:
            text.append_text(_drawn_line(line, width, label_width(section)))
    for sample in samples:
        text.append(f"\n{sample.title}", style="bold").append(" in ")
        text.append("green\n", style="bold green").append_text(_drawn_sample(sample, width)).append("\n")
    return text


def _drawn_line(line: Line, width: int, labels: int) -> Text:
    """One line in the layout of ``without_colors``, with colors."""
    from rich.text import Text

    text = Text("\n".join(_wrap_line(line, width, labels)) + "\n")
    text.stylize("cyan", 2, 2 + len(line.label))
    if line.where:
        text.stylize("dim", text.plain.rfind("("))
    return text


def _drawn_sample(sample: Sample, width: int) -> Text:
    from rich.text import Text

    shown = [_visible(piece, trained) for piece, trained in sample.pieces]
    folded, text, end = _with_line_breaks("".join(shown), width - 2), Text("  "), 0
    for piece, (_, trained) in zip(shown, sample.pieces, strict=True):
        begin, end = end, end + len(piece)
        text.append(folded[begin:end].replace("\n", "\n  "), style="bold green" if trained else "dim")
    text.rstrip()
    return text


def _with_line_breaks(text: str, width: int) -> str:
    """Replace spaces with line breaks to limit the line length. The number of characters does not change."""
    folded, start, space = list(text), 0, -1
    for place, character in enumerate(text):
        if character == "\n":
            start, space = place + 1, -1
        elif place - start >= width and space >= 0:
            folded[space] = "\n"
            start, space = space + 1, -1
        if character == " ":
            space = place
    return "".join(folded)
