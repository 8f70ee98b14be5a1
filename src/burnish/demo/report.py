"""What the demos share: the bundled configuration, and a table of held-out questions with their responses."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.run.plan.config_files import read_config, split_arguments
from burnish.run.plan.plan import Plan, plan

BUNDLED = Path(__file__).parent
SHOWN = 6
"""Number of held-out questions printed with their responses."""


def demo_plan(
    argv: list[str], name: str = "demo.yaml", model: Path = BUNDLED / "model", data: Path = BUNDLED / "data"
) -> Plan:
    """Return the plan of a bundled configuration with the given model and data folders. Options in ``argv`` take
    precedence."""
    places = {"model_name_or_path": model, "dataset_dir": data}
    config, flags = split_arguments(argv)
    if config is not None:
        what = f"burnish demo has a fixed configuration and does not accept a file. Received: {config}."
        raise UserError(what, remedy=f"Try: burnish train {config}")
    named = {name: RawValue(str(path), "burnish demo") for name, path in places.items()}
    return plan({**read_config(BUNDLED / name), **named, **flags})


@dataclass(frozen=True)
class DemoQuestion:
    prompt: str
    answer: str
    wrong: str = ""


def exact_match_rate(questions: list[DemoQuestion], found: list[str]) -> float:
    """Return the fraction of responses that equal the expected answer exactly, in [0, 1]."""
    return sum(q.answer == text for q, text in zip(questions, found, strict=True)) / len(questions)


def questions_in_table(questions: list[DemoQuestion]) -> list[int]:
    """Return the indices of the questions in the table, spread over the set."""
    return list(range(0, len(questions), max(1, len(questions) // SHOWN)))[:SHOWN]


def answered_right(questions: list[DemoQuestion], after: list[str]) -> str | None:
    """Return a question of one line in the table that was answered correctly, or None."""
    right = [questions[at].prompt for at in questions_in_table(questions) if after[at] == questions[at].answer]
    return next((prompt for prompt in reversed(right) if "\n" not in prompt), None)


def report(questions: list[DemoQuestion], before: list[str], after: list[str], noun: str = "question") -> str:
    """Return a table of questions spread over the set, and the scores before and after."""
    lines = [f"\n{noun:<46}{'before':<16}{'after':<20}"]
    for index in questions_in_table(questions):
        question = questions[index]
        mark = "right" if after[index] == question.answer else f"wrong, expected {question.answer}"
        prompt = shortened_line(question.prompt.replace("\n", " "), 44)
        lines.append(f"{prompt:<46}{shortened_line(before[index], 14):<16}{shortened_line(after[index], 18):<20}{mark}")
    scores = f"{exact_match_rate(questions, before):.2f} before, {exact_match_rate(questions, after):.2f} after"
    return "\n".join([*lines, f"\nexact match on {len(questions)} held-out {noun}s: {scores}"])


def shortened_line(text: str, width: int) -> str:
    visible = " ".join(text.split())
    return visible if len(visible) <= width else visible[: width - 1] + "…"


def next_steps(commands: Sequence[str]) -> str:
    """Return the commands to go on with, in the form in which the shell finds burnish.

    Args:
        commands: arguments of burnish.
    """
    here = Path(sys.executable).with_name("burnish")
    found = shutil.which("burnish")
    short = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    burnish = "burnish" if found and Path(found).resolve() == here.resolve() else shlex.quote(str(short))
    return "\n".join([f"\nNext steps, from {Path.cwd()}:", *(f"  {burnish} {command}" for command in commands)])
