"""Server-sent events: a response that lasts until the events end or the client disconnects.

    return EventStream(events())          # events: an asynchronous generator of what event_text() gives

While there are no events, a comment is sent every ``alive_s`` seconds, so that proxies keep the connection open. When
the client disconnects, ``over`` is called to cancel the work, and the generator is closed. A slow client blocks only
this generator.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx would buffer the events
}
KEEP_ALIVE = b": alive\n\n"


def event_text(data: bytes, name: str = "", cursor: str = "") -> bytes:
    """Format one event. ``data`` is JSON without line breaks. ``cursor`` becomes its ``id:``."""
    lines = [b"event: " + name.encode()] if name else []
    lines += [b"id: " + cursor.encode()] if cursor else []
    return b"\n".join([*lines, b"data: " + data, b"", b""])


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
        headers: further headers.
        alive_s: interval of keep-alive comments in seconds.
        over: called once at the end in every case; the ``finally`` of a generator that never started does not run.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None, alive_s: float = 10.0,
        over: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(events, headers={**HEADERS, **(headers or {})})
        self.events, self.alive_s, self.over = events, alive_s, over
        self._is_sending, self._last_s = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.over()
            await self.events.aclose()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keeping = asyncio.ensure_future(self._keep_alive(send))  # one task for all events
        try:
            async for text in self.events:
                self._is_sending = True
                await send({"type": "http.response.body", "body": text, "more_body": True})
                self._is_sending, self._last_s = False, time.monotonic()
        finally:
            keeping.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(self.alive_s - (time.monotonic() - self._last_s), 0.05))
            if not self._is_sending and time.monotonic() - self._last_s >= self.alive_s:
                self._last_s = time.monotonic()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
