"""Convert datasets of the ``datasets`` library with a column ``prompt`` to rows of prompts, for the rollout trainers.

A prompt is text, or messages that end with a user or tool message. All other columns are passed to the reward
functions. A row has the ids of the prompt, its record, and its number in the dataset. Prompts that are empty or too
long are skipped and counted. Of a streamed dataset, the records that the run needs are read at its start.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from burnish.config.errors import UserError
from burnish.data.chat.plain import PlainOptions, PlainTemplate
from burnish.data.images.family import Family
from burnish.data.images.image_file import BadImage
from burnish.data.images.in_rows import with_parts
from burnish.data.rows.encode import BATCH_SIZE
from burnish.data.sets.images import content_of, with_images, with_paths
from burnish.data.sets.records import BadRecord, Layout, Record
from burnish.data.sets.trl import has_turns
from burnish.data.sets.turns import OPENAI_TAGS
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message, RoleName, Row
from burnish.losses.base import StageObjective
from burnish.models.load import context_length
from burnish.trainer.data.loaders import is_datasets_set, is_streamed_set
from burnish.trainer.notes import logger
from burnish.trainer.trl.rollouts.config import RolloutConfig
from burnish.trainer.trl.rollouts.environments import Environments
from burnish.trainer.trl.vision import MEDIA, MEDIA_READER, image_columns, with_encoded_images, with_image_files
from burnish.trainer.trl.vision import has_images as has_images_in

_ROLES: Mapping[str, RoleName] = {"assistant": "assistant", "tool": "observation", "system": "system"}


class PromptTemplate(PlainTemplate):
    """The chat template of the tokenizer.

    Args:
        limit: maximum length of a prompt in tokens.
        stops: ids that end a completion.
        family: model family of a vision model whose prompts have images.
    """

    def __init__(self, tokenizer: Any, limit: int | None, stops: Sequence[int], family: Family | None = None) -> None:
        super().__init__(PlainOptions(limit, "keep_start"), tokenizer, family)
        self.stops = list(dict.fromkeys([*super().stop_token_ids(), *stops]))

    def stop_token_ids(self) -> list[int]:
        return self.stops


class PromptRows(list[Row]):
    """The rows of a dataset, each with ``row``, its number in the dataset."""


def prompt_rows(
    dataset: Any, name: str, objective: StageObjective, variables: Mapping[str, Any] | None = None, tools: str = "",
    most: int | None = None,
) -> PromptRows:  # fmt: skip
    """Return the rows of a dataset.

    Args:
        name: "train" or "eval", for messages.
        variables: arguments of the chat template for all records.
        tools: JSON text of the schemas of the tools that the model may call.
        most: number of records that are read from a streamed dataset. Default: all.

    Raises:
        TypeError: if it is not a dataset of the ``datasets`` library, or a list.
        UserError: if a record has no prompt, or one that ends with an assistant message.
    """
    if isinstance(dataset, PromptRows):
        return dataset
    if is_streamed_set(dataset):
        dataset = [*islice(dataset, most)]
    is_list = isinstance(dataset, list)
    if not is_list and not is_datasets_set(dataset):
        what = f"`{name}_dataset` must be a `Dataset` or `IterableDataset`. Received: `{type(dataset).__name__}`."
        raise TypeError(f"{what} Pass one of its splits, or use `Dataset.from_list`.")
    if not len(dataset):
        what = f"The {name} dataset contains no records."
        raise UserError(what, remedy='Pass at least one record with the column "prompt".', option=f"{name}_dataset")
    if not is_list and "prompt" not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise UserError(f'The {name} dataset requires a column "prompt". Received the columns: {columns}.')
    stats, has_images = DataStats(), getattr(objective.template, "family", None) is not None
    encoded = frozenset(image_columns(dataset))
    examples = (
        _with_image_files(_example(record, f"{name} dataset", at + 1, variables or {}, tools, has_images), encoded)
        for at, record in enumerate(with_encoded_images(dataset))
    )
    rows: list[Row | None] = []
    while batch := [*islice(examples, BATCH_SIZE)]:  # encodings need far more memory than their ids
        stats.seen += len(batch)
        rows += objective.encode(batch, stats)
    for reason, number in stats:
        if reason.kind == "kept":
            what = str(reason).removeprefix("kept: ")
            logger.warning(f"{number} of {len(rows)} records of the {name} dataset: {what}.")
    usable: list[Row] = [{**row, "row": at} for at, row in enumerate(rows) if row is not None]
    if not usable:
        template: Any = objective.template
        room = f"{template.options.limit} tokens, the model's context less max_completion_length"
        reasons = "; ".join(stats.problems()).replace("cutoff_len", room)
        raise UserError(f"The {name} dataset has no usable prompts.", why=f"{reasons}.")
    if len(usable) < len(rows):
        dropped = f"{len(rows) - len(usable)} of {len(rows)} prompts of the {name} dataset were dropped"
        logger.warning(f"{dropped}: they are empty or too long.")
    return PromptRows(usable)


def first_conversation(dataset: Any) -> list[dict[str, Any]] | None:
    """Return the messages of the first prompt of a dataset, as reward functions receive them. Returns None if it is
    text (then all are), or if this is not a dataset of the ``datasets`` library with a column ``prompt``."""
    if is_streamed_set(dataset):
        dataset = dataset.take(1)
    elif not is_datasets_set(dataset):
        return None
    if "prompt" not in (dataset.column_names or ()):
        return None
    first = next((record["prompt"] for record in dataset.select_columns("prompt")), None)
    return [_without_none(message) for message in first] if isinstance(first, list) and has_turns(first) else None


def _example(
    record: Mapping[str, Any], source: str, number: int, variables: Mapping[str, Any], tools: str, has_images: bool
) -> Example:  # fmt: skip
    if not isinstance(record, Mapping) or "prompt" not in record:
        what = f'{source}, record {number}: it must be a dictionary with the key "prompt". Received: {record!r:.100}.'
        raise UserError(what)
    prompt, extra = record["prompt"], dict(record)
    if not has_images and has_images_in({name: value for name, value in record.items() if value is not None}):
        what = "it contains images, and the first record of the dataset does not."
        raise UserError(what, where=f"{source}, record {number}", remedy="Begin the dataset with a record with images.")
    own = record.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        what = f'{source}, record {number}: "chat_template_kwargs" must be a dictionary. Received: {own!r:.100}.'
        raise UserError(what)
    if merged := {**variables, **own}:
        extra["chat_template_kwargs"] = merged
    if isinstance(prompt, str):
        example = Example(prompt=prompt, source=source, number=number, extra=extra)
        return _with_images(record, example) if has_images else example
    if not has_turns(prompt):
        what = f'{source}, record {number}: "prompt" must be a string or a list of messages. Received: {prompt!r:.100}.'
        raise UserError(what)
    messages = tuple(
        Message(_ROLES.get(one["role"], "user"), one.get("content") or "", raw=_without_none(one)) for one in prompt
    )
    example = Example(messages, tools=tools, source=source, number=number, extra=extra)
    return _with_images(record, example) if has_images else example


def _with_image_files(example: Example, encoded: Container[str]) -> Example:
    """Return the example with the images of columns that are not part of its prompt as files."""
    own = ("prompt", *MEDIA)
    try:
        extra = {
            name: value if name in own else with_image_files(value, name, name in encoded)
            for name, value in example.extra.items()
        }
    except BadImage as error:
        raise UserError(f"{str(error).rstrip('.')}.", where=example.place) from error
    return replace(example, extra=extra)


def _with_images(record: Mapping[str, Any], example: Example) -> Example:
    """Return the example with the images and videos of its record, whose columns then contain paths."""
    for one, several in (("image", "images"), ("video", "videos")):
        if record.get(one) is not None and record.get(several):
            what = f'both "{one}" and "{several}" have a value.'
            raise UserError(what, where=example.place, remedy="Rename or remove the column that is not in the prompt.")
    images, videos = (
        next((name for name in (f"{kind}s", kind) if record.get(name) is not None), "") for kind in ("image", "video")
    )
    layout = Layout(
        "prompts", {"prompt": "prompt"}, frozenset(), OPENAI_TAGS, images=images, videos=videos, reader=MEDIA_READER,
        verbatim=True,
    )  # fmt: skip
    found = Record(record, example.source, example.number, layout)
    try:
        messages = tuple(
            replace(one, content=content_of(layout, one.content, f"prompt[{at}].content"))
            for at, one in enumerate(example.messages)
        )
        example = with_images(found, replace(example, messages=messages))
    except BadRecord as error:
        raise UserError(error.what, where=example.place, remedy=error.remedy) from error
    # Reward functions receive the images in a column, and messages whose parts do not contain them.
    messages = tuple(with_parts(one, one.parts) if one.images else one for one in example.messages)
    return replace(example, messages=messages, extra=with_paths(example.extra, found, example))


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys whose value is None: ``datasets`` adds keys of other messages with None."""
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def blank_prompts(args: RolloutConfig, environments: Environments | None) -> Any:
    """Empty prompts for environments that write the prompt themselves. Raises ValueError without environments."""
    if environments is None:
        raise ValueError("`train_dataset` is required")
    if args.max_steps <= 0:
        raise ValueError("`max_steps` must be set if there is no `train_dataset`.")
    count = max(1, (args.generation_batch_size or 1) // args.num_generations)
    return [{"prompt": [{"role": "user", "content": ""}]}] * count


def room_for_prompts(model: Any, args: RolloutConfig) -> int | None:
    """Maximum length of a prompt in tokens; None if the model's context has no limit.

    Raises:
        UserError: if a completion of maximum length does not fit into the context.
    """
    context = context_length(model.config)
    if context is not None and args.max_completion_length >= context:
        raise UserError(
            f"max_completion_length must be below {context:,}, the model's context length, so that there is room for "
            f"a prompt. Received: {args.max_completion_length:,}."
        )
    return None if context is None else context - args.max_completion_length


class _SamplerWithoutRepeats(Sampler[int]):
    def __init__(self, sampler: Sampler[int], count: int, size: int, repeats: int) -> None:
        self.sampler, self.count, self.size, self.repeats = sampler, count, size, repeats

    def __len__(self) -> int:
        num_batches = len(self.sampler) // (self.size * self.repeats)  # type: ignore[arg-type]
        return num_batches * self.size // self.count

    def __iter__(self) -> Iterator[int]:
        numbers = iter(self.sampler)
        while len(batch := [*islice(numbers, self.size)]) == self.size:
            yield from batch[:: self.count]
            deque(islice(numbers, self.size * (self.repeats - 1)), maxlen=0)


def without_repeats(sampler: Any, count: int, size: int, repeats: int) -> Any:
    """Return a sampler that yields each prompt once, for a script's sampler.

    A sampler of TRL yields a prompt for each of its completions, and each generation batch as often as it is trained
    on. A sampler that does not repeat prompts is returned unchanged.

    Args:
        count: completions of a prompt. size: completions of a generation batch. repeats: uses of a generation batch.
    """
    if not isinstance(sampler, Sampler) or count == 1:
        return sampler
    first = [*islice(copy.deepcopy(sampler), count)]
    is_repeated = len(first) == count and len(set(first)) == 1
    return _SamplerWithoutRepeats(sampler, count, size, repeats) if is_repeated else sampler
