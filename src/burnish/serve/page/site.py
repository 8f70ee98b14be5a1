"""State of the web UI: roots, state folder, cached list of runs, starter, planner, engines."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from starlette.requests import Request

import burnish
from burnish.serve.http.errors import APIError
from burnish.serve.page.home import Home
from burnish.serve.page.jobs.engines import Engines
from burnish.serve.page.jobs.planner import Planner
from burnish.serve.page.jobs.starting import Starter
from burnish.serve.page.machine import Machine
from burnish.serve.page.options import NamedModel, WebOptions
from burnish.serve.page.places import Roots
from burnish.serve.page.runs.labels import labels
from burnish.serve.page.runs.listing import distinct_names, facts
from burnish.serve.page.runs.runs import FoundRun, KnownRuns, find, read_run

FRESH_S = 1.5
log = logging.getLogger("burnish.housekeeping")
Answer = Callable[[Request], Awaitable[Any]]


class Site:
    """State of one web UI server."""

    def __init__(self, options: WebOptions, home: Home, named: NamedModel | None = None) -> None:
        self.options, self.home, self.named = options, home, named
        self.places = Roots(options.web_roots)
        self.planner = Planner(self.places, home.folder / "planner.log")
        self.starter = Starter(self.places, home, options.web_allow, self.form)
        self.engines = Engines(home, self.starter)
        self.machine = Machine()
        self._form: dict[str, Any] = {}
        self._found: list[FoundRun] = []
        self._names: dict[Path, str] = {}
        self.known: KnownRuns = {}
        self._found_s = -FRESH_S
        self._discovery_lock = asyncio.Lock()

    async def form(self) -> dict[str, Any]:
        """The planner's description of all options; kept as long as the files that declare them are the same."""
        if not self._form:
            mark = await asyncio.to_thread(_source_version)
            cached = self.home.read("form.json")
            if not isinstance(cached, dict) or cached.get("mark") != mark:
                cached = {"mark": mark, **await self.planner.whole({"form": True})}
                with suppress(APIError):  # described again by the next server
                    self.home.write("form.json", json.dumps(cached))
            self._form = cached
        return self._form

    async def find_runs(self, fresh_s: float = FRESH_S) -> list[FoundRun]:
        """The runs inside the roots, cached for a short time."""
        async with self._discovery_lock:
            if time.monotonic() - self._found_s > fresh_s:
                self._found = await asyncio.to_thread(find, self.places.roots, self.known)
                self._found_s = time.monotonic()
                self._names = distinct_names(run.folder for run in self._found)
        return self._found

    def facts(self, runs: Iterable[FoundRun]) -> list[dict[str, Any]]:
        """Runs as JSON, with user-defined names, tags and notes. ``title`` is the name that is shown; ``name`` is that
        of the folder, with its parents if several runs have it."""
        known = labels(self.home)
        return [
            {**facts(run), "folder": self.places.display_path(run.folder),
             "name": (name := self._names.get(run.folder, run.name)), "title": label.get("name") or name,
             "tags": label.get("tags", []), "notes": label.get("notes", "")}
            for run in runs for label in [known.get(run.id, {})]
        ]  # fmt: skip

    async def run(self, identity: str) -> FoundRun:
        """The current state of a run.

        Raises:
            APIError: 404.
        """
        for attempt in (60.0, 0.0):  # a list of a minute ago knows most of them
            for known in await self.find_runs(attempt):
                if known.id == identity and (run := await asyncio.to_thread(read_run, known.folder)) is not None:
                    return run
        raise APIError(404, "no_run", "The run was not found. It may have been moved or removed.")

    async def look_after(self) -> None:
        """Periodic maintenance: start queued runs, reap children, stop idle engines."""
        while True:
            await asyncio.sleep(2.0)
            try:
                self.starter.reap()
                self.engines.end_idle()
                if self.starter.queued_jobs():
                    await self.starter.next_of_queue(await self.find_runs())
            except APIError as refusal:  # shown with the run in the queue
                log.warning("A queued run was not started: %s", refusal.message)
            except Exception:  # a fault in one round, such as a full disk, must not end the page
                log.exception("Periodic maintenance of the web UI failed; retrying in two seconds.")


def _source_version() -> str:
    """Changes with burnish's own files and with the packages that add options to it."""
    files = Path(burnish.__file__).parent.rglob("*.py")
    points = ((package, point) for package in distributions() for point in package.entry_points)
    plugins = sorted(f"{point} {package.version}" for package, point in points if point.group.startswith("burnish."))
    return " ".join([burnish.__version__, str(max(path.stat().st_mtime_ns for path in files)), *plugins])
