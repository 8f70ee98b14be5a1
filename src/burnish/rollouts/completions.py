"""Completions of prompts: the seam behind which another engine can stand, and this process's own.

In: prompts as ids, a noise key for each completion, limits. Out: the ids of each completion. The completions are those
of the weights at the time of the call; whoever calls takes care that the weights do not move meanwhile, and that the
model is in evaluation mode.

``SlotSource`` is the scheduler of ``inference/`` over the model that trains: no second copy of the weights, the prompt
of a group is read once, a completion that has ended leaves its slot to the next one. An engine elsewhere (a server with
weights of its own) would be another class with ``complete`` and ``free``; it has to return token ids, not text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from burnish.config.errors import Problem, UserError
from burnish.inference.types import GenerationRequest, NoiseKey, Sampling, StepOutput
from burnish.report.console import note
from burnish.utils.work import work

if TYPE_CHECKING:  # these load transformers, for which a misspelled option does not wait
    from burnish.inference.forward import Precision
    from burnish.inference.scheduler import Scheduler

SLOTS_CPU, SLOTS_GPU = 64, 256
"""Most completions side by side, where ``kept_seats`` does not say."""
_WORTH_WAITING = 4
"""A completion waits until its prompt was read for another one, where so many tokens are spared by it."""


@dataclass(frozen=True)
class CompletionLimits:
    """What holds for all completions of a call.

    Args:
        max_new_tokens: the longest completion, its end token included.
        stop_ids: tokens that end a completion, of which it keeps the one that came.
        wants_logps: whether ``Completion.logps`` is wanted.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    wants_logps: bool = False


@dataclass(frozen=True)
class Completion:
    """One completion.

    Args:
        ids: its tokens, with the end token.
        is_ended: whether an end token came; else it was cut.
        mask: 1 for a token of the model, 0 for one of a tool; None: all are the model's.
        logps: of its tokens in nats under the law that drew them, where the source knows them.
        columns: what the source adds for reward functions.
        messages: the completion as messages, where it has turns of tools; None: one of the assistant.
        prompt: the ids that it follows, where the source has changed them.
    """

    ids: list[int]
    is_ended: bool
    mask: list[int] | None = None
    logps: list[float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    prompt: list[int] | None = None


class CompletionSource(Protocol):
    """Whoever writes completions."""

    def begin(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Look at the records of the completions that are asked for next: ``prompt`` and ``columns`` of each."""
        return

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        """One completion for each prompt and key. The completions of one prompt lie next to each other."""
        ...

    def free(self) -> None:
        """Let go of memory that only completions need. Called before each pass with a gradient."""
        ...


class SlotSource(CompletionSource):
    """The model that trains, answering over slots.

    Args:
        model: of transformers or peft, adapter applied.
        seats: completions side by side. It decides which tokens share a pass, so it is fixed for a run: the sums of a
            pass round otherwise with other neighbors.
        context: the longest prompt and completion together.
        exact: each completion alone in its passes, so that nothing depends on neighbors to the last bit.
        merging: the context in which a trained adapter is part of the weights.

    Out of memory, fewer completions are written side by side from then on, and the call begins again.
    """

    def __init__(
        self, model: nn.Module, num_slots: int, context: int, precision: Precision, exact: bool = False,
        merging: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        from burnish.inference.slots import SlotLimits

        self.model, self.precision, self.merging = model, precision, merging
        self.limits = SlotLimits(num_slots, context, exact=exact, worth_waiting=_WORTH_WAITING)
        self.scheduler: Scheduler | None = None

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        # Autocast keeps what it has cast until its outermost context ends: weights are cast once for all tokens.
        with self.merging(), self.precision():
            while (found := self._completed(prompts, keys, limits)) is None:
                pass
        return found

    def _completed(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion] | None:
        """The completions; None where memory ran out, after which the scheduler has fewer slots."""
        if self.scheduler is None:
            from burnish.inference.scheduler import Scheduler

            self.scheduler = Scheduler(self.model, self.limits, precision=self.precision)
        scheduler = self.scheduler
        scheduler.forget()
        num_slots = scheduler.facts().slots
        found: dict[int, list[int]] = {at: [] for at in range(len(prompts))}
        logps: dict[int, list[float]] = {at: [] for at in range(len(prompts))}
        ended: set[int] = set()
        failed: list[Problem | None] = []
        with work("Generating", len(prompts), "completions") as advance:
            for at in _one_of_each_first(prompts):
                request = GenerationRequest(
                    list(prompts[at]), limits.max_new_tokens, sampling=limits.sampling, stop_ids=limits.stop_ids,
                    draw_logprobs=limits.wants_logps, noise=keys[at],
                )  # fmt: skip
                on_stop = partial(ended.add, at)
                scheduler.submit(request, _sink(found[at], logps[at], on_stop, failed, advance))
            while scheduler.turn():
                if failed:
                    scheduler.cancel_all()
        if failed:
            self._begin_again(num_slots, failed[0])
            return None
        wants = limits.wants_logps
        return [Completion(ids, at in ended, logps=logps[at] if wants else None) for at, ids in found.items()]

    def _begin_again(self, num_slots: int, problem: Problem | None) -> None:
        """Say that fewer completions fit into memory. Raises UserError where a completion failed otherwise."""
        assert self.scheduler is not None
        self.scheduler.free()
        fewer = self.scheduler.facts().slots
        if problem is None or problem.code != "out_of_memory":
            raise UserError(f"A completion failed: {problem}")
        if fewer == num_slots:
            what = "There is not enough memory for a single completion."
            raise UserError(what, remedy="Lower max_completion_length.", option="max_completion_length")
        note(
            f"Out of memory with {num_slots} concurrent completions. The generation starts over with {fewer}. To "
            f"reproduce this run exactly after a resume, set kept_seats: {fewer}."
        )

    def free(self) -> None:
        if self.scheduler is not None:
            self.scheduler.free()


def _sink(
    ids: list[int],
    logps: list[float],
    on_stop: Callable[[], None],
    failed: list[Problem | None],
    advance: Callable[[int], None],
) -> Callable[[StepOutput], None]:
    def callback(made: StepOutput) -> None:
        ids.extend(made.ids)
        if made.draw_logprob is not None:
            logps.append(made.draw_logprob)
        if made.reason in ("failed", "cancelled"):
            failed.append(made.error)
        if made.reason == "stop":
            on_stop()
        if made.reason is not None:
            advance(1)

    return callback


def _one_of_each_first(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the prompts: the first of each group before all others, so that no slot waits for another's prompt."""
    is_new = [at == 0 or prompts[at] is not prompts[at - 1] for at in range(len(prompts))]
    return sorted(range(len(prompts)), key=lambda at: (not is_new[at], at))
