"""The layout of a data set: as LLaMA-Factory's words describe it, or recognised from its first records.

In: format, columns and tags as given, and the first records. Out: a ``Layout``, checked against those records, so that
a name which does not fit is one problem and not one per record. Refused: columns that are not there, records that fit
no format or several, preferences and media, which belong to stages and models that burnish does not train.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from burnish.core.errors import Problem, UserError, did_you_mean
from burnish.data.formats import FORMATS
from burnish.data.json_files import Values
from burnish.data.records import Layout, listed

if TYPE_CHECKING:
    from burnish.data.dataset_info import Source

MEDIA = ("images", "videos", "audios", "image", "video", "audio")
PREFERENCE = ("chosen", "rejected", "kto_tag")


def layout_of(source: Source, records: Sequence[Values], where: str) -> Layout:
    """How the records of a data set are to be read, going by what is said about it and by its first records.

    Where an entry of ``dataset_info.json`` names no columns, LLaMA-Factory's names stand for them, and nothing else is
    read; a column of pictures or the like is refused there too, as long as the columns are not named. Where nothing is
    said, the format is recognised, and optional columns are read if they are there.

    Raises:
        UserError: where the records do not fit.
    """
    is_default = source.is_described and (source.formatting is not None or _has_required("alpaca", records))
    if source.columns is not None or is_default:
        layout = named_layout(source.formatting or "alpaca", source.columns, source.tags)
        if source.columns is None:
            layout = replace(layout, media=tuple(column for column in _columns_of(records) if column in MEDIA))
        _check(layout, records, where, is_given=source.columns is not None)
        return layout
    return _recognised(records, where, source)


def named_layout(
    name: str, columns: Mapping[str, str | None] | None = None, tags: Mapping[str, str | None] | None = None
) -> Layout:
    """The layout of the format ``name``. Where ``columns`` are given, a part that they do not name has no column."""
    traits = FORMATS.get(name).traits
    given = {part: column for part, column in (traits["columns"] if columns is None else columns).items() if column}
    spoken = {tag: word for tag, word in (tags or {}).items() if word}
    parts = {part: column for part, column in given.items() if part not in MEDIA}
    media = tuple(column for part, column in given.items() if part in MEDIA)
    required = frozenset(parts.keys() - traits.get("optional", {}).keys())
    return Layout(name, parts, required, {**traits.get("tags", {}), **spoken}, media)


def _check(layout: Layout, records: Sequence[Values], where: str, is_given: bool) -> None:
    """Hold a layout against the first records of its data set.

    Args:
        is_given: the columns were named by the user: then even an optional one must be in some record.

    Raises:
        UserError: with the columns that were found and those that were expected.
    """
    found = _columns_of(records)
    first = next(iter(FORMATS.get(layout.format).traits["columns"]))
    if first not in layout.columns:
        raise UserError(
            Problem(
                f'"columns" must name the column of "{first}" for the format {layout.format}. Found: {listed(found)}.',
                where=where,
            )
        )
    missing = [column for part, column in layout.columns.items() if part in layout.required and column not in found]
    if missing:
        raise UserError(missing_columns(layout, missing, records, where))
    if is_given:
        layout.awaited.update(layout.columns.values())
    _note_unused(layout, found)


def _columns_of(records: Iterable[Values]) -> list[str]:
    return list(dict.fromkeys(column for values in records for column in values))


def _note_unused(layout: Layout, found: Iterable[str]) -> None:
    """A column that the format knows by this name, and nobody asked for."""
    known = {**FORMATS.get(layout.format).traits.get("optional", {}), **{column: column for column in MEDIA}}
    for part, column in known.items():
        if column in found and part not in layout.columns and column not in layout.media:
            layout.notes[f'the column "{column}" is not used: "columns" has no "{part}"'] = None


def missing_columns(layout: Layout, missing: Iterable[str], records: Sequence[Values], where: str) -> Problem:
    """The columns of the records are not those of the layout."""
    found = _columns_of(records)
    guesses = "".join(did_you_mean(column, found) for column in islice(missing, 1))
    proposal = proposed_columns(found) if layout.format == "alpaca" else {}
    others = [name for name in FORMATS.names() if name != layout.format and _has_required(name, records)]
    remedy = f'Name them: "columns": {json.dumps(proposal)}' if proposal else ""
    if others:
        remedy = f'They look like the format {others[0]}: "formatting": "{others[0]}".'
    return Problem(
        f"the records have no column {_quoted(missing)}. Found: {listed(found)}.{guesses}",
        where=where,
        why=f"Expected for the format {layout.format}: {listed(layout.columns.values())}.",
        remedy=remedy,
    )


def _has_required(name: str, records: Sequence[Values]) -> bool:
    """Whether the columns that a format cannot do without, under their usual names, are in the first records."""
    layout = named_layout(name)
    return all(any(layout.columns[part] in values for values in records) for part in layout.required)


def _recognised(records: Sequence[Values], where: str, source: Source) -> Layout:
    """The layout that the first record of a known shape asks for; of the format that the source names, if it does."""
    for values in records:
        claims = {member.name: columns for member in FORMATS if (columns := _claim(member.traits, values))}
        if source.formatting is not None:
            claims = {name: columns for name, columns in claims.items() if name == source.formatting}
        elif claims and is_preference(values):
            raise UserError(preference_problem(where, values, readable_as=next(iter(claims))))
        if len(claims) > 1:
            claims.pop("text", None)  # beside others, a column "text" holds the same once more, rendered
        if len(claims) > 1:
            raise UserError(_ambiguous(where, values, claims))
        for name, columns in claims.items():
            return _with_optional(name, columns, source.tags, records)
    if source.formatting is not None:
        layout = named_layout(source.formatting, None, source.tags)
        _check(layout, records, where, is_given=False)
        return layout
    preference = next(filter(is_preference, records), None)
    problem = preference_problem(where, preference) if preference else _unknown(where, records, source.is_described)
    raise UserError(problem)


def _claim(traits: Mapping[str, Any], values: Values) -> Mapping[str, str] | None:
    if "finds" in traits:
        found: Mapping[str, str] | None = traits["finds"](values)
        return found
    optional = traits.get("optional", {})
    needed = {part: column for part, column in traits["columns"].items() if part not in optional}
    return needed if all(column in values for column in needed.values()) else None


def _with_optional(
    name: str, columns: Mapping[str, str], tags: Mapping[str, str | None] | None, records: Sequence[Values]
) -> Layout:
    """The layout with all optional columns, which any record may have, and a note of what was made of the first."""
    traits, found = FORMATS.get(name).traits, _columns_of(records)
    optional = {**traits.get("optional", {}), **{column: column for column in MEDIA}}
    layout = named_layout(name, {**traits["columns"], **optional, **columns}, tags)
    unused = [column for column in found if column not in (*layout.columns.values(), *layout.media)]
    rest = f"; not used: {listed(unused)}" if unused else ""
    read = [column for column in layout.columns.values() if column in found]
    layout.notes[f"read as {name} ({listed(read)}){rest}"] = None
    return layout


def is_preference(values: Values) -> bool:
    """Whether a record holds two answers to choose from, or a verdict on one."""
    verdicts = (values.get("label"), values.get("kto_tag"))
    return {"chosen", "rejected"} <= values.keys() or any(isinstance(verdict, bool) for verdict in verdicts)


def preference_problem(where: str, columns: Iterable[str], readable_as: str = "") -> Problem:
    return Problem(
        f"the records hold preferences ({listed(columns)}). They are for reward modelling, DPO or KTO, which burnish "
        "does not train yet.",
        where=where,
        remedy=f"To learn its conversations as they are, set formatting: {readable_as}." if readable_as else "",
    )


def _ambiguous(where: str, values: Values, claims: Mapping[str, Mapping[str, str]]) -> Problem:
    readings = "; ".join(f"{name} ({listed(columns.values())})" for name, columns in claims.items())
    return Problem(
        f"the records can be read in more than one way: {readings}. Found: {listed(values)}.",
        where=where,
        remedy=f"Choose one, for example formatting: {next(iter(claims))}",
    )


def _unknown(where: str, records: Sequence[Values], is_described: bool) -> Problem:
    found = _columns_of(records)
    known = "; ".join(f"{name}: {_needed(name)}" for name in FORMATS.names())
    proposal = json.dumps(proposed_columns(found) or {"prompt": "...", "response": "..."})
    remedy = f"Say which is which: formatting: alpaca, columns: {proposal}"
    if is_described:
        remedy = f'Say in the entry which is which: "formatting": "alpaca", "columns": {proposal}'
    return Problem(f"no known format fits the columns. Found: {listed(found)}.", where, f"Known: {known}.", remedy)


def _needed(name: str) -> str:
    layout = named_layout(name)
    return " and ".join(layout.columns[part] for part in layout.columns if part in layout.required)


_SYNONYMS = {
    "prompt": ("instruction", "prompt", "question", "query", "user", "problem", "input", "source"),
    "response": ("output", "response", "answer", "completion", "assistant", "solution", "reply", "target"),
    "system": ("system",),
}


def proposed_columns(found: Iterable[str]) -> dict[str, str]:
    """Which columns could be question and answer, going by their names; empty where there is no fair guess."""
    left, proposal = list(found), {}
    for part, words in _SYNONYMS.items():
        column = next((c for word in words for c in left if word in c.lower()), None)
        if column is not None:
            proposal[part] = column
            left.remove(column)
    return proposal if {"prompt", "response"} <= proposal.keys() else {}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
