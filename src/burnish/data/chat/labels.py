"""Labels: the tokens of a conversation that are trained.

In: the turns of one conversation, encoded. Out: the same with labels and, where a message asks for it, weights.

By default the responses are trained, each with the end token that the template writes after it. ``LearnOptions`` change
this for the whole run, ``train`` and ``weight`` of a message for that message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.data.chat.segments import Segment, Turn, masked
from burnish.loop.types import IGNORE_INDEX, Ids, Message


class TemplateChoices(Protocol):
    """The options that a template reads."""

    default_system: str | None
    enable_thinking: bool | None
    preserve_thinking: bool
    tool_format: str | None
    mask_history: bool
    train_on_prompt: bool
    train_on_eos: Literal["turn", "all", "last", "none"]
    cutoff_len: int
    truncation: Literal["content", "llamafactory"]
    on_too_long: Literal["truncate", "drop", "raise"]


@dataclass
class LearnOptions:
    """Trained tokens."""

    train_on_prompt: bool = option(False, "Compute the loss on the prompt as well as the response.")
    mask_history: bool = option(False, "Compute the loss on the last response of a conversation only.")
    train_on_eos: Literal["turn", "all", "last", "none"] = option(
        "turn",
        "Which EOS tokens contribute to the loss: those of trained turns (turn), all turns (all), the last "
        "turn (last), or none.",
    )


@check
def check_learning(options: TemplateChoices) -> list[Problem]:
    if options.train_on_prompt and options.mask_history:
        what = "train_on_prompt and mask_history contradict each other: learn everything, or the last answer only."
        return [Problem(what, remedy="Leave one of them out.", option=("train_on_prompt", "mask_history"))]
    return []


@dataclass(frozen=True)
class Ends:
    """The ids of end tokens, and the id that closes the row where turns have no end token."""

    token_ids: frozenset[int]
    closing_id: int | None = None


def label_turns(turns: Sequence[Turn], options: TemplateChoices, ends: Ends) -> list[Turn]:
    """Label each turn of a conversation."""
    before = [None, *(response.message for _, response in turns)]
    last = len(turns) - 1
    return [_labelled(*turn, before[at], at == last, options, ends) for at, turn in enumerate(turns)]


def _labelled(
    prompt: Segment, response: Segment, before: Message | None, is_last: bool, options: TemplateChoices, ends: Ends
) -> Turn:
    """Label the prompt and the response of one turn; ``before`` is the response that precedes them."""
    labels, weight_of_end = _prompt_labels(prompt, options, ends), None
    if labels and ends.closing_id is not None and _closes(before, is_last, options):
        # Such a template has no end token between turns. The label of the next turn's first token is therefore eos, so
        # that the response before it learns to stop (LLaMA-Factory's efficient_eos).
        labels[0], weight_of_end = ends.closing_id, before.weight if before else 1.0
    return (
        replace(prompt, labels=labels, weights=_prompt_weights(prompt, response.message.weight, weight_of_end)),
        replace(
            response,
            labels=_response_labels(response, is_last, options, ends),
            weights=_response_weights(response, prompt.message.weight),
        ),
    )


def _response_labels(response: Segment, is_last: bool, options: TemplateChoices, ends: Ends) -> Ids:
    ids, train = response.ids, response.message.train
    is_trained = train if train is not None else is_last or not options.mask_history
    labels = ids[:] if is_trained else masked(len(ids))
    end = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in ends.token_ids), len(ids))  # the last end token
    if options.train_on_eos == "none" or (options.train_on_eos == "last" and not is_last):
        labels[end:] = masked(len(labels) - end)
    elif options.train_on_eos == "all":
        labels[end : end + 1] = ids[end : end + 1]
    if response.trailing:
        labels[-response.trailing :] = masked(response.trailing)
    return labels


def _prompt_labels(prompt: Segment, options: TemplateChoices, ends: Ends) -> Ids:
    ids, begin = prompt.ids, prompt.begin
    labels = ids[:] if options.train_on_prompt else masked(len(ids))
    if prompt.message.train is not None:
        labels[begin:] = ids[begin:] if prompt.message.train else masked(len(ids) - begin)
    if options.train_on_eos == "turn":
        return labels
    for at, token in enumerate(ids):
        if token in ends.token_ids and (options.train_on_eos != "all" or at >= begin):
            labels[at] = token if options.train_on_eos == "all" else IGNORE_INDEX
    return labels


def _closes(before: Message | None, is_last: bool, options: TemplateChoices) -> bool:
    """Return whether the first token of a prompt is trained as the end of the response before it.

    With ``mask_history`` LLaMA-Factory trains these ends even of responses that it masks; so does burnish.
    """
    if options.train_on_eos in ("last", "none"):
        return False
    if before is not None and before.train is not None:
        return before.train or bool(options.train_on_eos == "all")
    return not is_last if options.mask_history else before is not None


def _prompt_weights(prompt: Segment, of_response: float, of_end: float | None) -> list[float] | None:
    """Loss weights of a prompt's tokens, or None where all are 1.

    Args:
        of_response: the weight of the response.
        of_end: the weight of the first token, where it is trained as the end of the response before.
    """
    if {prompt.message.weight, of_response, of_end or 1.0} == {1.0}:
        return None
    weights = [1.0] * prompt.begin + [prompt.message.weight] * (len(prompt.ids) - prompt.begin)
    if of_end is not None:
        weights[0] = of_end
    return weights


def _response_weights(response: Segment, of_prompt: float) -> list[float] | None:
    weight = response.message.weight
    return None if weight == of_prompt == 1.0 else [weight] * len(response.ids)
