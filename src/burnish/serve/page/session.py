"""Authentication of the web UI: after signing in with the key, by a cookie that is signed with it.

In: a request. Out: it is admitted, or an error: pages redirect to the sign-in page, API calls get 401. Changing the key
ends every session. After ten wrong keys in a minute, sign-in is blocked.

The name of the cookie depends on the key: browsers share the cookies of a host between its ports, on which other web
UIs may be served.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import urllib.parse
from collections import deque

from starlette.requests import Request

from burnish.serve.http.errors import APIError
from burnish.serve.http.guards import same_key

SESSION_LIFETIME_S = 30 * 86400
MAX_FAILED_ATTEMPTS = 10
_PUBLIC_PATHS = ("/", "/sign-in", "/healthz")
_PLACE = re.compile(r"[A-Za-z0-9-]+(/[A-Za-z0-9-]+)*(\?[A-Za-z0-9_,=&/.%~+*:@!()-]{0,2000})?")
"""Path and query of a page, relative to the root of the web UI."""


class Sessions:
    """Sessions of one key; ``key=None`` disables authentication."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.cookie = f"burnish-{self._signature('name')[:8]}"
        self._failed_attempts: deque[float] = deque(maxlen=MAX_FAILED_ATTEMPTS)

    def authenticate(self, request: Request) -> None:
        """Raises APIError if a request is not signed in."""
        path = request.scope["path"]
        is_open = self.key is None or path in _PUBLIC_PATHS or path.startswith("/static/")
        if not is_open and not self.is_valid(request.cookies.get(self.cookie, "")):
            raise _sign_in(request)

    def new_cookie(self) -> str:
        """A new cookie value: expiry time and its signature."""
        ends = str(int(time.time()) + SESSION_LIFETIME_S)
        return f"{ends}.{self._signature(ends)}"

    def is_valid(self, value: str) -> bool:
        ends, _, proof = value.partition(".")
        if not (ends.isascii() and ends.isdigit()) or not hmac.compare_digest(
            proof.encode(), self._signature(ends).encode()
        ):
            return False
        return int(ends) > time.time()

    def _signature(self, ends: str) -> str:
        return hmac.new((self.key or "").encode(), f"session {ends}".encode(), hashlib.sha256).hexdigest()

    def check_key(self, key: str) -> None:
        """Raises APIError 403 for a wrong key, 429 after too many of them."""
        now = time.monotonic()
        if len(self._failed_attempts) == MAX_FAILED_ATTEMPTS and now - self._failed_attempts[0] < 60:
            message = "Too many failed sign-in attempts. Wait one minute."
            raise APIError(429, "too_many_attempts", message, headers={"Retry-After": "60"})
        if self.key is not None and not same_key(key, self.key):
            self._failed_attempts.append(now)
            raise APIError(403, "wrong_key", "Invalid key.")


def is_place(to: str) -> bool:
    """Return whether ``to`` is a page of the web UI. Sign-in redirects to no other address."""
    return _PLACE.fullmatch(to) is not None


def _sign_in(request: Request) -> APIError:
    path = request.scope["path"]
    if path.startswith("/api/") or request.method != "GET":
        return APIError(401, "sign_in", "Sign in first.")
    query = request.scope["query_string"].decode("latin-1")
    to = path.lstrip("/") + (f"?{query}" if query else "")
    parameter = f"?to={urllib.parse.quote(to)}" if is_place(to) else ""
    return APIError(
        303, "sign_in", "Sign in first.", headers={"Location": f"{'../' * (path.count('/') - 1)}sign-in{parameter}"}
    )
