"""Life cycle of a server: accept requests, initialize in the background, shut down on a signal.

    status = asyncio.run(serve(app, found, begin, drain))

``begin`` is the initialization (such as loading a model), ``drain`` the graceful shutdown. The first SIGTERM or SIGINT
drains; a second one exits immediately. Exit status: 128 + signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from burnish.config.secrets import SecretFormatter
from burnish.serve.http.connections import LimitedProtocol, OncePerMinute, most_connections
from burnish.serve.http.guards import MOST_HEADER_BYTES

CLOSING_S = 1


def log_to_stderr() -> None:
    """Log warnings of all libraries to standard error, one line each, without secrets."""
    handler = logging.StreamHandler()
    handler.setFormatter(SecretFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    once = OncePerMinute()  # for messages that clients without a key can cause
    for name in ("uvicorn.error", "asyncio", "burnish.connections", "burnish.housekeeping", "burnish.refused"):
        logging.getLogger(name).addFilter(once)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ``serve`` handles signals


async def serve(
    app: ASGIApp, found: socket.socket, begin: Callable[[], Awaitable[None]], drain: Callable[[], Awaitable[None]]
) -> int:
    """Serve ``app`` on a listening socket until a signal, or until ``begin`` fails.

    ``begin`` may return early or run until the server stops.

    Returns:
        128 + signal.
    Raises:
        Exception: any exception of ``begin``.
    """
    server = _Server(_config(app))
    signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _answer_signals(signalled)
    serving, beginning = asyncio.ensure_future(server.serve(sockets=[found])), asyncio.ensure_future(begin())
    try:
        await _wait_for_first(signalled, serving, beginning)
        if signalled.done():
            await drain()
    finally:
        beginning.cancel()
        server.should_exit = True
        await asyncio.wait({serving, beginning})
    if not signalled.done():
        beginning.result()
        serving.result()
    return 128 + (signalled.result() if signalled.done() else signal.SIGTERM)


async def _wait_for_first(
    signalled: asyncio.Future[int], serving: asyncio.Future[None], beginning: asyncio.Future[None]
) -> None:
    """Wait for a signal, for the server to end, or for ``begin`` to fail."""
    waited: set[asyncio.Future[int] | asyncio.Future[None]] = {signalled, serving, beginning}
    while True:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done() or serving.done() or beginning.exception() is not None:
            return
        waited.discard(beginning)


def _answer_signals(signalled: asyncio.Future[int]) -> None:
    loop = asyncio.get_running_loop()

    def answer(number: int) -> None:
        if signalled.done():
            os._exit(128 + number)
        signalled.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, answer, number)


def _config(app: ASGIApp) -> uvicorn.Config:
    """Return the configuration: HTTP/1.1 with h11, no websockets, lifespan, access log or proxy headers."""
    protocol: Any = partial(LimitedProtocol, waiting={}, most=most_connections())
    return uvicorn.Config(
        app, http=protocol, ws="none", loop="asyncio", lifespan="off", access_log=False, log_config=None,
        server_header=False, proxy_headers=False, timeout_keep_alive=15, timeout_graceful_shutdown=CLOSING_S,
        h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,
    )  # fmt: skip
