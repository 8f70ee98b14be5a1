"""Generate completions of prompts: the interface of completion sources, and the source that uses the trained model.

A source takes prompts as ids, a noise key for each completion, and limits, and returns the ids of each completion.
Completions are those of the weights at the time of the call; the caller makes sure that the weights do not change
meanwhile and that the model is in evaluation mode.

``SlotSource`` uses the scheduler of ``inference/`` with the model that is trained: there is no second copy of the
weights, the prompt of a group is processed once, and a finished completion frees its slot for the next one. An external
engine (a server with its own weights) would be another class with ``complete`` and ``free``; it must return token ids,
not text.
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
from burnish.utils.work import progress

if TYPE_CHECKING:  # imported late: they load transformers, which an error on a misspelled option does not need
    from burnish.inference.forward import Precision
    from burnish.inference.scheduler import Scheduler

SLOTS_CPU, SLOTS_GPU = 64, 256
"""Maximum number of concurrent completions if ``max_concurrent_completions`` does not limit it."""
_MIN_TOKENS_WORTH_WAITING = 4
"""A completion waits for another one with the same prompt if this saves at least this number of tokens."""


@dataclass(frozen=True)
class CompletionLimits:
    """Limits of all completions of a call.

    Args:
        max_new_tokens: maximum length of a completion, including its end token.
        stop_ids: tokens that end a completion; the one that ended it is kept.
        wants_logps: whether ``Completion.logps`` is needed.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    wants_logps: bool = False


@dataclass(frozen=True)
class Completion:
    """One completion.

    Args:
        ids: its tokens, including the end token.
        is_ended: whether it ended with an end token; otherwise it was truncated.
        mask: 1 for a token of the model, 0 for a token of a tool result; None if all are the model's.
        logps: log-probabilities of its tokens in nats under the distribution that they were sampled from, if known.
        columns: additional columns for reward functions.
        messages: the completion as messages, if it has tool calls; None for a single assistant message.
        prompt: ids of the prompt, if the source has changed them.
    """

    ids: list[int]
    is_ended: bool
    mask: list[int] | None = None
    logps: list[float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    prompt: list[int] | None = None


def with_text_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a completion for a chat template: a tool result that is a list becomes text."""
    return [{**m, "content": str(m["content"])} if m["role"] == "tool" else dict(m) for m in messages]


class CompletionSource(Protocol):
    """Interface of a source of completions."""

    def set_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Called before ``complete`` with the record of each prompt: its ``prompt`` and its ``columns``."""
        return

    def set_images(self, images: Sequence[Mapping[str, Any]]) -> None:
        """Called before ``complete`` if any prompt has images.

        Args:
            images: fields of ``GenerationRequest`` with the images of each prompt; empty for a prompt without images.

        Raises:
            UserError: if the source does not support images.
        """
        raise UserError(
            f"{type(self).__name__} does not generate completions of prompts with images.",
            remedy="Remove the image column.",
        )

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        """Return one completion for each prompt and key. Completions of the same prompt are adjacent."""
        ...

    def free(self) -> None:
        """Release memory that only completions need. Called before each pass with gradients."""
        ...


class SlotSource(CompletionSource):
    """Generates completions with the trained model, using slots.

    Args:
        model: model of transformers or peft, with the adapter applied.
        num_slots: number of concurrent completions. It determines which tokens share a forward pass and is constant
            during a run, because rounding depends on the batch.
        context: maximum length of prompt and completion together.
        exact: process each completion separately, so that results do not depend on the batch at all.
        merging: context in which a trained adapter is merged into the weights.
        packing: context in which the weights are packed for products with few rows; entered within ``precision``.

    After running out of memory, the number of concurrent completions is reduced for the rest of the run, and the call
    is repeated.
    """

    def __init__(
        self, model: nn.Module, num_slots: int, context: int, precision: Precision, exact: bool = False,
        merging: Callable[[], AbstractContextManager[None]] = nullcontext,
        packing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        from burnish.inference.slots import SlotLimits

        self.model, self.precision, self.merging, self.packing = model, precision, merging, packing
        self.limits = SlotLimits(num_slots, context, exact=exact, min_shared_tokens=_MIN_TOKENS_WORTH_WAITING)
        self.scheduler: Scheduler | None = None
        self._images: Sequence[Mapping[str, Any]] = ()

    def set_images(self, images: Sequence[Mapping[str, Any]]) -> None:
        self._images = images

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        images, self._images = self._images or [{}] * len(prompts), ()
        # Autocast caches cast weights until its outermost context ends: weights are cast once for all tokens.
        with self.merging(), self.precision(), self.packing():
            while (found := self._generate_completions(prompts, keys, limits, images)) is None:
                pass
        return found

    def _generate_completions(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits,
        images: Sequence[Mapping[str, Any]],
    ) -> list[Completion] | None:  # fmt: skip
        """Return the completions; None after running out of memory, when the scheduler has fewer slots."""
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
        with progress("Generating", len(prompts), "completions") as advance:
            for at in _first_of_each_group(prompts):
                request = GenerationRequest(
                    list(prompts[at]), limits.max_new_tokens, sampling=limits.sampling, stop_ids=limits.stop_ids,
                    draw_logprobs=limits.wants_logps, noise=keys[at], **images[at],
                )  # fmt: skip
                on_stop = partial(ended.add, at)
                scheduler.submit(request, _output_callback(found[at], logps[at], on_stop, failed, advance))
            while scheduler.turn():
                if failed:
                    scheduler.cancel_all()
        if failed:
            self._reduce_concurrency(num_slots, failed[0])
            return None
        wants = limits.wants_logps
        return [Completion(ids, at in ended, logps=logps[at] if wants else None) for at, ids in found.items()]

    def _reduce_concurrency(self, num_slots: int, problem: Problem | None) -> None:
        """Free the memory, and warn that fewer completions fit into it.

        Raises:
            UserError: if a completion failed for another reason, or if not even one fits.
        """
        assert self.scheduler is not None
        self.scheduler.free()
        fewer = self.scheduler.facts().slots
        if problem is None or problem.code != "out_of_memory":
            raise UserError(f"Generating a completion failed: {problem}")
        if fewer == num_slots:
            what = "There is not enough memory for a single completion."
            raise UserError(what, remedy="Lower max_completion_length.", option="max_completion_length")
        note(
            f"Out of memory with {num_slots} concurrent completions. Generation restarts with {fewer}. To "
            f"reproduce this run exactly after resuming it, set max_concurrent_completions: {fewer}."
        )

    def free(self) -> None:
        if self.scheduler is not None:
            self.scheduler.free()


def _output_callback(
    ids: list[int],
    logps: list[float],
    on_stop: Callable[[], None],
    failed: list[Problem | None],
    advance: Callable[[int], None],
) -> Callable[[StepOutput], None]:
    def callback(output: StepOutput) -> None:
        ids.extend(output.ids)
        if output.draw_logprob is not None:
            logps.append(output.draw_logprob)
        if output.reason in ("failed", "cancelled"):
            failed.append(output.error)
        if output.reason == "stop":
            on_stop()
        if output.reason is not None:
            advance(1)

    return callback


def _first_of_each_group(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the prompts with the first of each group before all others, so that no slot waits for the
    prompt of another one."""
    is_new = [at == 0 or prompts[at] is not prompts[at - 1] for at in range(len(prompts))]
    return sorted(range(len(prompts)), key=lambda at: (not is_new[at], at))
