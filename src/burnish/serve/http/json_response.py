"""A response of JSON, of starlette's; what is said of an error (``errors.py``) needs no server."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from burnish.serve.http.errors import to_json, to_shown_json


class Json(Response):
    """JSON as UTF-8 text, without blanks. A lone surrogate, which UTF-8 cannot hold, becomes U+FFFD."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ShownJson(Json):
    """JSON that a person sees: tokens and passwords in it are masked."""

    def render(self, content: Any) -> bytes:
        return to_shown_json(content)
