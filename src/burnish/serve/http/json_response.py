"""JSON responses for starlette. Kept apart from ``errors.py``, which works without a server."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from burnish.serve.http.errors import to_json, to_shown_json


class Json(Response):
    """Compact JSON as UTF-8. Lone surrogates are replaced with U+FFFD."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ShownJson(Json):
    """JSON for display: tokens and passwords are masked."""

    def render(self, content: Any) -> bytes:
        return to_shown_json(content)
