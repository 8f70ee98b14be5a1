"""Forward a request to a server on a Unix socket and stream its response back unchanged.

In: method, path, body. Out: an ASGI response. When the client disconnects, the connection is closed, which cancels the
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import h11
from starlette.responses import StreamingResponse
from starlette.types import Send

from burnish.serve.http.errors import APIError

_FORWARDED_HEADERS = (b"content-type", b"x-burnish-ignored", b"retry-after")


class Relay(StreamingResponse):
    """A streaming response that forwards another server's response. It ends when the client disconnects."""

    def __init__(self, socket_path: str, method: str, path: str, body: bytes = b"") -> None:
        super().__init__(())
        self.events = exchange(socket_path, method, path, body)

    async def stream_response(self, send: Send) -> None:
        async for event in self.events:
            if isinstance(event, h11.Response):
                headers = [(name, value) for name, value in event.headers if name in _FORWARDED_HEADERS]
                headers.append((b"x-accel-buffering", b"no"))
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            else:
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def exchange(
    socket_path: str, method: str, path: str, body: bytes = b""
) -> AsyncIterator[h11.Response | h11.Data]:  # fmt: skip
    """Send a request over a Unix socket and yield the response's headers, then its data.

    Raises:
        APIError: 503 if the server does not respond.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError as error:
        raise APIError(503, "engine_gone", "The model does not respond: it is still loading or has exited.") from error
    talk = h11.Connection(h11.CLIENT)
    headers = [("Host", "localhost"), ("Content-Type", "application/json"), ("Content-Length", str(len(body))),
               ("Connection", "close")]  # fmt: skip
    try:
        for event in (
            h11.Request(method=method, target=path, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            writer.write(talk.send(event) or b"")
        await writer.drain()
        while True:
            found = talk.next_event()
            if found is h11.NEED_DATA:
                talk.receive_data(await reader.read(65536))
            elif isinstance(found, h11.Response | h11.Data):
                yield found
            elif isinstance(found, h11.EndOfMessage | h11.ConnectionClosed):
                return
    except (OSError, h11.RemoteProtocolError) as error:
        raise APIError(503, "engine_gone", "The model process exited in the middle of a response.") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def request_json(socket_path: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return the status and the whole body of a short response."""
    status, data = 0, b""
    async for event in exchange(socket_path, method, path, body):
        if isinstance(event, h11.Response):
            status = event.status_code
        else:
            data += bytes(event.data)
    return status, data
