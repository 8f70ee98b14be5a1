"""Generate responses to many prompts: longest first, and each slot is refilled as soon as it is free.

Unlike ``generate`` of transformers, which waits for the longest response of each batch, all slots stay in use until the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from burnish.config.errors import Problem
from burnish.inference.scheduler import Scheduler
from burnish.inference.types import EndReason, GenerationRequest, Logprob, StepOutput


@dataclass
class Finished:
    """A collected response.

    Args:
        ids: token ids, without a stop token.
        logprobs: log-probabilities of its tokens, including a stop token, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, if requested.
        reason: why it ended.
        error: error, if it failed.
        stop: stop token that ended it, if any.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    reason: EndReason | None = None
    error: Problem | None = None
    stop: int | None = None

    def take(self, output: StepOutput, stop_ids: frozenset[int]) -> None:
        self.ids += (token for token in output.ids if output.reason != "stop" or token not in stop_ids)
        self.logprobs += output.logprobs
        if output.filled is not None:
            self.prompt_logprobs += output.filled.logprobs
        self.reason, self.error = output.reason, output.error
        if output.reason == "stop":
            self.stop = output.ids[-1]


def generate_all(
    loop: Scheduler, requests: Sequence[GenerationRequest], on_done: Callable[[int, Finished], None] | None = None,
    on_submit: Callable[[int, GenerationRequest], GenerationRequest] | None = None,
) -> list[Finished]:  # fmt: skip
    """Return all responses, in the order of the requests.

    Args:
        loop: scheduler of the model.
        requests: requests to process.
        on_done: called with the index of each finished request and its response, in order of completion.
        on_submit: called with the index of a request when it is submitted, and returns the request to submit. Images
            are added here, so that they are not in memory before.
    Raises:
        RuntimeError: if a request fails, for lack of memory or because of non-finite numbers.
    """
    found = [Finished() for _ in requests]
    # The longest requests begin first, so that none of them is left over at the end.
    waiting = sorted(range(len(requests)), key=lambda at: len(requests[at].ids) + requests[at].max_new_tokens)

    def callback_of(at: int) -> Callable[[StepOutput], None]:
        def callback(output: StepOutput) -> None:
            found[at].take(output, requests[at].stop_ids)
            if output.reason == "failed":
                raise RuntimeError(f"Generation failed for prompt {at + 1}: {output.error}")
            if output.reason is not None and on_done is not None:
                on_done(at, found[at])

        return callback

    while waiting or loop.is_busy:
        while waiting and loop.num_waiting < loop.limits.slots:
            at = waiting.pop()
            loop.submit(on_submit(at, requests[at]) if on_submit is not None else requests[at], callback_of(at))
        loop.turn()
    return found
