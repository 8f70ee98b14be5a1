"""Write sections of docs/benchmarks.md, with date, machine and versions.

Text outside of the markers is not changed, nor are sections that were not measured: each has its own date.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from figures import Round

from burnish.parallel.precision import cpu_instructions, has_bfloat16, has_fast_bfloat16

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def provenance(rounds: Sequence[Round], arguments: Sequence[str], count: int) -> str:
    """Return a line with date, machine, versions and the command.

    Args:
        arguments: arguments of ``make bench`` that measure this part.
        count: number of rounds.
    """
    versions: dict[str, set[str]] = {}
    for figures in (figures for results in rounds for figures in results.values()):
        for library, number in figures.get("versions", {}).items():
            versions.setdefault(library, set()).add(number)
    listed = ", ".join(f"{library} {' and '.join(sorted(numbers))}" for library, numbers in sorted(versions.items()))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor()}; {count} round{'s' * (count > 1)}; {listed}. "
        f'Reproduce with: `make bench WHAT="{" ".join(arguments)}"`.'
    )


def processor() -> str:
    """Return the name of the processor and the instructions that matrix products use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    bfloat16 = "in hardware" if has_bfloat16() else "emulated"
    slower = ", slower than float32" if has_bfloat16() and not has_fast_bfloat16() else ""
    return f"{name} ({cpu_instructions()}; bfloat16 {bfloat16}{slower})"


def write_section(part: str, text: str, document: Path = DOCUMENT) -> None:
    """Replace the text between the markers of ``part``."""
    begin, end = f"<!-- {part}: made by make bench -->", f"<!-- end of {part} -->"
    content = document.read_text()
    before, after = content.split(begin)[0], content.split(end)[1]
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")
