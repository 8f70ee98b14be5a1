"""The prompts of an evaluation set with their reference responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.data.chat.rows import Template
from burnish.data.images.family import Family
from burnish.data.images.image_file import images_of
from burnish.data.images.in_rows import without_expansion
from burnish.data.length import num_characters
from burnish.data.rows.encode import batch_spans
from burnish.data.sets.preferences import has_reference, with_reference
from burnish.data.stats import DataStats
from burnish.loop.types import Example
from burnish.models.generate import until_stop
from burnish.utils.work import progress


@dataclass(frozen=True)
class Question:
    """A prompt, and its reference response; None if it has none."""

    prompt: list[int]
    label: list[int] | None
    images: Sequence[Any] = ()


def questions_of(examples: Sequence[Example], template: Template, stops: Sequence[int]) -> list[Question]:
    """Return the prompts for the last response of each conversation, or for the completion of each prompt.

    Records may be of any kind: conversations, pairs, labelled responses, or prompts without a response. Those with a
    response are not truncated.
    """
    examples = [with_reference(example) for example in examples if example.text is None]
    questions: list[Question] = []
    with progress("Tokenizing prompts", len(examples), "prompts") as advance:
        for span in batch_spans([num_characters(example) for example in examples]):
            questions += _of_batch(examples[span.start : span.stop], template, stops)
            advance(len(span))
    return questions


def _of_batch(examples: Sequence[Example], template: Template, stops: Sequence[int]) -> list[Question]:
    answered = [example for example in examples if has_reference(example)]
    rows = iter(template.encode_arrays(answered, DataStats(), truncate=False))
    questions = []
    for example in examples:
        if not has_reference(example):
            (found,) = template.encode_prompts([example], DataStats())
            if found is not None:
                questions.append(Question(list(found["input_ids"]), None, found.get("images", ())))
            continue
        row = next(rows)
        if row is None:
            continue
        ids = list(row["input_ids"])
        if example.completion is not None:
            prompt = list(template.completion_prompt(example))
            images = row.get("images", ())
        else:
            requested = template.prompt_row(example)
            prompt, images = list(requested["input_ids"]), requested.get("images", ())
        is_start = ids[: len(prompt)] == prompt
        label = ids[len(prompt) :] if is_start else template.form.encoder.plain(example.messages[-1].text)
        if prompt:
            questions.append(Question(prompt, until_stop(label, stops), images))
    return questions


def with_image_marks(question: Question, family: Family | None) -> Sequence[int]:
    """Return the prompt with one placeholder per image instead of all of its image tokens."""
    if family is None or not question.images:
        return question.prompt
    return without_expansion(question.prompt, images_of({"images": question.images}), family.mark_id)
