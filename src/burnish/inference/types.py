"""Types of inference: requests to an engine and its results.

An engine takes token ids, which the template of the training has rendered, and returns token ids. Text, stop strings,
tool calls and reasoning are parsed from these ids elsewhere, in the same way for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from burnish.config.errors import Problem
from burnish.models.images.prompts import PromptImages

BASE = "base"
"""Name of the model without any of the served adapters."""

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one response.

    Args:
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample from this many most likely tokens; 0 for all.
        top_p: sample from the most likely tokens whose probabilities add up to this.
        min_p: minimum probability of a token relative to the most likely one.
        repetition_penalty: penalty on tokens of prompt and response (Keskar et al. 2019, section 4.1,
            https://arxiv.org/abs/1909.05858); 1 for none.
        presence_penalty: subtracted from the logits of tokens that occur in the response.
        frequency_penalty: the same, once per occurrence.
        bias: token -> value added to its logit.
        seed: forms the noise key of the draws together with ``GenerationRequest.index``; None for a random one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def with_settings(self, settings: Mapping[str, Any]) -> Sampling:
        """Return these settings with some of them replaced.

        Args:
            settings: fields of this class, and ``do_sample``: false selects the most likely token, true samples.
        """
        changes = dict(settings)
        do_sample = changes.pop("do_sample", None)
        if do_sample is False:
            changes["temperature"] = 0.0
        elif do_sample and self.temperature == 0:
            changes.setdefault("temperature", 1.0)
        return replace(self, **changes)


GREEDY = Sampling(temperature=0.0)

CHAT, ROLLOUT, SHUFFLE, EVALUATION = 0, 1, 2, 16
"""Purposes of random numbers, which use separate streams: responses to requests, completions to train on, the order in
which these are trained on, and completions of evaluation sets (one number per set, from this one on)."""


@dataclass(frozen=True)
class NoiseKey:
    """Determines the random numbers of one response, together with position and token.

    Args:
        seed: up to 64 bits; the upper ones modify the word of ``generation``.
        purpose: below 256; different purposes have different random numbers.
        generation: index of the generation of completions; 0 for requests.
        row: index of the prompt in its dataset, or of the response with one seed.
        sample: index of the completion of the prompt, below 4,096.
        start: position of the first drawn token, if a completion is generated in several parts.
    """

    seed: int = 0
    purpose: int = CHAT
    generation: int = 0
    row: int = 0
    sample: int = 0
    start: int = 0

    def words(self, position: int) -> tuple[int, int, int, int, int]:
        """Return two words of the key and the first three of the counter of Philox4x32 (``kernels/philox.py``)."""
        high = (self.seed >> 32) * 0x9E3779B9  # so that adjacent seeds and generations have different words
        key = self.purpose | self.row >> 20 << 8
        words = (self.seed, key, self.generation ^ high, self.row << 12 | self.sample, position + self.start)
        a, b, c, d, e = (word & 0xFFFFFFFF for word in words)
        return a, b, c, d, e


class Grammar(Protocol):
    """Constrains the next tokens of one response (``grammar.py``). Each request has its own instance."""

    ends: Sequence[int]
    """Tokens that end a complete response. Another stop token of the request ends an incomplete one."""

    def mask(self, logits: Tensor) -> None:
        """Set the (V,) logits of tokens that are not allowed next to -inf, in place."""
        ...

    def take(self, token: int) -> None:
        """Advance by ``token``."""
        ...


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to generate one response to. Three choices are three requests, which share the prefill.

    Args:
        ids: prompt ids, from ``Template.prompt``; at least one.
        max_new_tokens: maximum length of the response; 0 only with ``prompt_logprobs_from``.
        adapter: name of a served adapter, or BASE.
        sampling: sampling settings.
        stop_ids: tokens that end the response; the stop token is part of the output.
        min_new_tokens: no stop token is drawn before this many tokens.
        top_logprobs: return log-probabilities of the generated tokens and of this many most likely ones (0 to 20);
            None for none.
        also: tokens whose log-probabilities are returned at each step, at the end of ``Logprob.top``.
        content_hashes: one number per prompt id, for positions whose id does not identify their content: a hash of the
            image at its placeholders, 0 elsewhere. None: all 0. Keys and values are shared only between positions that
            agree in both.
        images: images of the prompt, which ``content_hashes`` belong to.
        prompt_logprobs_from: first position of the prompt, at least 1, whose log-probability is returned.
        draw_logprobs: return ``StepOutput.draw_logprob``.
        grammar: constrains the response.
        index: index of the response among those with one seed (record number, index of a choice).
        noise: determines the draws instead of ``sampling.seed`` and ``index``.
        deadline: time in seconds of ``time.monotonic`` at which the request ends as "cancelled".
    """

    ids: list[int]
    max_new_tokens: int
    adapter: str = BASE
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    top_logprobs: int | None = None
    also: tuple[int, ...] = ()
    content_hashes: Sequence[int] | None = None
    images: PromptImages | None = None
    prompt_logprobs_from: int | None = None
    draw_logprobs: bool = False
    grammar: Grammar | None = None
    index: int = 0
    noise: NoiseKey | None = None
    deadline: float = float("inf")

    def noise_key(self) -> NoiseKey:
        """Return the noise key of the draws; a random one if neither ``noise`` nor a seed is set."""
        seed = randbits(63) if self.sampling.seed is None else self.sampling.seed
        return self.noise or NoiseKey(seed, CHAT, row=self.index)


@dataclass(frozen=True)
class Logprob:
    """A token and its log-probability under the model's own logits, in nats.

    Args:
        token: token id.
        logprob: its log-probability.
        top: (token, log-probability) of the most likely tokens, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptProcessed:
    """Sent when the prompt has been read.

    Args:
        cached_tokens: prompt tokens whose keys and values were in the cache.
        logprobs: log-probabilities of prompt tokens from ``prompt_logprobs_from`` on, if requested.
    """

    cached_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """Result of one step for one request.

    Args:
        ids: one token; none if only ``filled`` or ``reason`` is set; several from a remote engine.
        logprobs: one per id, if requested.
        draw_logprob: log-probability of the token in nats under the distribution it was drawn from, with penalties,
            temperature and filters.
        filled: set in the first output of a request.
        reason: set in the last output: a stop token, the maximum length, cancellation or failure.
        error: why the request failed, or that its deadline has passed.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    draw_logprob: float | None = None
    filled: PromptProcessed | None = None
    reason: EndReason | None = None
    error: Problem | None = None


OutputCallback: TypeAlias = Callable[[StepOutput], None]


@dataclass(frozen=True)
class RequestHandle:
    """Identifies a submitted request."""

    number: int


class QueueFullError(RuntimeError):
    """Raised if too many requests are queued. Retry after ``retry_after_s`` seconds."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are already queued.")
        self.waiting, self.retry_after_s = waiting, retry_after_s


class Closed(RuntimeError):
    """Raised if the engine accepts no more requests, because it was closed or its thread has ended."""


@dataclass(frozen=True)
class EngineFacts:
    """State of an engine at one moment.

    Args:
        backend: "slots" (batched), "own cache" or "whole text" (one request at a time), or the name of a remote engine.
        slots: maximum number of concurrent requests.
        running: number of running requests.
        waiting: number of queued requests.
        context: maximum number of tokens of prompt and response together.
        adapters: names besides BASE.
        memory_bytes: kind -> bytes: "weights", "cache".
        prompt_tokens, cached_prompt_tokens, new_tokens: totals since the start.
        tokens_per_second: rate of new tokens over the last seconds in which any were generated.
        is_alive: false after its thread has ended.
    """

    backend: str
    slots: int
    running: int
    waiting: int
    context: int
    adapters: tuple[str, ...] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    new_tokens: int = 0
    tokens_per_second: float = 0.0
    is_alive: bool = True


class InferenceEngine(Protocol):
    """An inference engine, in this process (``engine.LocalEngine``) or in another one (``remote.RemoteEngine``)."""

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        """Submit a request. ``callback`` is called in the engine's thread with each ``StepOutput``.

        The last output has a reason.

        Raises:
            QueueFullError: if too many requests are queued.
            Closed: if the engine accepts no more requests.
            UserError: for a request that can never be processed: no ids, an unknown adapter, or a prompt longer than
                the context.
        """
        ...

    def cancel(self, handle: RequestHandle) -> None:
        """End a request within a step. Its callback receives "cancelled". No effect on a finished request."""
        ...

    def close(self, drain_s: float = 0.0) -> None:
        """Accept no more requests; let running ones continue for ``drain_s`` seconds, then cancel them."""
        ...

    def facts(self) -> EngineFacts: ...
