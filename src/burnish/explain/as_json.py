"""The output of ``burnish explain`` as JSON, for editors and web pages.

In: a plan. Out: ``{"yaml", "command", "problems", "notes", "sections", "steps", "memory", "disk", "rows"}``. For a
refused run: the problems, each with the option that causes it.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from burnish.checkpoint.checkpoint import output_folder
from burnish.config.errors import UserError
from burnish.config.options import specs
from burnish.config.secrets import mask_json
from burnish.data.batches.batching import sequences_by_name
from burnish.data.images.image_file import images_of
from burnish.data.rows.row_set import ListedRows
from burnish.explain.explain import first_of_pack, memory_terms_of, pieces_of, schedule_factors, sections
from burnish.loop.types import Row
from burnish.report.metadata import given_yaml
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan, locate_problems
from burnish.run.plan.resources import available_memory, disk_of, free_disk
from burnish.run.prepare import Prepared, prepare

_NUM_CURVE_POINTS = 64


def explained_parts(chosen: Plan, num_rows: int = 2, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield parts of the result as they become available. The first one depends on the options only.

    Raises:
        UserError: if ``burnish train`` would refuse the run.
    """
    values = {name: getattr(chosen.options, name) for name in chosen.provenance if name in specs(RunOptions)}
    values = mask_json(values)
    yield {"yaml": given_yaml(values, {}), "command": command_of(values), "problems": [], "notes": list(chosen.notes)}
    prepared = prepare(chosen)
    yield {
        "notes": [*chosen.notes, *prepared.notes],
        "dropped": prepared.stats.sentences(),
        "sections": [
            {"title": section.title, "lines": [[line.label, line.text, line.where] for line in section.lines]}
            for section in sections(chosen, prepared)
        ],
        "steps": _steps(chosen, prepared),
        "rows": rows_of(prepared, num_rows, seed),
    }
    yield _resources(chosen, prepared)


def explain_as_object(chosen: Plan, num_rows: int = 2) -> dict[str, Any]:
    """All parts of the result as one object. For a refused run, its problems."""
    found: dict[str, Any] = {}
    try:
        with locate_problems(chosen.provenance):
            for part in explained_parts(chosen, num_rows):
                found |= part
    except UserError as error:
        found |= {"problems": problems_of(error)}
    return found


def problems_of(error: UserError) -> list[dict[str, str]]:
    """Each problem as JSON data, with the first of its options."""
    return [
        {"option": next(iter(one.options), ""), "sentence": " ".join(filter(None, (one.what, one.why))),
         "remedy": one.remedy, "where": one.where}
        for one in error.problems
    ]  # fmt: skip


def command_of(values: Mapping[str, Any]) -> str:
    """The same run as a shell command."""
    argv = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    return " ".join(["burnish train", *map(shlex.quote, argv)])


def _steps(chosen: Plan, prepared: Prepared) -> dict[str, Any]:
    steps, options = prepared.steps, chosen.options
    found = {"total": steps.max_steps, "per_epoch": steps.steps_per_epoch, "rows": steps.rows}
    curve = (
        schedule_factors(options, steps.schedule_steps, _NUM_CURVE_POINTS)
        if trains(options) and steps.max_steps > 0
        else []
    )
    return {**found, "curve": [options.learning_rate * factor for factor in curve]}


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
    """The longest row, the shortest one and some random ones, with both responses of a pair. Each row is a list of
    pieces of text with their ids and whether they are trained.
    """
    rows = prepared.sample if len(prepared.sample) else next(iter(prepared.eval_rows.values()), ListedRows([]))
    if not len(rows):
        return []
    lengths = list(rows.lengths)
    ends = {"longest": lengths.index(max(lengths)), "shortest": lengths.index(min(lengths))}
    drawn = random.Random(seed).sample(range(len(rows)), min(num_rows, len(rows)))  # noqa: S311  (a choice to look at)
    named = [(f"{place + 1}", place) for place in drawn]
    return [
        {"title": f"{title}, {name}" if name else title, "number": place + 1, "of": len(rows),
         "tokens": len(answer["input_ids"]), **_row_pieces(first_of_pack({**rows[place], **answer}), prepared)}
        for title, place in [*named, *ends.items()]
        for name, answer in sequences_by_name(rows[place]).items()
    ]  # fmt: skip


def _row_pieces(row: Row, prepared: Prepared) -> dict[str, Any]:
    """The pieces of a row, and for each image the number of its piece and its path."""
    pieces, images = pieces_of(row, prepared.tokenizer, prepared.family), images_of(row)
    begins = list(accumulate((len(ids) for _, _, ids in pieces), initial=0))
    placed = [(begins.index(image.begin), image.path) for image in images]
    return {"pieces": pieces, **({"images": placed} if placed else {})}


def as_json(planned: Callable[[], Plan]) -> tuple[str, int]:
    """The output of ``burnish explain --json`` without secrets, and its exit status: 2 if the run would be refused."""
    try:
        found = explain_as_object(planned())
    except UserError as error:
        found = {"problems": problems_of(error)}
    return json.dumps(mask_json(found), ensure_ascii=False, indent=1), 2 if found["problems"] else 0
