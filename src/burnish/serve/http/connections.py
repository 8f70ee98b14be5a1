"""Connections of a server: how long one may take for the head of a request, and how many there may be.

uvicorn closes a connection that is idle after a response; one that never sends a whole head stays open. Without limits
a visitor without a key takes every file descriptor of the process. So the head of each request has ``HEAD_S``. If there
are too many connections, the oldest that waits for a head is closed, so that a new one is served; if all of them are
being answered, the new one is closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
MOST_CONNECTIONS = 512
EVERY_S = 60.0
log, again = logging.getLogger("burnish.connections"), logging.getLogger("burnish.repeated")


def most_connections() -> int:
    """Connections at once: half of the files that this process may open, so that its work has the other half."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(4, min(MOST_CONNECTIONS, soft // 2))


class OncePerMinute(logging.Filter):
    """Drop a record whose message, before its arguments are filled in, was logged less than a minute ago; a line before
    the next one that passes says how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = f"{record.name} {str(record.msg).splitlines()[:1]}", time.monotonic()
        began, dropped = self._seen.get(key, (-EVERY_S, 0))
        if now - began < EVERY_S:
            self._seen[key] = began, dropped + 1
            return False
        if len(self._seen) > 100:
            self._seen.clear()
        self._seen[key] = now, 0
        if dropped:
            again.warning("%d messages like the following one were suppressed.", dropped)
        return True


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with both limits.

    Args:
        waiting: the connections of this server that wait for the head of a request, the oldest first.
        most: connections at once.
    """

    def __init__(self, *args: Any, waiting: dict[LimitedProtocol, None], most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting, self.most = waiting, most
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            oldest = next(iter(self.waiting), self)
            log.warning(
                "Connection limit of %d exceeded: closing the oldest idle connection, or the new one.", self.most
            )
            oldest.drop()
            if oldest is self:
                return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._forget_head()
        elif self._head_timer is None:
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.waiting[self] = None  # its time ends with uvicorn's timer, or with a head that does not become whole

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection now; what it has been sent so far may be lost."""
        self._forget_head()
        self.connections.discard(self)
        self.transport.abort()

    def _expect_head(self) -> None:
        self.waiting[self] = None
        self._head_timer = self.loop.call_later(HEAD_S, self.drop)

    def _forget_head(self) -> None:
        self.waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
