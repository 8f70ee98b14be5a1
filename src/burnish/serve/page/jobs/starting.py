"""Start, stop and queue runs: each is an independent ``burnish train`` process on a YAML file in its folder.

In: checked values of the form. Out: a process, or a queue entry. The values are written to a YAML file; user input
never becomes part of a command line.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report.metadata import (
    FINAL_STATES,
    LAUNCH,
    OUTCOME,
    REQUESTED_YAML,
    RUN_YAML,
    given_yaml,
    launch_record,
    write_outcome,
)
from burnish.report.results import write_text_atomically
from burnish.run.plan.config_files import read_arguments
from burnish.serve.http.child import environment_of_child, send_signal, start_burnish
from burnish.serve.http.errors import APIError
from burnish.serve.page.home import Home
from burnish.serve.page.permissions import check_values
from burnish.serve.page.places import Roots
from burnish.serve.page.runs.files import object_in, run_yaml_text
from burnish.serve.page.runs.follow import CONSOLE
from burnish.serve.page.runs.runs import FoundRun, is_alive
from burnish.serve.run_folder import absolute_data_options

QUEUE = "queue.json"
_COMMANDS, _MOST_COMMANDS = "commands.json", 100
"""File of the state folder with the started commands, and their maximum number."""


class Starter:
    """Starts and stops runs.

    Args:
        allow: risky options that the owner of the page has allowed.
        form: describes all options.
    """

    def __init__(
        self, places: Roots, home: Home, allow: Iterable[str], form: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> None:
        self.places, self.home, self.allow, self.form = places, home, frozenset(allow), form
        self._children: list[subprocess.Popen[bytes]] = []

    async def check_values(self, values: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
        """A copy of the values, after the permission check (``permissions.py``) that applies to everything from the
        web UI.

        Args:
            start: the folder in which the command runs; the first root by default.
        Raises:
            APIError: 422, with the option.
        """
        form = await self.form()
        check_values(values, form["fields"], self.allow, self.places, start or self.places.first)
        return dict(values)

    def folder_of(self, values: Mapping[str, Any]) -> Path:
        text = values.get("output_dir")
        if not isinstance(text, str) or not text:
            raise APIError(422, "missing", '"output_dir" must be set to the folder of the run.', param="output_dir")
        folder = self.places.within(text, "output_dir")
        if folder in self.places.roots:
            raise APIError(
                422, "outside", '"output_dir" must be a subfolder, not one of the web_roots.', param="output_dir"
            )
        return folder

    # --- starting -----------------------------------------------------------------------------------------------------

    async def begin(self, values: Mapping[str, Any], folder_choice: str, devices: list[int] | None = None) -> Path:
        """Start a run. The choice for its folder is ``new``, ``resume`` or ``overwrite``.

        Raises:
            APIError: 409 if the folder is in use, or is not empty and the choice is ``new``. 422 if files cannot be
                written.
        """
        values = await self.check_values(values)
        folder = self.folder_of(values)
        with self._writing(folder):
            self._check_folder(folder, folder_choice)
        values["overwrite_output_dir"] = folder_choice == "overwrite"
        if not values["overwrite_output_dir"]:
            del values["overwrite_output_dir"]
        is_resumed = folder_choice == "resume" and (folder / RUN_YAML).is_file()
        file = REQUESTED_YAML if is_resumed else RUN_YAML
        with self._writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(folder / file, given_yaml(values, {}))
            self._launch(folder, devices, file)
        return folder

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Report an ``OSError`` while writing to the folder of a run.

        Raises:
            APIError: 422.
        """
        try:
            yield
        except OSError as error:
            message = f'Cannot write to the folder "{self.places.display_path(folder)}": {error.strerror or error}.'
            raise APIError(422, "not_written", message, param="output_dir") from error

    def _check_folder(self, folder: Path, choice: str) -> None:
        if is_alive(object_in(folder / LAUNCH)):
            message = "Another run is writing to this folder. Choose a different folder, or wait."
            raise APIError(409, "folder_in_use", message, param="output_dir")
        holds = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
        if holds and choice == "new":
            shown = self.places.display_path(folder)
            message = f'"{shown}" already contains a run: resume it, overwrite it, or choose a different folder.'
            raise APIError(409, "folder_not_empty", message, param="output_dir")

    async def again(self, run: FoundRun) -> None:
        """Continue a run from its own file.

        Raises:
            APIError: 409 if it is still running, has no file, or the folder in which it was started is missing. 422 if
                the file sets options that a visitor may not set, or the folder of the run cannot be written.
        """
        if run.is_alive:
            raise APIError(409, "running", "The run is already running.")
        await self.check_values(await asyncio.to_thread(self._values_of, run), self._place_of(run.folder))
        with self._writing(run.folder):
            self._launch(run.folder, None)

    async def values_of(self, run: FoundRun) -> dict[str, Any]:
        """The values in a run's ``run.yaml``, with relative data paths resolved as at its start.

        Raises:
            APIError: 409 if it has no file, 422 if the file names paths that the web UI may not access.
        """
        values, place = await asyncio.to_thread(self._values_of, run), self._place_of(run.folder)
        return await self.check_values(
            values | (absolute_data_options(place, values) if place != self.places.first else {})
        )

    def _values_of(self, run: FoundRun) -> dict[str, Any]:
        """The values in a run's ``run.yaml``."""
        if not run_yaml_text(run.folder):
            raise APIError(409, "no_file", f"The run has no {RUN_YAML}, so its options are unknown.")
        try:
            values, _ = read_arguments([str(run.folder / RUN_YAML)])
        except UserError as error:
            raise APIError(422, "invalid_value", str(error)) from error
        return {name: item.value for name, item in values.items()}

    def _launch(self, folder: Path, devices: list[int] | None, file: str = RUN_YAML) -> None:
        before, start = object_in(folder / OUTCOME), self._place_of(folder)
        if not start.is_dir():
            message = (
                f'The folder "{self.places.display_path(start)}", in which the run was started, does not exist. '
                "Create it, since relative paths of the run begin there."
            )
            raise APIError(409, "no_start_folder", message)
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
        argv = ["train", str(folder / file)]
        child = start_burnish(argv, start, folder / CONSOLE, self._environment() | chosen)
        self._record(child, argv)
        (folder / OUTCOME).unlink(missing_ok=True)  # not earlier: a run that cannot be started keeps it
        launch = launch_record(
            [], child.pid, ["burnish", *argv], before if before.get("state") in FINAL_STATES else None
        )
        write_text_atomically(folder / LAUNCH, json.dumps(launch, indent=1) + "\n")

    def _place_of(self, folder: Path) -> Path:
        """Folder in which the run was started, if it is inside a root: relative paths in its file start there."""
        before = object_in(folder / LAUNCH).get("folder")
        if isinstance(before, str) and self.places.contains(Path(before)):
            return Path(before)
        return self.places.first

    def start_command(
        self, argv: list[str], output: Path, folder: Path | None = None, reads_all: bool = False
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start another command, such as an export or an engine, in a folder or in the first root.

        Args:
            reads_all: the owner of the page chose its arguments, so it may read outside of the roots.
        Raises:
            APIError: 507 if its output cannot be written.
        """
        environment = environment_of_child(() if reads_all else self.places.roots)
        with self.home.writing():
            child = start_burnish(argv, folder or self.places.first, output, environment)
        self._record(child, argv)
        return child

    def _record(self, child: subprocess.Popen[bytes], argv: list[str]) -> None:
        """Keep a started process and its command. A full disk does not prevent the start."""
        self._children.append(child)
        started = {"time": time.time(), "command": shlex.join(["burnish", *argv])}
        with suppress(APIError):
            self.home.write(_COMMANDS, json.dumps([*self.started_commands(), started][-_MOST_COMMANDS:]))

    def started_commands(self) -> list[dict[str, Any]]:
        """Return the ``time`` (seconds since the epoch) and the ``command`` of the latest starts, the newest last."""
        found, kinds = self.home.read(_COMMANDS), {"time": int | float, "command": str}
        return [one for one in found if _has_fields(one, kinds)] if isinstance(found, list) else []

    def _environment(self) -> dict[str, str]:
        return environment_of_child(self.places.roots)

    def reap(self) -> None:
        """Reap child processes that have ended, so that they do not stay as zombies."""
        self._children = [child for child in self._children if child.poll() is None]

    # --- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, run: FoundRun, how: str) -> None:
        """``save``: finish the current step and save. ``now``: stop immediately; steps since the last checkpoint are
        lost.

        Raises:
            APIError: 409 if the process cannot be identified as that of the run.
        """
        number = signal.SIGTERM if how == "save" else signal.SIGKILL
        if not send_signal(run.launch, number, is_alive):
            raise APIError(409, "not_running", "The run has no running process on this machine.")
        if how != "save":
            ending = {"state": "stopped", "exit_code": 137, "sentence": f"Stopped immediately, at step {run.step}.",
                      "remedy": "Resume it from its last checkpoint."}  # fmt: skip
            write_outcome(run.folder, ending, run.step)

    # --- the queue ----------------------------------------------------------------------------------------------------

    def queued_jobs(self) -> list[dict[str, Any]]:
        found, kinds = self.home.read(QUEUE), {"number": int, "values": dict, "folder": str}
        return [one for one in found if _has_fields(one, kinds)] if isinstance(found, list) else []

    async def enqueue(self, values: Mapping[str, Any], folder_choice: str, devices: list[int] | None) -> int:
        """Start a run when all runs of this server have ended. Returns its number, which no other run has had.

        Raises:
            APIError: as ``begin``, and 409 if another queued run writes to its folder.
        """
        values = await self.check_values(values)
        folder = self.folder_of(values)
        with self._writing(folder):
            self._check_folder(folder, folder_choice)
        queue = self.queued_jobs()
        if folder in self._queued_folders(queue):
            message = f'A queued run writes to "{self.places.display_path(folder)}". Choose a different folder.'
            raise APIError(409, "folder_queued", message, param="output_dir")
        # An open page may still show the numbers of earlier runs, and remove a run by its number.
        number: int = max([int(time.time() * 1000), *(one["number"] + 1 for one in queue)])
        one = {"number": number, "values": values, "folder": folder_choice, "devices": devices, "time": time.time()}
        self.home.write(QUEUE, json.dumps([*queue, one]))
        return number

    def _queued_folders(self, queue: Iterable[Mapping[str, Any]]) -> set[Path]:
        """The folders that queued runs will write to, without runs that were refused."""
        folders = set()
        for one in queue:
            if "error" not in one:
                with suppress(APIError):  # the file of the queue may have been edited; the run is refused at its start
                    folders.add(self.folder_of(one["values"]))
        return folders

    def free_folder(self, folder: Path) -> Path:
        """The folder, or ``first-2`` if ``first`` exists or a queued run writes to it."""
        names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
        queued = self._queued_folders(self.queued_jobs())
        return next(path for path in names if path not in queued and not path.exists())

    def unqueue(self, number: int) -> bool:
        queue = self.queued_jobs()
        left = [one for one in queue if one["number"] != number]
        self.home.write(QUEUE, json.dumps(left))
        return len(left) < len(queue)

    async def next_of_queue(self, runs: Iterable[FoundRun]) -> Path | None:
        """Start the first run of the queue if no run is active. A run that cannot be started stays in the queue with
        the ``error``, and the next one is started.

        Raises:
            APIError: if the run is refused, or its files cannot be written.
            OSError: if the process that describes the options cannot be started.
        """
        first = next((one for one in self.queued_jobs() if "error" not in one), None)
        if first is None or any(run.is_alive and run.state != "elsewhere" for run in runs):
            return None
        self.unqueue(first["number"])
        try:
            return await self.begin(first["values"], first["folder"], first.get("devices"))
        except (APIError, OSError) as error:
            refused = {**first, "error": error.message if isinstance(error, APIError) else str(error)}
            self.home.write(QUEUE, json.dumps([refused, *self.queued_jobs()]))
            raise


def _has_fields(one: Any, kinds: Mapping[str, Any]) -> bool:
    """Return whether an entry of a file, which may have been edited, has fields of these types."""
    return isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in kinds.items())
