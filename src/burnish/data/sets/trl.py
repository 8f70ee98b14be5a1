"""Convert a ``datasets.Dataset`` with TRL's column names to examples.

The columns are ``text``, ``messages`` (or ``conversations``), ``prompt`` and ``completion``, ``chosen`` and
``rejected``, ``label``, or token ids. ``formats.py`` converts the records; messages are kept unchanged
(``Layout.verbatim``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from burnish.config.errors import UserError
from burnish.data.images.sources import MediaReader
from burnish.data.length import record_length_error
from burnish.data.sets.examples import MARK_IN_TEXT, Located, marks_in
from burnish.data.sets.formats import BadRecords, bad_records, examples_from
from burnish.data.sets.preferences import unpair
from burnish.data.sets.records import BadRecord, Layout, Record
from burnish.data.sets.turns import OPENAI_TAGS
from burnish.data.stats import DataStats, keep_reason
from burnish.data.template_arguments import COLUMN
from burnish.loop.types import Example
from burnish.utils.json_files import quote_value
from burnish.utils.sequences import LazySequence

Kind: TypeAlias = Literal["texts", "pairs", "unpaired", "scores"]
IDS: Mapping[Kind, Sequence[str]] = {
    "texts": ("input_ids",),
    "pairs": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "unpaired": ("prompt_ids", "completion_ids", "label"),
    "scores": ("chosen_ids", "rejected_ids"),
}
"""Required columns of a dataset of token ids."""
_COLUMNS_BESIDES_IDS: Mapping[Kind, Sequence[str]] = {
    "texts": ("labels", "completion_mask", "assistant_masks"), "pairs": (), "unpaired": ("KL_completion_ids",),
    "scores": ("margin",),
}  # fmt: skip
IDS_LAYOUT = "token ids"
_LABELS: Mapping[Any, bool] = {"true": True, "false": False, "True": True, "False": False, 1: True, 0: False}
_MESSAGES = ("messages", "conversations")
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "tool_response"}
"""Roles that published chat templates render. Templates may silently skip other roles."""
NO_ASSISTANT = keep_reason("no assistant message, so the loss is computed on all messages")
UNKNOWN_ROLE = keep_reason('the role "{role}" may not be supported by the chat template')
LATE_SYSTEM = keep_reason("a system message is not the first message")


def trl_layout(
    kind: Kind, sample: Mapping[str, Any], text_field: str = "text", reader: MediaReader | None = None
) -> Layout:
    """Return the layout of a dataset, from the columns of its first record.

    Args:
        kind: kind of records that the trainer needs.
        sample: first record.
        text_field: column of plain text.
        reader: how images are found, or None if the model takes none.

    Raises:
        ValueError: if required columns are missing.
    """
    if set(IDS[kind]) <= sample.keys():
        names = [name for name in (*IDS[kind], *_COLUMNS_BESIDES_IDS[kind]) if name in sample]
        return Layout(IDS_LAYOUT, {name: name for name in names}, verbatim=True)
    messages = next((name for name in _MESSAGES if has_turns(sample.get(name))), None)
    if kind in ("pairs", "scores") or (kind == "unpaired" and {"chosen", "rejected"} <= sample.keys()):
        named, columns = "preference", {"chosen": "chosen", "rejected": "rejected"}
    elif kind == "unpaired":
        named, columns = "prompt_completion", {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
    elif "prompt" in sample and (messages is None or "completion" in sample):
        named, columns = "prompt_completion", {"prompt": "prompt", "response": "completion"}
    else:
        named, columns = ("text", {"text": text_field}) if messages is None else ("openai", {"messages": messages})
    if not set(columns.values()) <= sample.keys():
        expected = _EXPECTED[kind].format(text_field=text_field)
        raise ValueError(f"Expected the columns {expected}. Received: {', '.join(sample)}.")
    optional = {part: part for part in ("prompt", "margin", "tools", COLUMN) if part in sample and part not in columns}
    images, videos = (
        "" if reader is None else next((name for name in (f"{kind}s", kind) if name in sample), "")
        for kind in ("image", "video")
    )
    return Layout(
        named, columns | optional, frozenset(columns), OPENAI_TAGS, images=images, videos=videos, reader=reader,
        boolean_of_label=_LABELS, verbatim=True,
    )  # fmt: skip


_EXPECTED: Mapping[Kind, str] = {
    "texts": "`{text_field}` (`dataset_text_field`), `messages`, `prompt` and `completion`, or `input_ids`",
    "pairs": "chosen and rejected, and optionally prompt; use KTOTrainer for single responses with a label",
    "unpaired": "prompt, completion and label, or chosen and rejected",
    "scores": "chosen and rejected, and optionally prompt",
}


def has_turns(value: Any, *keys: str) -> bool:
    """Return whether a column holds messages that have one of these keys (default: "role" or "from")."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return is_list and any(key in value[0] for key in keys or ("role", "from"))


class TrlRecords(LazySequence[Located]):
    """The records of a dataset, read on access: (values, dataset name, number from 1).

    Args:
        source: name of the dataset.
        splits_pairs: yield each pair twice: ``BLOCK`` pairs for their chosen responses, then the same pairs for their
            rejected responses.
    """

    BLOCK = 1000

    def __init__(self, dataset: Any, source: str, splits_pairs: bool = False) -> None:
        self.dataset, self.source, self.sides = dataset, source, ("chosen", "rejected") if splits_pairs else ("",)

    def __len__(self) -> int:
        return len(self.dataset) * len(self.sides)

    def item(self, index: int) -> Located:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Located]:
        places, sides = zip(*map(self.place_of, indices), strict=True) if indices else ((), ())
        columns = self.dataset[list(places)]
        rows = zip(*columns.values(), strict=True)
        return [
            (
                {**dict(zip(columns, values, strict=True)), **({PAIR_SIDE_COLUMN: side} if side else {})},
                self.source,
                place + 1,
            )
            for values, place, side in zip(rows, places, sides, strict=True)
        ]

    def place_of(self, index: int) -> tuple[int, str]:
        """Return the record at ``index``, and which of its responses is used ("" for the whole record)."""
        block, within = divmod(index, len(self.sides) * self.BLOCK)
        size = min(self.BLOCK, len(self.dataset) - block * self.BLOCK)
        return block * self.BLOCK + within % size, self.sides[within // size]


PAIR_SIDE_COLUMN = "burnish_side"
"""Column that says which response of a pair becomes a labelled response."""


def examples_of(
    located: Sequence[Located], layout: Layout, stats: DataStats, on_bad_record: str
) -> list[Example | None]:
    """Return the examples of records, None for dropped ones.

    Args:
        located: records with source and number.
        layout: format and columns.
        stats: statistics that dropped records are added to.
        on_bad_record: "drop", "raise", or "refuse" (like "raise", for scripts that cannot drop records).

    Raises:
        UserError: with all of these records that break their format, unless they are dropped.
    """
    bad: BadRecords = []
    if layout.format != IDS_LAYOUT:
        examples = list(examples_from(located, layout, stats, on_bad_record, bad))
    else:
        stats.seen += len(located)
        examples = [_of_ids(*one, layout, bad) for one in located]
    is_second = [
        values.get(PAIR_SIDE_COLUMN) == "rejected" for values, _, _ in located
    ]  # of the two examples of a record
    stats.seen -= sum(is_second)
    for at, (values, source, number) in enumerate(located):
        example, problem = examples[at], record_length_error(values.values())
        if problem:
            bad.append((Record(values, source, number, layout), BadRecord(problem)))
        if example is None or problem:
            examples[at] = None
            continue
        examples[at] = _one_side(example, values)
        if not is_second[at]:
            _count_probable_mistakes(example, stats)
    if bad and on_bad_record != "drop":
        bad = _once_per_record(bad)
        bad.sort(key=lambda one: one[0].number)
        raise UserError(bad_records(bad, are_all=on_bad_record == "refuse"))
    return examples


def _once_per_record(bad: BadRecords) -> BadRecords:
    """Return each invalid record once, without the column that says which of its responses is used."""
    found = {record.number: (record, error) for record, error in reversed(bad)}
    return [
        (replace(record, values={name: v for name, v in record.values.items() if name != PAIR_SIDE_COLUMN}), error)
        for record, error in found.values()
    ]


def _one_side(example: Example, values: Mapping[str, Any]) -> Example:
    side = values.get(PAIR_SIDE_COLUMN)
    return example if side is None else next(one for one in unpair([example]) if one.tag is (side == "chosen"))


def _of_ids(values: Mapping[str, Any], source: str, number: int, layout: Layout, bad: BadRecords) -> Example | None:
    """Return the example of a record of token ids. The template reads its columns from ``extra``."""
    extra = {name: values[name] for name in layout.columns if values.get(name) is not None}
    label: Any = extra.get("label")
    label = _LABELS.get(label, label) if isinstance(label, str | int | float) else label
    if label not in (None, True, False):
        bad.append(
            (
                Record(values, source, number, layout),
                BadRecord('"label" must be true or false.', received=quote_value(label)),
            )
        )
        return None
    return Example(extra=extra, tag=label, margin=extra.get("margin"), source=source, number=number)


def _count_probable_mistakes(example: Example, stats: DataStats) -> None:
    """Count probable mistakes that some template or model may still support."""
    for mark in marks_in(example):
        stats.add(MARK_IN_TEXT.format(mark=mark), example)
    answers = [one for one in (example.chosen, example.rejected) if isinstance(one, tuple)]
    raws = [message.raw or {} for message in (*example.messages, *(m for answer in answers for m in answer))]
    roles = [raw.get("role") for raw in raws]
    if not roles:
        return
    if "assistant" not in roles:
        stats.add(NO_ASSISTANT, example)
    for role in dict.fromkeys(roles):
        if role not in ROLES:
            stats.add(UNKNOWN_ROLE.format(role=role), example)
    if "system" in roles[1:]:
        stats.add(LATE_SYSTEM, example)
