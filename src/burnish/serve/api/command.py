"""``burnish api PATH``:

options     problems are reported before anything is opened
listen      the socket is open and returns HTTP 503 before the model is loaded
begin       name the model, load it, start the engine, print four lines about them
drain       on a signal: finish running requests, then cancel them

No model library is imported before the socket is open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from burnish.config.bounds import SERVED_RENDERING_S
from burnish.config.errors import MissingExtraError, Problem, UserError, first_line
from burnish.config.options import RawValue, build, raise_if
from burnish.report.streams import say
from burnish.run.plan.config_files import COMMAND_LINE, CONFIG_SUFFIXES, merge, path_of, read_arguments
from burnish.serve.api.options import ApiOptions, check_api, from_environment, needs_key, problems_of_key, with_adapters
from burnish.utils.collection import collect_garbage_as_usual

if TYPE_CHECKING:
    import socket

    from burnish.inference.loaded_model import LoadedModel
    from burnish.inference.types import InferenceEngine
    from burnish.serve.api.app import ServerState
    from burnish.serve.api.responses import OutputQueue

log = logging.getLogger("burnish.api")
API_OPTIONS = frozenset(field.name for field in fields(ApiOptions))
_FINAL_EVENTS_S = 2.0
"""Time in seconds for the last events of streams after their requests were cancelled."""
_SWITCH_S = 0.001
"""Thread switch interval in seconds, instead of Python's 5 ms. Each event is a system call, after which the sending
thread waits for the GIL. With eight streams, that wait is a third of the server's overhead."""


def api(argv: Sequence[str]) -> int:
    """Run ``burnish api``. Returns 128 + the signal that ended it.

    Raises:
        UserError: for invalid options, or if the socket or the model is not available.
    """
    argv = with_adapters(argv)
    options = read_options(argv)
    try:
        from burnish.serve.api.app import ServerState
        from burnish.serve.http.guards import new_key
        from burnish.serve.http.server import log_to_stderr
        from burnish.serve.http.sockets import file_identity, listen, listen_unix, remove_own_socket
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "burnish api", "serve") from error
    key = options.api_key or (new_key() if needs_key(options) else None)
    found = (
        listen_unix(options.api_socket)
        if options.api_socket
        else listen(options.api_host, options.api_port, "api_port")
    )
    own_file = file_identity(options.api_socket) if options.api_socket else None
    log_to_stderr()
    logging.getLogger("burnish").setLevel(logging.INFO)
    state = ServerState()
    sys.setswitchinterval(_SWITCH_S)
    try:
        status = asyncio.run(_serve(argv, options, state, key, found))
    finally:
        if options.api_socket:
            remove_own_socket(options.api_socket, own_file)
    if state.phase == "loading":  # the loading thread would crash while its libraries are unloaded
        say("", sys.stdout, end="")  # flush
        os._exit(status)
    return status


def read_options(argv: Sequence[str]) -> ApiOptions:
    """Parse the server's own options without importing the code for the model's options.

    Raises:
        UserError: with all problems.
    """
    path, others = path_of(argv)
    file, flags = read_arguments(argv if path.endswith(CONFIG_SUFFIXES) else others)
    merged = merge(file, flags, {})
    own_values: Mapping[str, RawValue] = {name: item for name, item in merged.items() if name in API_OPTIONS}
    problems = [*problems_of_key(own_values, COMMAND_LINE), *_without_prefix(merged)]
    options, wrong = build(ApiOptions, {**own_values, **from_environment(own_values)})
    raise_if([*problems, *wrong, *check_api(options)])
    assert isinstance(options, ApiOptions)
    return options


def _without_prefix(merged: Mapping[str, RawValue]) -> Iterator[Problem]:
    """Yield a problem for each option of the server that is written without its prefix, such as ``port``."""
    for name, item in merged.items():
        if name not in API_OPTIONS and f"api_{name}" in API_OPTIONS:
            yield Problem(f'Unknown option "{name}". Did you mean "api_{name}"?', where=item.where)


async def _serve(
    argv: Sequence[str], options: ApiOptions, state: ServerState, key: str | None, found: socket.socket
) -> int:
    from burnish.data.chat.rendering import limit_rendering
    from burnish.serve.api.app import application
    from burnish.serve.http.server import serve

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        say(f"Loading {path_of(argv)[0] or 'the model'} ...", sys.stdout)
        loaded, engine, outputs = await in_thread(lambda: load_served(argv, options, state, loop))
        _create_service(loaded, engine, outputs, options, state)
        collect_garbage_as_usual()
        for line in opening_lines(loaded, engine, options, key, found):
            say(line, sys.stdout, masks_secrets=False)
        while engine.facts().is_alive or state.phase == "draining":
            await asyncio.sleep(1.0)
        state.phase = "failed"
        failure = getattr(engine, "failure", None)
        raise RuntimeError("The engine has stopped" + (f": {first_line(failure)}" if failure else "."))

    with limit_rendering(SERVED_RENDERING_S):
        return await serve(application(options, state, key), found, begin, lambda: drain(options, state))


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a daemon thread and await its result. The process does not wait for the thread when it exits."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not signalled.done():
            signalled.set_exception(error) if error is not None else signalled.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # every exception must reach the awaiting caller
            failure = error
        with suppress(RuntimeError):  # the loop has ended, because nothing waits for the result any more
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="burnish-loading", daemon=True).start()
    return await signalled


def load_served(
    argv: Sequence[str], options: ApiOptions, state: ServerState, loop: asyncio.AbstractEventLoop
) -> tuple[LoadedModel, InferenceEngine, OutputQueue]:
    """Load the model and start its engine, which delivers to an output queue of ``loop``.

    Called in a thread, because imports and loading take seconds.
    """
    from burnish.inference.loading import engine_of, load_for_inference
    from burnish.serve.api.responses import OutputQueue
    from burnish.serve.command_line import notes_of_chat, serving_of

    state.share = 0.1
    serving = serving_of(argv, own=tuple(API_OPTIONS))
    state.share = 0.3
    if taken := {options.api_model_name or serving.name, *options.api_aliases} & {
        *(serving.options.served_adapters or ())
    }:
        what = f'"{min(taken)}" is a name of the model and of an adapter, so requests could reach only one of them.'
        raise UserError(what, remedy="Rename the adapter, or set api_model_name.", option="served_adapters")
    loaded = load_for_inference(serving.options, serving.name, may_score=True, explicit=serving.provenance)
    for sentence in (*notes_of_chat(serving), *loaded.notes):
        log.info(sentence)
    state.share = 0.9
    outputs = OutputQueue(loop)
    return loaded, engine_of(loaded, options.api_max_waiting, outputs.deliver), outputs


def _create_service(
    loaded: LoadedModel, engine: InferenceEngine, outputs: OutputQueue, options: ApiOptions, state: ServerState
) -> None:
    """Create the service. From now on requests are processed."""
    from burnish.serve.api.completions import CompletionService
    from burnish.serve.api.served import ServedModel

    name = options.api_model_name or loaded.name
    state.versions = _versions(engine)
    print_of_weights = _weights(loaded)
    served = ServedModel(
        loaded, engine, name, options.api_aliases, options.api_reasoning,
        json.dumps([state.versions, print_of_weights, list(loaded.adapters)]),
    )  # fmt: skip
    state.service = CompletionService(served, outputs, options.api_max_tokens, options.api_timeout, set())
    state.models = served.models()
    state.phase, state.share = "ready", 1.0


def _weights(loaded: LoadedModel) -> str:
    """Return a string that identifies these weights, with their dtype and device."""
    from burnish.models.fingerprint import base_fingerprint

    model = loaded.model
    parameter = next(model.parameters()) if model is not None else None
    place = f"{parameter.dtype} {parameter.device.type}" if parameter is not None else "elsewhere"
    base = base_fingerprint(loaded.options, loaded.options.seed)
    return f"{base} {loaded.name} {loaded.notes} {place}"  # the notes name merged adapters


def _versions(engine: InferenceEngine) -> dict[str, str]:
    from importlib.metadata import version

    from burnish import __version__

    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"burnish": __version__, **libraries, "engine": engine.facts().backend}


def opening_lines(
    loaded: LoadedModel, engine: InferenceEngine, options: ApiOptions, key: str | None, found: socket.socket
) -> list[str]:
    """Return four lines: models, engine and memory, address, and an example request."""
    from burnish.serve.http.sockets import shown_address

    facts, name = engine.facts(), options.api_model_name or loaded.name
    adapters = f", adapters {', '.join(loaded.adapters)}" if loaded.adapters else ""
    memory = ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in facts.memory_bytes.items())
    address = shown_address(found)
    shown_key = "" if key is None else ' -H "Authorization: Bearer $API_KEY"'
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    made = f", key {key} (generated for this session; set API_KEY to choose one)" if key and not options.api_key else ""
    socket_word = f"--unix-socket {address} http://localhost" if options.api_socket else address
    route, unit = "/v1/chat/completions", "requests"
    if loaded.head is not None:
        route, unit, body = "/v1/score/evaluation", "scores", json.dumps({"model": name, "messages": ["Hello"]})
    return [
        f"model    {name}{adapters}",
        f"engine   {facts.slots} concurrent {unit}, {facts.context:,} tokens each; {memory}",
        f"address  {address}{made}",
        f"try      curl {socket_word}{route} -H 'Content-Type: application/json'{shown_key} -d '{body}'",
    ]


async def drain(options: ApiOptions, state: ServerState) -> None:
    """Graceful shutdown: stop accepting requests, wait up to ``api_drain`` seconds, then cancel the running ones."""
    from burnish.data.chat.rendering import stop_rendering
    from burnish.serve.api.responses import SHUTDOWN_ERROR

    service, phase = state.service, state.phase
    if service is None:
        return
    state.phase = "draining" if phase != "failed" else phase
    await _wait_until(lambda: not service.in_progress, options.api_drain)
    for answer in list(service.in_progress):
        answer.fail(SHUTDOWN_ERROR)
    await _wait_until(lambda: not service.in_progress, _FINAL_EVENTS_S / 2)
    for pool in (state.prompts, state.decoding, state.opening):
        pool.shutdown(wait=False, cancel_futures=True)
    stop_rendering()
    closing: Awaitable[Any] = in_thread(service.served.engine.close)
    try:
        await asyncio.wait_for(closing, _FINAL_EVENTS_S / 2)
    except TimeoutError:
        log.warning("The engine did not stop in time; exiting without waiting for its current step.")


async def _wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not is_true() and loop.time() < until:
        await asyncio.sleep(0.02)
