"""The words of answering: what is asked of an engine, and what it makes.

An engine is fed with token ids, which the template that trained has made, and gives token ids back. Text, stops that
are strings, tool calls and thoughts are read from those ids elsewhere, by one reader for every engine.
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
"""The name of the model without any of the adapters that are served beside it."""

EndReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Sampling:
    """Sampling of one answer.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw from this many of the likeliest; 0 for all.
        top_p: draw from the likeliest whose probabilities add up to this.
        min_p: draw from tokens at least this likely, relative to the likeliest.
        repetition_penalty: of tokens of the prompt and the answer (Keskar et al. 2019, section 4.1,
            https://arxiv.org/abs/1909.05858); 1 for none.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer, once, and per use.
        bias: token -> what is added to its logit.
        seed: with ``GenerationRequest.index`` it is the noise key of the draws; None for one that nobody knows.
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

    def changed(self, given: Mapping[str, Any]) -> Sampling:
        """These settings with others in their place.

        Args:
            given: fields of this class, and ``do_sample``: false takes the most likely token, true draws.
        """
        changes = dict(given)
        do_sample = changes.pop("do_sample", None)
        if do_sample is False:
            changes["temperature"] = 0.0
        elif do_sample and self.temperature == 0:
            changes.setdefault("temperature", 1.0)
        return replace(self, **changes)


GREEDY = Sampling(temperature=0.0)

CHAT, ROLLOUT, DEAL, EVALUATION = 0, 1, 2, 16
"""Purposes of random numbers, which keep them apart: answers to requests, completions to train on, the order in which
these are trained on, and completions of evaluation sets, from this number on one per set."""


@dataclass(frozen=True)
class NoiseKey:
    """What decides the random numbers of one answer, besides the position and the token.

    Args:
        seed: up to 64 bits, of which the upper ones change the word of ``generation``.
        purpose: below 256; different purposes share no number.
        generation: the number of the generation of completions; 0 for requests.
        row: the number of the prompt in its set, or of the answer under one seed.
        sample: which of the completions of the prompt, below 4,096.
        start: the position of the first token that is drawn, where a completion is drawn in several parts.
    """

    seed: int = 0
    purpose: int = CHAT
    generation: int = 0
    row: int = 0
    sample: int = 0
    start: int = 0

    def words(self, position: int) -> tuple[int, int, int, int, int]:
        """Two words of the key and the first three of the counter of Philox4x32 (``kernels/philox.py``)."""
        high = (self.seed >> 32) * 0x9E3779B9  # so that seeds and generations near each other have words of their own
        key = self.purpose | self.row >> 20 << 8
        words = (self.seed, key, self.generation ^ high, self.row << 12 | self.sample, position + self.start)
        a, b, c, d, e = (word & 0xFFFFFFFF for word in words)
        return a, b, c, d, e


class Grammar(Protocol):
    """The tokens that may come next in one answer (``grammar.py``). Each request has one of its own."""

    def mask(self, logits: Tensor) -> None:
        """Put -inf into the (V,) logits of tokens that may not come next, in place."""
        ...

    def take(self, token: int) -> None:
        """``token`` has come."""
        ...


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to be answered. A request for three choices is three requests, which share their prefill.

    Args:
        ids: the prompt, from ``Template.prompt``; at least one token.
        max_new_tokens: the longest answer; 0 only with ``prompt_logprobs_from``.
        adapter: the name of a served adapter, or BASE.
        stop_ids: tokens that end the answer, the last of which is part of what was made.
        min_new_tokens: before so many tokens no stop token is drawn.
        top_logprobs: log-probabilities of what was made, and of so many of the likeliest beside it (0 to 20); None for
            none.
        also: tokens whose log-probabilities are wanted at each step besides; they stand at the end of ``Logprob.top``.
        content_hashes: one number per id of the prompt, which says what the position stands for where the id alone
            does not: a hash of the image at its placeholders, 0 elsewhere. None: all 0. Keys and values are shared
            only between positions that agree in both.
        images: those of the prompt; ``content_hashes`` are theirs.
        prompt_logprobs_from: the first position of the prompt, at least 1, whose log-probability is wanted too.
        draw_logprobs: whether ``StepOutput.draw_logprob`` is wanted.
        index: which of the answers under one seed this is (the number of a record, the index of a choice).
        noise: decides each draw in place of ``sampling.seed`` and ``index``.
        deadline: in seconds of ``time.monotonic``; then it ends as "cancelled".
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
        """What decides its draws; a new key each time where neither ``noise`` nor a seed is given."""
        seed = randbits(63) if self.sampling.seed is None else self.sampling.seed
        return self.noise or NoiseKey(seed, CHAT, row=self.index)


@dataclass(frozen=True)
class Logprob:
    """A token, and its log-probability under the model's own logits, in nats.

    Args:
        top: (token, log-probability) of the likeliest ones, the first is the likeliest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Filled:
    """The prompt has been read.

    Args:
        cached_tokens: tokens of it whose keys and values were there already.
        logprobs: of its tokens from ``prompt_logprobs_from`` on, where that was asked for.
    """

    cached_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """One step's result for one request.

    Args:
        ids: one token; none where only ``filled`` or ``reason`` is said; more from a remote engine.
        logprobs: one per id, where asked for.
        draw_logprob: of its token in nats under the law that drew it, with penalties, temperature and filters.
        filled: set once, in the first of a request.
        reason: set once, in the last: a stop token came, the room was used up, or why it ended before.
        error: why it failed, or that its deadline has passed.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    draw_logprob: float | None = None
    filled: Filled | None = None
    reason: EndReason | None = None
    error: Problem | None = None


OutputCallback: TypeAlias = Callable[[StepOutput], None]


@dataclass(frozen=True)
class RequestHandle:
    """A request that was taken in."""

    number: int


class Full(RuntimeError):
    """Too many requests wait already. ``retry_after_s`` is when to come again."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are already queued.")
        self.waiting, self.retry_after_s = waiting, retry_after_s


class Closed(RuntimeError):
    """The engine takes no more requests: it was closed, or its thread has ended."""


@dataclass(frozen=True)
class EngineFacts:
    """An engine at one moment.

    Args:
        way: "slots" (batches), "own cache" or "whole text" (one request at a time), or the name of a remote engine.
        slots, running, waiting: requests that can be answered at once, that are, and that wait.
        context: the longest prompt and answer together.
        adapters: names beside BASE.
        memory_bytes: kind -> bytes: "weights", "cache".
        prompt_tokens, cached_prompt_tokens, new_tokens: since the start.
        tokens_per_second: of new tokens, over the last seconds in which any were made.
        is_alive: false once its thread has ended.
    """

    way: str
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
    """An engine of answers: in this process (``engine.LocalEngine``) or in another one (``remote.RemoteEngine``)."""

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        """Take in a request; ``callback`` is called from the engine's thread with each ``StepOutput``, the last has a
        reason.

        Raises:
            Full: where too many wait.
            Closed: where it takes no more.
            UserError: for a request that can never be answered: no ids, an unknown adapter, a prompt beyond the
            context.
        """
        ...

    def cancel(self, handle: RequestHandle) -> None:
        """End a request within a step; its callback hears "cancelled". Does nothing for one that has ended."""
        ...

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more; give those that run ``drain_s`` seconds, then cancel them."""
        ...

    def facts(self) -> EngineFacts: ...
