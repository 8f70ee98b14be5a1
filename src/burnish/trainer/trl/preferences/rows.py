"""Raw sets -> rows, as TRL makes them: prompts, and answers of which one is preferred or each has a verdict.

In: a ``datasets.Dataset`` or ``IterableDataset`` of texts or conversations: ``prompt``, ``chosen``, ``rejected``; the
same without ``prompt``, which is then what both begin with; ``prompt``, ``completion``, ``label``; or token ids. Out:
the same set with TRL's columns (``prompt_ids``, ``chosen_ids``, ...), cut to ``max_length``. Left out and counted: rows
from which nothing can be learned within that length. Refused by number: records that break their format.

Text is tokenised as it is, with eos at its end; a conversation is rendered by the chat template. The answer begins
where its tokens part from those of the prompt alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from transformers.utils import logging

from burnish.config.errors import UserError
from burnish.data.length import endless
from burnish.data.reading.json_files import shortened
from burnish.data.rows.others_of_step import Key, keys_of
from burnish.data.rows.row_set import RowSet
from burnish.data.sets.formats import bad_records
from burnish.data.sets.records import BadRecord, Layout, Record
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.trl.preferences.config import PreferenceConfig
from burnish.trainer.trl.preferences.records import Answer, check_answer, pair_of, text_or_messages
from burnish.trainer.trl.sft.rows import column_names, ids_of_chats, refuse_transform, with_eos, without_absent_keys
from burnish.utils.sequences import shared_beginning

logger = logging.get_logger("transformers.trainer")

Columns = dict[str, list[Any]]
FILLED = "its prompt alone fills max_length"
EQUAL = "its answers are the same once cut to max_length"
TOO_LONG = "an answer with its prompt is longer than max_length"
_NUMBERS = {"margin": "float32", "label": "bool", "fault": "string", "dropped": "string", "number": "int64"}
_VERDICTS = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}


@dataclass
class EncodePairs:
    """Records of a set -> rows, with ``fault`` or ``dropped`` where one is not to be used. A class, because
    ``datasets`` pickles what it caches.

    Args:
        args: reads ``max_length`` and ``truncation_mode``.
        columns: of the set.
    """

    tokenizer: Any
    args: PreferenceConfig
    columns: Sequence[str]
    has_warned: bool = False

    makes: ClassVar[Sequence[str]] = ("prompt_ids", "chosen_ids", "rejected_ids")
    takes: ClassVar[Sequence[str]] = ("chosen", "rejected")

    def __post_init__(self) -> None:
        if not self.is_encoded and not set(self.takes) <= set(self.columns):
            raise ValueError(
                f"The dataset needs {' and '.join(self.takes)}, with or without a prompt. Received the columns: "
                f"{', '.join(self.columns)}.{self._elsewhere()}"
            )

    def _elsewhere(self) -> str:
        is_unpaired = {"completion", "label"} <= set(self.columns)
        return " Single answers with a label are for KTOTrainer." if is_unpaired else ""

    @property
    def is_encoded(self) -> bool:
        """Return whether the set holds token ids already."""
        return {*self.makes} - {"margin", "KL_completion_ids"} <= {*self.columns}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return (*self.makes, "fault", "dropped", "number")

    @property
    def features(self) -> Any:
        """Their types: a batch of which nothing is left has none of its own."""
        datasets = _datasets()
        kinds = {name: datasets.Value(_NUMBERS.get(name, "int32")) for name in self.names}
        return datasets.Features(
            {name: kind if name in _NUMBERS else datasets.Sequence(kind) for name, kind in kinds.items()}
        )

    def __call__(self, columns: Columns, indices: list[int]) -> Columns:
        records = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        made = [self._tried(record, index + 1) for index, record in zip(indices, records, strict=True)]
        rows = [row for rank in zip_longest(*made) for row in rank if row is not None]
        return {name: [row.get(name, _empty(name)) for row in rows] for name in self.names}

    def _tried(self, record: dict[str, Any], number: int) -> list[dict[str, Any]]:
        try:
            if said := endless(record.values()):
                raise BadRecord(said)
            return [{"number": number, **row} for row in self.rows_of(record)]
        except BadRecord as error:
            return [{"number": number, "fault": error.what}]

    def rows_of(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a record. Raises BadRecord."""
        prompt, chosen, rejected = self._pair_ids(record)
        prompt, (chosen, rejected), dropped = self._cut(prompt, chosen, rejected)
        if chosen == rejected:
            dropped = dropped or EQUAL
        return [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "dropped": dropped}]

    def _pair_ids(self, record: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        if self.is_encoded:
            return record["prompt_ids"], record["chosen_ids"], record["rejected_ids"]
        prompt, chosen, rejected = pair_of(record)
        asked, (one, other) = self._ids(record, prompt, chosen, rejected)
        return asked, one, other

    def _ids(self, record: Mapping[str, Any], prompt: Answer, *answers: Answer) -> tuple[list[int], list[list[int]]]:
        """The ids of the prompt, and those of each answer behind it."""
        asked = self._whole(record, prompt)
        wholes = [self._whole(record, prompt, answer) for answer in answers]
        begin = min(shared_beginning(asked, whole) for whole in wholes)
        if begin < len(asked) and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "The tokens of a prompt are not the first tokens of the prompt with its answer: the template writes "
                "the prompt differently alone, or tokens merge at the border. What is learned begins where they part; "
                f"at inference the model sees instead: {self.tokenizer.decode(asked[begin:])!r}. Said once."
            )
        return wholes[0][:begin], [whole[begin:] for whole in wholes]

    def _whole(self, record: Mapping[str, Any], prompt: Answer, answer: Answer | None = None) -> list[int]:
        """The ids of a prompt, with its answer where one is given."""
        if isinstance(prompt, str):
            assert answer is None or isinstance(answer, str)
            text = prompt if answer is None else with_eos(self.tokenizer, prompt + answer)
            return list(self.tokenizer(text=text)["input_ids"])
        if answer is None:
            return ids_of_chats(self.tokenizer, [record], [without_absent_keys(prompt)], is_prompt=True)[0]
        assert not isinstance(answer, str)
        return ids_of_chats(self.tokenizer, [record], [without_absent_keys([*prompt, *answer])])[0]

    def _cut(self, prompt: list[int], *answers: list[int]) -> tuple[list[int], list[list[int]], str]:
        """The same within ``max_length``, and why the row cannot be used, if so. The answers keep one prompt."""
        limit = self.args.max_length
        if limit is None:
            return prompt, list(answers), ""
        if self.args.truncation_mode == "keep_end":
            prompt = prompt[-max(limit - max(map(len, answers)), 1) :]
        room = limit - len(prompt)
        return prompt, [answer[: max(room, 0)] for answer in answers], "" if room > 0 else FILLED


@dataclass
class EncodeVerdicts(EncodePairs):
    """Answers with a label; pairs become two of them."""

    makes: ClassVar[Sequence[str]] = ("prompt_ids", "completion_ids", "label", "KL_completion_ids")
    takes: ClassVar[Sequence[str]] = ("prompt", "completion", "label")

    @property
    def is_paired(self) -> bool:
        return not self.is_encoded and {"chosen", "rejected"} <= {*self.columns}

    def __post_init__(self) -> None:
        if not self.is_paired:
            super().__post_init__()

    def rows_of(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        if self.is_paired:
            prompt, chosen, rejected = pair_of(record)
            return [self._row(record, prompt, answer, label) for answer, label in ((chosen, True), (rejected, False))]
        label = _VERDICTS.get(record["label"])
        if label is None:
            raise BadRecord(f'"label" must be true or false. Received: {shortened(record["label"])}')
        if self.is_encoded:
            made = self._fitted(record["prompt_ids"], record["completion_ids"], label)
            return [made | {"KL_completion_ids": record.get("KL_completion_ids", [])}]
        prompt, answer = text_or_messages(record, "prompt"), text_or_messages(record, "completion")
        if isinstance(prompt, str) != isinstance(answer, str):
            raise BadRecord('"prompt" and "completion" must be both text or both messages.')
        check_answer(answer, "completion")
        return [self._row(record, prompt, answer, label)]

    def _row(self, record: dict[str, Any], prompt: Answer, answer: Answer, label: bool) -> dict[str, Any]:
        asked, (ids,) = self._ids(record, prompt, answer)
        return self._fitted(asked, ids, label)

    def _fitted(self, prompt: list[int], answer: list[int], label: bool) -> dict[str, Any]:
        prompt, (answer,), dropped = self._cut(prompt, answer)
        return {"prompt_ids": prompt, "completion_ids": answer, "label": label, "dropped": dropped}


@dataclass
class EncodeScored(EncodePairs):
    """Pairs of whole conversations, or texts, each of which gets a score."""

    makes: ClassVar[Sequence[str]] = ("chosen_ids", "rejected_ids", "margin")

    def rows_of(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        margin = record.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float | None):
            raise BadRecord(f'"margin" must be a number. Received: {shortened(margin)}')
        if self.is_encoded:
            wholes = [record["chosen_ids"], record["rejected_ids"]]
        else:
            prompt, *answers = pair_of(record)
            wholes = [self._whole(record, prompt, answer) for answer in answers]
        limit = self.args.max_length
        dropped = TOO_LONG if limit is not None and max(map(len, wholes)) > limit else ""
        return [{"chosen_ids": wholes[0], "rejected_ids": wholes[1], "margin": margin or 0.0, "dropped": dropped}]


def _empty(name: str) -> Any:
    kinds = {"float32": 0.0, "bool": False, "string": "", "int64": 0}
    return kinds[_NUMBERS[name]] if name in _NUMBERS else []


# --- sets -------------------------------------------------------------------------------------------------------------


def prepared(dataset: Any, name: str, tokenizer: Any, args: PreferenceConfig, kind: type[EncodePairs]) -> Any:
    """The rows of a set.

    Raises:
        UserError: with all records that break their format, unless they are dropped; where no row is left.
    """
    refuse_transform(dataset)
    columns = column_names(dataset)
    encode, is_held = kind(tokenizer, args, columns), is_datasets_set(dataset)
    more = {"num_proc": args.dataset_num_proc, "desc": f"Tokenizing {name} dataset"} if is_held else {}
    rows = dataset.map(
        encode, batched=True, with_indices=True, remove_columns=columns, features=encode.features, **more
    )
    if not is_held:
        return rows.filter(_is_kept if args.on_bad_record == "drop" else _is_kept_and_good, input_columns=_WHY)
    _refuse_bad(dataset, rows, name, args)
    kept = rows.filter(_is_kept, input_columns=_WHY, desc=f"Leaving out rows of {name} dataset")
    for why, count in Counter(filter(None, rows["dropped"])).items():
        logger.warning(f"{count} of {len(rows)} rows of the {name} dataset are left out: {why} ({args.max_length}).")
    if len(rows) and not len(kept):
        raise UserError(f"No row of the {name} dataset is left to learn from. Raise `max_length`.")
    return kept.remove_columns([*_WHY, "number"])


def _datasets() -> Any:
    """The library ``datasets``, which whoever made a set of it has loaded."""
    return sys.modules["datasets"]


_WHY = ["fault", "dropped"]


def _is_kept(fault: str, dropped: str) -> bool:
    return not fault and not dropped


def _is_kept_and_good(fault: str, dropped: str) -> bool:
    if fault:
        raise UserError(fault, remedy='Correct the data, or set on_bad_record="drop".')
    return not dropped


def _refuse_bad(dataset: Any, rows: Any, name: str, args: PreferenceConfig) -> None:
    places = [(number, fault) for number, fault in zip(rows["number"], rows["fault"], strict=True) if fault]
    if not places:
        return
    if args.on_bad_record == "drop":
        logger.warning(f"{len(places)} records of the {name} dataset break their format and are left out.")
        return
    layout = Layout("preference", {})
    bad = [
        (Record(dataset[number - 1], f"{name} dataset", number, layout), BadRecord(fault)) for number, fault in places
    ]
    raise UserError(bad_records(bad, are_all=False))


def with_kl_answers(rows: Any, name: str) -> Any:
    """Each verdict with another record's answer: that of the one before it whose answer is another; the first look back
    to the last. Depends on the set alone, not on batches or order (KTO's baseline). In a streamed set they look back
    within runs of ``WINDOW`` records."""
    if not is_datasets_set(rows):
        return rows.map(_looking_back, batched=True, batch_size=WINDOW, features=rows.features)
    if any(rows["KL_completion_ids"]):
        return rows
    said = [hash(tuple(ids)) for ids in rows["completion_ids"]]
    if len(said) == 1:
        logger.warning(f"The {name} dataset is one record, whose answer is compared with itself: it has no other.")
        return rows.map(lambda row: {"KL_completion_ids": row["completion_ids"]}, features=rows.features)
    if len({*said}) < 2:
        raise UserError(f"All answers of the {name} dataset are the same; nothing can be learned from them.")
    others = rows.select([_before(said, place) for place in range(len(said))]).select_columns("completion_ids")
    others = others.rename_column("completion_ids", "KL_completion_ids")
    return _datasets().concatenate_datasets([rows.remove_columns("KL_completion_ids"), others], axis=1)


WINDOW = 1000
"""Records of a stream that are looked at together."""


def _looking_back(columns: Columns) -> Columns:
    said = columns["completion_ids"]
    if any(columns["KL_completion_ids"]):
        return columns
    others = [said[_before(said, place)] if len(said) > 1 else [] for place in range(len(said))]
    return {**columns, "KL_completion_ids": [[] if one == own else one for one, own in zip(others, said, strict=True)]}


class VerdictsOfSteps:
    """Verdicts of which each takes its other answer from its own step (``kl_pairing="group"``): a key names the row,
    and the row whose answer it takes."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def keys_of_step(self, chosen: Sequence[int]) -> Mapping[int, Key]:
        """The key of each row of a step. Args: chosen: all of them, on all ranks, in order."""
        return keys_of(chosen, self.rows[list(chosen)]["completion_ids"])

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        if not isinstance(key, tuple):
            what = '`kl_pairing="group"` takes other answers from the steps of the Trainer\'s own order of rows.'
            raise ValueError(f"{what} Leave a sampler of your own out, or the option.")
        number, other = key
        return {**self.rows[number], "KL_completion_ids": [] if other is None else self.rows[other]["completion_ids"]}


def _before(said: Sequence[Any], place: int) -> int:
    """The place of the answer before that is another; its own where there is none."""
    backs = (back for back in range(1, len(said)) if said[place - back] != said[place])
    return (place - next(backs, 0)) % len(said)


# --- rows of a set -> rows of the objectives --------------------------------------------------------------------------


def pair_row(row: Mapping[str, Any]) -> Row:
    """The two sequences of a pair; one that is scored has no prompt."""
    return {**_sequence(row, "chosen"), **_sequence(row, "rejected"), "margin": row.get("margin", 0.0)}


def verdict_row(row: Mapping[str, Any], limit: int | None) -> Row:
    """An answer with its verdict, and the same prompt with another answer, which is cut as its own was."""
    prompt, answer, other = row["prompt_ids"], row["completion_ids"], row["KL_completion_ids"]
    other = other if limit is None else other[: limit - len(prompt)]
    unlearned = [IGNORE_INDEX] * len(prompt)
    return {
        "input_ids": prompt + answer, "labels": unlearned + answer, "tag": row["label"],
        "kl_input_ids": prompt + other if other else [], "kl_labels": unlearned + other,
    }  # fmt: skip


class ObjectiveRows(RowSet[Row]):
    """The rows of a set as objectives take them, each made when it is used."""

    def __init__(self, dataset: Any, row_of: Callable[[Mapping[str, Any]], Row]) -> None:
        self.dataset, self.row_of = dataset, row_of

    def __len__(self) -> int:
        return len(self.dataset)

    def made(self, index: int) -> Row:
        return self.row_of(self.dataset[index])


def _sequence(row: Mapping[str, Any], side: str) -> dict[str, list[int]]:
    prompt, answer = row.get("prompt_ids") or [], row[f"{side}_ids"]
    return {f"{side}_input_ids": prompt + answer, f"{side}_labels": [IGNORE_INDEX] * len(prompt) + answer}
