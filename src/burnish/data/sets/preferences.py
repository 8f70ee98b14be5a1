"""Preferences of a record: two responses to one prompt, or a label on one response.

The layout names ``chosen`` and ``rejected``, or ``kto_tag``. Raises BadRecord for responses that are missing, empty,
identical or not from the assistant, and for labels that are not boolean.

LLaMA-Factory stores a prompt and two responses. TRL stores that, or two whole conversations (or texts) with a common
prefix, which is the prompt: message by message, and in texts up to the last blank, so that no word is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from sys import float_info
from typing import Any

from burnish.data.reading.json_files import Values
from burnish.data.sets.images import system_text
from burnish.data.sets.records import BadRecord, Record, as_text
from burnish.data.sets.turns import OPENAI_TAGS, SHAREGPT_TAGS, as_context, message_of
from burnish.loop.types import RESPONSE_ROLES, Answer, Example, Message
from burnish.utils.json_files import quote_value, shorten_value
from burnish.utils.sequences import shared_beginning

_WORDS = {"true": True, "false": False}
IDENTICAL_RESPONSES = "chosen and rejected are identical."


def with_preference(record: Record, example: Example) -> Example:
    """Return ``example`` with the responses of a pair, or with a label, if the layout has columns for them."""
    columns = record.layout.columns
    if "chosen" in columns:
        pair = _pair(record, example)
        context = map(as_context, pair.messages) if record.layout.verbatim else pair.messages
        return replace(pair, messages=tuple(context))
    if "kto_tag" in columns:
        return replace(example, tag=_kto_label(record))
    return example


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pair(record: Record, example: Example) -> Example:
    chosen, rejected = (_answer(record, part) for part in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRecord('"chosen" and "rejected" must both be text or both be messages.')
    example = replace(example, margin=_margin(record))
    prompt = example.prompt if record.layout.verbatim else example.prompt or None
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _texts(example, prompt, chosen, rejected)
    assert not isinstance(chosen, str)
    assert not isinstance(rejected, str)
    return _conversations(record, example, chosen, rejected)


def _answer(record: Record, part: str) -> Answer:
    """Return the text, the message or the messages in a column."""
    value, column = record.value(part), record.layout.columns[part]
    turns = [value] if isinstance(value, dict) else record.turns_or_none(part)
    if turns is not None:
        return tuple(_message(record, turn, f"{column}[{place}]") for place, turn in enumerate(turns))
    if not isinstance(value, str):
        raise BadRecord(f'"{column}" must be text, a message or a list of messages.', received=shorten_value(value))
    return as_text(value, column)


def _message(record: Record, turn: Mapping[str, Any], place: str) -> Message:
    """Parse a message with the tags of the layout, or with those of the format that its keys indicate."""
    layout = record.layout
    if layout.tags.get("role_tag") not in turn:
        tags = SHAREGPT_TAGS if "from" in turn else OPENAI_TAGS
        layout = replace(layout, tags=tags)
    return message_of(layout, turn, place)


def _texts(example: Example, prompt: str | None, chosen: str, rejected: str) -> Example:
    """Return the example with text responses that follow a text prompt or a conversation."""
    if example.messages:
        answers = ((Message("assistant", chosen),), (Message("assistant", rejected),))
        return _check_pair(example, *answers)
    if prompt is None:
        prompt = common_prompt(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return _check_pair(replace(example, prompt=prompt), chosen, rejected)


def common_prompt(chosen: str, rejected: str) -> str:
    """Return the common prefix of two texts, up to the last blank, so that no word is split."""
    common = chosen[: shared_beginning(chosen, rejected)]
    if common in (chosen, rejected):
        raise BadRecord(IDENTICAL_RESPONSES if chosen == rejected else "one response is a prefix of the other.")
    return common[: max(common.rfind(" "), common.rfind("\n"), 0)]


def _conversations(
    record: Record, example: Example, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> Example:
    """Return the example with responses made of messages. Common leading messages are added to the prompt."""
    shared = shared_beginning(chosen, rejected)
    if chosen == rejected:
        raise BadRecord(IDENTICAL_RESPONSES, reason="chosen and rejected are identical")
    before, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    for part, answer in (("chosen", chosen), ("rejected", rejected)):
        column = record.layout.columns[part]
        if not answer:
            raise BadRecord(f'"{column}" contains only the common prompt and no response.')
        _check_role(record, column, answer[-1])
    if before and before[0].role == "system" and not record.layout.verbatim:
        example, before = replace(example, system=system_text(before[0])), before[1:]
    messages = example.messages if _ends(example.messages, before) else (*example.messages, *before)
    if not messages:
        raise BadRecord(
            f'"{record.layout.columns["chosen"]}" must be a message, or a list of messages that starts with the same '
            'prompt as "rejected".'
        )
    return _check_pair(replace(example, messages=messages, prompt=None), chosen, rejected)


def _ends(messages: Sequence[Message], before: Sequence[Message]) -> bool:
    """Return whether the common messages of the responses repeat the end of the prompt."""
    return bool(before) and tuple(messages[-len(before) :]) == tuple(before)


def _check_role(record: Record, column: str, last: Message) -> None:
    if last.role in RESPONSE_ROLES:
        return
    tags = record.layout.tags
    spoken: dict[str, str] = {role: word for word in tags.values() if (role := record.layout.roles.get(word))}
    answering = " or ".join(f'"{spoken.get(role, role)}"' for role in RESPONSE_ROLES)
    raise BadRecord(
        f'"{column}" must end with a message from {answering}.',
        reason="a response has a role other than assistant",
        received=f'"{spoken.get(last.role, last.role)}".',
    )


def _check_pair(example: Example, chosen: Answer, rejected: Answer) -> Example:
    if chosen == rejected:
        raise BadRecord(IDENTICAL_RESPONSES, reason="chosen and rejected are identical")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        spoken = answer if isinstance(answer, str) else answer[-1].text
        if not spoken.strip():
            raise BadRecord(f'"{name}" is empty.', reason="a response is empty")
    return replace(example, chosen=chosen, rejected=rejected)


def _margin(record: Record) -> float | None:
    value = record.value("margin")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= float_info.max:
        raise BadRecord(f'"{record.layout.columns["margin"]}" must be a finite number.', received=shorten_value(value))
    return float(value)


# --- KTO labels -------------------------------------------------------------------------------------------------------


def _kto_label(record: Record) -> bool:
    value, column = record.value("kto_tag"), record.layout.columns["kto_tag"]
    read = record.layout.boolean_of_label.get(value) if isinstance(value, str | int | float) else None
    if isinstance(value, bool):
        return value
    if read is None:
        raise BadRecord(
            f'"{column}" must be true or false.', reason="the label is not a boolean", received=quote_value(value)
        )
    return read


def label_values(records: Iterable[Values], column: str) -> Mapping[Any, bool]:
    """Return the meaning of each label value, if all labels are numbers or words: 0 and 1, "true" and "false".

    Empty if they are JSON's true and false, or a mixture.
    """
    values = [record.get(column) for record in records]
    if values and all(type(value) in (int, float) and value in (0, 1) for value in values):
        return {0: False, 1: True}
    if values and all(isinstance(value, str) and value.lower() in _WORDS for value in values):
        return {word: _WORDS[word.lower()] for word in (*_WORDS, "True", "False", "TRUE", "FALSE")}
    return {}


def unpair(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield each response of each pair with a KTO label: first all chosen ones, then all rejected ones, as TRL does."""
    for side, is_desirable in (("chosen", True), ("rejected", False)):
        for example in examples:
            yield replace(example.with_answer(side), tag=is_desirable)


def with_reference(example: Example) -> Example:
    """Return the example with its reference response only, or without a response if it has no reference.

    The reference is the chosen response of a pair, or a response that is neither empty nor labelled as undesirable.
    """
    if example.chosen is not None:
        return example.with_answer("chosen")
    example = replace(example, tag=None, other=None) if example.tag is not False else _without_response(example)
    return example if has_reference(example) else _without_response(example)


def _without_response(example: Example) -> Example:
    return replace(example, completion=None, messages=example.request, tag=None, other=None)


def with_references(examples: Iterable[Example]) -> list[Example]:
    """Return the examples that have a reference response, with that response only."""
    return [example for example in map(with_reference, examples) if has_reference(example)]


def has_reference(example: Example) -> bool:
    """Return whether an example has a response to compare with. Plain text counts as one."""
    if example.text is not None:
        return True
    answer = example.response.text if example.completion is None and example.response else example.completion
    return bool(answer and answer.strip())


def with_other_answers(examples: Sequence[Example]) -> list[Example]:
    """Give each labelled example a mismatched response, for KTO's KL term.

    It is the response of the nearest preceding record with another text, wrapping around. It depends on the dataset
    only, not on batches or their order.
    """
    answers = [last_answer(example) for example in examples]
    texts = list(map(response_text, answers))
    other = next((place for place in reversed(range(len(texts))) if texts[place] != texts[0]), None)
    found = []
    for place, example in enumerate(examples):
        if place and texts[place - 1] != texts[place]:
            other = place - 1
        found.append(replace(example, other=answers[place if other is None else other]))
    return found


def last_answer(example: Example) -> Answer:
    """Return the response that a label refers to."""
    return example.completion if example.completion is not None else example.messages[-1:]


def response_text(answer: Answer) -> str:
    """Return the text of a response."""
    return answer if isinstance(answer, str) else answer[-1].text
