"""Rows of preference pairs and of labelled responses.

A pair has the columns ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels`` and
optionally ``margin``. A labelled response has ``input_ids``, ``labels`` and ``tag``; its prompt with the response of
another record is in ``kl_input_ids`` and ``kl_labels``. Responses are trained, prompts are masked.

Both sequences of a pair begin with the same prompt, also after truncation (``truncate.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from burnish.data.chat.labels import Segment, Turn, concatenate_ids, masked_labels
from burnish.data.chat.truncate import EncodingChoices, fit_segments, refuse_long
from burnish.data.images.in_rows import images_column
from burnish.data.stats import DataStats, RecordReason, drop_reason
from burnish.loop.types import Example, Row
from burnish.utils.sequences import shared_beginning

IDENTICAL_AFTER_TRUNCATION = drop_reason(
    "chosen and rejected are identical after truncation to cutoff_len", is_length=True
)
EMPTY_AFTER_TRUNCATION = drop_reason("a response is empty after truncation to cutoff_len", is_length=True)
TOO_LONG = drop_reason("longer than cutoff_len", is_length=True)
IMAGE_TRUNCATED = drop_reason(
    "truncation to cutoff_len would split an image; raise cutoff_len, or lower image_max_pixels", is_length=True
)
TRUNCATED = RecordReason("truncated to cutoff_len", "truncated", is_length=True)


def with_mismatched_response(example: Example) -> Example:
    """Return the prompt of a labelled response with another record's response, if it has the same type."""
    other = example.other
    if other is None or isinstance(other, str) != (example.completion is not None):
        return example
    if isinstance(other, str):
        return replace(example, completion=other)
    return replace(example, messages=(*example.messages[:-1], *other))


def pair_rows(
    examples: Sequence[Example], chosen: Sequence[Turn | None], rejected: Sequence[Turn | None],
    options: EncodingChoices, available: int, stats: DataStats,
) -> list[Row | None]:  # fmt: skip
    """Return a row per pair, None for dropped pairs (counted in ``stats``).

    Raises:
        UserError: if a row is too long and ``on_too_long`` is "raise".
    """
    pairs = [None if a is None or b is None else _with_one_prompt(a, b) for a, b in zip(chosen, rejected, strict=True)]
    _refuse_long(examples, pairs, options, available)
    rows: list[Row | None] = []
    for example, pair in zip(examples, pairs, strict=True):
        fitted = None if pair is None else _truncate_to_fit(example, pair, options, available, stats)
        if fitted is not None and fitted[1].ids == fitted[2].ids:
            stats.add(IDENTICAL_AFTER_TRUNCATION, example)
            fitted = None
        if fitted is None:
            rows.append(None)
            continue
        prompt, one, other = fitted
        row = _columns(prompt, one, "chosen_") | _columns(prompt, other, "rejected_")
        rows.append(row if example.margin is None else row | {"margin": example.margin})
    return rows


def unpaired_rows(
    examples: Sequence[Example], own: Sequence[Turn | None], others: Sequence[Turn | None],
    options: EncodingChoices, available: int, stats: DataStats,
) -> list[Row | None]:  # fmt: skip
    """Return a row per labelled response, with the mismatched response if the example has one."""
    _refuse_long(examples, own, options, available)
    rows: list[Row | None] = []
    for example, turn, other in zip(examples, own, others, strict=True):
        fitted = None if turn is None else _truncate_to_fit(example, turn, options, available, stats)
        if fitted is None:
            rows.append(None)
            continue
        row: Row = {**_columns(fitted[0], fitted[1], ""), "tag": bool(example.tag)}
        beside = None if other is None else _truncate_to_fit(example, other, options, available, DataStats())
        rows.append(row if beside is None else row | _columns(beside[0], beside[1], "kl_"))
    return rows


def _with_one_prompt(chosen: Turn, rejected: Turn) -> list[Segment]:
    """Return the common prompt of two turns and both responses. Tokens after the common prompt move to the response."""
    prompt = chosen[0]
    shared = shared_beginning(prompt.ids, rejected[0].ids)
    if shared == len(prompt.ids) == len(rejected[0].ids):
        return [prompt, chosen[1], rejected[1]]
    images = [image for image in prompt.images if image.end <= shared]
    start = Segment(
        prompt.ids[:shared], lambda: prompt.content()[:shared], labels=prompt.labels[:shared], images=images
    )
    return [start, *(_prepend_to_response(*turn, shared) for turn in (chosen, rejected))]


def _prepend_to_response(prompt: Segment, response: Segment, at: int) -> Segment:
    rest = prompt.ids[at:]
    return Segment(
        rest + response.ids, lambda: [*[False] * len(rest), *response.content()], labels=rest + response.labels
    )


def _refuse_long(
    examples: Sequence[Example], encoded: Sequence[Sequence[Segment] | None], options: EncodingChoices, available: int
) -> None:
    if options.on_too_long == "raise":
        refuse_long(examples, (0 if one is None else _length(one) for one in encoded), available)


def _length(encoded: Sequence[Segment]) -> int:
    """Return the length of a prompt with its longest response."""
    prompt, *responses = encoded
    return len(prompt.ids) + max(len(response.ids) for response in responses)


def _truncate_to_fit(
    example: Example, encoded: Sequence[Segment], options: EncodingChoices, available: int, stats: DataStats
) -> list[Segment] | None:
    """Return a prompt and its responses truncated to ``available`` tokens, or None if dropped, counted in ``stats``."""
    fitted: list[Segment] | None = list(encoded)
    if _length(encoded) > available:
        if options.on_too_long == "drop":
            stats.add(TOO_LONG, example)
            return None
        fitted = fit_segments(encoded[0], encoded[1:], available, options.truncation)
        if fitted is not None:
            stats.add(TRUNCATED, example)
    sizes = [[image.end - image.begin for image in of[0].images] for of in (encoded, fitted or encoded)]
    if sizes[0] != sizes[1]:  # an image of the prompt was truncated
        stats.add(IMAGE_TRUNCATED, example)
        return None
    if fitted is None or not all(response.is_trained for response in fitted[1:]):
        stats.add(EMPTY_AFTER_TRUNCATION, example)
        return None
    return fitted


def _columns(prompt: Segment, response: Segment, prefix: str) -> Row:
    labels = masked_labels(len(prompt.ids)) + response.labels
    columns: Any = {f"{prefix}input_ids": concatenate_ids([prompt.ids, response.ids]), f"{prefix}labels": labels}
    row: Row = columns
    if prompt.images:
        row["images" if prefix != "kl_" else "kl_images"] = images_column(prompt.images)
    return row
