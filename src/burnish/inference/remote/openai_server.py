"""Client of a server with OpenAI's API, based on httpx: list models, stream completions."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

import httpx2 as httpx

from burnish.config.errors import UserError, first_line

TIMEOUT_S = 600.0


class OpenAIServer:
    """A server with OpenAI's API. The key is sent to this server only; redirects are not followed.

    Args:
        url: URL that ends in ``/v1``.
        key: sent as a bearer token; "" for none.
        uses_proxy: use the proxies of the environment.
    """

    def __init__(self, url: str, key: str = "", uses_proxy: bool = False) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=uses_proxy)

    def models(self) -> list[str]:
        """Return the names of its models.

        Raises:
            UserError: if it cannot be reached, or lists no model.
        """
        try:
            response = self._client.get(f"{self.url}/models")
            names = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
        except httpx.HTTPStatusError as error:
            raise UserError(
                f"{self.url} returned HTTP {error.response.status_code}: {_message(error.response)}"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(f"cannot connect to {self.url}: {error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.url}/models returned no list of models: {error}") from error
        if not names:
            raise UserError(f"{self.url}/models returned an empty list of models.")
        return names

    def chunks(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the chunks of a streamed completion. Closing the iterator closes the connection.

        Raises:
            UserError: if the server cannot be reached, returns an error, or ends the stream early.
        """
        try:
            with self._client.stream("POST", f"{self.url}/{path}", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise UserError(f"{self.url} returned HTTP {response.status_code}: {_message(response)}")
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    chunk = _chunk(data)
                    if chunk is None:
                        raise UserError(f"{self.url} sent data that is not a JSON object: {data[:200]}")
                    if "error" in chunk:
                        raise UserError(f"{self.url} ended the response with an error: {_sentence(chunk['error'])}")
                    yield chunk
        except httpx.HTTPError as error:
            raise UserError(f"cannot connect to {self.url}: {first_line(error)}.") from error
        raise UserError(f"{self.url}: the stream ended before the response was complete.")

    def close(self) -> None:
        self._client.close()


def _chunk(data: str) -> dict[str, Any] | None:
    try:
        chunk = json.loads(data)
    except ValueError:
        return None
    return chunk if isinstance(chunk, dict) else None


def _message(response: httpx.Response) -> str:
    try:
        return _sentence(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200].strip() or "no error message"


def _sentence(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
