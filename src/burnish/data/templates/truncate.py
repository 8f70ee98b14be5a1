"""Truncation of a conversation that is longer than ``cutoff_len``.

In: the turns of one conversation, encoded and labelled, in order of priority. Out: the turns that stay, each within
its share of the tokens. The caller counts the conversations that were cut.

Turn by turn, ``infer_seqlen`` divides the remaining tokens between question and answer. Only content is cut from these
halves: the first tokens of each message stay, and headers, end tokens, lists of tools and tool calls stay whole (half
a call is worse than none). A turn that cannot keep at least a token of its question and of its answer is dropped, with
every turn after it. ``truncation: llamafactory`` cuts each half from the right instead, with end tokens and headers,
for rows that must equal those of LLaMA-Factory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from burnish.core.errors import Problem
from burnish.core.options import option, raise_if
from burnish.core.types import Example, Ids


@dataclass
class EncodingOptions:
    """Length of rows."""

    cutoff_len: int = option(2048, "The longest row.", unit="tokens", aliases=("max_seq_length",), ge=1)
    truncation: Literal["content", "llamafactory"] = option(
        "content",
        "How a longer row is cut: out of the messages, keeping headers and end tokens; or as LLaMA-Factory cuts it.",
    )
    on_too_long: Literal["truncate", "drop", "raise"] = option(
        "truncate", "What happens to a row that is longer than cutoff_len: it is cut, left out, or the run stops."
    )


@dataclass(frozen=True)
class Half:
    """One side of a turn: a question with everything before it, or an answer.

    Args:
        ids, labels: tokens, and their labels.
        weights: weight of the loss at each token, or None where all are 1.
        content: returns for each token whether it may be cut; called only where something has to be cut.
    """

    ids: Ids
    labels: Ids
    weights: list[float] | None
    content: Callable[[], list[bool]]

    def only(self, kept: Sequence[int]) -> Half:
        """The half with only the tokens at these positions."""
        weights = self.weights and [self.weights[i] for i in kept]
        ids, labels = (array("i", [values[i] for i in kept]) for values in (self.ids, self.labels))
        return replace(self, ids=ids, labels=labels, weights=weights)


def refuse_long(examples: Iterable[Example], lengths: Iterable[int], cutoff_len: int) -> None:
    """Raise UserError with every example whose row is too long."""
    raise_if(
        Problem(
            f"The row has {n} tokens; cutoff_len is {cutoff_len}, and on_too_long is raise.",
            where=example.place,
            option=("cutoff_len", "on_too_long"),
        )
        for example, n in zip(examples, lengths, strict=True)
        if n > cutoff_len
    )


def infer_seqlen(source_len: int, target_len: int, cutoff_len: int) -> tuple[int, int]:
    """The number of tokens that a question and its answer keep when they share ``cutoff_len``.

    The shorter one stays whole where it takes less than half; otherwise both shrink in proportion.
    Source: LLaMA-Factory, src/llamafactory/data/processor/processor_utils.py.
    """
    if target_len * 2 < cutoff_len:
        longest_target = cutoff_len
    elif source_len * 2 < cutoff_len:
        longest_target = cutoff_len - source_len
    else:
        longest_target = int(cutoff_len * (target_len / (source_len + target_len)))
    target = min(longest_target, target_len)
    return min(max(cutoff_len - target, 0), source_len), target


def fit_turns(turns: Sequence[tuple[Half, Half]], room: int, truncation: str) -> list[tuple[Half, Half]]:
    """The turns that fit into ``room`` tokens, cut where they must be.

    Args:
        turns: (question, answer) in order of priority: the first keeps most.
    """
    fit = _from_the_right if truncation == "llamafactory" else _out_of_the_content
    kept: list[tuple[Half, Half]] = []
    for source, target in turns:
        if room <= 0:
            break
        fitted = fit(source, target, room)
        if fitted is None:
            break
        kept.append(fitted)
        room -= len(fitted[0].ids) + len(fitted[1].ids)
    return kept


def _from_the_right(source: Half, target: Half, room: int) -> tuple[Half, Half]:
    source_len, target_len = infer_seqlen(len(source.ids), len(target.ids), room)
    return source.only(range(source_len)), target.only(range(target_len))


def _out_of_the_content(source: Half, target: Half, room: int) -> tuple[Half, Half] | None:
    if len(source.ids) + len(target.ids) <= room:
        return source, target
    source_content, target_content = source.content(), target.content()
    source_least, target_least = _least(source_content), _least(target_content)
    if source_least + target_least > room:
        return None
    source_len, target_len = infer_seqlen(len(source.ids), len(target.ids), room)
    source_len = min(max(source_len, source_least), room - target_least)
    target_len = min(max(target_len, target_least), room - source_len)
    return source.only(_kept(source_content, source_len)), target.only(_kept(target_content, target_len))


def least_of(half: Half) -> int:
    """The shortest that a half can get out of its content."""
    return _least(half.content())


def cut_half(half: Half, length: int) -> Half:
    """A half held to ``length``, at least ``least_of`` it; itself where it is no longer."""
    return half if len(half.ids) <= length else half.only(_kept(half.content(), length))


def _least(content: list[bool]) -> int:
    """The smallest length of a half: everything that is not content, and one token of content."""
    return len(content) - sum(content) + any(content)


def _kept(content: list[bool], length: int) -> list[int]:
    """The positions that stay when a half is cut to ``length``: the longest message is cut first, from its end."""
    runs = _runs(content)
    level = _level([len(run) for run in runs], length - (len(content) - sum(content)))
    given_up = {place for run, kept in zip(runs, level, strict=True) for place in run[kept:]}
    return [place for place in range(len(content)) if place not in given_up]


def _runs(content: list[bool]) -> list[list[int]]:
    """The positions of each contiguous run of content."""
    runs: list[list[int]] = []
    for place, is_content in enumerate(content):
        if is_content and (place == 0 or not content[place - 1]):
            runs.append([])
        if is_content:
            runs[-1].append(place)
    return runs


def _level(lengths: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` tokens between messages as evenly as their lengths allow, so that the longest are cut first."""
    kept = [0] * len(lengths)
    left = min(budget, sum(lengths))
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for done, index in enumerate(order):
        kept[index] = min(lengths[index], left // (len(order) - done))
        left -= kept[index]
    return kept
