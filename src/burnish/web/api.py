"""JSON for the page's scripts. Errors are ``{"error": {"message", "option", "code"}}``, fit to be shown."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import burnish
from burnish.app.config import read_arguments
from burnish.core.errors import UserError
from burnish.report.journal import EVENTS, GIVEN
from burnish.web.exports import Exports
from burnish.web.follow import CONSOLE, Place, cursor_text, end_of, news, read_cursor
from burnish.web.home import safe_name
from burnish.web.layout import BOXES, DEPENDS, PRESETS, RISKY
from burnish.web.listing import facts
from burnish.web.remarks import remarks_on
from burnish.web.runs import Found, checkpoints, id_of, tail_lines
from burnish.web.series import series, thinned
from burnish.web.site import Site
from burnish.web.starting import free_folder
from burnish.wire.bodies import json_object
from burnish.wire.errors import Refusal, to_json
from burnish.wire.json_response import Json
from burnish.wire.relay import Relay
from burnish.wire.stream import EventStream, event_text

_LOOKS_EVERY_S, _LISTS_EVERY_S = 0.25, 2.0
_FIGURES = (".png", ".yaml", ".jsonl", ".json", ".log")
_NOT_OFFERED = ("tokenizer", "config.json", "adapter_config", "generation_config")
_LOG_BYTES = 256 * 1024
MOST_STREAMS, MOST_PRESETS = 50, 200
Answer = Callable[[Request], Awaitable[Any]]


class Api:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.exports = Exports(site)
        self._num_streams = 0
        self._form: dict[str, Any] | None = None

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Method, path, and what answers."""
        yield "GET", "/api/form", self.form
        yield "POST", "/api/check", self.check
        yield "POST", "/api/yaml", self.yaml
        yield "PUT", "/api/presets/{id}", self.keep_preset
        yield "DELETE", "/api/presets/{id}", self.drop_preset
        yield "GET", "/api/free", self.free
        yield "GET", "/api/models", self.models
        yield "GET", "/api/datasets", self.datasets
        yield "GET", "/api/datasets/columns", self.columns
        yield "GET", "/api/runs", self.runs
        yield "POST", "/api/runs", self.begin
        yield "GET", "/api/runs/{id}", self.run
        yield "GET", "/api/runs/{id}/series", self.series
        yield "GET", "/api/runs/{id}/log", self.log
        yield "GET", "/api/runs/{id}/download/{name}", self.download
        yield "GET", "/api/runs/{id}/held-out", self.held_out
        yield "POST", "/api/runs/{id}/stop", self.stop
        yield "POST", "/api/runs/{id}/continue", self.again
        yield "DELETE", "/api/queue/{number:int}", self.unqueue
        yield "GET", "/api/engines", self.engines
        yield "POST", "/api/engines", self.begin_engine
        yield "DELETE", "/api/engines/{id}", self.end_engine
        yield "POST", "/api/chat/{id}", self.chat
        yield "GET", "/api/chats", self.chats
        yield "GET", "/api/chats/{id}", self.chat_of
        yield "PUT", "/api/chats/{id}", self.keep_chat
        yield "GET", "/api/machine", self.machine
        yield "POST", "/api/exports", self.begin_export
        yield "GET", "/api/exports/{id}", self.export_of
        yield "GET", "/api/stream", self.stream
        yield "GET", "/api/poll", self.poll

    # --- the form -----------------------------------------------------------------------------------------------------

    async def form(self, request: Request) -> Response:
        """Every option, from the planner, kept as long as burnish's own files are what they were."""
        if self._form is None:
            mark = await asyncio.to_thread(_mark_of_source)
            kept = self.site.home.read("form.json")
            if not isinstance(kept, dict) or kept.get("mark") != mark:
                kept = {"mark": mark, **await self.site.planner.whole({"form": True})}
                self.site.home.write("form.json", json.dumps(kept))
            self._form = kept
        allowed = self.site.starter.allow
        risky = {name: why for name, why in RISKY.items() if name not in allowed}
        boxes = {name: list(options) for name, options in BOXES.items()}
        return Json(
            {"groups": self._form["groups"], "fields": self._form["fields"], "boxes": boxes, "risky": risky,
             "depends": {name: [on, list(values)] for name, (on, values) in DEPENDS.items()}, "presets": PRESETS,
             "own_presets": await asyncio.to_thread(self._presets)}
        )  # fmt: skip

    def _presets(self) -> dict[str, dict[str, Any]]:
        """Name -> values of the presets that were saved here; a file that cannot be read is passed over."""
        home = self.site.home
        texts = {name: home.text(f"presets/{name}.yaml") for name in home.names("presets")}
        read = {name: self._read_yaml(text) for name, text in texts.items() if text}
        return {name: found["values"] for name, found in read.items() if not found["problems"]}

    async def keep_preset(self, request: Request) -> Response:
        """Keep the text of a YAML file under a name; it is a file that can be mailed, and run."""
        text, name = (await json_object(request)).get("text"), _safe(request)
        found = await asyncio.to_thread(self._read_yaml, text) if isinstance(text, str) else {"problems": ["no text"]}
        if found["problems"]:
            raise Refusal(422, "invalid_value", f'"text" must be a YAML file: {found["problems"][0]}')
        if len(self.site.home.names("presets")) >= MOST_PRESETS:
            raise Refusal(409, "too_many", f"{MOST_PRESETS} presets are kept; remove some.")
        self.site.home.write(f"presets/{name}.yaml", str(text))
        return Json({"status": "kept"})

    async def drop_preset(self, request: Request) -> Response:
        if not self.site.home.remove(f"presets/{_safe(request)}.yaml"):
            raise Refusal(404, "no_preset", "There is no such preset.")
        return Json({"status": "removed"})

    async def check(self, request: Request) -> Any:
        """Explain what a run would do, part by part as it becomes known: one JSON object per line."""
        body = await json_object(request)
        values = body.get("values")
        if not isinstance(values, dict):
            raise Refusal(422, "invalid_type", '"values" must be an object.')
        question = {"values": self.site.starter.checked(values), "rows": 5, "seed": int(body.get("seed") or 0)}

        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                async for part in self.site.planner.ask(question, replaces=True):
                    yield event_text(to_json(part))
            except Refusal as refusal:
                problem = {"option": refusal.param or "", "sentence": refusal.message, "remedy": ""}
                yield event_text(to_json({"problems": [problem], "code": refusal.code, "is_last": True}))

        return EventStream(parts())

    async def free(self, request: Request) -> Response:
        """A folder beside the one that is named, or that one, which holds nothing yet."""
        folder = self.site.places.within(request.query_params.get("folder", ""), "folder")
        return Json({"folder": self.site.places.shown(free_folder(folder))})

    async def yaml(self, request: Request) -> Response:
        """The values of a YAML text, or what is wrong with it and in which line."""
        text = (await json_object(request)).get("text")
        if not isinstance(text, str):
            raise Refusal(422, "invalid_type", '"text" must be the text of a YAML file.')
        return Json(await asyncio.to_thread(self._read_yaml, text))

    def _read_yaml(self, text: str) -> dict[str, Any]:
        """Read by the same function as a file of the command line, with its limits and its sentences."""
        with tempfile.TemporaryDirectory(dir=self.site.home.folder) as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(text, encoding="utf-8", errors="replace")
            try:
                given, _ = read_arguments([str(file)])
            except UserError as error:
                places = [str(problem).replace(f"{folder}/", "") for problem in error.problems]
                return {"values": {}, "problems": places}
        return {"values": {name: item.value for name, item in given.items()}, "problems": []}

    async def models(self, request: Request) -> Response:
        """Models, adapters and finished runs below the roots."""
        return Json({"models": await asyncio.to_thread(self._models)})

    def _models(self) -> list[dict[str, str]]:
        from burnish.web.runs import DEPTH

        found = []
        for root in self.site.places.roots:
            for name, kind in (("config.json", "model"), ("adapter_config.json", "adapter")):
                for depth in range(DEPTH):
                    for path in root.glob("/".join(["*"] * (depth + 1)) + "/" + name):
                        if not any(part.startswith(".") for part in path.relative_to(root).parts):
                            found.append({"path": self.site.places.shown(path.parent), "kind": kind})
                        if len(found) >= 200:
                            return found
        return sorted(found, key=lambda one: one["path"])

    async def datasets(self, request: Request) -> Response:
        """Names in the ``dataset_info.json`` of folders below the roots."""
        return Json({"datasets": await asyncio.to_thread(self._datasets)})

    def _datasets(self) -> list[dict[str, str]]:
        found = []
        for root in self.site.places.roots:
            for pattern in ("dataset_info.json", "*/dataset_info.json", "*/*/dataset_info.json"):
                for path in list(root.glob(pattern))[:20]:
                    try:
                        names = list(json.loads(path.read_text(encoding="utf-8")))
                    except (OSError, ValueError):
                        continue
                    folder = self.site.places.shown(path.parent)
                    found += [{"name": str(name), "folder": folder} for name in names[:200]]
        return found

    async def columns(self, request: Request) -> Response:
        """The columns of a file of records below a root, with their first values."""
        path = self.site.places.within(request.query_params.get("file", ""), "dataset")
        if not path.is_file():
            raise Refusal(404, "no_file", "There is no such file.")
        found = await self.site.planner.whole({"columns_of": str(path)})
        if found.get("problems"):
            raise Refusal(422, "unreadable", found["problems"][0]["sentence"], param="dataset")
        return Json(found)

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        asked, state = request.query_params.get("q", "").lower(), request.query_params.get("state", "")
        found = [
            self._facts(run)
            for run in await self.site.found()
            if (not state or run.state == state) and asked in f"{run.name} {run.folder}".lower()
        ]
        return Json({"runs": found, "queue": self.site.starter.queued()})

    def _facts(self, run: Found) -> dict[str, Any]:
        return {**facts(run), "folder": self.site.places.shown(run.folder)}

    async def begin(self, request: Request) -> Response:
        body = await json_object(request)
        values, choice = body.get("values"), str(body.get("folder") or "new")
        if not isinstance(values, dict) or choice not in ("new", "continue", "anew", "another"):
            raise Refusal(422, "invalid_value", '"values" and "folder" (new, continue, anew, another) are needed.')
        devices = body.get("devices")
        if devices is not None and not (
            isinstance(devices, list) and all(isinstance(one, int) and 0 <= one < 1024 for one in devices)
        ):
            raise Refusal(422, "invalid_value", '"devices" must be a list of the numbers of devices.')
        starter = self.site.starter
        if choice == "another":
            folder = free_folder(starter.folder_of(values))
            values, choice = {**values, "output_dir": self.site.places.shown(folder)}, "new"
        if body.get("when") == "queue" and any(run.is_alive for run in await self.site.found(0.0)):
            return Json({"queued": starter.enqueue(values, choice, devices)}, 202)
        return Json({"id": id_of(starter.begin(values, choice, devices))}, 201)

    async def run(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        return Json(await asyncio.to_thread(self._whole, run))

    def _whole(self, run: Found) -> dict[str, Any]:
        given = run.folder / GIVEN
        return {
            **self._facts(run),
            "outcome": run.outcome,
            "launch": {name: run.launch.get(name) for name in ("argv", "host", "user", "time", "burnish", "devices")},
            "given": given.read_text(encoding="utf-8", errors="replace")[:65536] if given.is_file() else "",
            "checkpoints": checkpoints(run.folder),
            "events": tail_lines(run.folder / EVENTS)[-200:],
            "files": _files(run.folder),
            "cursor": cursor_text({run.id: end_of(run.folder, run)}),
        }

    async def series(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        points = min(20_000, max(16, int(request.query_params.get("points", "4000") or 4000)))
        columns, offset = await asyncio.to_thread(series, run.folder)
        place = end_of(run.folder, run)
        cursor = cursor_text({run.id: type(place)(offset, place.events, place.console, place.mark)})
        said = [{"key": one.key, "values": one.values} for one in await asyncio.to_thread(remarks_on, run, columns)]
        few = await asyncio.to_thread(thinned, columns, points)
        return Json({"cursor": cursor, "rows": len(columns["step"]), "columns": few, "remarks": said})

    async def log(self, request: Request) -> Response:
        """The end of what the run has said, as text; ``before`` pages back."""
        run = await self.site.run(request.path_params["id"])
        path = next((p for name in (CONSOLE, "run.log") if (p := run.folder / name).is_file()), None)
        if path is None:
            return Json({"from": 0, "text": ""})
        end = path.stat().st_size
        end = min(end, int(request.query_params.get("before") or end))
        begin = max(0, end - _LOG_BYTES)
        with path.open("rb") as file:
            file.seek(begin)
            text = file.read(end - begin).decode("utf-8", "replace")
        return Json({"from": begin, "text": text})

    async def download(self, request: Request) -> Response:
        """A file that the run's list gave, and nothing else."""
        run, name = await self.site.run(request.path_params["id"]), request.path_params["name"]
        if name not in [file["name"] for file in _files(run.folder)]:
            raise Refusal(404, "no_file", "There is no such file of this run.")
        body = await asyncio.to_thread((run.folder / name).read_bytes)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def held_out(self, request: Request) -> Response:
        """A record that the run does not learn, as a question with its answer; drawn, or ``number``."""
        run, number = await self.site.run(request.path_params["id"]), request.query_params.get("number", "")
        values = await asyncio.to_thread(self.site.starter.values_of, run)
        question = {"held_out": True, "values": values, "number": int(number) if number.isdigit() else None}
        found = await self.site.planner.whole(question)
        if found.get("problems"):
            problem = found["problems"][0]
            raise Refusal(422, "nothing_held_out", f"{problem['sentence']} {problem['remedy']}".strip())
        return Json(found)

    async def stop(self, request: Request) -> Response:
        body = await json_object(request)
        how = body.get("how", "save")
        if how not in ("save", "now"):
            raise Refusal(422, "invalid_value", '"how" must be save or now.')
        self.site.starter.stop(await self.site.run(request.path_params["id"]), how)
        return Json({"status": "told"}, 202)

    async def again(self, request: Request) -> Response:
        await json_object(request)
        self.site.starter.again(await self.site.run(request.path_params["id"]))
        return Json({"status": "started"}, 202)

    async def unqueue(self, request: Request) -> Response:
        if not self.site.starter.unqueue(request.path_params["number"]):
            raise Refusal(404, "not_queued", "That is not in the queue any more.")
        return Json({"status": "removed"})

    # --- engines and conversations ------------------------------------------------------------------------------------

    async def engines(self, request: Request) -> Response:
        return Json({"engines": await self.site.engines.states()})

    async def begin_engine(self, request: Request) -> Response:
        path, name = await self._target(await json_object(request))
        one = self.site.engines.begin(path, name)
        return Json({"id": one.id, "name": one.name, "state": one.state}, 202)

    async def _target(self, body: Mapping[str, Any]) -> tuple[Path, str]:
        """A run (``run``, perhaps with a ``checkpoint``), or a ``path`` below a root."""
        if isinstance(body.get("run"), str):
            run = await self.site.run(body["run"])
            step = body.get("checkpoint")
            if step is None:
                return run.folder, run.name
            if step not in checkpoints(run.folder):
                raise Refusal(422, "no_checkpoint", f"{run.name} has no checkpoint {step}.")
            return run.folder / f"checkpoint-{step}", f"{run.name} / checkpoint-{step}"
        text = body.get("path")
        if not isinstance(text, str) or not text:
            raise Refusal(422, "missing", '"run" or "path" must name what is to answer.')
        path = self.site.places.within(text, "path")
        if not path.is_dir():
            raise Refusal(422, "outside", f'"path" must name a folder below {self.site.places.first}.', param="path")
        return path, self.site.places.shown(path)

    async def end_engine(self, request: Request) -> Response:
        self.site.engines.end(request.path_params["id"])
        return Json({"status": "told"}, 202)

    async def chat(self, request: Request) -> Any:
        engine = self.site.engines.of(request.path_params["id"])
        body = {**await json_object(request), "model": engine.id}
        return Relay(str(engine.socket), "POST", "/v1/chat/completions", json.dumps(body).encode())

    async def chats(self, request: Request) -> Response:
        return Json({"chats": self.site.home.names("chats")})

    async def chat_of(self, request: Request) -> Response:
        found = self.site.home.read(f"chats/{_safe(request)}.json")
        if found is None:
            raise Refusal(404, "no_chat", "There is no such conversation.")
        return Json(found)

    async def keep_chat(self, request: Request) -> Response:
        body, name = await json_object(request), _safe(request)
        if len(self.site.home.names("chats")) >= 1000 and not (self.site.home.folder / f"chats/{name}.json").is_file():
            raise Refusal(409, "too_many", "A thousand conversations are kept; remove some.")
        self.site.home.write(f"chats/{name}.json", json.dumps(body, ensure_ascii=False))
        return Json({"status": "kept"})

    async def machine(self, request: Request) -> Response:
        return Json(await asyncio.to_thread(self.site.machine.use))

    # --- exports ------------------------------------------------------------------------------------------------------

    async def begin_export(self, request: Request) -> Response:
        body = await json_object(request)
        path, _ = await self._target(body)
        folder = self.site.places.within(str(body.get("folder") or ""), "folder")
        return Json({"id": self.exports.begin(path, folder, str(body.get("format") or "safetensors"))}, 202)

    async def export_of(self, request: Request) -> Response:
        return Json(self.exports.state(_safe(request)))

    # --- what is new --------------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Any:
        if self._num_streams >= MOST_STREAMS:
            raise Refusal(503, "too_many_streams", "Too many windows follow already.", headers={"Retry-After": "5"})
        self._num_streams += 1

        def over() -> None:
            self._num_streams -= 1

        cursor = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventStream(self._events(request, cursor), alive_s=15.0, over=over)

    async def _events(self, request: Request, cursor: str) -> AsyncGenerator[bytes, None]:
        yield event_text(to_json({"server": burnish.__version__, "time": time.time(), "retry_ms": 2000}), "hello")
        while True:
            messages, cursor = await self._news(request, cursor)
            for name, data in messages:
                yield event_text(to_json(data), name, cursor)
            await asyncio.sleep(_LOOKS_EVERY_S if request.query_params.get("runs") else _LISTS_EVERY_S)

    async def poll(self, request: Request) -> Response:
        messages, cursor = await self._news(request, request.query_params.get("after", ""))
        return Json({"cursor": cursor, "messages": [{"event": name, "data": data} for name, data in messages]})

    async def _news(self, request: Request, cursor: str) -> tuple[list[tuple[str, Any]], str]:
        """News of the runs that are asked for, or of all runs if none is."""
        asked = [one for one in request.query_params.get("runs", "").split(",") if one]
        found = {run.id: run for run in await self.site.found(60.0 if asked else _LISTS_EVERY_S)}
        if any(one not in found for one in asked):
            found = {run.id: run for run in await self.site.found()}
        wanted = [found[one] for one in asked if one in found] if asked else list(found.values())
        log = request.query_params.get("log") == "1"
        return await asyncio.to_thread(_collected, wanted, cursor, log, bool(asked))


def _collected(wanted: list[Found], cursor: str, log: bool, is_followed: bool) -> tuple[list[tuple[str, Any]], str]:
    places, messages = read_cursor(cursor), []
    now = {}
    for run in wanted[:100]:
        place = places.get(run.id) or (Place() if is_followed else end_of(run.folder, None))
        for name, data, behind in news(run.id, run.folder, place, log):
            place = behind
            if is_followed or name in ("run", "gone"):
                messages.append((name, data))
        now[run.id] = place
    return messages, cursor_text(now)


def _files(folder: Path) -> list[dict[str, Any]]:
    """Figures, YAML, logs: what may be downloaded. No weights."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        is_offered = path.suffix in _FIGURES and not path.name.startswith((".", *_NOT_OFFERED))
        if is_offered and path.is_file() and not path.is_symlink() and path.stat().st_size < 64 * 2**20:
            found.append({"name": path.name, "bytes": path.stat().st_size})
    return found


def _safe(request: Request) -> str:
    name = safe_name(request.path_params["id"])
    if name is None:
        raise Refusal(404, "no_such_name", "A name has letters, digits, - and _ only.")
    return name


def _mark_of_source() -> str:
    """Changes when burnish's own files do."""
    files = Path(burnish.__file__).parent.rglob("*.py")
    return f"{burnish.__version__} {max(path.stat().st_mtime_ns for path in files)}"
