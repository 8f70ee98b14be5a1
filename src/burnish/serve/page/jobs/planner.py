"""Client of the planner process, which loads the model libraries and previews runs for the web UI.

    answer = planner.ask({"values": {...}})       # yields parts as they are ready

One request runs at a time. A newer preview supersedes an older one, whose parts are dropped. A request that its client
has given up, such as one that reads a large dataset, is ended with the process if others wait for it. If the process
dies, an error is raised and the next request starts a new process. It is stopped when idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from burnish.serve.http.child import environment_of_child
from burnish.serve.http.errors import APIError
from burnish.serve.page.places import Roots

IDLE_S = 600.0
SLOWEST_S = 120.0
PATIENCE_S, START_S = 10.0, 30.0
"""Seconds after which the process is ended for an abandoned request: since that request, and since its own start."""
_LONGEST_LINE = 32 * 2**20


class Planner:
    """A ``burnish _planner`` process, started on demand in the first root."""

    def __init__(self, places: Roots, log: Path) -> None:
        self.places, self.log = places, log
        self._child: asyncio.subprocess.Process | None = None
        self._started_s = 0.0
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._newest = 0
        self._unfinished: tuple[int, float] | None = None
        """Number of the request that the process handles, and the time at which it may be ended if it was given up."""
        self._idle: asyncio.TimerHandle | None = None

    async def ask(self, question: Mapping[str, Any], replaces: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of the response.

        Args:
            replaces: this request supersedes earlier ones that also set it.
        Raises:
            APIError: 409 if superseded by a newer request, 503 if the process exited.
        """
        number = next(self._numbers)
        if replaces:
            self._newest = number
        async with self._turn:
            if replaces and self._newest != number:
                raise APIError(409, "superseded", "Superseded by a newer request.")
            async for part in self._answers({**question, "id": number}):
                yield part

    async def _answers(self, question: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        await self._finish_given_up()
        child = await self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        now_s = asyncio.get_running_loop().time()
        self._unfinished = (question["id"], max(now_s + PATIENCE_S, self._started_s + START_S))
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            await child.stdin.drain()
            while True:
                async with asyncio.timeout(SLOWEST_S):
                    part = await self._part(child.stdout)
                if part.get("id") != question["id"]:
                    continue  # of a question that was given up
                if part.get("is_last"):
                    self._unfinished = None
                yield part
                if part.get("is_last"):
                    return
        except (ConnectionError, TimeoutError, ValueError) as error:
            self.end()
            raise APIError(503, "planner_ended", "The planner process has exited. Try again.") from error

    async def _finish_given_up(self) -> None:
        """Read what is left of a request that was given up, or end the process if that takes too long."""
        if self._child is None or self._child.returncode is not None or self._unfinished is None:
            return
        assert self._child.stdout is not None
        number, until_s = self._unfinished
        try:
            async with asyncio.timeout_at(until_s):
                part: dict[str, Any] = {}
                while not (part.get("id") == number and part.get("is_last")):
                    part = await self._part(self._child.stdout)
        except (ConnectionError, TimeoutError, ValueError):
            self.end()

    async def _part(self, answers: asyncio.StreamReader) -> dict[str, Any]:
        line = await answers.readline()
        if not line:
            raise ConnectionError
        part: dict[str, Any] = json.loads(line)
        return part

    async def _running(self) -> asyncio.subprocess.Process:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.end)
        if self._child is None or self._child.returncode is not None:
            self._child, self._unfinished = await self._start(), None
            self._started_s = asyncio.get_running_loop().time()
        return self._child

    async def _start(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "burnish", "_planner", cwd=self.places.first, stderr=errors,
                env=environment_of_child(self.places.roots),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
            )  # fmt: skip

    def end(self) -> None:
        """End the process; the next request starts a new one."""
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()

    async def stop(self) -> None:
        """End the process and wait for it, so that its pipes are closed before the event loop is."""
        child = self._child
        if self._idle is not None:
            self._idle.cancel()
        self.end()
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()
            await child.wait()

    async def whole(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """All parts of a response, merged."""
        found: dict[str, Any] = {}
        async for part in self.ask(question):
            found |= part
        return found
