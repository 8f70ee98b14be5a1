"""Server-sent events out: a response that goes on until its events end or nobody listens any more.

    return EventStream(events())          # events: an asynchronous generator of what event_text() gives

In: an asynchronous generator of bytes. Out: ``text/event-stream``. While nothing comes, a comment line goes out every
``alive_s`` seconds, so that proxies keep the connection. When the client goes, ``over`` is called at once, which is
where work is cancelled, and the generator is closed. A client that reads slowly holds up this generator and nothing
else.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold the events back
}
ALIVE = b": alive\n\n"
_LEAST_S = 0.05
"""A client that reads so slowly that an event is still being sent is looked at again after so long."""


def event_text(data: bytes, name: str = "", cursor: str = "") -> bytes:
    """One event. ``data`` is one line: JSON without line breaks. ``cursor`` is its ``id:``."""
    lines = [b"event: " + name.encode()] if name else []
    lines += [b"id: " + cursor.encode()] if cursor else []
    return b"\n".join([*lines, b"data: " + data, b"", b""])


async def until_gone(receive: Receive) -> None:
    """Return when the client has gone. The body has been read before, so nothing else is awaited here."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response of events.

    Args:
        over: called once at the end, however it came: a generator that was never begun has no ``finally``.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None, alive_s: float = 10.0,
        over: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.events, self.headers, self.alive_s, self.over = events, {**HEADERS, **(headers or {})}, alive_s, over
        self._is_sending, self._last_s = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._pump(send, gone)
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self.over()
            await self.events.aclose()

    async def _pump(self, send: Send, gone: asyncio.Future[None]) -> None:
        """Send all events. One task sends and this one watches: an event costs no task and no timer of its own."""
        sending = asyncio.ensure_future(self._send_all(send))
        try:
            while not (sending.done() or gone.done()):
                left = self.alive_s - (time.monotonic() - self._last_s)
                if left <= 0 and not self._is_sending:
                    self._last_s = time.monotonic()
                    await send({"type": "http.response.body", "body": ALIVE, "more_body": True})
                    continue
                both: set[asyncio.Future[Any]] = {sending, gone}
                await asyncio.wait(both, timeout=max(left, _LEAST_S), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})

    async def _send_all(self, send: Send) -> None:
        async for text in self.events:
            self._is_sending = True
            await send({"type": "http.response.body", "body": text, "more_body": True})
            self._is_sending, self._last_s = False, time.monotonic()
