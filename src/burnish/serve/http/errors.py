"""Errors of a request, in the error format of OpenAI's API and in the shorter one of the web UI.

    raise APIError(400, "invalid_value", '"temperature" must be between 0 and 2. Received: 3.', param="temperature")

Messages state what was expected, what was received and the remedy. For an internal error, the client gets one line and
the request id; the log has the details.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from burnish.config.secrets import mask_json, without_secrets

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(Exception):
    """Raised while a request is handled; converted to an error response.

    Args:
        status: HTTP status, 400 and above.
        code: machine-readable code.
        message: human-readable message.
        param: path of the parameter that caused it: ``messages[3].content``.
        headers: further headers of the response, such as ``Retry-After``.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's ``type`` of the error, which follows from the status."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def openai_error(refusal: APIError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``, in a response or as the last event of a stream."""
    return {
        "error": {
            "message": without_secrets(refusal.message),
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def page_error(refusal: APIError) -> dict[str, Any]:
    """``{"error": {"message", "option", "code"}}``, for the web UI's own scripts."""
    return {"error": {"message": without_secrets(refusal.message), "option": refusal.param, "code": refusal.code}}


def to_json(content: Any) -> bytes:
    """JSON as UTF-8 bytes. Raises ValueError for NaN and infinity, which are not valid JSON."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode("utf-8")


def to_shown_json(content: Any) -> bytes:
    """Return JSON for display as UTF-8 bytes, with tokens and passwords masked."""
    return to_json(mask_json(content))


INTERNAL = APIError(500, "internal_error", "Internal error. See the server log for details of this request id.")
