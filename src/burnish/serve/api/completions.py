"""Chat completions and text completions, streamed or complete.

Both kinds use the same deltas of the choices: they are written as chunks, or summed and written once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from burnish.inference.types import GenerationRequest, Logprob
from burnish.loop.types import Row
from burnish.serve.api.chat_responses import ChatResponseWriter, usage_of
from burnish.serve.api.requests import ChatRequest, CompletionRequest
from burnish.serve.api.responses import Choice, Delta, OutputQueue, RequestAnswer, queue_full
from burnish.serve.api.text_responses import EchoedPrompt, TextLogprobs, TextResponseWriter
from burnish.serve.http.errors import APIError, openai_error, to_json
from burnish.serve.http.json_response import Json
from burnish.serve.http.stream import EventStream, event_text, wait_for_disconnect

if TYPE_CHECKING:
    from burnish.serve.api.served import ServedModel

DONE = event_text(b"[DONE]")
CHARACTERS_PER_TOKEN = 16
"""Prompts with more characters than this per token of context are rejected before tokenization."""
MOST_LOGPROBS = 2**18
"""Maximum number of prompt log-probabilities in one response."""
_MAX_LOGPROBS_IN_EVENT_LOOP = 1000
"""Responses with more log-probabilities are serialized in a thread, so that the event loop is not blocked."""


@dataclass
class RequestStats:
    """Facts about a finished request, for the log."""

    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class CompletionService:
    """Runs requests.

    Args:
        served: the model and its engine.
        outputs: queue from the engine to the event loop.
        max_tokens: maximum length of a response, and the default length.
        timeout_s: maximum duration of a request in seconds, including the time in the queue.
        in_progress: running requests.
    """

    served: ServedModel
    outputs: OutputQueue
    max_tokens: int
    timeout_s: float
    in_progress: set[RequestAnswer]

    def begin(self, choices: Sequence[Choice]) -> RequestAnswer:
        """Submit the choices to the engine.

        Raises:
            APIError: 429 if they cannot be finished in time at the current rate, or too many requests are queued.
        """
        facts = self.served.engine.facts()
        owed = sum(self._max_remaining_tokens(choice) for answer in self.in_progress for choice in answer.choices)
        would_wait, rate = facts.running >= facts.slots, facts.tokens_per_second
        if would_wait and rate > 0 and owed / rate > self.timeout_s:
            raise queue_full(owed / rate)
        answer = RequestAnswer(self.outputs, choices)
        answer.begin(self.served.engine)
        self.in_progress.add(answer)
        return answer

    def _max_remaining_tokens(self, choice: Choice) -> int:
        """Return the number of tokens that may have to be generated before a new request: none for choices that are
        not submitted yet, because they follow it in the queue.
        """
        is_before = choice.handle is not None and not choice.is_over
        return max(0, choice.ask.max_new_tokens - choice.num_tokens) if is_before else 0

    def end(self, answer: RequestAnswer) -> None:
        answer.cancel()
        self.in_progress.discard(answer)

    def length(self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> int:
        """Return the maximum length of a response: as requested, limited by the room that the prompt leaves.

        Raises:
            APIError: 400 ``context_length_exceeded`` if there is no room.
        """
        requested = self.max_tokens if request.most_tokens is None else request.most_tokens
        available = self.served.context - len(prompt)
        if available < min(1, requested):  # 0 if the prompt is only scored
            message = (
                f"The prompt has {len(prompt):,} tokens; the context for prompt and response together is "
                f"{self.served.context:,} tokens. Shorten the prompt."
            )
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise APIError(400, "context_length_exceeded", message, param=param)
        return min(requested, self.max_tokens, available)

    def refuse_long(self, num_characters: int, param: str) -> None:
        """Raise APIError for a prompt that cannot fit into the context, however it is tokenized."""
        most = self.served.context * CHARACTERS_PER_TOKEN
        if num_characters > most:
            message = (
                f"The prompt has {num_characters:,} characters; a context of {self.served.context:,} tokens allows at "
                f"most {most:,}. Shorten the prompt."
            )
            raise APIError(400, "context_length_exceeded", message, param=param)

    def prompt_row(self, request: ChatRequest) -> Row:
        """Return the prompt of a chat. Renders and tokenizes, so it is called in a thread. Raises APIError."""
        self.served.adapter_of(request.model)
        self.refuse_long(request.num_characters, "messages")
        return self.served.prompt_row(request)

    def text_prompt(self, prompt: str | tuple[int, ...]) -> list[int]:
        """Return the ids of a text prompt. Tokenizes, so it is called in a thread. Raises APIError."""
        if isinstance(prompt, str):
            self.refuse_long(len(prompt), "prompt")
        return self.served.text_prompt(prompt)

    def ask(self, request: ChatRequest | CompletionRequest, prompt: list[int], index: int) -> GenerationRequest:
        """Return the engine's request for one choice. Choice i has seed + i."""
        beyond = [token for token in request.token_bias if token >= self.served.vocab_size]
        if beyond:
            message = f'"logit_bias" contains token id {beyond[0]}; the vocabulary size is {self.served.vocab_size:,}.'
            raise APIError(400, "invalid_value", message, param="logit_bias")
        if any(not 0 <= token < self.served.vocab_size for token in prompt):
            message = f"The prompt contains a token id outside the vocabulary (size {self.served.vocab_size:,})."
            raise APIError(400, "invalid_value", message, param="prompt")
        sampling = self.served.loaded.defaults.with_settings(request.sampling)
        if request.seed is not None:
            sampling = replace(sampling, seed=request.seed + index)
        return GenerationRequest(
            ids=prompt, max_new_tokens=self.length(request, prompt),
            adapter=self.served.adapter_of(request.model), sampling=sampling, stop_ids=self.served.stop_ids(request),
            min_new_tokens=request.min_tokens, top_logprobs=request.num_logprobs,
            grammar=self.served.grammar(request, prompt), index=index, deadline=time.monotonic() + self.timeout_s,
        )  # fmt: skip


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready to be submitted to the engine.

    Args:
        num_prompt_tokens: tokens of all its prompts.
        whole: function from summed deltas and usage to the response body.
        events: function that returns the events of a stream.
    """

    choices: Sequence[Choice]
    num_prompt_tokens: int
    whole: Callable[[Sequence[Delta], dict[str, Any]], dict[str, Any]]  # folded deltas and usage -> the body
    events: Callable[[RequestAnswer], AsyncGenerator[bytes, None]]


def respond(
    service: CompletionService,
    prepared: PreparedRequest,
    is_stream: bool,
    stats: RequestStats,
    over: Callable[[], None],
    headers: dict[str, str],
) -> Any:
    """Submit a request to the engine and return its response.

    Args:
        prepared: the request.
        is_stream: stream the response.
        stats: filled in when the request ends.
        over: called once when the request ends, for any reason.
        headers: response headers.
    """
    answer = service.begin(prepared.choices)

    def end() -> None:
        service.end(answer)
        _update_stats(stats, answer, prepared.num_prompt_tokens)
        over()

    if is_stream:
        return EventStream(_events(prepared.events(answer)), headers, over=end)

    async def whole() -> bytes:
        folded = [Delta() for _ in answer.choices]
        async for index, delta in answer.deltas():
            folded[index].add(delta)
        usage = usage_of(prepared.num_prompt_tokens, answer.choices)
        size = sum(len(each.logprobs) for each in folded) + sum(len(each.prompt_logprobs) for each in answer.choices)
        return await _write_response(lambda: to_json(prepared.whole(folded, usage)), size)

    return CancelOnDisconnect(whole, end, headers)


async def _events(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error after the first byte becomes an event; the final line is then omitted."""
    try:
        async for event in events:
            yield event
        yield DONE
    except APIError as refusal:
        yield event_text(to_json(openai_error(refusal)))


async def _write_response(write: Callable[[], bytes], num_logprobs: int) -> bytes:
    return await asyncio.to_thread(write) if num_logprobs > _MAX_LOGPROBS_IN_EVENT_LOOP else write()


class CancelOnDisconnect:
    """A complete response that watches the connection: if the client disconnects, generation is cancelled at once."""

    def __init__(self, made: Callable[[], Any], over: Callable[[], None], headers: dict[str, str]) -> None:
        self.made, self.over, self.headers = made, over, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making, gone = asyncio.ensure_future(self.made()), asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            both: set[asyncio.Future[Any]] = {making, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                await Response(making.result(), 200, self.headers, Json.media_type)(scope, receive, send)
        finally:
            making.cancel()
            gone.cancel()
            self.over()


def _update_stats(stats: RequestStats, answer: RequestAnswer, num_prompt_tokens: int) -> None:
    stats.prompt_tokens, stats.new_tokens, stats.first_token_s = (
        num_prompt_tokens,
        answer.num_tokens,
        answer.first_token_s,
    )
    stats.cached_tokens = answer.choices[0].cached_tokens if answer.choices else 0
    stats.reason = "+".join(
        sorted({choice.reason or (choice.error.code if choice.error else "gone") for choice in answer.choices})
    )


# --- chat -------------------------------------------------------------------------------------------------------------


def prepared_chat(
    service: CompletionService, request: ChatRequest, row: Row | None = None, images: Mapping[str, Any] | None = None
) -> PreparedRequest:
    """Prepare a chat completion. Tokenizes, so it is called in a thread.

    Args:
        row: the prompt, if it is rendered already.
        images: its decoded images, likewise.
    Raises:
        APIError: for an unknown model, an invalid prompt or an unsupported grammar.
    """
    served = service.served
    row = service.prompt_row(request) if row is None else row
    images, prompt = served.image_fields(row) if images is None else images, list(row["input_ids"])
    choices = [
        Choice(
            replace(service.ask(request, prompt, index), **images),
            served.chat_reader(request, prompt),
            ends_with_first_call=not request.parallel_tool_calls,
        )
        for index in range(request.n)
    ]
    wire = ChatResponseWriter(
        id=f"chatcmpl-{secrets.token_hex(16)}", created=int(time.time()), name=request.model,
        fingerprint=served.fingerprint, shown=served.shown, has_logprobs=request.num_logprobs is not None,
        has_ids=request.return_token_ids, has_usage=request.include_usage, prompt_ids=prompt,
    )  # fmt: skip

    async def events(answer: RequestAnswer) -> AsyncGenerator[bytes, None]:
        sent_calls = [0] * len(choices)
        async for index, delta in answer.deltas():
            chunks = wire.chunks(index, delta, sent_calls[index])
            sent_calls[index] += len(delta.calls)
            yield b"".join(event_text(to_json(chunk)) for chunk in chunks)
        if wire.has_usage:
            yield event_text(to_json(wire.usage_chunk(usage_of(len(prompt), choices))))

    return PreparedRequest(choices, len(prompt), wire.whole, events)


# --- text -------------------------------------------------------------------------------------------------------------


def prepared_completion(
    service: CompletionService, request: CompletionRequest, prompts: Sequence[list[int]]
) -> PreparedRequest:
    """Prepare a text completion. Called in a thread.

    Args:
        prompts: ids of the request's prompts.
    Raises:
        APIError: for an unknown model, an invalid prompt, or too many log-probabilities.
    """
    served = service.served
    if request.echo and request.logprobs is not None:
        number = sum(map(len, prompts)) * request.num_made * (1 + request.logprobs)
        if number > MOST_LOGPROBS:
            message = (
                f'"echo" with "logprobs" requests {number:,} log-probabilities of prompts; a response can hold at most '
                f"{MOST_LOGPROBS:,}. Send fewer prompts per request, or lower logprobs."
            )
            raise APIError(400, "invalid_value", message, param="logprobs")
    choices = [
        Choice(_text_generation_request(service, request, prompt, index), served.text_reader(request))
        for prompt in prompts
        for index in range(request.num_made)
    ]
    wire = TextResponseWriter(
        id=f"cmpl-{secrets.token_hex(16)}", created=int(time.time()), name=request.model,
        fingerprint=served.fingerprint, shown=served.shown, has_logprobs=request.num_logprobs is not None,
        has_ids=request.return_token_ids, has_usage=request.include_usage,
    )  # fmt: skip
    echoes = [_echo(served, request, prompt) for prompt in prompts for _ in range(request.num_made)]
    num_prompt_tokens = sum(map(len, prompts))

    def whole(folded: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        written = []
        for place, index in enumerate(_best_responses(folded, request.num_made, request.n)):
            log = TextLogprobs(wire.shown)
            written.append(wire.choice(place, folded[index], log, echoes[index], choices[index].prompt_logprobs))
        return wire.body(written, usage)

    async def events(answer: RequestAnswer) -> AsyncGenerator[bytes, None]:
        logs, to_echo = [TextLogprobs(wire.shown) for _ in choices], list(echoes)
        async for index, delta in answer.deltas():
            echo, to_echo[index] = to_echo[index], None
            measured = choices[index].prompt_logprobs if echo is not None else ()
            event = partial(_text_event, wire, index, delta, logs[index], echo, measured)
            yield await _write_response(event, len(measured))
        if wire.has_usage:
            yield event_text(to_json(wire.chunk([], usage_of(num_prompt_tokens, choices))))

    return PreparedRequest(choices, num_prompt_tokens, whole, events)


def _text_event(
    wire: TextResponseWriter,
    index: int,
    delta: Delta,
    log: TextLogprobs,
    echo: EchoedPrompt | None,
    measured: Sequence[Logprob],
) -> bytes:
    """Return one delta as an event of a stream, or b"" if it is empty. ``measured`` are the prompt's tokens."""
    choice = wire.choice(index, delta, log, echo, measured)
    has_content = choice["text"] or choice["finish_reason"] or delta.logprobs or delta.ids
    return event_text(to_json(wire.chunk([choice]))) if has_content else b""


def _text_generation_request(
    service: CompletionService, request: CompletionRequest, prompt: list[int], index: int
) -> GenerationRequest:
    ask = service.ask(request, prompt, index)
    if request.num_made > request.n and request.logprobs is None:
        ask = replace(ask, top_logprobs=0)  # needed to choose the best responses
    if not request.echo or (request.logprobs is None and ask.max_new_tokens):
        return ask
    return replace(ask, prompt_logprobs_from=1 if request.logprobs is not None else max(1, len(prompt) - 1))


def _echo(served: ServedModel, request: CompletionRequest, prompt: list[int]) -> EchoedPrompt | None:
    return EchoedPrompt(served.text_of(prompt), prompt) if request.echo else None


def _best_responses(folded: Sequence[Delta], best_of: int, n: int) -> list[int]:
    """Return the indices of the n responses to each prompt with the highest mean token log-probability, best first.

    If no more than n were generated, all are returned in order.
    """
    if best_of == n:
        return list(range(len(folded)))
    best = []
    for begin in range(0, len(folded), best_of):
        group = range(begin, begin + best_of)
        best += sorted(group, key=lambda index: -_mean_logprob(folded[index]))[:n]
    return best


def _mean_logprob(delta: Delta) -> float:
    return sum(one.logprob for one in delta.logprobs) / max(1, len(delta.logprobs))
