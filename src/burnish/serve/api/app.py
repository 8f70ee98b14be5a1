"""Routes of ``burnish api``: the ASGI application and its state.

The routes respond as soon as the server listens, with HTTP 503 until the model is loaded. ``command.py`` changes the
state from loading to ready to draining. No model library is imported here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from burnish.serve.api.body import read
from burnish.serve.api.image_access import ImageAccess
from burnish.serve.api.messages import ends_with_assistant
from burnish.serve.api.options import ApiOptions
from burnish.serve.api.prompt_queue import PROMPT_WAIT_S, DecodingQueue, PromptQueue
from burnish.serve.api.requests import (
    NAME_OF_TRAINERS,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    ScoreRequest,
    TokenizeRequest,
    read_fields,
    read_request,
    unknown_model_error,
)
from burnish.serve.http.bodies import json_object
from burnish.serve.http.errors import APIError, openai_error
from burnish.serve.http.guards import Guard, Rules, bearer, with_and_without_prefix
from burnish.serve.http.hosts import LOOPBACK_NAMES, host_name, is_loopback
from burnish.serve.http.json_response import Json
from burnish.serve.http.metrics import ServerMetrics

if TYPE_CHECKING:
    from burnish.loop.types import Row
    from burnish.serve.api.completions import CompletionService, RequestStats

log = logging.getLogger("burnish.api")
refused = logging.getLogger("burnish.refused")  # clients without a key can cause these: one line a minute (http/server)
_REFUSED = frozenset({401, 403, 421, 431})
OPEN_PATHS = ("/healthz", "/readyz", "/health")
UNSUPPORTED_PATHS = tuple(f"/v1/{name}" for name in (
    "assistants", "audio", "batches", "embeddings", "files", "fine_tuning", "images", "moderations", "realtime",
    "responses", "threads", "uploads", "vector_stores",
))  # fmt: skip
"""OpenAI endpoints that do not exist here. Other unknown paths are not echoed, because they may contain a key."""
AVAILABLE_PATHS = (
    "Available: POST /v1/chat/completions, /v1/completions, /v1/score/evaluation, /tokenize, /detokenize, and GET "
    "/v1/models, /version, /readyz, /metrics."
)


@dataclass
class ServerState:
    """State of the server.

    Args:
        phase: loading, ready, draining or failed.
        share: progress of loading, 0 to 1.
        service: handles requests once the model is loaded.
        models: entries of ``/v1/models``.
        versions: content of ``/version``.
        metrics: counters for ``/metrics``.
        prompts: single thread that renders and tokenizes prompts.
        decoding: single thread that decodes images.
        opening: threads that fetch images.
    """

    phase: Literal["loading", "ready", "draining", "failed"] = "loading"
    share: float = 0.0
    service: CompletionService | None = None
    models: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    prompts: PromptQueue = field(default_factory=PromptQueue)
    decoding: DecodingQueue = field(default_factory=DecodingQueue)
    opening: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "burnish-images"))

    def ready(self) -> CompletionService:
        """Return the service.

        Raises:
            APIError: 503 while the model loads, while the server shuts down, and after the engine has stopped.
        """
        if self.phase == "draining":
            raise APIError(503, "draining", "The server is shutting down and does not accept new requests.")
        if self.phase != "failed" and self.service is None:
            message = f"The model is still loading ({self.share:.0%})."
            raise APIError(503, "model_loading", message, headers={"Retry-After": "2"})
        if self.phase == "failed" or self.service is None or not self.service.served.engine.facts().is_alive:
            raise APIError(503, "internal_error", "The engine has stopped. See the server log for the reason.")
        return self.service


def application(options: ApiOptions, state: ServerState, key: str | None) -> ASGIApp:
    """Return the application: all routes behind a guard."""
    routes = Routes(options, state)
    names = {host_name(host) for host in (options.api_host, *options.api_hosts)}
    rules = Rules(
        hosts=LOOPBACK_NAMES | (names - {"0.0.0.0", "::"}),  # noqa: S104  (compared with, not bound to)
        any_address=options.api_socket is None and not is_loopback(options.api_host),
        origins=frozenset(origin.rstrip("/").lower() for origin in options.api_origins),  # as browsers write them
        max_body_bytes=options.api_max_body,
    )
    headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    guard = Guard(routes.router, rules, bearer(key, OPEN_PATHS), openai_error, headers, routes.seen)
    return with_and_without_prefix(options.api_root_path, guard)


class Routes:
    """The routes, one method each."""

    def __init__(self, options: ApiOptions, state: ServerState) -> None:
        self.options, self.state = options, state
        self.images = ImageAccess(options.allow_image_urls, options.media_root, options.max_image_bytes)
        self._warned_of: set[str] = set()
        posts: Mapping[str, Callable[[Request], Awaitable[Any]]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/v1/score/evaluation": self.score,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/load_model": self.load_model,
            "/v1/load_lora_adapter": self.no_loading,
            "/v1/unload_lora_adapter": self.no_loading,
        }
        gets: Mapping[str, Callable[[Request], Awaitable[Any]]] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
            "/health": self.readyz,
            "/version": self.version,
            **({"/metrics": self.metrics} if options.api_metrics else {}),
        }
        self.router = Router(
            [
                *(Route(path, route, methods=["POST"]) for path, route in posts.items()),
                *(Route(path, route, methods=["GET"]) for path, route in gets.items()),
            ],
            redirect_slashes=False,  # redirecting would use request.url, and with it the Host header
            default=_unknown_url,
        )
        self.paths = {*posts, *gets}

    # --- completions --------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Any:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: Request) -> Any:
        return await self._answer(request, CompletionRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Any:
        body = await json_object(request)
        from burnish.serve.api.completions import RequestStats, prepared_chat, prepared_completion, respond

        request_body = await self._in_order(self._read, kind, body)
        service, stats = self.state.ready(), RequestStats(model=request_body.model)
        if service.served.scorer is not None:
            message = (
                f'"{request_body.model}" is a reward model and cannot generate text. Use POST /v1/score/evaluation.'
            )
            raise APIError(405, "model_cannot_generate", message, headers={"Allow": ""})
        if isinstance(request_body, ChatRequest):
            service.served.adapter_of(request_body.model)
            request_body = await self._with_images(request_body)
            drawn = await self._decoded(service, request_body) if request_body.has_images else ()
            prepared = await self._in_order(prepared_chat, service, request_body, *drawn)
        else:
            service.served.adapter_of(request_body.model)
            # One by one, so that other requests are served in between.
            prompts = [await self._in_order(service.text_prompt, prompt) for prompt in request_body.prompt]
            prepared = await self._in_order(prepared_completion, service, request_body, prompts)
        self.state.ready()  # raises if the server has begun to shut down meanwhile
        request_id, path, began_s = request.scope["burnish.request_id"], request.scope["path"], time.monotonic()

        def over() -> None:
            self._log_request(request_id, path, stats, time.monotonic() - began_s)

        if self.options.api_log == "content":
            log.info("%s request: %s", request_id, request_body)
        return respond(service, prepared, request_body.stream, stats, over, self._headers(request_body.ignored))

    def _read(self, kind: type[AnyRequest], body: Mapping[str, Any]) -> AnyRequest:
        return read_request(kind, body, self.options.api_max_choices, self.options.api_strict)

    async def _in_order(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run in the single tokenization thread. Streams continue meanwhile, and templates are used by one thread
        only. Raises APIError 429 after ``PROMPT_WAIT_S`` in its queue."""
        service = self.state.service
        scores = service is not None and service.served.scorer is not None  # its forward passes are in the same queue
        patience_s = self.options.api_timeout if scores else PROMPT_WAIT_S
        return await self._result(lambda: self.state.prompts.submit(patience_s, function, *arguments))

    async def _result(self, submit: Callable[[], Future[Any]]) -> Any:
        """Await work in another thread. Raises APIError 503 if the server shuts down before it begins."""
        self.state.ready()
        try:
            return await asyncio.wrap_future(submit())
        except asyncio.CancelledError:
            self.state.ready()  # raises 503 if the server is shutting down
            raise

    async def _decoded(self, service: CompletionService, request_body: ChatRequest) -> tuple[Row, Mapping[str, Any]]:
        """Return the prompt of a request and its decoded images. Requests with few pixels are decoded first."""
        row = await self._in_order(service.prompt_row, request_body)
        pixels = sum(image["width"] * image["height"] for image in row.get("images") or ())
        submit = partial(self.state.decoding.submit, PROMPT_WAIT_S, pixels)
        return row, await self._result(lambda: submit(service.served.image_fields, row))

    async def _with_images(self, request_body: ChatRequest) -> ChatRequest:
        """Return the request with the images that it names by URL or path included."""
        if not self.images.needs(request_body):
            return request_body
        loaded: ChatRequest = await self._result(
            lambda: self.state.opening.submit(self.images.load_images, request_body)
        )
        return loaded

    def _headers(self, ignored: tuple[str, ...]) -> dict[str, str]:
        if not ignored:
            return {}
        names = [name if name.isascii() and name.isprintable() and len(name) < 65 else "?" for name in ignored[:16]]
        for name in names:
            if name not in self._warned_of and len(self._warned_of) < 1000:
                self._warned_of.add(name)
                log.warning("The request field %r is unknown and was ignored.", name)
        return {"x-burnish-ignored": ", ".join(names)}

    # --- models and status --------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Any:
        self.state.ready()
        return Json({"object": "list", "data": self.state.models})

    async def model(self, request: Request) -> Any:
        self.state.ready()
        name = request.path_params["name"]
        for entry in self.state.models:
            if entry["id"] == name:
                return Json(entry)
        raise unknown_model_error(name, [entry["id"] for entry in self.state.models])

    async def healthz(self, request: Request) -> Any:
        return Json({"status": "alive"})

    async def readyz(self, request: Request) -> Any:
        try:
            self.state.ready()
        except APIError as refusal:
            status = {"model_loading": "loading", "draining": "draining"}.get(refusal.code, "failed")
            return Json({"status": status, "loaded": round(self.state.share, 3)}, 503, refusal.headers)
        return Json({"status": "ready"})

    async def version(self, request: Request) -> Any:
        return Json(self.state.versions)

    async def metrics(self, request: Request) -> Any:
        service = self.state.service
        facts = service.served.engine.facts() if service is not None else None
        text = self.state.metrics.text(facts, self.state.phase == "ready")
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # --- tokens and scores --------------------------------------------------------------------------------------------

    async def load_model(self, request: Request) -> Any:
        """First request of ``transformers chat``. The model is already loaded, so nothing happens."""
        request_body = read(ModelRequest, await json_object(request))
        self.state.ready().served.adapter_of(request_body.model.removesuffix("@main"))
        return Response(b'data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    async def tokenize(self, request: Request) -> Any:
        body = await json_object(request)
        service = self.state.ready()
        is_chat = body.get("messages") is not None
        body_fields, ignored = read_fields(TokenizeRequest, body, self.options.api_strict and not is_chat)
        model = body_fields.model or self.state.models[0]["id"]
        service.served.adapter_of(model)
        images: list[dict[str, int]] = []
        if not is_chat:
            ids = await self._in_order(service.text_prompt, body_fields.prompt)
        else:
            continues = not body_fields.add_generation_prompt and ends_with_assistant(body_fields.messages)
            chat = {**body, "model": model, **({"continue_final_message": True} if continues else {})}
            request_body = self._read(ChatRequest, chat)
            ignored = request_body.ignored
            service.refuse_long(request_body.num_characters, "messages")
            request_body = await self._with_images(request_body)
            ids, images = await self._in_order(service.served.counted_prompt, request_body)
        pieces = [service.served.shown(token)[0] for token in ids]
        found = {"tokens": ids, "count": len(ids), "max_model_len": service.served.context, "pieces": pieces}
        return Json({**found, "images": images} if images else found, headers=self._headers(ignored))

    async def detokenize(self, request: Request) -> Any:
        body = await json_object(request)
        service = self.state.ready()
        body_fields, ignored = read_fields(DetokenizeRequest, body, self.options.api_strict)
        service.served.adapter_of(body_fields.model or self.state.models[0]["id"])
        tokens = body_fields.tokens
        for place, token in enumerate(tokens):
            if token >= service.served.vocab_size:
                message = f'"tokens[{place}]" must be below {service.served.vocab_size:,}. Received: {token}.'
                raise APIError(400, "invalid_value", message, param=f"tokens[{place}]")
        text = await self._in_order(service.served.text_of, tokens)
        return Json({"prompt": text}, headers=self._headers(ignored))

    async def score(self, request: Request) -> Any:
        body = await json_object(request)
        service = self.state.ready()
        body_fields, ignored = read_fields(ScoreRequest, body, self.options.api_strict)
        model = body_fields.model
        if model != NAME_OF_TRAINERS:
            service.served.adapter_of(model)
        scorer = service.served.scorer
        if scorer is None:
            message = f'"{model}" is not a reward model; this endpoint requires one.'
            raise APIError(405, "model_cannot_score", message, headers={"Allow": ""})
        most = min(body_fields.max_length or service.served.context, service.served.context)
        request_body = [self._scoring_input(model, place, text) for place, text in enumerate(body_fields.messages)]
        ids: list[list[int]] = []
        for place, text in enumerate(request_body):
            param = f"messages[{place}]"
            service.refuse_long(len(text) if isinstance(text, str) else text.num_characters, param)
            ids.append(await self._in_order(service.served.scored_text, text))
            if not 0 < len(ids[-1]) <= most:
                message = f'"{param}" has {len(ids[-1]):,} tokens. Expected: 1 to {most:,}.'
                raise APIError(400, "context_length_exceeded", message, param=param)
        from burnish.inference.scoring import BATCH_SIZE

        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        scores = [0.0] * len(ids)
        for start in range(0, len(order), BATCH_SIZE):  # other requests are served in between
            some = order[start : start + BATCH_SIZE]
            found_scores = await self._in_order(scorer.scores, [ids[place] for place in some])
            for place, score in zip(some, found_scores, strict=True):
                scores[place] = score
        found = {"id": f"scoreval-{secrets.token_hex(12)}", "object": "score.evaluation", "model": model}
        return Json({**found, "scores": scores}, headers=self._headers(ignored))

    def _scoring_input(self, model: str, place: int, text: Any) -> Any:
        """Return one input of a scoring request: a text, or the messages of a conversation with its response."""
        if isinstance(text, str):
            return text
        if not isinstance(text, list):
            message = f'"messages[{place}]" must be a string or a list of messages.'
            raise APIError(400, "invalid_type", message, param=f"messages[{place}]")
        return self._read(
            ChatRequest, {"model": model, "messages": text, "continue_final_message": ends_with_assistant(text)}
        )

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def no_loading(self, request: Request) -> Any:
        """vLLM's routes for adapters. Requests cannot change what is served."""
        message = "Adapters cannot be changed at runtime. Start the server with --adapter name=folder for each adapter."
        raise APIError(403, "loading_not_allowed", message)

    # --- logging ------------------------------------------------------------------------------------------------------

    def seen(self, path: str, status: int, seconds: float, request_id: str) -> None:
        """Count every request and log it. A completed generation is logged when its stream ends."""
        route = path if path in self.paths else "other"
        self.state.metrics.requests[route, status] += 1
        self.state.metrics.request.add(seconds)
        if route not in OPEN_PATHS and not (status == 200 and route in {"/v1/chat/completions", "/v1/completions"}):
            (refused if status in _REFUSED else log).info("%s %s %s %.3fs", request_id, route, status, seconds)

    def _log_request(self, request_id: str, path: str, stats: RequestStats, seconds: float) -> None:
        metrics = self.state.metrics
        first_s = stats.first_token_s
        if first_s is not None:
            metrics.first_token.add(first_s)
            if stats.new_tokens > 1:
                metrics.per_token.add((seconds - first_s) / (stats.new_tokens - 1))
        log.info(
            "%s %s %s 200 in=%d cached=%d out=%d first=%s %.3fs %s", request_id, path, stats.model[:64].encode(
                "unicode_escape").decode(), stats.prompt_tokens, stats.cached_tokens, stats.new_tokens,
            "-" if first_s is None else f"{first_s:.3f}s", seconds, stats.reason,
        )  # fmt: skip


async def _unknown_url(scope: Any, receive: Any, send: Any) -> None:
    named = next((known for known in UNSUPPORTED_PATHS if str(scope["path"]).startswith(known)), "This URL")
    raise APIError(404, "unknown_url", f"{named} does not exist. {AVAILABLE_PATHS}")
