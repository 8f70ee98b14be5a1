"""Output of the demos: held-out questions with the responses before and after training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUNDLED = Path(__file__).parent
SHOWN = 6
"""Number of held-out questions printed with their responses."""


@dataclass(frozen=True)
class DemoQuestion:
    prompt: str
    answer: str
    wrong: str = ""


def share_exact(questions: list[DemoQuestion], found: list[str]) -> float:
    """Return the fraction of responses that equal the expected answer exactly, in [0, 1]."""
    return sum(q.answer == text for q, text in zip(questions, found, strict=True)) / len(questions)


def report(questions: list[DemoQuestion], before: list[str], after: list[str], noun: str = "question") -> str:
    """Return a table of questions spread over the set, and the scores before and after."""
    lines = [f"\n{noun:<46}{'before':<16}{'after':<20}"]
    for index in range(0, len(questions), max(1, len(questions) // SHOWN))[:SHOWN]:
        question = questions[index]
        mark = "right" if after[index] == question.answer else f"wrong, expected {question.answer}"
        prompt = cut(question.prompt.replace("\n", " "), 44)
        lines.append(f"{prompt:<46}{cut(before[index], 14):<16}{cut(after[index], 18):<20}{mark}")
    scores = f"{share_exact(questions, before):.2f} before, {share_exact(questions, after):.2f} after"
    return "\n".join([*lines, f"\nexact match on {len(questions)} held-out {noun}s: {scores}"])


def cut(text: str, width: int) -> str:
    visible = " ".join(text.split())
    return visible if len(visible) <= width else visible[: width - 1] + "…"
