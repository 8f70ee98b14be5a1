"""Building blocks of the scheduler: limits, jobs, slots, and generation speed."""

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

AdapterContext = Callable[[Sequence[str]], AbstractContextManager[Any]]
"""Adapter names, one per row -> a context in which each row uses its adapter."""
Deliver = Callable[[Sequence[tuple[OutputCallback, StepOutput]]], None]


@dataclass(frozen=True)
class SlotLimits:
    """Limits of concurrent requests.

    Args:
        slots: number of concurrent requests.
        context: maximum number of tokens of prompt and response together.
        waiting: maximum number of queued requests; None for no limit.
        exact: process each request in its own forward passes, so that results do not depend on others to the last bit.
        min_shared_tokens: a request waits for another one with a common prefix if that saves this many tokens.
    """

    slots: int
    context: int
    waiting: int | None = None
    exact: bool = False
    min_shared_tokens: int = 32


@dataclass(eq=False)
class Job:
    """A request in progress."""

    request: GenerationRequest
    callback: OutputCallback
    handle: RequestHandle
    limit: int  # maximum number of response tokens
    noise: NoiseKey
    answer: list[int] = field(default_factory=list)
    cached: int = 0
    is_over: bool = False  # its callback has received a reason
    prompt_logprobs: list[Logprob] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """A row of the cache and the tokens that it holds. ``content_hashes`` are those of the prompt."""

    ids: list[int] = field(default_factory=list)
    content_hashes: Sequence[int] | None = None
    adapter: str = BASE
    job: Job | None = None
    used: int = 0  # the turn in which it was last used

    @property
    def active(self) -> Job:
        """The job of a slot that is in use."""
        assert self.job is not None
        return self.job


class RecentSpeed:
    """New tokens per second over the last turns that generated any."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, int]] = deque(maxlen=64)

    def add(self, tokens: int) -> None:
        self._turns.append((time.monotonic(), tokens))

    def rate(self) -> float:
        if len(self._turns) < 2 or self._turns[-1][0] <= self._turns[0][0]:
            return 0.0
        return sum(number for _, number in list(self._turns)[1:]) / (self._turns[-1][0] - self._turns[0][0])

    def estimated_wait_s(self, waiting: Sequence[Job]) -> float:
        """Estimated seconds until queued requests are done, in [1, 60]."""
        return min(60.0, max(1.0, sum(job.limit for job in waiting) / max(self.rate(), 1.0)))


def check_request(request: GenerationRequest, limits: SlotLimits, adapters: Sequence[str]) -> None:
    """Raise UserError for a request that can never be processed."""
    context, problems = limits.context, []
    if not request.ids:
        problems.append(Problem("the prompt must have at least one token. Received: an empty prompt."))
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
    """Return the length of the common prefix, up to ``most``: positions with equal ids and equal content hashes."""
    most = common_length(a.ids, b.ids, most)
    if a.content_hashes is None and b.content_hashes is None:
        return most
    hashes = [(each.content_hashes or ())[:most] for each in (a, b)]
    ones, others = ([*some, *[0] * (most - len(some))] for some in hashes)
    return common_length(ones, others, most)


def common_length(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return the number of leading tokens that two sequences share, up to ``most``."""
    most = min(most, len(a), len(b))
    if list(a[:most]) == list(b[:most]):
        return most
    return next(at for at in range(most) if a[at] != b[at])


def deliver_each(outputs: Sequence[tuple[OutputCallback, StepOutput]]) -> None:
    """Call each callback with its result."""
    for callback, output in outputs:
        callback(output)
