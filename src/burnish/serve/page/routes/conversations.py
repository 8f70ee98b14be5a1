"""API for conversations, which are files in the state folder: list, read, save and remove."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from burnish.serve.http.bodies import json_object
from burnish.serve.http.errors import APIError
from burnish.serve.http.json_response import ShownJson
from burnish.serve.page.form import safe_id
from burnish.serve.page.home import Home
from burnish.serve.page.site import Answer, Site

MOST_CHATS, LONGEST_TITLE = 1000, 80


class Conversations:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.home = site.home

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "GET", "/api/chats", self.chats
        yield "GET", "/api/chats/{id}", self.chat
        yield "PUT", "/api/chats/{id}", self.keep
        yield "DELETE", "/api/chats/{id}", self.remove

    async def chats(self, request: Request) -> Response:
        """The conversations with at least one message, the latest first."""
        return ShownJson({"chats": await asyncio.to_thread(summaries, self.home)})

    async def chat(self, request: Request) -> Response:
        found = self.home.read(f"chats/{safe_id(request)}.json")
        if found is None:
            raise APIError(404, "no_chat", "The conversation does not exist.")
        return ShownJson(found)

    async def keep(self, request: Request) -> Response:
        body, name = await json_object(request), safe_id(request)
        known = self.home.names("chats")
        if len(known) >= MOST_CHATS and name not in known:
            message = f"The limit of {MOST_CHATS} saved conversations is reached. Remove some."
            raise APIError(409, "too_many_chats", message)
        self.home.write(f"chats/{name}.json", json.dumps(body, ensure_ascii=False))
        return ShownJson({"status": "kept"})

    async def remove(self, request: Request) -> Response:
        if not self.home.remove(f"chats/{safe_id(request)}.json"):
            raise APIError(404, "no_chat", "The conversation does not exist.")
        return ShownJson({"status": "removed"})


def summaries(home: Home) -> list[dict[str, Any]]:
    """Id, first message and time of each conversation with at least one message, the latest first."""
    found = []
    for name in home.names("chats"):
        chat = home.read(f"chats/{name}.json")
        turns = chat.get("turns") if isinstance(chat, dict) else None
        if not (isinstance(turns, list) and turns and isinstance(turns[0], dict)):
            continue
        title = " ".join(str(turns[0].get("user", "")).split())[:LONGEST_TITLE]
        changed = (home.folder / f"chats/{name}.json").stat().st_mtime
        found.append({"id": name, "title": title, "time": changed})
    return sorted(found, key=lambda one: -one["time"])
