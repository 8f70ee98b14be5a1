"""API of the "New run" form: options, presets, YAML, models, datasets, and the preview of a run."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from burnish.config.errors import UserError
from burnish.data.sets.dataset_info import INFO_NAME
from burnish.data.sets.formats import FORMATS
from burnish.report.results import write_text_atomically
from burnish.run.plan.config_files import read_arguments
from burnish.serve.http.bodies import json_object
from burnish.serve.http.errors import APIError, to_shown_json
from burnish.serve.http.json_response import ShownJson
from burnish.serve.http.stream import EventStream, event_text
from burnish.serve.page.layout import BOXES, DEPENDS, PRESETS
from burnish.serve.page.site import Answer, Site
from burnish.serve.page.words import in_language, option_words, requested_language
from burnish.utils.json_files import read_object

MOST_PRESETS = 200
SHOWN = ("name", "group", "control", "default", "choices", "unit", "help", "short", "label", "aliases", "ignored",
         "is_secret")  # fmt: skip
"""Fields of an option that the page receives, unless they are empty. The planner returns more, to validate values."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Form:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "GET", "/api/form", self.form
        yield "POST", "/api/check", self.check
        yield "POST", "/api/yaml", self.yaml
        yield "PUT", "/api/presets/{id}", self.keep_preset
        yield "DELETE", "/api/presets/{id}", self.drop_preset
        yield "GET", "/api/free", self.free
        yield "GET", "/api/datasets/columns", self.columns
        yield "PUT", "/api/datasets/{id}", self.describe

    async def form(self, request: Request) -> Response:
        """All options, their layout, the presets, and the options that cannot be set from the web UI."""
        form, language = await self.site.form(), requested_language(request)
        fields = in_language(form["fields"], language)
        texts, allowed = option_words(language), self.site.starter.allow
        secret = texts["reasons"].get("it is a secret", "it is a secret")
        risky = {
            one["name"]: one["risky"] or secret
            for one in fields
            if (one["is_secret"] or (one["risky"] and not one["harmless"])) and one["name"] not in allowed
        }
        shown = [
            {part: field[part] for part in SHOWN if part == "default" or field.get(part) not in (None, "", [])}
            for field in (
                {**one, "choices": one["choices"] or one["harmless"], "is_secret": one["is_secret"] or None}
                for one in fields
            )
        ]
        boxes = {name: list(options) for name, options in BOXES.items()}
        return ShownJson(
            {"groups": form["groups"], "titles": texts["groups"], "fields": shown, "boxes": boxes, "risky": risky,
             "depends": {name: [on, list(values)] for name, (on, values) in DEPENDS.items()}, "presets": PRESETS,
             "own_presets": await asyncio.to_thread(self._presets)}
        )  # fmt: skip

    def _presets(self) -> dict[str, dict[str, Any]]:
        """Name -> values of the saved presets. Unreadable files are skipped."""
        home = self.site.home
        read = {name: _read_yaml_file(home.folder / f"presets/{name}.yaml") for name in home.names("presets")}
        return {name: found["values"] for name, found in read.items() if not found["problems"]}

    async def keep_preset(self, request: Request) -> Response:
        """Save the content of a YAML file as a preset."""
        text, name = (await json_object(request)).get("text"), safe_id(request)
        found = await asyncio.to_thread(self._read_yaml, text) if isinstance(text, str) else {"problems": ["no text"]}
        if found["problems"]:
            raise APIError(422, "invalid_value", f'"text" must be the content of a YAML file: {found["problems"][0]}')
        if len(self.site.home.names("presets")) >= MOST_PRESETS:
            raise APIError(409, "too_many_presets", f"The limit of {MOST_PRESETS} presets is reached. Remove some.")
        self.site.home.write(f"presets/{name}.yaml", str(text))
        return ShownJson({"status": "kept"})

    async def drop_preset(self, request: Request) -> Response:
        if not self.site.home.remove(f"presets/{safe_id(request)}.yaml"):
            raise APIError(404, "no_preset", "The preset does not exist.")
        return ShownJson({"status": "removed"})

    async def check(self, request: Request) -> Any:
        """Explain what a run would do. The parts are streamed as they become available, one JSON object per line."""
        body = await json_object(request)
        values = body.get("values")
        if not isinstance(values, dict):
            raise APIError(422, "invalid_type", '"values" must be an object.')
        question = {
            "values": await self.site.starter.check_values(values),
            "rows": 5,
            "seed": whole_number(body.get("seed"), "seed", 0),
        }

        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                async for part in self.site.planner.ask(question, replaces=True):
                    yield event_text(to_shown_json(part))
            except APIError as refusal:
                problem = {"option": refusal.param or "", "sentence": refusal.message, "remedy": ""}
                yield event_text(to_shown_json({"problems": [problem], "code": refusal.code, "is_last": True}))

        return EventStream(parts())

    async def free(self, request: Request) -> Response:
        """The given folder if it does not exist yet, else the next free name with a number."""
        folder = self.site.places.within(request.query_params.get("folder", ""), "folder")
        return ShownJson({"folder": self.site.places.display_path(self.site.starter.free_folder(folder))})

    async def yaml(self, request: Request) -> Response:
        """The values of YAML content, or its errors with line numbers."""
        text = (await json_object(request)).get("text")
        if not isinstance(text, str):
            raise APIError(422, "invalid_type", '"text" must be the content of a YAML file.')
        return ShownJson(await asyncio.to_thread(self._read_yaml, text))

    def _read_yaml(self, text: str) -> dict[str, Any]:
        """Parse YAML with the reader of the command line, so that limits and errors are the same."""
        home = self.site.home
        with home.writing(), tempfile.TemporaryDirectory(dir=home.folder) as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(text, encoding="utf-8", errors="replace")
            return _read_yaml_file(file)

    async def columns(self, request: Request) -> Response:
        """The columns of a file of records below a root, with their first values."""
        path = self.site.places.within(request.query_params.get("file", ""), "dataset")
        if not path.is_file():
            raise APIError(404, "no_file", "The file does not exist.")
        found = await self.site.planner.whole({"columns_of": str(path)})
        if found.get("problems"):
            raise APIError(422, "unreadable", found["problems"][0]["sentence"], param="dataset")
        return ShownJson(found)

    async def describe(self, request: Request) -> Response:
        """Save the column mapping of a file to the ``dataset_info.json`` in its folder, under a name."""
        body, name = await json_object(request), safe_id(request)
        path, columns = self.site.places.within(str(body.get("file") or ""), "dataset"), body.get("columns") or {}
        kind = body.get("formatting")
        is_text = isinstance(columns, dict) and all(isinstance(one, str) for one in [*columns, *columns.values()])
        if kind not in [one.name for one in FORMATS] or not is_text:
            raise APIError(
                422, "invalid_value", '"formatting" must be a known format, and "columns" an object of column names.'
            )
        if not path.is_file():
            raise APIError(404, "no_file", "The file does not exist.")
        entry = {"file_name": path.name, "formatting": kind, **({"columns": columns} if columns else {})}
        await asyncio.to_thread(_add_entry, path.with_name(INFO_NAME), name, entry)
        return ShownJson({"name": name, "folder": self.site.places.display_path(path.parent)}, 201)


_ENTRIES = threading.Lock()
"""Lock that is held while ``dataset_info.json`` is read and written: requests run in several threads."""


def _add_entry(file: Path, name: str, entry: dict[str, Any]) -> None:
    """Raises APIError if the name is taken by another dataset, or the file cannot be read or written."""
    with _ENTRIES:
        try:
            known = read_object(file) if file.is_file() else {}
        except UserError as error:
            raise APIError(422, "unreadable", str(error)) from error
        if known.get(name, entry) != entry:
            message = f'{file.name} already describes another dataset as "{name}". Choose a different name.'
            raise APIError(409, "name_taken", message)
        try:
            write_text_atomically(file, json.dumps({**known, name: entry}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise APIError(422, "not_written", f"Cannot write {file.name}: {error.strerror}.") from error


def _read_yaml_file(file: Path) -> dict[str, Any]:
    """The values of a YAML file, and its problems without the folder of the file."""
    try:
        values, _ = read_arguments([str(file)])
    except UserError as error:
        return {"values": {}, "problems": [str(problem).replace(f"{file.parent}/", "") for problem in error.problems]}
    return {"values": {name: item.value for name, item in values.items()}, "problems": []}


def safe_id(request: Request) -> str:
    """The name in the URL, which is used as a file name. Raises APIError 404 for invalid characters."""
    name = str(request.path_params["id"])
    if not _NAME.fullmatch(name):
        raise APIError(404, "no_such_name", "A name may contain only letters, digits, - and _ (at most 64).")
    return name


def whole_number(value: Any, name: str, usual: int) -> int:
    """Parse a non-negative integer parameter; ``usual`` is the default. Raises APIError 422."""
    text = str(usual if value in (None, "") else value)
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise APIError(422, "invalid_value", f'"{name}" must be a non-negative integer.', param=name)
    return int(text)
