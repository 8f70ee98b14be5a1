"""The relay passes on headers, data, and end of another server's response; disconnecting cancels the work."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.routing import Route, Router

from burnish.serve.http.errors import page_error
from burnish.serve.http.guards import Guard, Rules
from burnish.serve.http.relay import Relay
from serve.server_thread import serve_app


class Engine:
    """A slow server on a Unix socket that notices when its client disconnects."""

    def __init__(self, path: Path) -> None:
        self.path, self.bodies, self.gone = str(path), [], threading.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.bodies.append(await reader.readexactly(length))
        writer.write(
            b"HTTP/1.1 429 Too Many\r\nContent-Type: text/event-stream\r\nRetry-After: 7\r\nX-Inner: secret\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
        )
        if b"/long" in head:
            await reader.read()  # until the client disconnects
            self.gone.set()
        else:
            await asyncio.sleep(0.1)
            writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
        writer.close()


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[tuple[int, Engine]]:
    engine, loop = Engine(tmp_path / "engine.sock"), asyncio.new_event_loop()

    async def route(request: Request) -> Relay:
        path = "/nobody" if request.url.path == "/away" else engine.path
        return Relay(path, "POST", request.url.path, await request.body())

    router = Router([Route(path, route, methods=["POST"]) for path in ("/short", "/long", "/away")])
    port, end = serve_app(Guard(router, Rules(), lambda request: None, page_error), loop)
    asyncio.run_coroutine_threadsafe(asyncio.start_unix_server(engine.answer, engine.path), loop).result(5)
    yield port, engine
    end()


def test_head_and_data_are_forwarded(relayed: tuple[int, Engine]) -> None:
    port, engine = relayed
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/short", b'{"a": 1}', {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, response.read(), engine.bodies) == (429, b"firstsecond", [b'{"a": 1}'])
    assert (response.getheader("retry-after"), response.getheader("x-inner")) == ("7", None)


def test_disconnected_client_cancels_the_forwarded_request(relayed: tuple[int, Engine]) -> None:
    port, engine = relayed
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/long", b"{}")
    response = connection.getresponse()
    assert response.read(5) == b"first"
    response.close()
    connection.close()
    assert engine.gone.wait(5)


def test_unreachable_engine_is_an_error_message(relayed: tuple[int, Engine]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", relayed[0], timeout=10)
    connection.request("POST", "/away", b"{}")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "engine_gone")
