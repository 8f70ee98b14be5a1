"""Idle connections, incomplete headers and malformed requests before authentication: both servers keep responding."""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import burnish
from burnish.serve.http import connections
from burnish.serve.http.connections import LimitedProtocol, OncePerMinute, most_connections
from burnish.serve.http.server import serve

FILES = 120
"""Open files that the server may have."""
WORDS = {
    "webui": ["webui", "web_port=0", "web_home=home", "web_root_path="],
    "api": ["api", "model", "api_port=0", "api_model_name=model"],
}


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Start a server process with a low limit of open files. Yield its port and output file."""
    shutil.copytree(Path(burnish.__file__).parent / "demo/model", tmp_path / "model")
    message = tmp_path / "said.txt"
    with message.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "burnish", *WORDS[request.param]], cwd=tmp_path, stdout=output, stderr=output,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )  # fmt: skip
    until = time.monotonic() + 60
    while not (result := re.search(r"127\.0\.0\.1:(\d+)", message.read_text())):
        assert child.poll() is None, message.read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    yield child, int(result[1]), message
    child.kill()
    child.wait()


def status_of(port: int, path: str = "/healthz", host: str = "localhost") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


def opened(port: int, number: int, text: bytes = b"") -> list[socket.socket]:
    result = []
    for _ in range(number):
        one = socket.create_connection(("127.0.0.1", port), timeout=10)
        if text:
            one.sendall(text)
        result.append(one)
    return result


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.parametrize("started", sorted(WORDS), indirect=True)
def test_idle_connections_above_file_limit_do_not_stop_server_or_fill_log(started) -> None:
    child, port, message = started
    while status_of(port) != 200:
        time.sleep(0.1)
    stored = []
    for text in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-", b"POST / HTTP/1.1\r\nHost: localhost\r\n"):
        stored += opened(port, FILES + 40, text)
        for _ in range(3):
            began = time.monotonic()
            assert status_of(port) == 200
            assert time.monotonic() - began < 5
        for _ in range(FILES):
            assert status_of(port, "/healthz", host="evil.example") == 421
        for one in opened(port, FILES, b"\x16\x03\x01 no request\r\n\r\n"):
            one.close()
    time.sleep(1.5)
    assert status_of(port) == 200
    for one in stored:
        one.close()
    assert status_of(port) == 200
    assert child.poll() is None
    assert message.stat().st_size < 20_000, message.read_text()[-3000:]


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_server_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Start a small server with a header timeout of 0.5 s and at most 8 connections. Yield its port."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("burnish.serve.http.server.most_connections", lambda: 8)

    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/slow":
            await asyncio.sleep(2.0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def nothing() -> None:
        await asyncio.Event().wait()

    import threading

    result, loop = socket.create_server(("127.0.0.1", 0)), asyncio.new_event_loop()
    monkeypatch.setattr("burnish.serve.http.server._answer_signals", lambda reported: signal_futures.append(reported))
    signal_futures: list[asyncio.Future[int]] = []

    async def drained() -> None:
        return None

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(app, result, nothing, drained)))
    thread.start()
    yield result.getsockname()[1]
    loop.call_soon_threadsafe(lambda: signal_futures[0].set_result(15))
    thread.join(10)
    assert not thread.is_alive()


def closed_after_s(one: socket.socket, trickle: bytes = b"") -> float:
    """Return the seconds until the server closes the connection, while ``trickle`` is sent repeatedly."""
    began = time.monotonic()
    one.settimeout(0.1)
    while time.monotonic() - began < 5:
        try:
            if trickle:
                one.send(trickle)
            if one.recv(1) == b"":
                return time.monotonic() - began
        except TimeoutError:
            continue
        except OSError:
            return time.monotonic() - began
    return float("inf")


@pytest.mark.parametrize("text", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\nX-"])
def test_request_head_has_a_time_limit(small_server_port: int, text: bytes) -> None:
    (one,) = opened(small_server_port, 1, text)
    assert 0.3 < closed_after_s(one, b"a" if text else b"") < 2


def test_second_request_head_of_a_connection_has_a_time_limit(small_server_port: int) -> None:
    (one,) = opened(small_server_port, 1, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert one.recv(4096).startswith(b"HTTP/1.1 200")
    one.sendall(b"GET /again")
    assert 0.3 < closed_after_s(one, b"a") < 2


def test_active_request_is_not_interrupted_and_idle_connections_are_closed(small_server_port: int) -> None:
    (busy,) = opened(small_server_port, 1, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
    time.sleep(0.1)
    idle = opened(small_server_port, 20)
    assert status_of(small_server_port) == 200
    busy.settimeout(5)
    assert busy.recv(4096).startswith(b"HTTP/1.1 200")
    for one in idle:
        one.close()


def test_requests_without_body_are_closed_for_new_ones(small_server_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        connections, "HEADER_TIMEOUT_S", 30.0
    )  # on a busy machine, two packets may be half a second apart
    head = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    (busy,) = opened(small_server_port, 1, head + b"{}")
    assert (
        status_of(small_server_port) == 200
    )  # then the previous request has been read, and its connection is not idle
    stored = opened(small_server_port, 20, head + b"{")
    assert status_of(small_server_port) == 200
    busy.settimeout(5)
    assert busy.recv(4096).startswith(b"HTTP/1.1 200")
    stored[-1].sendall(b"}")
    stored[-1].settimeout(5)
    assert stored[-1].recv(4096).startswith(b"HTTP/1.1 200")
    for one in stored:
        one.close()


@pytest.mark.parametrize("size", [1, 5])
def test_a_body_in_chunks_of_a_few_bytes_is_not_read(small_server_port: int, size: int) -> None:
    (one,) = opened(small_server_port, 1, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunks = b"%x\r\n%s\r\n" % (size, b" " * size) * 1_000_000
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        one.sendall(chunks)
    assert status_of(small_server_port) == 200


def test_a_body_in_chunks_of_some_hundred_bytes_is_read(small_server_port: int) -> None:
    (one,) = opened(small_server_port, 1, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    lines = b'  "a": 1,\r\n' * 20
    one.sendall(b"%x\r\n%s\r\n" % (len(lines), lines) * 200 + b"0\r\n\r\n")
    one.settimeout(5)
    assert one.recv(4096).startswith(b"HTTP/1.1 200")


def test_new_connection_is_rejected_if_all_are_active(small_server_port: int) -> None:
    busy = opened(small_server_port, 8, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
    time.sleep(0.2)
    (late,) = opened(small_server_port, 1)
    assert closed_after_s(late) < 0.4
    for one in busy:
        one.settimeout(5)
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
    assert status_of(small_server_port) == 200


def test_repeated_warning_is_logged_once_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    passed, only = [], OncePerMinute()
    monkeypatch.setattr(connections.again, "warning", lambda text, number: passed.append(text % number))
    for at in range(200):
        now[0] = 1000.0 + at
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 1, "broken %s", (at,), None)
        if only.filter(record):
            passed.append(record.getMessage())
    more = "59 messages like the following one were suppressed."
    assert passed == ["broken 0", more, "broken 60", more, "broken 120", more, "broken 180"]


def test_connection_limit_reserves_file_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < most_connections() <= min(soft // 2, 512)
    assert issubclass(LimitedProtocol, asyncio.Protocol)
