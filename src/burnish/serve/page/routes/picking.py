"""API of the pickers: models and datasets inside the roots, search on the hub, and uploads of data files. The hub is
accessed only when a user searches. Uploads are sent in chunks, are written inside the first root, and never replace a
file.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from burnish.data.sets.dataset_info import INFO_NAME
from burnish.serve.http.bodies import whole_body
from burnish.serve.http.errors import APIError
from burnish.serve.http.json_response import ShownJson
from burnish.serve.page.form import whole_number
from burnish.serve.page.runs.files import object_in
from burnish.serve.page.runs.runs import DEPTH, run_folders
from burnish.serve.page.site import Answer, Site

MOST_FOUND, MOST_UPLOAD_BYTES = 200, 2**30
_HUB_S = 5.0
UPLOADS, _SUFFIXES = "data", (".jsonl", ".json", ".csv", ".parquet")
_UPLOAD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Picking:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "GET", "/api/models", self.models
        yield "GET", "/api/datasets", self.datasets
        yield "GET", "/api/hub", self.hub
        yield "PUT", "/api/uploads/{name}", self.upload

    async def models(self, request: Request) -> Response:
        """Models, adapters and finished runs inside the roots, and the model passed on the command line."""
        named = self.site.named
        return ShownJson({"models": await asyncio.to_thread(self._models), "named": named and named.name})

    def _models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for root in self.site.places.roots:
            for name, kind in (("config.json", "model"), ("adapter_config.json", "adapter")):
                for depth in range(DEPTH):
                    for path in root.glob("/".join(["*"] * (depth + 1)) + "/" + name):
                        is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
                        if not is_hidden and self.site.places.contains(path):
                            found.append(
                                {"path": self.site.places.display_path(path.parent), "kind": kind, **_facts_of(path)}
                            )
                        if len(found) >= MOST_FOUND:
                            return found
        return sorted(found, key=lambda one: str(one["path"]))

    async def datasets(self, request: Request) -> Response:
        """Names in the ``dataset_info.json`` of folders below the roots, and files of records that have no name."""
        return ShownJson({"datasets": await asyncio.to_thread(self._datasets)})

    def _datasets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        named: set[Path] = set()
        for root in self.site.places.roots:
            for pattern in (INFO_NAME, f"*/{INFO_NAME}", f"*/*/{INFO_NAME}"):
                for path in list(root.glob(pattern))[:20]:
                    folder = self.site.places.display_path(path.parent)
                    for name, entry in list(object_in(path).items())[:MOST_FOUND]:
                        file_name = entry.get("file_name") if isinstance(entry, dict) else None
                        local = path.parent / file_name if isinstance(file_name, str) else None
                        is_inside = local is not None and self.site.places.contains(local)
                        named |= {local.resolve()} if local is not None and is_inside else set()
                        file = self._file(local) if local is not None and is_inside and _is_file(local) else {}
                        found.append({"name": str(name), "folder": folder, **file})
        return found + [one for root in self.site.places.roots for one in self._unnamed_datasets(root, named)]

    def _unnamed_datasets(self, root: Path, named: set[Path]) -> Iterator[dict[str, Any]]:
        runs = set(run_folders(root))
        for pattern in ("*", "*/*"):
            for path in sorted(root.glob(pattern))[: 10 * MOST_FOUND]:
                is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
                if is_hidden or path.name == INFO_NAME or not _may_hold_records(path):
                    continue
                if not self.site.places.contains(path):
                    continue
                if path.resolve() not in named and not runs & {path.parent, path.parent.parent}:
                    yield {"name": self.site.places.display_path(path), "folder": "", **self._file(path)}

    def _file(self, path: Path) -> dict[str, Any]:
        return {"file": self.site.places.display_path(path), "bytes": path.stat().st_size}

    async def hub(self, request: Request) -> Response:
        """Models or datasets of the Hugging Face Hub whose name matches, the most downloaded first."""
        query, kind = request.query_params.get("q", "").strip()[:100], request.query_params.get("kind", "model")
        if not query:
            raise APIError(422, "missing", '"q" must be the text to search for.', param="q")
        return ShownJson({"found": await asyncio.to_thread(search_hub, query, kind)})

    async def upload(self, request: Request) -> Response:
        """Receive a chunk of a data file at ``offset``. ``last=1`` marks the last chunk, after which the file gets
        its name."""
        name, offset = request.path_params["name"], whole_number(request.query_params.get("offset"), "offset", 0)
        if not _UPLOAD_NAME.fullmatch(name) or not name.endswith(_SUFFIXES):
            kinds = ", ".join(_SUFFIXES)
            message = f"A file name may contain only letters, digits, -, _ and ., and must end in one of {kinds}."
            raise APIError(422, "invalid_value", message, param="name")
        piece, is_last = await whole_body(request), request.query_params.get("last") == "1"
        target = self.site.places.within(f"{UPLOADS}/{name}", "name")
        try:
            await asyncio.to_thread(_append, target, piece, offset, is_last)
        except OSError as error:
            raise APIError(422, "not_written", f"Cannot write {UPLOADS}/{name}: {error.strerror}.") from error
        return ShownJson({"file": self.site.places.display_path(target)}, 201 if is_last else 202)


def _may_hold_records(path: Path) -> bool:
    """Whether a file has records by its suffix. A JSON file must begin as a list, unlike settings of a model."""
    if not _is_file(path):
        return False
    if path.suffix != ".json":
        return path.suffix in (".jsonl", ".csv", ".parquet")
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    """Also False for a name that is too long for a file."""
    try:
        return path.is_file()
    except OSError:
        return False


def search_hub(query: str, kind: str) -> list[dict[str, Any]]:
    """Search the hub, with one attempt of ``_HUB_S`` seconds: a visitor waits for the answer.

    Raises:
        APIError: 502 if it cannot be reached.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    address = f"{constants.ENDPOINT}/api/{'datasets' if kind == 'dataset' else 'models'}"
    question: dict[str, str | int] = {"search": query, "sort": "downloads", "limit": 20}
    try:
        answer = get_session().get(address, params=question, headers=build_hf_headers(), timeout=_HUB_S)
        answer.raise_for_status()
        found = answer.json()
        return [{"name": one["id"], "downloads": one.get("downloads")} for one in found]
    except Exception as error:  # requests, httpx and the hub's own errors, by version
        message = (
            f"The Hugging Face Hub cannot be reached: {str(error).splitlines()[0][:200] if str(error) else error!r}"
        )
        raise APIError(502, "hub_unreachable", message) from error


def _facts_of(config: Path) -> dict[str, Any]:
    """Architecture and bytes of the weights in the folder of a ``config.json``."""
    kind = object_in(config).get("model_type")
    sizes = (
        entry.stat().st_size for entry in os.scandir(config.parent) if entry.name.endswith((".safetensors", ".bin"))
    )
    return {"type": kind if isinstance(kind, str) else "", "bytes": sum(sizes)}


def _append(target: Path, piece: bytes, offset: int, is_last: bool) -> None:
    """Raises APIError 409 if the name exists or the offset is wrong, 413 for a file that is too large."""
    part = target.with_name(f".{target.name}.part")
    if target.exists():
        raise APIError(409, "name_taken", f"{target.name} already exists. Rename the file.", param="name")
    if offset + len(piece) > MOST_UPLOAD_BYTES:
        raise APIError(413, "body_too_large", f"A file must not be larger than {MOST_UPLOAD_BYTES:,} bytes.")
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if offset == 0 else os.O_APPEND)
    with os.fdopen(os.open(part, flags, 0o644), "ab") as file:
        if file.tell() != offset:
            raise APIError(409, "wrong_offset", f"The next chunk must start at {file.tell()}. Received: {offset}.")
        file.write(piece)
    if is_last:
        os.link(part, target)
        part.unlink()
