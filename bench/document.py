"""Text -> a part of docs/benchmarks.md, with the date, the machine and the versions.

What stands outside of the markers is written by hand and stays, and so do the parts that were not measured this time:
each says its own date.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from figures import Round

from burnish.parallel.precision import cpu_instructions, has_fast_bfloat16

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def where(rounds: Sequence[Round], words: Sequence[str], count: int) -> str:
    """The date, the machine, the versions and the command.

    Args:
        words: what measures this part alone.
        count: of rounds.
    """
    versions: dict[str, set[str]] = {}
    for figures in (figures for found in rounds for figures in found.values()):
        for library, number in figures.get("versions", {}).items():
            versions.setdefault(library, set()).add(number)
    named = ", ".join(f"{library} {' and '.join(sorted(numbers))}" for library, numbers in sorted(versions.items()))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor()}; {count} round{'s' * (count > 1)}; {named}. "
        f'Reproduce with: `make bench WHAT="{" ".join(words)}"`.'
    )


def processor() -> str:
    """The processor's own name, and the instructions that matrix products are computed with in this environment."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{named} ({cpu_instructions()}; bfloat16 {'in hardware' if has_fast_bfloat16() else 'emulated'})"


def write(part: str, text: str, document: Path = DOCUMENT) -> None:
    """Put ``text`` between the markers of ``part``."""
    begin, end = f"<!-- {part}: made by make bench -->", f"<!-- end of {part} -->"
    whole = document.read_text()
    before, after = whole.split(begin)[0], whole.split(end)[1]
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")
