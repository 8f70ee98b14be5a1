"""API for jobs after training: exports, predictions, evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from burnish.serve.http.bodies import json_object
from burnish.serve.http.errors import APIError
from burnish.serve.http.json_response import ShownJson
from burnish.serve.page.form import safe_id
from burnish.serve.page.jobs.commands import Commands
from burnish.serve.page.runs.files import checkpoints
from burnish.serve.page.site import Answer, Site


class Jobs:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.commands = Commands(site)

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "POST", "/api/exports", self.export
        yield "POST", "/api/evaluations", self.evaluate
        yield "GET", "/api/jobs", self.jobs
        yield "GET", "/api/jobs/{id}", self.job

    async def export(self, request: Request) -> Response:
        body = await json_object(request)
        path, name = await target_of(self.site, body)
        folder = self.site.places.within(str(body.get("folder") or ""), "folder")
        await self._check_dataset(body, "dataset")
        id = self.commands.export(path, name, folder, str(body.get("format") or "safetensors"), body)
        return ShownJson({"id": id}, 202)

    async def evaluate(self, request: Request) -> Response:
        body = await json_object(request)
        path, name = await target_of(self.site, body)
        folder = self.site.places.within(str(body.get("folder") or ""), "folder")
        await self._check_dataset(body, "eval_dataset")
        if task_dir := str(body.get("task_dir") or ""):
            self.site.places.within(task_dir, "task_dir")
        id = self.commands.evaluate(path, name, folder, str(body.get("kind") or "predict"), body)
        return ShownJson({"id": id}, 202)

    async def _check_dataset(self, body: Mapping[str, Any], option: str) -> None:
        values = {option: body.get("dataset"), "dataset_dir": body.get("dataset_dir")}
        await self.site.starter.check_values({key: str(value) for key, value in values.items() if value})

    async def jobs(self, request: Request) -> Response:
        return ShownJson({"jobs": self.commands.all()})

    async def job(self, request: Request) -> Response:
        return ShownJson(self.commands.state(safe_id(request)))


async def target_of(site: Site, body: Mapping[str, Any]) -> tuple[Path, str]:
    """Folder and name of a run (``run``, optionally ``checkpoint``) or of a ``path`` inside a root.

    Raises:
        APIError: 404 or 422 if there is no such model.
    """
    if isinstance(body.get("run"), str):
        run = await site.run(body["run"])
        step = body.get("checkpoint")
        if step is None:
            return run.folder, run.name
        if step not in checkpoints(run.folder):
            raise APIError(422, "no_checkpoint", f"{run.name} has no checkpoint {step}.")
        return run.folder / f"checkpoint-{step}", f"{run.name} / checkpoint-{step}"
    text = body.get("path")
    if not isinstance(text, str) or not text:
        raise APIError(422, "missing", 'Set "run" or "path" to the model to load.')
    path = site.places.within(text, "path")
    if not path.is_dir():
        raise APIError(422, "outside", f'"path" must be an existing folder inside {site.places.first}.', param="path")
    return path, site.places.display_path(path)
