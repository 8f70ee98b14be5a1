"""A server in a thread, with its own event loop, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from burnish.serve.api.app import ServerState, application
from burnish.serve.api.completions import CompletionService
from burnish.serve.api.options import ApiOptions
from burnish.serve.api.responses import OutputQueue
from serve.fakes import FakeServed, ScriptedEngine, saying

HELLO = saying("hello")


@dataclass
class RunningServer:
    port: int
    state: ServerState
    engine: ScriptedEngine


class QuietServer(uvicorn.Server):
    """Installs no signal handlers, stops within 10 ms of a request, and does not wait for clients."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self):
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets=None):
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


@contextlib.contextmanager
def server_starter() -> Iterator[Callable[..., RunningServer]]:
    ends: list[Callable[[], None]] = []

    def start(script=HELLO, key=None, is_ready=True, engine=None, **options) -> RunningServer:
        engine = engine or ScriptedEngine(script)
        overrides, loop, state = ApiOptions(**options), asyncio.new_event_loop(), ServerState()
        if is_ready:
            state.service = CompletionService(
                FakeServed(engine), OutputQueue(loop), overrides.api_max_tokens, overrides.api_timeout, set()
            )
            state.models = [{"id": "first", "object": "model", "created": 1, "owned_by": "burnish"}]
            state.phase, state.share = "ready", 1.0
        port, end = serve_app(application(overrides, state, key), loop)
        ends.append(end)
        return RunningServer(port, state, engine)

    yield start
    for end in ends:
        end()


def serve_app(app, loop: asyncio.AbstractEventLoop) -> tuple[int, Callable[[], None]]:
    """Serve an application in a thread. Return the port, and a function that stops the server."""
    result = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False)
    server = QuietServer(config)
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[result]),), daemon=True)
    thread.start()

    def end() -> None:
        server.should_exit = server.force_exit = True
        thread.join(10)

    return result.getsockname()[1], end
