"""Parts of the loop of slots: its limits, a request on its way, the row of the cache that it takes, the pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from burnish.config.errors import Problem, UserError
from burnish.inference.types import (
    BASE,
    GenerationRequest,
    Logprob,
    NoiseKey,
    OutputCallback,
    RequestHandle,
    StepOutput,
)

Through = Callable[[Sequence[str]], AbstractContextManager[Any]]
"""Names of adapters, one per row -> a context in which each row goes through its own."""
Deliver = Callable[[Sequence[tuple[OutputCallback, StepOutput]]], None]


@dataclass(frozen=True)
class SlotLimits:
    """Limits of what is answered at once.

    Args:
        slots: requests at once.
        context: the longest prompt and answer together.
        waiting: requests that may wait; None for any number.
        exact: each request alone in its forward passes, so that no sum depends on neighbours to the last bit.
        worth_waiting: a request waits for another one's prompt where that spares it so many tokens.
    """

    slots: int
    context: int
    waiting: int | None = None
    exact: bool = False
    worth_waiting: int = 32


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: GenerationRequest
    callback: OutputCallback
    handle: RequestHandle
    limit: int  # tokens that the answer may have
    noise: NoiseKey
    answer: list[int] = field(default_factory=list)
    cached: int = 0
    is_over: bool = False  # its callback has heard a reason
    prompt_logprobs: list[Logprob] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """A row of the cache, and whose tokens it holds; ``content_hashes`` are those of the prompt."""

    ids: list[int] = field(default_factory=list)
    content_hashes: Sequence[int] | None = None
    adapter: str = BASE
    job: Job | None = None
    used: int = 0  # the turn in which it was used last

    @property
    def active(self) -> Job:
        """The job of a slot that is in use."""
        assert self.job is not None
        return self.job


class RecentSpeed:
    """New tokens per second over the last turns that made any."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, int]] = deque(maxlen=64)

    def add(self, tokens: int) -> None:
        self._turns.append((time.monotonic(), tokens))

    def rate(self) -> float:
        if len(self._turns) < 2 or self._turns[-1][0] <= self._turns[0][0]:
            return 0.0
        return sum(number for _, number in list(self._turns)[1:]) / (self._turns[-1][0] - self._turns[0][0])

    def patience(self, waiting: Sequence[Job]) -> float:
        """Seconds until requests that wait are likely to be answered, in [1, 60]."""
        return min(60.0, max(1.0, sum(job.limit for job in waiting) / max(self.rate(), 1.0)))


def check_request(request: GenerationRequest, limits: SlotLimits, adapters: Sequence[str]) -> None:
    """Raises UserError for a request that can never be answered."""
    context, problems = limits.context, []
    if not request.ids:
        problems.append(Problem("the prompt must have at least one token. Received: none."))
    if len(request.ids) + min(1, request.max_new_tokens) > context:
        what = f"the prompt has {len(request.ids)} tokens; the context for prompt and response together is {context}."
        problems.append(Problem(what, remedy="Shorten the prompt, or raise infer_context."))
    if request.max_new_tokens < (request.prompt_logprobs_from is None):
        problems.append(
            Problem(f"max_new_tokens must be at least 1. Received: {request.max_new_tokens}.", option="max_new_tokens")
        )
    if request.adapter != BASE and request.adapter not in adapters:
        known = ", ".join((BASE, *adapters))
        problems.append(Problem(f'unknown adapter "{request.adapter}".', remedy=f"Available: {known}."))
    if problems:
        raise UserError(problems)


def common_prefix(a: Slot | GenerationRequest, b: GenerationRequest, most: int) -> int:
    """Number of positions, up to ``most``, that stand for the same in two sequences: equal ids, of equal content."""
    most = common_length(a.ids, b.ids, most)
    if a.content_hashes is None and b.content_hashes is None:
        return most
    ones, others = (_padded(each.content_hashes or (), most) for each in (a, b))
    return common_length(ones, others, most)


def _padded(hashes: Sequence[int], length: int) -> list[int]:
    """The hashes of ``length`` positions: 0 behind those that are given."""
    return [*hashes[:length], *[0] * (length - len(hashes))]


def common_length(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Length of the common prefix of two texts, in tokens, up to ``most``."""
    most = min(most, len(a), len(b))
    if list(a[:most]) == list(b[:most]):
        return most
    return next(at for at in range(most) if a[at] != b[at])


def deliver_each(made: Sequence[tuple[OutputCallback, StepOutput]]) -> None:
    """Give each callback what was made for it."""
    for callback, each in made:
        callback(each)
