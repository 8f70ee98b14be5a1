"""Client of the planner process, which loads the model libraries and previews runs for the web UI.

    answer = planner.ask({"values": {...}})       # yields parts as they are ready

One request runs at a time. A newer preview supersedes an older one, whose parts are dropped. If the process dies, an
error is raised and the next request starts a new process. It is stopped when idle.
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
_LONGEST_LINE = 32 * 2**20


class Planner:
    """A ``burnish _planner`` process, started on demand in the first root."""

    def __init__(self, places: Roots, log: Path) -> None:
        self.places, self.log = places, log
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._newest = 0
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
        child = await self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            await child.stdin.drain()
            while True:
                async with asyncio.timeout(SLOWEST_S):
                    line = await child.stdout.readline()
                if not line:
                    raise ConnectionError
                part = json.loads(line)
                if part.get("id") != question["id"]:
                    continue  # of a question that was given up
                yield part
                if part.get("is_last"):
                    return
        except (ConnectionError, TimeoutError, ValueError) as error:
            self.end()
            raise APIError(503, "planner_ended", "The planner process has exited. Try again.") from error

    async def _running(self) -> asyncio.subprocess.Process:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.end)
        if self._child is None or self._child.returncode is not None:
            with self.log.open("ab") as errors:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "burnish", "_planner", cwd=self.places.first, stderr=errors,
                    env=environment_of_child(self.places.roots),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
                )  # fmt: skip
        return self._child

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
