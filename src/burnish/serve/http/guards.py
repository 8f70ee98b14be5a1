"""Checks of every request before a route receives it: Host, Origin, key, limits; and headers of every response.

    app = Guard(routes, Rules(...), authenticate=bearer(key, open_paths), as_object=openai_error)

Cheap checks run first: number and size of headers, Host (against DNS rebinding), Origin (against cross-site
requests), key, declared length of the body. The size of the body is then checked while it is read. A rejected body is
discarded.

Starlette's own middleware does less: TrustedHostMiddleware does not parse [::1], and CORSMiddleware still executes
requests from foreign origins. Forms, file uploads and ``request.url`` are not used because of past security bugs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from burnish.serve.http.errors import INTERNAL, APIError
from burnish.serve.http.hosts import LOOPBACK_NAMES, host_name, is_address
from burnish.serve.http.json_response import Json

MOST_HEADERS, MOST_HEADER_BYTES = 64, 16 * 1024
STATE_CHANGING_METHODS = frozenset({"POST", "PUT", "DELETE", "PATCH"})
_CORS = {
    "access-control-allow-methods": "GET, POST",
    "access-control-expose-headers": "x-request-id, x-burnish-ignored, retry-after",
    "vary": "origin",
}
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?:, ?[A-Za-z0-9-]+)*")
_DISCARD_BODY_STATUSES = frozenset({401, 404, 405, 413, 415, 503})
MOST_DISCARDED = 32 * 2**20
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
log = logging.getLogger("burnish.serve.http")
Authenticator: TypeAlias = Callable[[Request], None]
"""Raises APIError if a request is not authorized."""


@dataclass(frozen=True)
class Rules:
    """Rules on the requests that a server accepts.

    Args:
        hosts: names that a Host header may give, in lower case, without port.
        any_address: accept any IP address as a Host too (DNS cannot redirect it). For servers not bound to loopback.
        origins: allowed foreign origins, such as ``https://chat.example.org``. ``*`` is not supported.
        own_origin: accept the server's own origin, as named by the Host header.
        effects_need_origin: reject requests other than GET, HEAD and OPTIONS without an Origin header.
        max_body_bytes: maximum size of a body in bytes.
    """

    hosts: frozenset[str] = LOOPBACK_NAMES
    any_address: bool = False
    origins: frozenset[str] = frozenset()
    own_origin: bool = False
    effects_need_origin: bool = False
    max_body_bytes: int = 4 * 2**20


def single_header(request: Request, name: str) -> str | None:
    """Return the value of a header that may appear at most once.

    Raises:
        APIError: 400 if it is repeated; a proxy may have used the other value.
    """
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise APIError(400, "invalid_value", f'The header "{name}" must appear at most once. Received: {len(values)}.')
    return values[0] if values else None


def allowed_header_names(request: Request) -> str:
    """Return the header names that a page of an allowed origin may send: all that its browser asks for.

    OpenAI's JavaScript client sends more than ten headers of its own.
    """
    requested = request.headers.get("access-control-request-headers", "")
    return requested if _HEADER_NAMES.fullmatch(requested) else "authorization, content-type"


def new_key() -> str:
    """Return a random key of 256 bits as URL-safe text."""
    return secrets.token_urlsafe(32)


def same_key(received: str, key: str) -> bool:
    """Compare two keys in constant time."""
    return hmac.compare_digest(received.encode("utf-8", "replace"), key.encode("utf-8", "replace"))


def bearer(key: str | None, open_paths: Collection[str]) -> Authenticator:
    """Require ``Authorization: Bearer KEY``, except on the open paths or if ``key`` is None."""

    def authenticate(request: Request) -> None:
        if key is None or request.scope["path"] in open_paths:
            return
        challenge = {"WWW-Authenticate": "Bearer"}
        received = single_header(request, "authorization")
        if received is None:
            raise APIError(
                401, "missing_api_key", 'An API key is required: "Authorization: Bearer KEY".', headers=challenge
            )
        scheme, _, token = received.partition(" ")
        if scheme.lower() != "bearer" or not same_key(token.strip(), key):
            raise APIError(401, "invalid_api_key", "The API key is not valid.", headers=challenge)

    return authenticate


class Guard:
    """ASGI middleware that passes on only the requests that the rules allow.

    Args:
        app: the routes.
        rules: conditions on requests.
        authenticate: checks the key.
        as_object: converts an error to the JSON format of this server.
        headers: added to every response.
        seen: called with path, status, seconds and request id after every request.
    """

    def __init__(
        self, app: ASGIApp, rules: Rules, authenticate: Authenticator, as_object: Callable[[APIError], dict[str, Any]],
        headers: Mapping[str, str] | None = None, seen: Callable[[str, int, float, str], None] | None = None,
    ) -> None:  # fmt: skip
        self.app, self.rules, self.authenticate, self.as_object, self.seen = app, rules, authenticate, as_object, seen
        self.headers = dict(headers or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither websockets nor lifespan are used by these servers
        began_s, request = time.monotonic(), Request(scope)
        received = request.headers.getlist("x-request-id")  # the client's own id, if it is safe in logs and headers
        is_harmless = len(received) == 1 and _ID.fullmatch(received[0])
        request_id = scope["burnish.request_id"] = received[0] if is_harmless else f"req-{secrets.token_hex(12)}"
        answer = _MeteredResponse(
            send, receive, {**self.headers, "x-request-id": request_id}, self.rules.max_body_bytes
        )
        scope["app"] = self  # so that routes raise an exception for unknown paths
        try:
            self._check(request, answer)
            if request.method == "OPTIONS" and "origin" in request.headers:
                await Response(status_code=204)(scope, receive, answer)
            else:
                await self.app(scope, answer.receive, answer)
        except (APIError, HTTPException) as error:
            await self._refuse(as_api_error(error), scope, receive, answer)
        except Exception:  # the outermost frame: unexpected errors are one line for the client; the log has details
            log.exception("request %s: %s %s", request_id, request.method, scope["path"])
            await self._refuse(INTERNAL, scope, receive, answer)
        finally:
            if self.seen is not None:
                self.seen(scope["path"], answer.status, time.monotonic() - began_s, request_id)

    def _check(self, request: Request, answer: _MeteredResponse) -> None:
        pairs = request.headers.raw
        if len(pairs) > MOST_HEADERS or sum(len(name) + len(value) for name, value in pairs) > MOST_HEADER_BYTES:
            message = f"A request may have at most {MOST_HEADERS} headers, with {MOST_HEADER_BYTES} bytes in total."
            raise APIError(431, "invalid_value", message)
        host = check_host(request, self.rules)
        origin = check_origin(request, host, self.rules)
        if origin is not None:  # so that the page may read the response, including errors
            answer.headers |= {"access-control-allow-origin": origin, **_CORS}
            answer.headers["access-control-allow-headers"] = allowed_header_names(request)
        if request.method != "OPTIONS" or origin is None:  # browsers send no key with a preflight request
            self.authenticate(request)
        length = single_header(request, "content-length")
        if length is not None and int(length) > self.rules.max_body_bytes:  # h11 has verified that it is a number
            raise _too_large(self.rules.max_body_bytes)

    async def _refuse(self, refusal: APIError, scope: Scope, receive: Receive, answer: _MeteredResponse) -> None:
        if refusal.status in _DISCARD_BODY_STATUSES and not answer.has_body:
            await _discard(receive)
        if answer.status == 0:  # otherwise the response has begun, and the stream reports the error itself
            response = Json(self.as_object(refusal), refusal.status, headers=refusal.headers)
            await response(scope, receive, answer)


class _MeteredResponse:
    """Wraps ``send``, which records the status and adds common headers, and ``receive``, which counts the body.

    ``has_body`` is true when the request has been read to its end.
    """

    def __init__(self, send: Send, receive: Receive, headers: dict[str, str], most: int) -> None:
        self._send, self._receive, self.headers, self.most = send, receive, headers, most
        self.status, self.received, self.has_body = 0, 0, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name for name, _ in message["headers"]}
            added = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in own)]
        await self._send(message)

    async def receive(self) -> Message:
        message = await self._receive()
        self.has_body = not message.get("more_body", False)
        self.received += len(message.get("body", b""))
        if self.received > self.most:
            raise _too_large(self.most)
        return message


def _too_large(most: int) -> APIError:
    message = f"The body must not be longer than {most:,} bytes."
    return APIError(413, "body_too_large", message, headers={"Connection": "close"})


async def _discard(receive: Receive) -> None:
    """Read and discard the body for up to one second, so that a client that is still sending receives the error
    response and not a connection reset."""
    left = MOST_DISCARDED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def path_prefix(root_path: str) -> str:
    """``llm``, ``/llm`` and ``/llm/`` -> ``/llm``"""
    return f"/{stripped}" if (stripped := root_path.strip("/")) else ""


def with_and_without_prefix(root_path: str, app: ASGIApp) -> ASGIApp:
    """Serve ``app`` with and without a path prefix, since a proxy may or may not strip it.

    For the prefix without a slash, ``scope["burnish.root"]`` is the relative URL of the root. Otherwise it is missing.
    """
    prefix = path_prefix(root_path)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if prefix and path.startswith(f"{prefix}/"):
            scope = {**scope, "path": path.removeprefix(prefix)}
        elif prefix and path == prefix:
            scope = {**scope, "path": "/", "burnish.root": f"{prefix.rpartition('/')[2]}/"}
        await app(scope, receive, send)

    return inner


def as_api_error(error: APIError | HTTPException) -> APIError:
    """Convert the routes' own "not found" and "method not allowed"."""
    if isinstance(error, APIError):
        return error
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        message = f"Method not allowed. Use {allowed.get('Allow', 'another method')}."
        return APIError(405, "method_not_allowed", message, headers=allowed)
    return APIError(error.status_code, "unknown_url", "This URL does not exist.")


def check_host(request: Request, rules: Rules) -> str:
    """Return the Host header, including the port.

    Raises:
        APIError: 421 if the host is not allowed.
    """
    host = single_header(request, "host") or ""
    name = host_name(host)
    if name in rules.hosts or (rules.any_address and is_address(name)):
        return host.lower()
    raise APIError(421, "wrong_host", f'The host "{name[:100]}" is not allowed by this server.')


def check_origin(request: Request, host: str, rules: Rules) -> str | None:
    """Reject requests from origins that are not allowed.

    Returns:
        The foreign origin if the request has one and it is allowed, else None.
    Raises:
        APIError: 403.
    """
    origin = single_header(request, "origin")
    if origin is None:
        if rules.effects_need_origin and request.method in STATE_CHANGING_METHODS:
            raise _foreign_origin_error("no origin")
        return None
    is_own = rules.own_origin and origin.lower() == f"{request.scope.get('scheme', 'http')}://{host}"
    if not (is_own or origin in rules.origins):
        raise _foreign_origin_error(f'"{origin[:100]}"')
    if is_own and single_header(request, "sec-fetch-site") not in {None, "same-origin"}:
        raise _foreign_origin_error("a request from another site")
    return None if is_own else origin


def _foreign_origin_error(received: str) -> APIError:
    return APIError(403, "origin_not_allowed", f"Requests from this origin are not allowed. Received: {received}.")
