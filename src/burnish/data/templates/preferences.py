"""Examples that prefer one answer -> rows: one prompt and the answers that follow it.

In: pairs of answers, or an answer with a verdict. Out: rows of several sequences: ``chosen_input_ids``,
``chosen_labels``, ``rejected_input_ids``, ``rejected_labels`` and ``margin``; or ``input_ids``, ``labels``, ``tag``
and, of the same prompt with another record's answer, ``kl_input_ids`` and ``kl_labels``. The answer is learned, the
prompt is not.

Both sequences of a pair begin with the very same prompt. Where a row is too long, the prompt gives up what
``infer_seqlen`` asks of it for the longer answer, and both answers are held to the same length. With
``truncation: llamafactory`` the rows are LLaMA-Factory's: prompt and answers cut from the right (data/processor/
pairwise.py and feedback.py there, August 2026).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from burnish.core.sequences import shared_beginning
from burnish.core.types import IGNORE_INDEX, Example, Ids, Row
from burnish.data.tally import Tally
from burnish.data.templates.labels import TemplateChoices, Turn, label_turns, unlearned
from burnish.data.templates.parts import TemplateParts, ends_of
from burnish.data.templates.truncate import Half, cut_half, infer_seqlen, least_of, refuse_long

EQUAL_AFTER_CUT = "dropped: its answers are the same once cut to cutoff_len"
NOTHING_LEFT = "dropped: cutoff_len leaves nothing of an answer"
TOO_LONG = "dropped: longer than cutoff_len"
CUT = "cut: shortened to cutoff_len"
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Answered:
    """A prompt and one answer to it, encoded."""

    prompt: Half
    answer: Half

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + len(self.answer.ids)


def encode_pairs(template: TemplateParts, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
    """A row per pair, None where there is nothing to learn from it (counted in ``tally``).

    Raises:
        UserError: where a row is too long and ``on_too_long`` is "raise".
    """
    sides = [_encoded(template, [_with(example, side) for example in examples], tally) for side in _SIDES]
    drafts = [
        None if chosen is None or rejected is None else _with_one_prompt(chosen, rejected)
        for chosen, rejected in zip(*sides, strict=True)
    ]
    _refuse_long(template, examples, drafts)
    return [
        None if draft is None else _pair_row(template, example, draft, tally)
        for example, draft in zip(examples, drafts, strict=True)
    ]


def encode_verdicts(template: TemplateParts, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
    """A row per answer with a verdict, and its prompt with another answer where the example has one."""
    own = _encoded(template, examples, tally)
    others = _encoded(template, [_with_other(example) for example in examples], Tally())
    _refuse_long(template, examples, [None if draft is None else [draft] for draft in own])
    return [
        None if draft is None else _verdict_row(template, example, draft, other, tally)
        for example, draft, other in zip(examples, own, others, strict=True)
    ]


# --- prompt and answer ------------------------------------------------------------------------------------------------


def _with(example: Example, side: str) -> Example:
    """The conversation, or the text, with one of its two answers."""
    alone, answer = replace(example, chosen=None, rejected=None), getattr(example, side)
    if isinstance(answer, str):
        return replace(alone, completion=answer)
    return replace(alone, messages=(*example.messages, *answer))


def _with_other(example: Example) -> Example:
    """The prompt of a verdict with another record's answer; as it is where there is none of its kind."""
    other = example.other
    if other is None or isinstance(other, str) != (example.completion is not None):
        return example
    if isinstance(other, str):
        return replace(example, completion=other)
    return replace(example, messages=(*example.messages[:-1], *other))


def _encoded(template: TemplateParts, examples: Sequence[Example], tally: Tally) -> list[Answered | None]:
    is_text = [example.completion is not None for example in examples]
    texts = _texts(template, [e for e, is_one in zip(examples, is_text, strict=True) if is_one])
    talks = _conversations(template, [e for e, is_one in zip(examples, is_text, strict=True) if not is_one], tally)
    return [next(texts) if is_one else next(talks) for is_one in is_text]


def _conversations(template: TemplateParts, examples: Sequence[Example], tally: Tally) -> Iterator[Answered | None]:
    """All before the last answer is prompt."""
    form, options = template.form.answering_last(), template.options
    closing, ends = ends_of(template, form)
    for turns in form.turns(examples, tally) if examples else ():
        if turns is None:
            yield None
            continue
        prompt, last = _prompt(turns), label_turns(turns[-1:], options, replace(ends, closing_id=None))[0][1]
        yield Answered(prompt, last if closing is None else _closed(last, closing, options))


def _prompt(turns: Sequence[Turn]) -> Half:
    ids = array("i")
    for turn in turns[:-1]:
        ids += turn.source + turn.target
    ids += turns[-1].source

    def content() -> list[bool]:
        earlier = chain.from_iterable(chain(*turn.content()) for turn in turns[:-1])
        return [*earlier, *turns[-1].content()[0]]

    return Half(ids, unlearned(len(ids)), None, content)


def _closed(answer: Half, closing: int, options: TemplateChoices) -> Half:
    """An answer with the end token that closes a row, for templates whose turns have none of their own."""
    label = IGNORE_INDEX if options.train_on_eos == "none" else closing
    ids, labels = answer.ids + array("i", [closing]), answer.labels + array("i", [label])
    return Half(ids, labels, None, lambda: [*answer.content(), False])


def _texts(template: TemplateParts, examples: Sequence[Example]) -> Iterator[Answered]:
    """A text behind a text; the end token behind it, unless it ends so. Tokenised apart and together: the answer begins
    where the two first differ, which is at the end of the prompt unless a token spans the border."""
    encoder, eos = template.form.encoder, template.tokenizer.eos_token_id
    wholes = [(example.prompt or "") + (example.completion or "") for example in examples]
    prompts = [example.prompt or "" for example in examples]
    ids = encoder.encode(filter(None, (*wholes, *prompts)))
    opening = template.opening_ids() if examples else array("i")
    for whole, prompt in zip(wholes, prompts, strict=True):
        every = ids[whole]
        at = shared_beginning(ids[prompt], every) if prompt else 0
        answer = every[at:]
        if eos is not None and (not len(answer) or answer[-1] != eos):
            answer = answer + array("i", [eos])
        yield _text(opening + every[:at], answer)


def _text(asked: Ids, answer: Ids) -> Answered:
    return Answered(
        Half(asked, unlearned(len(asked)), None, lambda: [True] * len(asked)),
        Half(answer, answer, None, lambda: [*[True] * (len(answer) - 1), False]),
    )


def _with_one_prompt(chosen: Answered, rejected: Answered) -> list[Answered]:
    """Both answers behind the same tokens: what one prompt has beyond the other becomes part of its answer."""
    if chosen.prompt.ids == rejected.prompt.ids:
        return [chosen, replace(rejected, prompt=chosen.prompt)]
    shared = shared_beginning(chosen.prompt.ids, rejected.prompt.ids)
    return [_parted(chosen, shared), _parted(rejected, shared)]


def _parted(answered: Answered, at: int) -> Answered:
    prompt, answer = answered.prompt, answered.answer
    rest = prompt.ids[at:]
    return Answered(
        Half(prompt.ids[:at], prompt.labels[:at], None, lambda: prompt.content()[:at]),
        Half(rest + answer.ids, rest + answer.labels, None, lambda: [*[False] * len(rest), *answer.content()]),
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def _refuse_long(
    template: TemplateParts, examples: Sequence[Example], drafts: Sequence[Sequence[Answered] | None]
) -> None:
    if template.options.on_too_long == "raise":
        lengths = (max(one.length for one in draft) if draft else 0 for draft in drafts)
        refuse_long(examples, lengths, template.cutoff_len)


def _pair_row(template: TemplateParts, example: Example, draft: list[Answered], tally: Tally) -> Row | None:
    fitted = _fitted(template, example, draft, tally)
    if fitted is None:
        return None
    if fitted[0].answer.ids == fitted[1].answer.ids:
        tally.add(EQUAL_AFTER_CUT, example)
        return None
    row: Row = {}
    for side, one in zip(_SIDES, fitted, strict=True):
        row |= _columns(one, f"{side}_")
    if example.margin is not None:
        row["margin"] = example.margin
    return row


def _verdict_row(
    template: TemplateParts, example: Example, draft: Answered, other: Answered | None, tally: Tally
) -> Row | None:
    fitted = _fitted(template, example, [draft], tally)
    if fitted is None:
        return None
    row = _columns(fitted[0], "")
    row["tag"] = bool(example.tag)
    beside = None if other is None or example.other is None else _fitted(template, example, [other], Tally())
    if beside is not None:
        row |= _columns(beside[0], "kl_")
    return row


def _columns(one: Answered, prefix: str) -> Row:
    labels = unlearned(len(one.prompt.ids)) + one.answer.labels
    columns: Any = {f"{prefix}input_ids": one.prompt.ids + one.answer.ids, f"{prefix}labels": labels}
    row: Row = columns
    return row


def _fitted(template: TemplateParts, example: Example, draft: list[Answered], tally: Tally) -> list[Answered] | None:
    """A prompt and its answers within ``cutoff_len``; None where they are dropped for it, which is counted."""
    options, room = template.options, template.cutoff_len
    if max(one.length for one in draft) > room:
        if options.on_too_long == "drop":
            tally.add(TOO_LONG, example)
            return None
        cut = _from_the_right if options.truncation == "llamafactory" else _out_of_the_content
        shortened = cut(draft, room)
        if shortened is None:
            tally.add(NOTHING_LEFT, example)
            return None
        tally.add(CUT, example)
        draft = shortened
    if not all(any(label != IGNORE_INDEX for label in one.answer.labels) for one in draft):
        tally.add(NOTHING_LEFT, example)
        return None
    return draft


def _from_the_right(draft: list[Answered], room: int) -> list[Answered] | None:
    asked, answered = infer_seqlen(len(draft[0].prompt.ids), max(len(one.answer.ids) for one in draft), room)
    return [
        Answered(one.prompt.only(range(asked)), one.answer.only(range(min(answered, len(one.answer.ids)))))
        for one in draft
    ]


def _out_of_the_content(draft: list[Answered], room: int) -> list[Answered] | None:
    """Headers and end tokens stay; what people wrote gives way."""
    prompt, answers = draft[0].prompt, [one.answer for one in draft]
    least_prompt, least_answer = least_of(prompt), max(map(least_of, answers))
    if least_prompt + least_answer > room:
        return None
    asked, answered = infer_seqlen(len(prompt.ids), max(len(answer.ids) for answer in answers), room)
    asked = min(max(asked, least_prompt), room - least_answer)
    answered = min(max(answered, least_answer), room - asked)
    cut_prompt = cut_half(prompt, asked)
    return [Answered(cut_prompt, cut_half(answer, answered)) for answer in answers]
