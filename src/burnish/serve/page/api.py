"""JSON for the page's scripts. Errors are ``{"error": {"message", "option", "code"}}``, and the message can be shown
to users."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

import burnish
from burnish.config.secrets import without_secrets
from burnish.report.metadata import EVENTS
from burnish.serve.http.bodies import json_object
from burnish.serve.http.errors import APIError, to_shown_json
from burnish.serve.http.json_response import ShownJson
from burnish.serve.http.relay import Relay
from burnish.serve.http.stream import EventStream, event_text
from burnish.serve.page.form import Form, whole_number
from burnish.serve.page.routes.conversations import Conversations
from burnish.serve.page.routes.images import Images
from burnish.serve.page.routes.jobs import Jobs, target_of
from burnish.serve.page.routes.picking import Picking
from burnish.serve.page.routes.shelf import Shelf
from burnish.serve.page.runs.completions import completions
from burnish.serve.page.runs.files import checkpoints, run_yaml_text, tail_lines
from burnish.serve.page.runs.follow import (
    LOG_BYTES,
    MOST_RUNS,
    FilePosition,
    console_of,
    cursor_text,
    end_of,
    line_start,
    log_text,
    matching_lines,
    new_events,
    read_cursor,
)
from burnish.serve.page.runs.listing import joined
from burnish.serve.page.runs.log_columns import MOST_ROWS
from burnish.serve.page.runs.predictions import predictions
from burnish.serve.page.runs.run_warnings import warnings_of
from burnish.serve.page.runs.runs import FoundRun, KnownRuns, id_of
from burnish.serve.page.runs.series import downsample, series, small_line_chart
from burnish.serve.page.site import Answer, Site

_LOOKS_EVERY_S, _LISTS_EVERY_S = 0.25, 2.0
_DOWNLOAD_SUFFIXES = (".png", ".yaml", ".jsonl", ".json", ".log")
_EXCLUDED_DOWNLOADS = ("tokenizer", "config.json", "adapter_config", "generation_config")
_MOST_WANTED = 200
"""Maximum length of the text of a search, in characters."""
MOST_STREAMS = 50


class Api:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._num_streams = 0
        self._followed: dict[str, Path] = {}

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield from Form(self.site).routes()
        yield from Shelf(self.site).routes()
        yield from Jobs(self.site).routes()
        yield from Picking(self.site).routes()
        yield from Conversations(self.site).routes()
        yield from Images(self.site).routes()
        yield "GET", "/api/runs", self.runs
        yield "POST", "/api/runs", self.begin
        yield "GET", "/api/runs/{id}", self.run
        yield "GET", "/api/runs/{id}/series", self.series
        yield "GET", "/api/runs/{id}/log", self.log
        yield "GET", "/api/runs/{id}/download/{name}", self.download
        yield "GET", "/api/runs/{id}/completions", self.completions
        yield "GET", "/api/runs/{id}/predictions", self.predictions
        yield "GET", "/api/runs/{id}/held-out", self.held_out_example
        yield "POST", "/api/runs/{id}/stop", self.stop
        yield "POST", "/api/runs/{id}/continue", self.again
        yield "DELETE", "/api/queue/{number:int}", self.unqueue
        yield "GET", "/api/engines", self.engines
        yield "POST", "/api/engines", self.begin_engine
        yield "DELETE", "/api/engines/{id}", self.end_engine
        yield "POST", "/api/chat/{id}", self.chat
        yield "POST", "/api/chat/{id}/tokens", self.tokens
        yield "GET", "/api/machine", self.machine
        yield "GET", "/api/stream", self.stream
        yield "GET", "/api/poll", self.poll

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        query, state = request.query_params.get("q", "").lower(), request.query_params.get("state", "")
        found = [
            run
            for run in await self.site.find_runs()
            if (not state or run.state == state) and query in f"{run.name} {run.folder}".lower()
        ]
        facts = {"runs": self.site.facts(found), "queue": self.site.starter.queued_jobs()}
        return await asyncio.to_thread(ShownJson, facts)  # seconds for thousands of runs

    async def begin(self, request: Request) -> Response:
        body = await json_object(request)
        values, choice = body.get("values"), str(body.get("folder") or "new")
        if not isinstance(values, dict) or choice not in ("new", "resume", "overwrite", "another"):
            raise APIError(
                422,
                "invalid_value",
                '"values" must be an object, and "folder" must be one of new, resume, overwrite, another.',
            )
        devices = body.get("devices")
        if devices is not None and not (
            isinstance(devices, list) and all(type(one) is int and 0 <= one < 1024 for one in devices)
        ):
            raise APIError(422, "invalid_value", '"devices" must be a list of device indices.')
        starter = self.site.starter
        if choice == "another":
            folder = starter.free_folder(starter.folder_of(values))
            values, choice = {**values, "output_dir": self.site.places.display_path(folder)}, "new"
        if body.get("when") == "queue" and any(run.is_alive for run in await self.site.find_runs(0.0)):
            return ShownJson({"queued": await starter.enqueue(values, choice, devices)}, 202)
        return ShownJson({"id": id_of(await starter.begin(values, choice, devices))}, 201)

    async def run(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        self._followed[run.id] = run.folder
        return ShownJson(await asyncio.to_thread(self._details, run))

    def _details(self, run: FoundRun) -> dict[str, Any]:
        return {
            **self.site.facts([run])[0],
            "outcome": run.outcome,
            "launch": {name: run.launch.get(name) for name in ("argv", "host", "user", "time", "burnish", "devices")},
            "yaml": run_yaml_text(run.folder),
            "checkpoints": checkpoints(run.folder),
            "events": tail_lines(run.folder / EVENTS)[-200:],
            "files": _files(run.folder),
            "cursor": cursor_text({run.id: end_of(run.folder, run)}),
        }

    async def series(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        points = min(MOST_ROWS, max(16, whole_number(request.query_params.get("points"), "points", 4000)))
        columns, offset = await asyncio.to_thread(series, run.folder)
        cursor = cursor_text({run.id: replace(end_of(run.folder, run), rows=offset)})
        found = [{"key": one.key, "values": one.values} for one in await asyncio.to_thread(warnings_of, run, columns)]
        few = await asyncio.to_thread(downsample, columns, points)
        return ShownJson({"cursor": cursor, "rows": len(columns["step"]), "columns": few, "warnings": found})

    async def log(self, request: Request) -> Response:
        """The end of the run's console output; ``before`` pages back. With ``find``, only the lines that contain it."""
        run = await self.site.run(request.path_params["id"])
        path = console_of(run.folder)
        if not path.is_file():
            return ShownJson({"from": 0, "to": 0, "text": ""})
        end = path.stat().st_size
        end = min(end, whole_number(request.query_params.get("before"), "before", end))
        if wanted := request.query_params.get("find", "")[:_MOST_WANTED]:
            text, begin = await asyncio.to_thread(matching_lines, path, end, wanted)
            return ShownJson({"from": begin, "to": end, "text": text})
        begin = await asyncio.to_thread(line_start, path, max(0, end - LOG_BYTES), end)
        text, behind = await asyncio.to_thread(log_text, path, begin, end)
        return ShownJson({"from": begin, "to": behind, "text": text})

    async def completions(self, request: Request) -> Response:
        """Rewarded completions of a step and a record, from ``offset`` on. Without a step: the steps and records."""
        run, query = await self.site.run(request.path_params["id"]), request.query_params
        step = whole_number(query["step"], "step", 0) if query.get("step") else None
        order, offset = query.get("order", "sample"), whole_number(query.get("offset"), "offset", 0)
        record = query.get("record") or None
        return ShownJson(await asyncio.to_thread(completions, run.folder, step, record, order, offset))

    async def predictions(self, request: Request) -> Response:
        """Some responses that a run has written, from ``offset`` on."""
        run, query = await self.site.run(request.path_params["id"]), request.query_params
        offset = whole_number(query.get("offset"), "offset", 0)
        return ShownJson(await asyncio.to_thread(predictions, run.folder, query.get("file", ""), offset))

    async def download(self, request: Request) -> Response:
        """Download one of the files that the run lists."""
        run, name = await self.site.run(request.path_params["id"]), request.path_params["name"]
        if name not in [file["name"] for file in _files(run.folder)]:
            raise APIError(404, "no_file", "The run has no file with this name.")
        try:
            body = await asyncio.to_thread(_download, run.folder / name)
        except OSError as error:  # it was removed meanwhile, or belongs to another user
            raise APIError(404, "no_file", f'Cannot read "{name}": {error.strerror or error}.') from error
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}"}  # RFC 6266
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def held_out_example(self, request: Request) -> Response:
        """A validation example as a prompt with its reference response: a random one, or ``number``."""
        run, number = await self.site.run(request.path_params["id"]), request.query_params.get("number", "")
        values = await self.site.starter.values_of(run)
        question = {"held_out": True, "values": values, "number": whole_number(number, "number", 0) if number else None}
        found = await self.site.planner.whole(question)
        if found.get("problems"):
            problem = found["problems"][0]
            raise APIError(422, "nothing_held_out", joined(problem["sentence"], problem["remedy"]))
        return ShownJson(found)

    async def stop(self, request: Request) -> Response:
        body = await json_object(request)
        how = body.get("how", "save")
        if how not in ("save", "now"):
            raise APIError(422, "invalid_value", '"how" must be "save" or "now".')
        self.site.starter.stop(await self.site.run(request.path_params["id"]), how)
        return ShownJson({"status": "told"}, 202)

    async def again(self, request: Request) -> Response:
        await json_object(request)
        await self.site.starter.again(await self.site.run(request.path_params["id"]))
        return ShownJson({"status": "started"}, 202)

    async def unqueue(self, request: Request) -> Response:
        if not self.site.starter.unqueue(request.path_params["number"]):
            raise APIError(404, "not_queued", "The run is no longer in the queue.")
        return ShownJson({"status": "removed"})

    # --- engines ------------------------------------------------------------------------------------

    async def engines(self, request: Request) -> Response:
        return ShownJson({"engines": await self.site.engines.states()})

    async def begin_engine(self, request: Request) -> Response:
        body = await json_object(request)
        if body.get("named") is True and self.site.named is not None:
            one = self.site.engines.begin_named(self.site.named)
        else:
            one = self.site.engines.begin(*await target_of(self.site, body))
        return ShownJson({"id": one.id, "name": one.name, "state": one.state}, 202)

    async def end_engine(self, request: Request) -> Response:
        self.site.engines.end(request.path_params["id"])
        return ShownJson({"status": "told"}, 202)

    async def chat(self, request: Request) -> Any:
        engine = self.site.engines.of(request.path_params["id"])
        body = {**await json_object(request), "model": engine.id}
        return Relay(str(engine.socket), "POST", "/v1/chat/completions", json.dumps(body).encode())

    async def tokens(self, request: Request) -> Any:
        """Tokens of a conversation, and of each image in it."""
        engine = self.site.engines.of(request.path_params["id"])
        body = {**await json_object(request), "model": engine.id}
        return Relay(str(engine.socket), "POST", "/tokenize", json.dumps(body).encode())

    async def machine(self, request: Request) -> Response:
        return ShownJson(await asyncio.to_thread(self.site.machine.use))

    # --- what is new --------------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Any:
        if self._num_streams >= MOST_STREAMS:
            raise APIError(
                503,
                "too_many_streams",
                "Too many open event streams. Close some browser tabs.",
                headers={"Retry-After": "5"},
            )
        self._num_streams += 1

        def over() -> None:
            self._num_streams -= 1

        cursor = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventStream(self._events(request, cursor), alive_s=15.0, over=over)

    async def _events(self, request: Request, cursor: str) -> AsyncGenerator[bytes, None]:
        yield event_text(to_shown_json({"server": burnish.__version__, "time": time.time(), "retry_ms": 2000}), "hello")
        gone: set[str] = set()
        while True:
            messages, cursor = await self._new_messages(request, cursor)
            for name, data in messages:
                if name != "gone" or data["run"] not in gone:  # once, although its folder is looked for again
                    yield event_text(to_shown_json(data), name, cursor)
            gone = {data["run"] for name, data in messages if name == "gone"}
            await asyncio.sleep(_LOOKS_EVERY_S if request.query_params.get("runs") else _LISTS_EVERY_S)

    async def poll(self, request: Request) -> Response:
        messages, cursor = await self._new_messages(request, request.query_params.get("after", ""))
        return ShownJson({"cursor": cursor, "messages": [{"event": name, "data": data} for name, data in messages]})

    async def _new_messages(self, request: Request, cursor: str) -> tuple[list[tuple[str, Any]], str]:
        """New messages of the requested runs, or of all runs if none is requested."""
        ids = [one for one in request.query_params.get("runs", "").split(",") if one]
        found = {run.id: run for run in await self.site.find_runs(60.0 if ids else _LISTS_EVERY_S)}
        if any(one not in found for one in ids):
            found = {run.id: run for run in await self.site.find_runs()}
        wanted = [found[one] for one in ids if one in found] if ids else list(found.values())
        log = request.query_params.get("log") == "1"
        messages, after = await asyncio.to_thread(_collect_messages, wanted, cursor, log, bool(ids), self.site.known)
        self._followed |= {run.id: run.folder for run in wanted if ids}
        gone = [one for one in ids if one not in found and one in self._followed and not self._followed[one].is_dir()]
        return messages + [("gone", {"run": one}) for one in gone], after


def _collect_messages(
    wanted: list[FoundRun], cursor: str, log: bool, is_followed: bool, known: KnownRuns
) -> tuple[list[tuple[str, Any]], str]:
    places, messages = read_cursor(cursor), []
    now = {}
    for run in wanted[:MOST_RUNS]:
        place = places.get(run.id) or (FilePosition() if is_followed else end_of(run.folder, None))
        for name, data, behind in new_events(run.id, run.folder, place, log, known):
            place = behind
            if is_followed or name == "gone":
                messages.append((name, data))
            elif name == "run":
                messages.append((name, {**data, "curve": small_line_chart(run.folder)}))
        now[run.id] = place
    if not is_followed:
        messages += [("gone", {"run": one}) for one in places.keys() - {run.id for run in wanted}]
    return messages, cursor_text(now)


def _download(path: Path) -> bytes:
    body = path.read_bytes()
    return body if path.suffix == ".png" else without_secrets(body.decode("utf-8", "replace")).encode()


def _files(folder: Path) -> list[dict[str, Any]]:
    """Files that may be downloaded: metrics, YAML, logs, plots. No weights."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        is_offered = path.suffix in _DOWNLOAD_SUFFIXES and not path.name.startswith((".", *_EXCLUDED_DOWNLOADS))
        if is_offered and path.is_file() and not path.is_symlink() and path.stat().st_size < 64 * 2**20:
            found.append({"name": path.name, "bytes": path.stat().st_size})
    return found
