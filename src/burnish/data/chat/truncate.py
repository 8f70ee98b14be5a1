"""Truncation of conversations that are longer than ``cutoff_len``.

The functions return None if the rule leaves nothing of a turn. The caller counts truncated examples.

Rules:

- ``content``: ``infer_seqlen`` divides the tokens between prompt and response. Only message content is removed: the
  first tokens of each message are kept, and headers, end tokens, lists of tools and tool calls are never truncated. A
  turn that cannot keep a token of its prompt and one of its response is dropped, with all turns after it.
- ``llamafactory``: the same division, but both are truncated on the right, including headers and end tokens.
- ``keep_start``, ``keep_end``: the first or the last tokens of the row, as TRL's ``truncation_mode`` for SFT.
- ``keep_end_of_prompt``: the last tokens of the prompt and the first ones of the responses, as TRL for preferences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from burnish.config.errors import Problem
from burnish.config.options import option, raise_if
from burnish.data.chat.labels import Segment, Turn
from burnish.loop.types import Example


@dataclass
class EncodingOptions:
    """Sequence length and truncation."""

    cutoff_len: int = option(
        2048, "Maximum sequence length in tokens.", unit="tokens", aliases=("max_seq_length",), ge=1
    )
    truncation: Literal["content", "llamafactory"] = option(
        "content",
        "Truncation method: remove message content and keep headers and EOS tokens (content), or truncate as "
        "LLaMA-Factory does (llamafactory).",
    )
    on_too_long: Literal["truncate", "drop", "raise"] = option(
        "truncate", "What to do with an example longer than cutoff_len: truncate it, drop it, or stop with an error."
    )


def row_length(options: EncodingOptions) -> int:
    """Return the maximum length of a row in tokens."""
    return options.cutoff_len


class EncodingChoices(Protocol):
    """Options that affect rows, whichever class encodes them."""

    @property
    def truncation(self) -> str: ...
    @property
    def on_too_long(self) -> str: ...
    @property
    def mask_history(self) -> bool: ...
    @property
    def train_on_eos(self) -> str: ...


def refuse_long(examples: Iterable[Example], lengths: Iterable[int], cutoff_len: int) -> None:
    """Raise UserError with every example whose row is longer than ``cutoff_len``."""
    raise_if(
        Problem(
            f"The example has {n} tokens, more than cutoff_len ({cutoff_len}), and on_too_long is raise.",
            where=example.place,
            option=("cutoff_len", "on_too_long"),
        )
        for example, n in zip(examples, lengths, strict=True)
        if n > cutoff_len
    )


def infer_seqlen(source_len: int, target_len: int, cutoff_len: int) -> tuple[int, int]:
    """Return the number of tokens kept of a prompt and of a response that share ``cutoff_len``.

    A part that needs less than half of ``cutoff_len`` is kept whole; otherwise both shrink in proportion.
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


def fit_turns(turns: Sequence[Turn], available: int, rule: str, last_first: bool = False) -> list[Turn]:
    """Return the turns that fit into ``available`` tokens, truncated if necessary.

    Args:
        turns: turns of a conversation.
        available: maximum number of tokens.
        rule: truncation rule.
        last_first: give the last turns priority, instead of the first.
    """
    turns_kept: list[Turn] = []
    for prompt, response in reversed(turns) if last_first else turns:
        fitted = fit_segments(prompt, [response], available, rule) if available > 0 else None
        if fitted is None:
            break
        turns_kept.append((fitted[0], fitted[1]))
        available -= sum(len(segment.ids) for segment in fitted)
    return turns_kept[::-1] if last_first else turns_kept


def fit_segments(prompt: Segment, responses: Sequence[Segment], available: int, rule: str) -> list[Segment] | None:
    """Truncate a prompt and each response to it (one, or the two of a pair) to ``available`` tokens.

    All responses get the same maximum length and keep the same prompt. Returns None if nothing useful is left.
    """
    return _RULES[rule](prompt, responses, available)


def _content(prompt: Segment, responses: Sequence[Segment], available: int) -> list[Segment] | None:
    longest = max(len(response.ids) for response in responses)
    if len(prompt.ids) + longest <= available:
        return [prompt, *responses]
    removable = [list(segment.content()) for segment in (prompt, *responses)]
    least_prompt, least_response = _min_length(removable[0]), max(map(_min_length, removable[1:]))
    if least_prompt + least_response > available:
        return None
    of_prompt, of_response = infer_seqlen(len(prompt.ids), longest, available)
    of_prompt = min(max(of_prompt, least_prompt), available - least_response)
    of_response = min(max(of_response, least_response), available - of_prompt)
    sizes = [of_prompt, *[of_response] * len(responses)]
    return [
        segment if len(segment.ids) <= size else segment.only(_kept_positions(content, size))
        for segment, content, size in zip((prompt, *responses), removable, sizes, strict=True)
    ]


def _from_the_right(prompt: Segment, responses: Sequence[Segment], available: int) -> list[Segment]:
    of_prompt, of_response = infer_seqlen(len(prompt.ids), max(len(one.ids) for one in responses), available)
    return [_first(prompt, of_prompt), *(_first(response, of_response) for response in responses)]


def _keep_start(prompt: Segment, responses: Sequence[Segment], available: int) -> list[Segment]:
    left = max(available - len(prompt.ids), 0)
    return [_first(prompt, available), *(_first(response, left) for response in responses)]


def _keep_end(prompt: Segment, responses: Sequence[Segment], available: int) -> list[Segment]:
    left = max(available - max(len(response.ids) for response in responses), 0)
    return [_last(prompt, left), *(_last(response, available) for response in responses)]


def _keep_end_of_prompt(prompt: Segment, responses: Sequence[Segment], available: int) -> list[Segment]:
    left = max(available - max(len(response.ids) for response in responses), 1)
    return _keep_start(_last(prompt, left), responses, available)


Rule: TypeAlias = "Callable[[Segment, Sequence[Segment], int], list[Segment] | None]"
_RULES: Mapping[str, Rule] = {
    "content": _content,
    "llamafactory": _from_the_right,
    "keep_start": _keep_start,
    "keep_end": _keep_end,
    "keep_end_of_prompt": _keep_end_of_prompt,
}


def _first(segment: Segment, length: int) -> Segment:
    return segment if len(segment.ids) <= length else segment.only(range(length))


def _last(segment: Segment, length: int) -> Segment:
    size = len(segment.ids)
    return segment if size <= length else segment.only(range(size - length, size))


def _min_length(content: Sequence[bool]) -> int:
    """Return the minimum length of a segment: everything but its content, and one token of content."""
    return len(content) - sum(content) + any(content)


def _kept_positions(content: Sequence[bool], length: int) -> list[int]:
    """Return the positions kept in a segment of ``length``. The longest message is shortened first, from its end."""
    runs = _runs(content)
    level = _divide_budget([len(run) for run in runs], length - (len(content) - sum(content)))
    removed = {place for run, count in zip(runs, level, strict=True) for place in run[count:]}
    return [place for place in range(len(content)) if place not in removed]


def _runs(content: Sequence[bool]) -> list[list[int]]:
    """Return the positions of each contiguous run of content."""
    runs: list[list[int]] = []
    for place, is_content in enumerate(content):
        if is_content and (place == 0 or not content[place - 1]):
            runs.append([])
        if is_content:
            runs[-1].append(place)
    return runs


def _divide_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` tokens between messages as evenly as their lengths allow: the longest are truncated first."""
    limits = [0] * len(lengths)
    left = min(budget, sum(lengths))
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for done, index in enumerate(order):
        limits[index] = min(lengths[index], left // (len(order) - done))
        left -= limits[index]
    return limits
