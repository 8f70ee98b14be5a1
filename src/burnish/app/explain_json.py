"""The explanation of a run as JSON, for editors and pages: the same that ``burnish explain`` prints.

    burnish explain run.yaml --json      one object
    burnish _planner                     an object in, objects out, line by line, with the libraries loaded once

In: a plan, or values as a form gives them. Out: ``{"yaml", "command", "problems", "notes", "sections", "steps",
"memory", "disk", "rows"}``; of what is refused, the problems, each with the option that it is about. Values of a form
are read as those of a file are, so there is one meaning and one sentence for each.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from burnish.app.checks import problems_in_files, trains
from burnish.app.columns import columns_of_file
from burnish.app.explain import memory_terms_of, sections
from burnish.app.form import form
from burnish.app.held_out import held_out
from burnish.app.options import RunOptions
from burnish.app.plan import Plan, aliases, placing, plan
from burnish.app.prepare import Prepared, prepare
from burnish.app.resources import (
    available_memory,
    disk_of,
    free_disk,
)
from burnish.core.checkpoint import output_folder
from burnish.core.errors import Problem, UserError
from burnish.core.options import Given, specs
from burnish.core.schedule import FOLLOWS_METRIC, lr_factor
from burnish.core.types import IGNORE_INDEX, Row
from burnish.data.rows.row_set import ListedRows
from burnish.report.journal import given_yaml

_POINTS = 64
FORM = "the form"


def explained(chosen: Plan, num_rows: int = 2, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Parts of the answer as they become known: first what the options alone say.

    Raises:
        UserError: where ``burnish train`` would refuse.
    """
    given = {name: getattr(chosen.options, name) for name in chosen.provenance if name in specs(RunOptions)}
    yield {"yaml": given_yaml(given, {}), "command": command_of(given), "problems": [], "notes": list(chosen.notes)}
    prepared = prepare(chosen)
    yield {
        "notes": [*chosen.notes, *prepared.notes],
        "dropped": prepared.tally.sentences(),
        "sections": [
            {"title": section.title, "lines": [[line.label, line.text, line.where] for line in section.lines]}
            for section in sections(chosen, prepared)
        ],
        "steps": _steps(chosen, prepared),
        "rows": rows_of(prepared, num_rows, seed),
    }
    yield _resources(chosen, prepared)


def whole(chosen: Plan, num_rows: int = 2) -> dict[str, Any]:
    """All parts of the answer as one; of a run that is refused, its problems."""
    found: dict[str, Any] = {}
    try:
        with placing(chosen.provenance):
            for part in explained(chosen, num_rows):
                found |= part
    except UserError as error:
        found |= {"problems": problems_of(error)}
    return found


def problems_of(error: UserError) -> list[dict[str, str]]:
    """Each problem with the option that it speaks of first."""
    return [
        {"option": option_of(one), "sentence": " ".join(filter(None, (one.what, one.why))), "remedy": one.remedy,
         "where": one.where}
        for one in error.problems
    ]  # fmt: skip


def option_of(problem: Problem) -> str:
    words = re.findall(r"\w+", f"{problem.what} {problem.where}")
    known = specs(RunOptions)
    named = [aliases().get(word, word) for word in words if word in known or word in aliases()]
    quoted = [word for word in named if f'"{word}"' in problem.what or "_" in word]
    return next(iter(quoted), "")


def command_of(given: Mapping[str, Any]) -> str:
    """The same run as one line for a shell."""
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    return " ".join(["burnish train", *map(shlex.quote, words)])


def _steps(chosen: Plan, prepared: Prepared) -> dict[str, Any]:
    steps, options = prepared.steps, chosen.options
    found = {"total": steps.max_steps, "per_epoch": steps.steps_per_epoch, "rows": steps.rows}
    if not trains(options) or options.lr_scheduler_type in FOLLOWS_METRIC or steps.max_steps < 1:
        return {**found, "curve": []}
    factor = lr_factor(options, steps.max_steps, options.learning_rate)
    places = [round(place * (steps.max_steps - 1) / (_POINTS - 1)) for place in range(_POINTS)]
    return {**found, "curve": [options.learning_rate * factor(place) for place in places]}


def _resources(chosen: Plan, prepared: Prepared) -> dict[str, Any]:
    options, sizes, formats = chosen.options, prepared.sizes, prepared.formats
    terms = memory_terms_of(chosen, prepared)
    return {
        "memory": {
            "terms": [{"name": term.name, "bytes": term.num_bytes, "why": term.reason} for term in terms],
            "total": sum(term.num_bytes for term in terms),
            "available": available_memory(options),
        },
        "disk": {
            "needed": disk_of(options, prepared.config, sizes, formats, prepared.steps),
            "free": free_disk(output_folder(options)),
        },
    }


def rows_of(prepared: Prepared, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """The longest row, the shortest, and some at random, each piece with its ids and whether it is trained."""
    rows = prepared.sample if len(prepared.sample) else next(iter(prepared.eval_rows.values()), ListedRows([]))
    if not len(rows):
        return []
    lengths = list(rows.lengths)
    ends = {"longest": lengths.index(max(lengths)), "shortest": lengths.index(min(lengths))}
    drawn = random.Random(seed).sample(range(len(rows)), min(num_rows, len(rows)))  # noqa: S311  (a choice to look at)
    named = [(f"{place + 1}", place) for place in drawn]
    return [
        {"title": title, "number": place + 1, "of": len(rows), "tokens": lengths[place],
         "pieces": pieces_of(rows[place], prepared.tokenizer)}
        for title, place in [*named, *ends.items()]
    ]  # fmt: skip


def pieces_of(row: Row, tokenizer: Any) -> list[list[Any]]:
    """``[text, is trained, ids]`` for each stretch of a row that is trained or is not."""
    end = row.get("seq_lengths", [len(row["input_ids"])])[0]
    found: list[list[Any]] = []
    for token, label in zip(row["input_ids"][:end], row["labels"][:end], strict=True):
        is_trained = label != IGNORE_INDEX
        if not found or found[-1][1] != is_trained:
            found.append(["", is_trained, []])
        found[-1][2].append(int(token))
    for piece in found:
        piece[0] = tokenizer.decode(piece[2], skip_special_tokens=False)
    return found


# --- line by line -----------------------------------------------------------------------------------------------------


def planner(asked: TextIO | None = None, told: TextIO | None = None) -> int:
    """Answer questions until none come: ``{"id", "values", "rows", "seed"}`` in, parts with the same id out, the last
    with ``"is_last": true``. What a question does wrong is part of its answer."""
    asked, told = asked or sys.stdin, told or sys.stdout
    for line in asked:
        question = json.loads(line)
        for part in _parts(question):
            told.write(json.dumps({"id": question["id"], **part}, ensure_ascii=False) + "\n")
            told.flush()
    return 0


def _parts(question: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if question.get("form"):
        yield {**form(), "is_last": True}
        return
    try:
        if question.get("columns_of"):
            yield {**columns_of_file(Path(question["columns_of"])), "is_last": True}
            return
        if question.get("held_out"):
            yield {**held_out(question["values"], question.get("number")), "is_last": True}
            return
        given = {name: Given(value, "") for name, value in question["values"].items()}
        chosen = plan(given, also=[problems_in_files])
        yield from explained(chosen, question.get("rows", 5), question.get("seed", 0))
        yield {"is_last": True}
    except UserError as error:
        yield {"problems": problems_of(error), "is_last": True}
    except (Exception, SystemExit) as error:  # a fault of one question must not end the process that answers the next
        what = f"burnish failed on this: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        yield {"problems": [{"option": "", "sentence": what, "remedy": "", "where": ""}], "is_last": True}


def as_json(planned: Callable[[], Plan]) -> tuple[str, int]:
    """The output of ``burnish explain --json``, and its exit status: 2 where the run would be refused."""
    try:
        found = whole(planned())
    except UserError as error:
        found = {"problems": problems_of(error)}
    return json.dumps(found, ensure_ascii=False, indent=1), 2 if found["problems"] else 0
