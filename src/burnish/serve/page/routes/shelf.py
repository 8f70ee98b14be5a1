"""API for organizing runs: names, tags, notes, deletion and undo."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from burnish.serve.http.bodies import json_object
from burnish.serve.http.json_response import ShownJson
from burnish.serve.page.runs.labels import save_label
from burnish.serve.page.runs.runs import id_of
from burnish.serve.page.runs.trash import delete, empty, restore, runs_in_trash
from burnish.serve.page.site import Answer, Site


class Shelf:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "PUT", "/api/runs/{id}/label", self.label
        yield "DELETE", "/api/runs/{id}", self.delete
        yield "GET", "/api/trash", self.trash
        yield "POST", "/api/trash/{id}", self.restore
        yield "DELETE", "/api/trash", self.empty

    async def label(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        return ShownJson(save_label(self.site.home, run.id, await json_object(request)))

    async def delete(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        entry = await asyncio.to_thread(delete, run, self.site.places.roots)
        await self.site.find_runs(0.0)
        return ShownJson({"entry": entry})

    async def trash(self, request: Request) -> Response:
        return ShownJson({"runs": await asyncio.to_thread(runs_in_trash, self.site.places.roots)})

    async def restore(self, request: Request) -> Response:
        folder = await asyncio.to_thread(restore, request.path_params["id"], self.site.places.roots)
        await self.site.find_runs(0.0)
        return ShownJson({"id": id_of(folder)})

    async def empty(self, request: Request) -> Response:
        await asyncio.to_thread(empty, self.site.places.roots)
        return ShownJson({"status": "removed"})
