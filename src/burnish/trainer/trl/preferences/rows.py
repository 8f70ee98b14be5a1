"""Convert raw datasets to rows as in TRL: prompts with responses that are chosen, rejected or labelled.

In: a ``datasets.Dataset`` or ``IterableDataset`` of texts or conversations: ``prompt``, ``chosen``, ``rejected``; the
same without ``prompt``, which is then the common prefix of both; ``prompt``, ``completion``, ``label``; or token ids.
Out: the same dataset with TRL's columns (``prompt_ids``, ``chosen_ids``, ...), truncated to ``max_length``. Other
columns are kept for a script's own ``data_collator``, as in TRL.

    records -> examples -> rows of the objective (``prepared.py``) -> TRL's columns -> rows of the objective, when used
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.plain import KL_IDS, PlainOptions, PlainTemplate
from burnish.data.chat.rendering import PROMPT, Conversation, chat_texts
from burnish.data.images.family import Family
from burnish.data.rows.mismatched import Key, keys_of
from burnish.data.rows.row_set import RowSet
from burnish.data.sets.trl import IDS, Kind, trl_layout
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.losses.pair_values import PAIR_COLUMNS
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.notes import logger
from burnish.trainer.trl.preferences.config import PreferenceConfig
from burnish.trainer.trl.prepared import (
    EncodeRecords,
    column_names,
    first_row,
    hashable_by_class,
    prepare_dataset,
    refuse_transform,
)
from burnish.trainer.trl.vision import MEDIA, MEDIA_READER, refuse_image_columns, with_encoded_images

Columns = dict[str, list[Any]]
NAMES: Mapping[Kind, tuple[str, ...]] = {
    "pairs": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "unpaired": ("prompt_ids", "completion_ids", "label", KL_IDS),
    "scores": ("chosen_ids", "rejected_ids", "margin"),
}
"""The columns of prepared datasets, by kind of records."""
RECORD_COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "pairs": ("prompt", "chosen", "rejected"), "unpaired": ("prompt", "completion", "label"),
    "scores": ("prompt", "chosen", "rejected"),
}  # fmt: skip
"""The columns of records, by kind, which a script's collator gets with their images."""


def template_of(args: PreferenceConfig, tokenizer: Any, kind: Kind, family: Family | None = None) -> PlainTemplate:
    """TRL's truncation: prompts keep their start or end, responses their start. Rows for scoring are never
    truncated."""
    mode = "keep_end_of_prompt" if args.truncation_mode == "keep_end" else "keep_start"
    options = PlainOptions(args.max_length, mode, on_too_long="drop" if kind == "scores" else "truncate")
    return PlainTemplate(options, tokenizer, family)


def preference_rows(
    dataset: Any, name: str, args: PreferenceConfig, kind: Kind, encode: Callable[..., Sequence[Row | None]],
    template: PlainTemplate,
) -> Any:  # fmt: skip
    """The dataset with TRL's columns. ``encode`` is that of the objective.

    Raises:
        UserError: for all records with an invalid format, unless they are dropped; if no row is left.
    """
    refuse_transform(dataset)
    if template.family is None:
        refuse_image_columns(column_names(dataset), name)
    dataset = dataset if template.family is None else with_encoded_images(dataset)
    sample, reader = first_row(dataset), None if template.family is None else MEDIA_READER
    names = NAMES[kind] if reader is None else (*NAMES[kind], "images", *(["kl_images"] * (kind == "unpaired")))
    splits = kind == "unpaired" and {"chosen", "rejected"} <= sample.keys() and not set(IDS[kind]) <= sample.keys()
    is_known = hashable_by_class(template.tokenizer)
    records = EncodeRecords(
        trl_layout(kind, sample, reader=reader), encode, names, f"{kind} {template.fingerprint}" if is_known else None,
        _COLUMNS_OF[kind], args.on_bad_record,
    )  # fmt: skip
    replaced = {*names, *MEDIA, *(("chosen", "rejected") if splits else ())}
    keep = [one for one in column_names(dataset) if one not in replaced and not one.startswith("reference_")]
    return prepare_dataset(dataset, name, records, args, keep, splits)


def _pair_columns(row: Row) -> dict[str, Any]:
    begin = _begin(row["chosen_labels"])
    chosen, rejected = row["chosen_input_ids"], row["rejected_input_ids"]
    ids = {"prompt_ids": chosen[:begin], "chosen_ids": chosen[begin:], "rejected_ids": rejected[begin:]}
    return ids | _images(row)


def _unpaired_columns(row: Row) -> dict[str, Any]:
    begin, ids, other = _begin(row["labels"]), row["input_ids"], row.get("kl_input_ids", ())
    mismatched = other[_begin(row["kl_labels"]) :] if other else []
    known = {"prompt_ids": ids[:begin], "completion_ids": ids[begin:], "label": row["tag"], KL_IDS: mismatched}
    return known | _images(row)


def _images(row: Mapping[str, Any]) -> dict[str, Any]:
    """The images of a row, if it has any. The prompt of the mismatched response has the same images."""
    return {name: row[name] for name in ("images", "kl_images") if row.get(name)}


def _score_columns(row: Row) -> dict[str, Any]:
    ids = {f"{side}_ids": row[f"{side}_input_ids"] for side in ("chosen", "rejected")}
    return {**ids, "margin": float(row.get("margin") or 0.0)}


_COLUMNS_OF: Mapping[Kind, Callable[[Row], Mapping[str, Any]]] = {
    "pairs": _pair_columns, "unpaired": _unpaired_columns, "scores": _score_columns
}  # fmt: skip


def _begin(labels: Sequence[int]) -> int:
    return next(at for at, label in enumerate(labels) if label != IGNORE_INDEX)


def with_kl_answers(rows: Any, name: str) -> Any:
    """Add a mismatched response to each labelled response: the previous record's with different text, wrapping around.

    Only depends on the dataset, not on batches or order (KTO's baseline). In a streamed dataset records are matched
    within blocks of ``WINDOW`` records.
    """
    if not is_datasets_set(rows):
        return rows.map(_with_mismatched_completions, batched=True, batch_size=WINDOW)
    if any(rows["KL_completion_ids"]):
        return rows
    hashes = [hash(tuple(ids)) for ids in rows["completion_ids"]]
    if len(hashes) == 1:
        logger.warning(f"The {name} dataset has one example, so KTO's KL term uses its own completion.")
        return rows.map(lambda row: {"KL_completion_ids": row["completion_ids"]}, features=rows.features)
    if len({*hashes}) < 2:
        raise UserError(f"All completions of the {name} dataset are identical.")
    mismatched = rows.select([other for _, other in keys_of(range(len(hashes)), hashes).values()])
    mismatched = mismatched.select_columns("completion_ids")
    mismatched = mismatched.rename_column("completion_ids", "KL_completion_ids")
    return sys.modules["datasets"].concatenate_datasets([rows.remove_columns("KL_completion_ids"), mismatched], axis=1)


WINDOW = 1000
"""Number of records of a stream that are matched together."""


def _with_mismatched_completions(columns: Columns) -> Columns:
    completions = columns["completion_ids"]
    if any(columns["KL_completion_ids"]):
        return columns
    mismatched = [
        [] if other is None else completions[other]
        for _, other in keys_of(range(len(completions)), completions).values()
    ]
    return {**columns, KL_IDS: mismatched}


class UnpairedOfSteps:
    """Labelled responses whose mismatched responses come from the same step (``kl_pairing="group"``). A key consists of
    the row and the row with the mismatched response.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def keys_of_step(self, chosen: Sequence[int]) -> Mapping[int, Key]:
        """The key of each row of a step. ``chosen`` are all rows of the step over all ranks, in order."""
        return keys_of(chosen, self.rows[list(chosen)]["completion_ids"])

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        if not isinstance(key, tuple):
            raise ValueError('`kl_pairing="group"` does not support a custom sampler. Remove one of them.')
        number, other = key
        return {**self.rows[number], "KL_completion_ids": [] if other is None else self.rows[other]["completion_ids"]}


def pair_texts(record: Mapping[str, Any], tokenizer: Any) -> dict[str, str]:
    """``prompt``, ``chosen`` and ``rejected`` as texts; messages are rendered. Without a prompt it is the common prefix
    of both responses.
    """
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if prompt is None:
        pairs = enumerate(zip(chosen, rejected, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
        at -= isinstance(chosen, str) and chosen[at - 1 : at] == " "
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    if not isinstance(prompt, str):
        chats = [Conversation(prompt, parts=[PROMPT]), Conversation(prompt + chosen), Conversation(prompt + rejected)]
        begin, *both = chat_texts(tokenizer, chats)
        prompt, chosen, rejected = begin, *(text[len(begin) :] for text in both)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# --- rows of a set -> rows of the objectives --------------------------------------------------------------------------


def pair_row(row: Mapping[str, Any]) -> Row:
    """The two sequences of a pair. A sequence for scoring has no prompt."""
    if "chosen_labels" in row:  # from a script's ``tokenize_row``
        return {name: row[name] for name in PAIR_COLUMNS} | {"margin": 0.0}
    sides = {**_sequence(row, "chosen"), **_sequence(row, "rejected"), "margin": row.get("margin", 0.0)}
    return sides | _images(row)


def unpaired_row(row: Mapping[str, Any], limit: int | None) -> Row:
    """A labelled response, and the same prompt with a mismatched response, truncated as its own was."""
    prompt, answer, other = row["prompt_ids"], row["completion_ids"], row["KL_completion_ids"]
    other = other if limit is None else other[: limit - len(prompt)]
    masked = [IGNORE_INDEX] * len(prompt)
    return {
        "input_ids": prompt + answer, "labels": masked + answer, "tag": row["label"],
        "kl_input_ids": prompt + other if other else [], "kl_labels": masked + other, **_images(row),
        **({"kl_images": row["images"]} if row.get("images") else {}),
    }  # fmt: skip


class ObjectiveRows(RowSet[Row]):
    """The rows of a dataset in the form of objectives, created on access."""

    def __init__(self, dataset: Any, row_of: Callable[[Mapping[str, Any]], Row]) -> None:
        self.dataset, self.row_of = dataset, row_of

    def __len__(self) -> int:
        return len(self.dataset)

    def item(self, index: int) -> Row:
        return self.row_of(self.dataset[index])


def _sequence(row: Mapping[str, Any], side: str) -> dict[str, list[int]]:
    prompt, answer = row.get("prompt_ids") or [], row[f"{side}_ids"]
    return {f"{side}_input_ids": prompt + answer, f"{side}_labels": [IGNORE_INDEX] * len(prompt) + answer}
