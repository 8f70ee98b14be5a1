"""Layout of a dataset: from its description (LLaMA-Factory's keys), or detected from its first records.

Each layout is the layout of a format (``named_layout``). Datasets of preferences (``_preference_layout``) differ from
others (``_plain_layout``, ``_detected_layout``) in the choice of the format and its columns. The layout is checked
against the first records (``_check``), so that a wrong column name is one error instead of one per record.
Errors: missing columns, records that match no format or several, preference data for other stages and vice versa.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.registry import Member
from burnish.data.reading.json_files import Values
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.formats import FORMATS, MESSAGES, Format
from burnish.data.sets.preferences import label_values
from burnish.data.sets.records import ALL_COLUMNS, ANSWERS, Layout, RecordNeeds, as_messages, list_columns
from burnish.utils.json_files import quote_value

MEDIA = ("images", "videos", "audios", "image", "video", "audio")
_MEDIA_COLUMNS = {column: column for column in MEDIA}
PREFERENCE = ("chosen", "rejected", "kto_tag", "margin")
_PAIR = ("chosen", "rejected")
_LABEL_COLUMNS = ("kto_tag", "label")


def layout_of(source: DataSource, records: Sequence[Values], where: str, needs: RecordNeeds | None = None) -> Layout:
    """Return the layout of a dataset, from its description and its first records.

    If an entry of ``dataset_info.json`` names no columns, LLaMA-Factory's default columns are used and no others are
    read. Without an entry, the format is detected and optional columns are read if they exist.

    Args:
        source: description of the dataset.
        records: its first records.
        where: name of the dataset in error messages.
        needs: requirements of the stage. Default: single responses.
    Raises:
        UserError: if the records do not match.
    """
    needs = needs or ANSWERS
    source = _separate_further_columns(source, needs)
    found = _columns_of(records)
    if needs.kind == "any":
        needs = replace(needs, kind=_kind_of(source, records))
    if missing := [column for column in needs.columns if column not in (*found, ALL_COLUMNS)]:
        what = f"stage: {needs.stage} requires the {_quote_columns(missing)}. Found: {list_columns(found)}."
        raise UserError(what, where=where, option="stage")
    choose = _preference_layout if needs.compares else _plain_layout
    layout = choose(source, records, where, needs)
    layout.awaited.update(source.further_columns.values())
    media = tuple(column for column in layout.media if column not in needs.columns)
    images, videos = (_media_column(kind, source.columns or {}, media, found) for kind in ("image", "video"))
    return replace(
        layout, needs=needs, media=media, images=images, videos=videos, reader=needs.reader,
        further_columns=source.further_columns,
    )  # fmt: skip


def _separate_further_columns(source: DataSource, needs: RecordNeeds) -> DataSource:
    """Return the source with the names of "columns" that are no part of any format in ``further_columns``, if the stage
    needs all columns. If there are only such names, the format is detected."""
    if ALL_COLUMNS not in needs.columns:
        return replace(source, further_columns={})
    defaults = (member.metadata.get(key, {}) for member in FORMATS for key in ("columns", "optional"))
    known = {part for parts in defaults for part in parts} | {*MEDIA, *PREFERENCE}
    named = source.columns or {}
    further = {part: column for part, column in named.items() if column and part not in known}
    further = {**source.further_columns, **further}
    parts = {part: column for part, column in named.items() if part not in further}
    return replace(source, columns=None if further and not parts else source.columns and parts, further_columns=further)


def _kind_of(source: DataSource, records: Sequence[Values]) -> str:
    """Detect the kind of records in a dataset (see ``RecordNeeds.kind``)."""
    named = source.columns or {}
    if source.ranking or all(named.get(part) for part in _PAIR):
        return "pairs"
    if source.columns is not None:
        has_response = any(named.get(part) for part in ("response", "messages", "text"))  # messages may end with one
        return "unpaired" if named.get("kto_tag") else "answers" if has_response else "prompts"
    if any(set(_PAIR) <= values.keys() for values in records):
        return "pairs"
    if any(map(is_preference, records)):
        return "unpaired"
    return "answers" if any(_matching_formats(values, ANSWERS) for values in records) else "prompts"


def _media_column(kind: str, named: Mapping[str, str | None], media: Sequence[str], found: Sequence[str]) -> str:
    """Return the column of images or videos that the dataset names, or that its first records have; "" for none."""
    columns = [c for c in (named.get(f"{kind}s"), named.get(kind), f"{kind}s", kind) if c is not None and c in media]
    return next((column for column in columns if column in found), next(iter(columns), ""))


# --- without preferences ----------------------------------------------------------------------------------------------


def _plain_layout(source: DataSource, records: Sequence[Values], where: str, needs: RecordNeeds) -> Layout:
    """Return the layout of a dataset without preferences. If it names no columns, they are detected, unless it has an
    entry and either names its format or has the default columns."""
    if preferred := [part for part in PREFERENCE if (source.columns or {}).get(part)] or ["ranking"] * source.ranking:
        raise UserError(preference_problem(source.name, preferred, needs, is_explicit=True))
    usual = next((member.name for member in _formats_of_kind(needs)), "alpaca")
    if source.columns is None:
        has_default_columns = {*_required_columns(usual, needs)} <= {*_columns_of(records)}
        is_default = source.is_described and (source.formatting is not None or has_default_columns)
        if not is_default and (detected := _detected_layout(source, records, where, needs)):
            return detected
    layout = named_layout(source.formatting or usual, source.columns, source.tags, needs)
    _check(layout, source, records, where)
    return layout


def _detected_layout(source: DataSource, records: Sequence[Values], where: str, needs: RecordNeeds) -> Layout | None:
    """Return the layout of the first record in a known format, None if no record has the format that the source names.

    Raises:
        UserError: if the format is ambiguous, or unknown and not named, or holds preferences.
    """
    for values in records:
        claims = _matching_formats(values, needs)
        if source.formatting is not None:
            claims = {name: columns for name, columns in claims.items() if name == source.formatting}
        elif claims and is_preference(values):
            raise UserError(preference_problem(source.name, values, needs, next(iter(claims))))
        if len(claims) > 1:
            claims.pop("text", None)  # together with other columns, "text" usually is their rendered form
        if len(claims) > 1:
            readings = "; ".join(f"{name} ({list_columns(columns.values())})" for name, columns in claims.items())
            what = f"the record format is ambiguous: {readings}. Found: {list_columns(values)}."
            remedy = f"Set formatting to one of them, for example formatting: {next(iter(claims))}"
            raise UserError(what, where=where, remedy=remedy)
        if claims:
            return _with_optional(*next(iter(claims.items())), source, records, needs)
    if source.formatting is not None:
        return None
    if preference := next(filter(is_preference, records), None):
        raise UserError(preference_problem(source.name, preference, needs))
    raise UserError(_unknown_messages(where, records) or _unknown(where, records, source.is_described))


def _formats_of_kind(needs: RecordNeeds) -> list[Member[Format]]:
    """Return the formats that hold records of the required kind."""
    kind = "answers" if needs.kind == "prompts" else needs.kind
    return [member for member in FORMATS if member.metadata.get("holds", "answers") == kind]


def _matching_formats(values: Values, needs: RecordNeeds) -> dict[str, Mapping[str, str]]:
    """Return the formats of the required kind that match a record, each with the columns that match, by part."""
    found = {member.name: _matching_columns(member.metadata, values, needs) for member in _formats_of_kind(needs)}
    return {name: columns for name, columns in found.items() if columns}


def _matching_columns(metadata: Mapping[str, Any], values: Values, needs: RecordNeeds) -> Mapping[str, str] | None:
    if "finds" in metadata:
        found: Mapping[str, str] | None = metadata["finds"](values)
        return found
    optional = _optional_parts(metadata, needs)
    needed = {part: column for part, column in metadata["columns"].items() if part not in optional}
    return needed if values.keys() >= {*needed.values()} else None


def _with_optional(
    name: str, columns: Mapping[str, str], source: DataSource, records: Sequence[Values], needs: RecordNeeds
) -> Layout:
    """Return a detected layout with all optional columns, which any record may have, and a note about the format."""
    metadata, found = FORMATS.get(name).metadata, _columns_of(records)
    layout = named_layout(name, {**metadata["columns"], **_optional_columns(name), **columns}, source.tags, needs)
    used = (*layout.columns.values(), *layout.media, *needs.columns)
    unused = [] if ALL_COLUMNS in used else [column for column in found if column not in used]
    rest = f"; ignored columns: {list_columns(unused)}" if unused else ""
    read = [column for column in layout.columns.values() if column in found]
    layout.notes[f"detected format {name} ({list_columns(read)}){rest}"] = None
    return layout


# --- preferences ------------------------------------------------------------------------------------------------------


def _preference_layout(source: DataSource, records: Sequence[Values], where: str, needs: RecordNeeds) -> Layout:
    """Return the layout of a dataset of preference pairs or labelled responses."""
    name = _preferred_format(source, records)
    columns = source.columns if source.columns is not None else _preferred_columns(name, records)
    has_pairs, has_labels = all(columns.get(part) for part in _PAIR), bool(columns.get("kto_tag"))
    if not has_pairs and not (needs.kind == "unpaired" and has_labels):
        raise UserError(_no_preference(source, needs, has_labels, records[0]))
    if has_pairs:
        columns = {part: column for part, column in columns.items() if part not in ("response", "kto_tag")}
    layout = named_layout(name, columns, source.tags)
    if source.columns is None:
        layout = replace(layout, required=layout.required - {"margin"})
        layout.notes[f"detected format {name} ({list_columns(layout.columns.values())})"] = None
    _check(layout, source, records, where)
    if label := layout.columns.get("kto_tag"):
        layout.boolean_of_label = label_values(records, label)
        if layout.boolean_of_label:
            layout.notes[f'"{label}" is converted to booleans: {_labels_in_words(layout.boolean_of_label)}'] = None
    return layout


def _preferred_format(source: DataSource, records: Sequence[Values]) -> str:
    """Return the format of the columns other than responses and label."""
    if source.formatting:
        return source.formatting
    first = records[0]
    for name in ("sharegpt", "openai"):
        if FORMATS.get(name).metadata["finds"](first):
            return name
    if source.columns is None:
        return "alpaca" if "instruction" in first else "preference" if {*_PAIR} <= first.keys() else "prompt_completion"
    others = [column for column in first if column not in source.columns.values()]
    is_pair_alone = {part for part, column in source.columns.items() if column} == {*_PAIR}
    # Without a prompt, both responses begin with it.
    return "preference" if is_pair_alone and _guess("prompt", others) is None else "alpaca"


def _preferred_columns(name: str, records: Sequence[Values]) -> dict[str, str]:
    """Return the columns of a dataset that names none: the default columns of its format that exist, and media."""
    found, metadata = _columns_of(records), FORMATS.get(name).metadata
    own = metadata["finds"](records[0]) if "finds" in metadata else None
    label = "kto_tag" if "kto_tag" in found else "label"
    further = {**{part: part for part in (*_PAIR, "margin")}, "kto_tag": label}
    named = {**metadata["columns"], **metadata.get("optional", {}), **(own or {}), **further}
    return {**_MEDIA_COLUMNS, **{part: column for part, column in named.items() if column in found}}


def _labels_in_words(boolean_of_label: Mapping[Any, bool]) -> str:
    """Describe the values of a KTO label, for example ``1 is true, 0 is false``."""
    words = {meaning: json.dumps(word) for word, meaning in reversed([*boolean_of_label.items()])}
    return f"{words[True]} is true, {words[False]} is false"


# --- the layout of a format -------------------------------------------------------------------------------------------


def named_layout(
    name: str, columns: Mapping[str, str | None] | None = None, tags: Mapping[str, str | None] | None = None,
    needs: RecordNeeds = ANSWERS,
) -> Layout:  # fmt: skip
    """Return the layout of the format ``name``. With ``columns``, a part that they do not name has no column. Without,
    it has the default columns, and all columns of media, which any record may have."""
    metadata = FORMATS.get(name).metadata
    columns = {**_MEDIA_COLUMNS, **metadata["columns"]} if columns is None else columns
    named = {part: column for part, column in columns.items() if column}
    spoken = {tag: word for tag, word in (tags or {}).items() if word}
    parts = {part: column for part, column in named.items() if part not in MEDIA}
    media = tuple(column for part, column in named.items() if part in MEDIA)
    required = frozenset(parts.keys() - _optional_parts(metadata, needs))
    return Layout(name, parts, required, {**metadata.get("tags", {}), **spoken}, media)


def _optional_parts(metadata: Mapping[str, Any], needs: RecordNeeds) -> set[str]:
    """Return the parts of a format that are optional in this stage."""
    return {*metadata.get("optional", {}), *(["response"] if needs.kind == "prompts" else [])}


def _optional_columns(name: str) -> dict[str, str]:
    """Return the columns that detection adds to those of the format ``name``, by part."""
    return {**FORMATS.get(name).metadata.get("optional", {}), **_MEDIA_COLUMNS}


def _required_columns(name: str, needs: RecordNeeds = ANSWERS) -> list[str]:
    """Return the required columns of a format, with their default names."""
    layout = named_layout(name, needs=needs)
    return [column for part, column in layout.columns.items() if part in layout.required]


def _columns_of(records: Iterable[Values]) -> list[str]:
    return list(dict.fromkeys(column for values in records for column in values))


def is_preference(values: Values) -> bool:
    """Return whether a record holds a pair of responses or a KTO label."""
    return set(_PAIR) <= values.keys() or any(isinstance(values.get(column), bool) for column in _LABEL_COLUMNS)


def _check(layout: Layout, source: DataSource, records: Sequence[Values], where: str) -> None:
    """Check a layout against the first records of its dataset, and note columns that it ignores.

    Raises:
        UserError: with the columns that were found and those that were expected.
    """
    found = _columns_of(records)
    metadata = FORMATS.get(layout.format).metadata
    first = next(iter(metadata["columns"]))
    if first not in layout.columns and first not in metadata.get("optional", {}):
        raise UserError(_unnamed_part(first, layout, found, where))
    missing = [column for part, column in layout.columns.items() if part in layout.required and column not in found]
    if missing:
        raise UserError(missing_columns(layout, missing, records, where))
    if source.columns is not None:  # even an optional column that the user named must be in some record
        layout.awaited.update(layout.columns.values())
    for part, column in _optional_columns(layout.format).items():
        if column in found and part not in layout.columns and column not in layout.media:
            layout.notes[f'the column "{column}" is ignored because "columns" does not contain "{part}"'] = None


# --- errors -----------------------------------------------------------------------------------------------------------


def _unnamed_part(part: str, layout: Layout, found: Sequence[str], where: str) -> Problem:
    """Return the problem that "columns" lacks the main part of the format."""
    column = _guess(part, [column for column in found if column not in layout.columns.values()])
    remedy = f'Add "{part}": "{column}" to "columns".' if column else ""
    if others := [member.name for member in FORMATS if next(iter(member.metadata["columns"])) in layout.columns]:
        remedy = f"Set formatting: {' or '.join(others)}."
    what = f'"columns" must contain "{part}" for the format {layout.format}. Found: {list_columns(found)}.'
    return Problem(what, where, remedy=remedy, option="columns")


def missing_columns(layout: Layout, missing: Iterable[str], records: Sequence[Values], where: str) -> Problem:
    """Return the problem that the records lack columns of the layout."""
    found, lacking = _columns_of(records), set(missing)
    named = {**layout.columns, **layout.further_columns}
    parts = {part: column for part, column in named.items() if column in lacking}
    guesses = did_you_mean(next(iter(parts.values())), found)
    proposal = proposed_columns(found) if layout.format == "alpaca" else {}
    others = [name for name in FORMATS.names() if name != layout.format and {*_required_columns(name)} <= {*found}]
    remedy = f'Set "columns": {json.dumps(proposal)}' if proposal else ""
    if others:
        remedy = f'The records appear to be in the format {others[0]}. Set "formatting": "{others[0]}".'
    if not parts.keys() & layout.required:
        remedy = f'Correct the column in "columns", or remove {_quote_names(parts)} from it.'
    return Problem(
        f"the records have no {_quote_columns(parts.values())}. Found: {list_columns(found)}.{guesses}",
        where=where,
        why=f"Expected for the format {layout.format}: {list_columns(layout.columns.values())}.",
        remedy=remedy,
    )


def preference_problem(
    name: str, columns: Collection[str], needs: RecordNeeds, readable_as: str = "", is_explicit: bool = False
) -> Problem:
    """Return the problem that a dataset contains preferences, but the stage expects single responses or prompts.

    Args:
        name: name of the dataset.
        columns: columns found.
        needs: the requirements of the stage.
        readable_as: format in which the conversations could be trained as they are, or "".
        is_explicit: whether ``columns`` are keys of the dataset's entry.
    """
    names, found = set(columns), list_columns(columns)
    is_pair = not names.isdisjoint((*_PAIR, "ranking")) or names.isdisjoint(_LABEL_COLUMNS)
    what = "preference pairs" if is_pair else "KTO labels"
    if needs.kind == "prompts":
        prompts = f"Set formatting: {readable_as}" if readable_as else 'Add a column "prompt"'
        prompts = f"Remove {found} from its entry" if is_explicit else prompts
        stage = "stage: dpo without online: true" if is_pair else "stage: kto"
        remedy = f"{prompts} to use the prompts only. To train on the {'pairs' if is_pair else 'labels'}, set {stage}."
        return Problem(f"dataset {name} contains {what} ({found}). Expected: prompts.", remedy=remedy)
    if is_pair:
        remedy = "Set stage: dpo, or set stage: sft and columns: {response: chosen} to train on the chosen responses."
    else:
        remedy = "Set stage: kto to train on the labels, or remove the label column to train on all responses."
    if readable_as:
        remedy += f" To train on the conversations, set formatting: {readable_as}."
    return Problem(f"dataset {name} contains {what} ({found}).", remedy=remedy)


def _no_preference(source: DataSource, needs: RecordNeeds, has_labels: bool, record: Values) -> Problem:
    if needs.kind == "unpaired":
        return Problem(
            f'stage: kto requires a boolean label ("kto_tag") or "chosen" and "rejected". '
            f"Dataset {source.name} has neither.",
            remedy="Set columns: {kto_tag: <column>}, or use stage: sft for responses without labels.",
        )
    remedy = "Use stage: kto for responses with labels, or stage: sft for responses without."
    lists = [column for column, value in record.items() if isinstance(value, list) and _are_responses(value)]
    if has_labels:
        remedy = "It has labels on single responses. Use stage: kto."
    elif lists:
        remedy = f'"{lists[0]}" is a list of responses. Write the better one to "chosen" and the other to "rejected".'
    return Problem(
        f'stage: {needs.stage} requires "chosen" and "rejected". Dataset {source.name} has neither.',
        remedy=f"{needs.without_pairs} {remedy}".lstrip(),
    )


def _are_responses(value: list[Any]) -> bool:
    """Whether a list holds the responses of a pair, as in datasets of LLaMA-Factory before 0.7.1."""
    return len(value) > 1 and all(isinstance(response, str) for response in value)


def _unknown_messages(where: str, records: Sequence[Values]) -> Problem | None:
    """Return the problem of a column that has the name of messages, but no messages that were recognized."""
    column = next((name for name in _columns_of(records) if name in MESSAGES), None)
    if column is None:
        return None
    values = [record[column] for record in records if record.get(column)]
    value = values[0] if values else next(record[column] for record in records if column in record)
    turns = as_messages(value)
    if not turns:
        return Problem(
            f'"{column}" must be a list of messages that is not empty. Received: {quote_value(value)}.',
            where,
            remedy='For example, [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].',
        )
    tags = json.dumps({"role_tag": "...", "content_tag": "..."})
    formatting = "openai" if column == "messages" else "sharegpt"
    return Problem(
        f'the messages in "{column}" have neither the key "role" nor "from". Found: {list_columns(turns[0])}.',
        where,
        remedy=f'Set formatting: {formatting}, columns: {{"messages": "{column}"}} and tags: {tags}.',
    )


def _unknown(where: str, records: Sequence[Values], is_described: bool) -> Problem:
    found = _columns_of(records)
    known = "; ".join(f"{name}: {' and '.join(_required_columns(name))}" for name in FORMATS.names())
    proposal = json.dumps(proposed_columns(found) or {"prompt": "...", "response": "..."})
    remedy = f"Set the columns, for example formatting: alpaca, columns: {proposal}"
    if is_described:
        remedy = f'Set the columns in the entry, for example "formatting": "alpaca", "columns": {proposal}'
    return Problem(
        f"the columns do not match a known format. Found: {list_columns(found)}.",
        where,
        f"Known formats: {known}.",
        remedy,
    )


_SYNONYMS = {
    "prompt": ("instruction", "prompt", "question", "query", "user", "problem", "input", "source"),
    "response": ("output", "response", "answer", "completion", "assistant", "solution", "reply", "target"),
    "system": ("system",),
    "messages": ("messages", "conversation"),
}


def _guess(part: str, found: Iterable[str]) -> str | None:
    """Guess the column of a part from its name."""
    return next((column for word in _SYNONYMS.get(part, ()) for column in found if word in column.lower()), None)


def proposed_columns(found: Iterable[str]) -> dict[str, str]:
    """Guess the columns of the alpaca format from their names; empty without a prompt and a response."""
    left, proposal = list(found), {}
    for part in ("prompt", "query", "response", "system"):
        column = _guess(part, left) if part != "query" else "input" if "input" in left else None
        if column is not None:
            proposal[part] = column
            left.remove(column)
    return proposal if {"prompt", "response"} <= proposal.keys() else {}


def _quote_names(names: Iterable[str]) -> str:
    """``"a", "b" and "c"``."""
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def _quote_columns(names: Collection[str]) -> str:
    """``column "a"``, or ``columns "a" and "b"``."""
    return f"{'column' if len(names) == 1 else 'columns'} {_quote_names(names)}"
