"""Answers to many prompts at once: the longest first, and a slot is refilled as soon as it is free.

In:  a loop over a model, requests. Out: the ids of each answer, without the token that ended it, in the order of the
requests. Beside ``generate``, which waits for the longest answer of each batch, the slots stay full to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from burnish.config.errors import Problem
from burnish.inference.scheduler import Scheduler
from burnish.inference.types import EndReason, GenerationRequest, Logprob, StepOutput


@dataclass
class Finished:
    """An answer as it was put together.

    Args:
        ids: without a token that ended it.
        logprobs: of its tokens, where asked for, the ending one included.
        prompt_logprobs: of the prompt's tokens, where asked for.
        stop: the token that ended it, if one did.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    reason: EndReason | None = None
    error: Problem | None = None
    stop: int | None = None

    def take(self, made: StepOutput, stop_ids: frozenset[int]) -> None:
        self.ids += (token for token in made.ids if made.reason != "stop" or token not in stop_ids)
        self.logprobs += made.logprobs
        if made.filled is not None:
            self.prompt_logprobs += made.filled.logprobs
        self.reason, self.error = made.reason, made.error
        if made.reason == "stop":
            self.stop = made.ids[-1]


def generate_all(
    loop: Scheduler, requests: Sequence[GenerationRequest], on_done: Callable[[int, Finished], None] | None = None,
    on_submit: Callable[[int, GenerationRequest], GenerationRequest] | None = None,
) -> list[Finished]:  # fmt: skip
    """All answers.

    Args:
        on_submit: is given the number of each request when its turn comes, and completes it: with images, which
            should not be in memory before.
        on_done: is told the number of each request whose answer is whole, in the order in which they are.
    Raises:
        RuntimeError: where one of them fails: memory, or numbers that are not finite.
    """
    found = [Finished() for _ in requests]
    # Whose prompt and answer may be longest begins first, so that no long one is left over at the end.
    waiting = sorted(range(len(requests)), key=lambda at: len(requests[at].ids) + requests[at].max_new_tokens)

    def sink_of(at: int) -> Callable[[StepOutput], None]:
        def callback(made: StepOutput) -> None:
            found[at].take(made, requests[at].stop_ids)
            if made.reason == "failed":
                raise RuntimeError(f"Generation failed for prompt {at + 1}: {made.error}")
            if made.reason is not None and on_done is not None:
                on_done(at, found[at])

        return callback

    while waiting or loop.is_busy:
        while waiting and loop.num_waiting < loop.limits.slots:
            at = waiting.pop()
            loop.submit(on_submit(at, requests[at]) if on_submit is not None else requests[at], sink_of(at))
        loop.turn()
    return found
