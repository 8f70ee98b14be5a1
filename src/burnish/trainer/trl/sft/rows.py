"""Raw sets -> rows: the preparation of a data set by ``SFTTrainer``.

In: a ``datasets.Dataset`` or ``IterableDataset`` of texts, prompts with completions, conversations, or token ids.
Out: the same set with ``input_ids`` and ``labels``, truncated to ``max_length``, or packed. Left out, with a warning:
rows from which nothing is learned. Refused: columns that the arguments need and the set does not have.

    formatting_func -> token ids -> labels -> cut, or pack -> shuffle

The ids are those of the tokenizer: text as it is, with eos at its end; a conversation rendered by the chat template.
Learned is the whole row, its completion, or the assistant's tokens (``masks.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from burnish.config.errors import UserError
from burnish.data.batches.batching import pack
from burnish.data.chat.rendering import PROMPT, WHOLE, Conversation, UnreadableTemplate, chat_ids
from burnish.data.length import endless
from burnish.loop.types import IGNORE_INDEX
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.trl.sft.masks import AssistantMasks
from burnish.trainer.trl.sft.remarks import Remarks
from burnish.utils.sequences import shared_beginning

if TYPE_CHECKING:
    from burnish.trainer.trl.sft.config import SFTConfig


logger = logging.get_logger("transformers.trainer")

Columns = dict[str, list[Any]]

_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles -> those of chat templates."""

_CONVERSATIONS = ("prompt", "completion", "messages", "conversations")


@dataclass
class Preparation:
    """The preparation of sets; the same for the training set and all evaluation sets.

    Args:
        tokenizer: with its eos token and chat template set.
        args: ``SFTConfig``.
        completion_only: learn completions only.
        masks: finds the assistant's tokens, where only those are learned.
        formatting_func: row -> text, in place of the row's own columns.
    """

    tokenizer: Any
    args: SFTConfig
    completion_only: bool
    masks: AssistantMasks | None = None
    formatting_func: Callable[[Any], str] | None = None

    def __call__(self, dataset: Any, name: str, packing: bool) -> Any:
        """Prepare a set. One that holds token ids keeps them."""
        refuse_transform(dataset)
        columns = column_names(dataset)
        if "input_ids" not in columns:
            dataset, columns = self._with_texts(dataset, columns, name)
            field, sample = self.args.dataset_text_field, first_row(dataset)
            encode = EncodeTexts(self.tokenizer, field, self.completion_only, self.masks, sample)
            dataset = self._mapped(dataset, encode, f"Tokenizing {name} dataset")
            columns = [*columns, "input_ids"]
        elif self.formatting_func is not None:
            logger.warning(f"`formatting_func` is ignored: the {name} dataset holds token ids (input_ids) already.")
        columns = column_names(dataset)
        if "labels" not in columns:
            wanted = (["completion_mask"] if self.completion_only else []) + ["assistant_masks"]
            masks = [column for column in wanted if column in columns]
            dataset = self._mapped(dataset, Labels(masks), f"Building labels for {name} dataset", drop=masks)
        if "seq_lengths" in columns:
            return dataset  # packs already
        if packing:
            return self._packed(dataset, name)
        dataset = self._cut(dataset, name)
        return dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset

    def _with_texts(self, dataset: Any, columns: list[str], name: str) -> tuple[Any, list[str]]:
        """Apply the formatting function, and convert ``messages`` to the form of chat templates."""
        if self.formatting_func is not None:
            function = Formatting(self.formatting_func, self.args.dataset_text_field)
            function.takes_batches = formats_batches(self.formatting_func, first_row(dataset))
            if function.takes_batches:
                logger.warning(
                    "`formatting_func` takes a batch and returns its texts, as earlier versions of TRL called it. "
                    "Today it takes a row and returns its text."
                )
            said = f"Applying formatting function to {name} dataset"
            dataset = self._mapped(dataset, function, said, drop=columns, batched=False)
            columns = column_names(dataset)
        sample = first_row(dataset)
        if is_from_value(sample):
            drop = [column for column in ("conversations",) if column in sample]
            dataset = self._mapped(
                dataset, to_messages, f"Converting {name} dataset to ChatML", drop=drop, batched=False
            )
            columns = column_names(dataset)
        return dataset, columns

    def _mapped(
        self, dataset: Any, function: Any, said: str, drop: list[str] | None = None, batched: bool = True
    ) -> Any:
        """Call ``dataset.map``; a streamed set has neither processes nor progress. On resume it is read from one batch
        of each step before the place on, so that batches are small, but for packs, which depend on them."""
        more = {"num_proc": self.args.dataset_num_proc, "desc": said}
        if not is_datasets_set(dataset):
            more = {"batch_size": 1000 if isinstance(function, Pack) else _STREAMED_AT_ONCE} if batched else {}
        return dataset.map(function, batched=batched, remove_columns=drop or None, **more)

    def _cut(self, dataset: Any, name: str) -> Any:
        """Truncate rows to ``max_length``, and drop those with nothing left to learn."""
        limit, mode = self.args.max_length, self.args.truncation_mode
        if limit is None:
            return dataset
        if mode not in ("keep_start", "keep_end"):
            raise ValueError(f"Unsupported truncation mode: {mode}, expected 'keep_start' or 'keep_end'")
        dataset = self._mapped(dataset, Truncation(limit, keeps_end=mode == "keep_end"), f"Truncating {name} dataset")
        if not is_datasets_set(dataset):
            return dataset.filter(learns_something, input_columns="labels")
        kept = dataset.filter(
            learns_something, input_columns="labels", desc=f"Leaving out empty rows of {name} dataset"
        )
        if len(kept) < len(dataset):
            logger.warning(
                f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} dataset are left out: nothing is "
                f"learned of them (max_length is {limit})."
            )
        if len(dataset) and not len(kept):
            raise _nothing_left(name)
        return kept

    def _packed(self, dataset: Any, name: str) -> Any:
        limit, strategy = self.args.max_length, self.args.packing_strategy
        if limit is None:
            raise ValueError("When packing is enabled, `max_length` can't be `None`.")
        if strategy not in ("bfd", "bfd_split", "wrapped"):
            raise ValueError(f"Invalid packing strategy '{strategy}', must be one of ('bfd', 'bfd_split', 'wrapped').")
        drop = [column for column in column_names(dataset) if column not in ("input_ids", "labels")]
        if drop:
            dataset = dataset.remove_columns(drop)
        kept = limit if strategy == "bfd" else None  # of a row
        if is_datasets_set(dataset) and not any(learns_something(row["labels"][:kept]) for row in dataset):
            raise _nothing_left(name)
        if self.args.shuffle_dataset:
            dataset = dataset.shuffle(seed=self.args.seed)
        dataset = self._mapped(dataset, Pack(limit, strategy), f"Packing {name} dataset", ["input_ids", "labels"])
        return dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset


_STREAMED_AT_ONCE = 100
"""Rows of a stream that a step is given at once; enough for the tokenizer's threads."""


def _nothing_left(name: str) -> ValueError:
    return ValueError(f"No row of the {name} dataset is left to learn from. Raise `max_length`.")


# --- steps: columns of a batch -> new columns. Classes, because ``datasets`` pickles what it caches. -----------------


@dataclass
class Formatting:
    function: Callable[[Any], Any]
    field: str
    takes_batches: bool = False

    def __call__(self, row: Any) -> dict[str, str]:
        text = self.function(_in_batch(row))[0] if self.takes_batches else self.function(row)
        if not isinstance(text, str):
            what = f"formatting_func must return the text of the row that it is given. Received: {type(text).__name__}."
            raise UserError(what)
        return {self.field: text}


def formats_batches(function: Callable[[Any], Any], row: Any) -> bool:
    """Tell whether a ``formatting_func`` takes a batch and returns its texts: a row is nothing to it, a batch is."""
    if isinstance(_returned(function, row), str):
        return False
    found = _returned(function, _in_batch(row))
    return isinstance(found, list) and len(found) == 1 and isinstance(found[0], str)


def _returned(function: Callable[[Any], Any], given: Any) -> Any:
    try:
        return function(given)
    except Exception:  # a script's own, of any kind; it is raised when the set is made
        return None


def _in_batch(row: Any) -> dict[str, list[Any]]:
    return {name: [value] for name, value in row.items()}


@dataclass
class EncodeTexts:
    """Texts, prompts with completions, or conversations -> ids, and masks where only a part is learned.

    Args:
        sample: the first row of the set, which shows its kind.
    """

    tokenizer: Any
    field: str
    completion_only: bool
    masks: AssistantMasks | None
    sample: Any

    def __post_init__(self) -> None:
        self.is_chat = is_conversational(self.sample)
        self.has_prompts = "prompt" in self.sample
        wanted = "completion" if self.has_prompts else self.field
        if wanted not in self.sample and not (self.is_chat and not self.has_prompts):
            raise ValueError(
                f"A dataset has texts (`dataset_text_field`: `{self.field}`), `messages`, `prompt` and `completion`, "
                f"or `input_ids`. Received the columns: {', '.join(self.sample)}."
            )
        self.sample = None  # not needed any more, and not to be sent to other processes
        self.has_warned, self.remarks = False, Remarks()

    def __call__(self, columns: Columns) -> Columns:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self._refuse_hollow(rows)
        for row in rows:
            if self.is_chat:
                self.remarks.of_chat(row["prompt"] + row["completion"] if self.has_prompts else row["messages"])
            else:
                self.remarks.of_texts(*(row[name] for name in self._columns))
        if self.has_prompts:
            return self._completions(rows)
        if not self.is_chat:
            return {"input_ids": self._ids([self._with_eos(row[self.field]) for row in rows])}
        if self.masks is None:
            return {"input_ids": self._chat_ids(rows, [without_absent_keys(row["messages"]) for row in rows])}
        found = [self.masks(without_absent_keys(row["messages"]), template_arguments(row)) for row in rows]
        return {"input_ids": [ids for ids, _ in found], "assistant_masks": [mask for _, mask in found]}

    @property
    def _columns(self) -> tuple[str, ...]:
        return ("prompt", "completion") if self.has_prompts else ("messages" if self.is_chat else self.field,)

    def _refuse_hollow(self, rows: list[Any]) -> None:
        """Refuse rows of another kind than the first one, in which arrow has filled missing columns with None."""
        kind, kind_in_words = (list, "a list of messages") if self.is_chat else (str, "a text")
        for row in rows:
            for column in self._columns:
                if not isinstance(row[column], kind):
                    raise ValueError(
                        f"`{column}` must be {kind_in_words} in every row of a dataset. Received: {row[column]!r}, in "
                        f"the row {str(row)[:200]}"
                    )
            if said := endless(row[column] for column in self._columns):
                raise ValueError(f"{said[0].upper()}{said[1:]} The row: {str(row)[:200]}")

    def _completions(self, rows: list[Any]) -> Columns:
        made: Columns = {}
        if self.is_chat:
            prompts = self._chat_ids(rows, [without_absent_keys(row["prompt"]) for row in rows], is_prompt=True)
            chats = [without_absent_keys(row["prompt"]) + without_absent_keys(row["completion"]) for row in rows]
            if self.masks is None:
                wholes = self._chat_ids(rows, chats)
            else:
                found = [self.masks(chat, template_arguments(row)) for row, chat in zip(rows, chats, strict=True)]
                wholes = [ids for ids, _ in found]
                made["assistant_masks"] = [mask for _, mask in found]
        else:
            prompts = self._ids([row["prompt"] for row in rows])
            wholes = self._ids([row["prompt"] + self._with_eos(row["completion"]) for row in rows])
        begins = [self._begin(prompt, whole) for prompt, whole in zip(prompts, wholes, strict=True)]
        if self.completion_only:
            made["completion_mask"] = [
                [0] * begin + [1] * (len(whole) - begin) for begin, whole in zip(begins, wholes, strict=True)
            ]
        return {"input_ids": wholes, **made}

    def _begin(self, prompt: list[int], whole: list[int]) -> int:
        """The begin of the completion: the first token that differs from the prompt's."""
        begin = shared_beginning(prompt, whole)
        if begin < len(prompt) and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "The tokens of a prompt are not the first tokens of the prompt with its completion: the template "
                "writes the prompt differently alone, or tokens merge at the border. What is learned begins where they "
                f"part; at inference the model sees instead: {self.tokenizer.decode(prompt[begin:])!r}. Said once."
            )
        return begin

    def _with_eos(self, text: str) -> str:
        return with_eos(self.tokenizer, text)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(text=texts)["input_ids"]  # type: ignore[no-any-return]

    def _chat_ids(self, rows: list[Any], chats: list[list[Any]], is_prompt: bool = False) -> list[list[int]]:
        return ids_of_chats(self.tokenizer, rows, chats, is_prompt)


def with_eos(tokenizer: Any, text: str) -> str:
    eos = tokenizer.eos_token
    return text if eos is None or text.endswith(eos) else text + eos


def ids_of_chats(
    tokenizer: Any, rows: Sequence[Mapping[str, Any]], chats: Sequence[list[Any]], is_prompt: bool = False
) -> list[list[int]]:
    """The ids of messages, as the chat template writes them.

    Args:
        rows: have tools and arguments of the template, one for each conversation.
        is_prompt: the beginning of an answer follows.
    """
    given = []
    for row, chat in zip(rows, chats, strict=True):
        arguments = template_arguments(row)
        given.append(Conversation(chat, arguments.pop("tools"), [PROMPT if is_prompt else WHOLE], variables=arguments))
    try:
        return chat_ids(tokenizer, given)
    except UnreadableTemplate as error:
        if len(given) > 1:  # the error names its row
            return [ids for row, chat in zip(rows, chats, strict=True)
                    for ids in ids_of_chats(tokenizer, [row], [chat], is_prompt)]  # fmt: skip
        raise ValueError(f"A row cannot be encoded: {error}. The row: {str(chats[0])[:200]}") from error


@dataclass
class Labels:
    """Makes labels: the ids where all masks are 1. Args: masks: names of the columns."""

    masks: list[str]

    def __call__(self, columns: Columns) -> Columns:
        labels = []
        for place, ids in enumerate(columns["input_ids"]):
            masks = [columns[name][place] for name in self.masks]
            labels.append([i if all(bits) else IGNORE_INDEX for i, *bits in zip(ids, *masks, strict=False)])
        return {"labels": labels}


@dataclass
class Truncation:
    limit: int
    keeps_end: bool

    def __call__(self, columns: Columns) -> Columns:
        part = slice(-self.limit, None) if self.keeps_end else slice(None, self.limit)
        return {name: [values[part] for values in columns[name]] for name in ("input_ids", "labels")}


@dataclass
class Pack:
    """Rows -> packs. A row that is longer than a pack is truncated (bfd) or split (bfd_split). "wrapped" concatenates
    all rows, and its blocks have no borders of documents: within them documents attend to each other, as in TRL."""

    limit: int
    strategy: str

    def __call__(self, columns: Columns) -> Columns:
        names = ["input_ids", "labels"]
        rows = [dict(zip(names, pair, strict=True)) for pair in zip(*(columns[name] for name in names), strict=True)]
        rows = [row for row in rows if row["input_ids"]]
        if self.strategy == "bfd":
            rows = [{name: row[name][: self.limit] for name in names} for row in rows]
        packs: Any = pack(rows, self.limit, self.strategy)
        kept = names if self.strategy == "wrapped" else [*names, "seq_lengths"]
        return {name: [row[name] for row in packs] for name in kept}


def learns_something(labels: list[int]) -> bool:
    return any(label != IGNORE_INDEX for label in labels)


# --- kinds of rows ----------------------------------------------------------------------------------------------------


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Return whether a column holds messages, each with its role."""
    return any(_has_turns(row.get(column), "role") for column in _CONVERSATIONS)


def is_from_value(row: Mapping[str, Any]) -> bool:
    """Return whether a column holds messages in ShareGPT's form: from and value."""
    return any(_has_turns(row.get(column), "from") for column in _CONVERSATIONS)


def _has_turns(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]


def to_messages(row: Any) -> dict[str, Any]:
    """Convert the conversations of a row to role and content; a column ``conversations`` becomes ``messages``."""
    found = {}
    for column in _CONVERSATIONS:
        if _has_turns(row.get(column), "from"):
            turns = [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in row[column]]
            found["messages" if column == "conversations" else column] = turns
    return found


def without_absent_keys(chat: list[Any]) -> list[Any]:
    """Remove keys of messages that are None only because another row of the set has them: arrow fills them in, and
    templates test whether a key is there."""
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in chat]


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template beside the messages: tools, a list or JSON, and the row's own arguments."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    own = {k: v for k, v in (row.get("chat_template_kwargs") or {}).items() if v is not None}
    return {"tools": tools or None, **own}


def first_row(dataset: Any) -> dict[str, Any]:
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError("A dataset holds no rows.")
    return dict(row)


def column_names(dataset: Any) -> list[str]:
    """The names of the columns; for a streamed set, from its first row if necessary."""
    names = dataset.column_names
    return list(names) if names is not None else list(first_row(dataset))


def refuse_transform(dataset: Any) -> None:
    if is_datasets_set(dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            "SFTTrainer cannot prepare a dataset that uses `Dataset.with_transform()`: to prepare it would be to apply "
            "the transform once and keep what came out. Pass `dataset_kwargs={'skip_prepare_dataset': True}` and let "
            "the transform give trainer-ready rows, of token ids, or apply it with `Dataset.map()` before."
        )
