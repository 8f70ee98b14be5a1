"""A client that sends raw requests through http.client."""

from __future__ import annotations

import http.client
import json
from typing import Any


def send(running: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
    """Send a request. Return status, headers and the text of the body."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    options = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, data, {**options, **(headers or {})})
    response = connection.getresponse()
    text = response.read().decode("utf-8")
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, text


def post(running: Any, path: str, body: Any, **headers: str):
    """Post JSON. Return status and the parsed body."""
    status, _, text = send(running, "POST", path, body, headers)
    return status, json.loads(text)


def events(text: str) -> list[Any]:
    """Return the data of the events of a stream; the last is "[DONE]"."""
    result = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in result]


CHAT = {"model": "first", "messages": [{"role": "user", "content": "hi"}]}
