"""Limits on the connections of a server: time to receive a request's headers, and number of open connections.

uvicorn closes a connection that is idle after a response, but not one that never completes its headers. Without limits,
a client without a key can exhaust the file descriptors of the process. The headers of each request must arrive within
``HEADER_TIMEOUT_S``. When there are too many connections, the oldest one that waits for headers or for a body is
closed; if all connections are in use, the new one is closed. A body in chunks of a few bytes is not read, because
parsing a chunk takes as long as parsing thousands of bytes.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0
MOST_CONNECTIONS = 512
EVERY_S = 60.0
PIECE_BYTES, LEAST_CHUNK_BYTES = 8192, 16
"""Received bytes are parsed in pieces of this size, and a piece of a chunked body has larger chunks on average."""
log, again = logging.getLogger("burnish.connections"), logging.getLogger("burnish.repeated")


def most_connections() -> int:
    """Maximum number of open connections: at most half of the process's file descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(4, min(MOST_CONNECTIONS, soft // 2))


class OncePerMinute(logging.Filter):
    """Suppresses a record if the same message template was logged less than a minute ago.

    The number of suppressed records is logged before the next one that passes.
    """

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
    """uvicorn's HTTP/1.1 protocol with both limits.

    Args:
        waiting: connections of this server that wait for the headers or the body of a request, oldest first.
        most: maximum number of connections.
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
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            if self._is_of_tiny_chunks(piece):
                log.warning("A request body sent in chunks of a few bytes was rejected.")
                self.drop()
            else:
                super().data_received(piece)
            if self.transport.is_closing():
                return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self.cycle.more_body:
            self._stop_timer()  # the time of a body is limited by http/bodies.py
        elif is_answering:
            self._forget_head()
        elif self._head_timer is None:
            self._expect_head()

    def _is_of_tiny_chunks(self, piece: bytes) -> bool:
        """Whether a piece of a request's body consists of chunks that cost more than their content. Each chunk has two
        line breaks."""
        if len(piece) < PIECE_BYTES // 2:
            return False
        if self.cycle is not None and self.cycle.more_body:
            is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        else:  # the head of a request, and the beginning of its body
            head, _, piece = piece.partition(b"\r\n\r\n")
            is_chunked = b"chunked" in head.lower() and len(piece) > PIECE_BYTES // 4
        return is_chunked and piece.count(b"\r\n") * LEAST_CHUNK_BYTES > 2 * len(piece)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.waiting[self] = None  # it ends by uvicorn's keep-alive timer, or when headers remain incomplete

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once. Data that is not sent yet may be lost."""
        self._forget_head()
        self.connections.discard(self)
        self.transport.abort()

    def _expect_head(self) -> None:
        self.waiting[self] = None
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.drop)

    def _forget_head(self) -> None:
        self.waiting.pop(self, None)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
