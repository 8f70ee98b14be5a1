"""Inference engines of the chat page: each is ``burnish api`` on a private Unix socket, stopped when idle.

In: a run, one of its checkpoints, or a model folder inside a root. Out: an engine with an id; requests are forwarded to
it unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from burnish.serve.http.errors import APIError
from burnish.serve.http.relay import request_json
from burnish.serve.page.home import Home
from burnish.serve.page.jobs.starting import Starter
from burnish.serve.page.options import NamedModel

IDLE_S = 900.0
MOST_ENGINES = 3


@dataclass
class RunningEngine:
    id: str
    name: str
    socket: Path
    child: subprocess.Popen[bytes]
    log: Path
    used: float = field(default_factory=time.monotonic)
    state: str = "loading"
    message: str = ""


class Engines:
    """All engines of the page."""

    def __init__(self, home: Home, starter: Starter) -> None:
        self.home, self.starter = home, starter
        self._all: dict[str, RunningEngine] = {}

    def begin(self, path: Path, name: str) -> RunningEngine:
        """Start the engine of a folder, or return the one that is already running.

        Raises:
            APIError: 409 if too many models are loaded.
        """
        return self._begin(NamedModel(name, (str(path.resolve()),), self.starter.places.first), reads_all=False)

    def begin_named(self, named: NamedModel) -> RunningEngine:
        """Start the engine for the command-line arguments of the owner. Raises as ``begin``."""
        return self._begin(named, reads_all=True)

    def _begin(self, named: NamedModel, reads_all: bool) -> RunningEngine:
        identity = hashlib.sha256(os.fsencode("\0".join(named.argv))).hexdigest()[:12]
        if identity in self._all and self._all[identity].child.poll() is None:
            return self._all[identity]
        alive = [one for one in self._all.values() if one.child.poll() is None]
        if len(alive) >= MOST_ENGINES:
            raise APIError(409, "too_many_engines", f"{MOST_ENGINES} models are already loaded. Unload one first.")
        # Not the socket of an earlier process of the same model, which may still be shutting down.
        socket, log = self.home.folder / f"engine-{token_hex(6)}.sock", self.home.folder / f"engine-{identity}.log"
        log.unlink(missing_ok=True)
        argv = ["api", *named.argv, f"--api_socket={socket}", f"--api_model_name={identity}", "--api_max_tokens=2048"]
        child = self.starter.start_command(argv, log, named.folder, reads_all)
        self._all[identity] = RunningEngine(identity, named.name, socket, child, log)
        return self._all[identity]

    def of(self, identity: str) -> RunningEngine:
        """Raises APIError 404 if there is none."""
        if identity not in self._all:
            raise APIError(404, "no_engine", "The model is not loaded. Load it again.")
        self._all[identity].used = time.monotonic()
        return self._all[identity]

    async def states(self) -> list[dict[str, Any]]:
        """State of every engine."""
        for one in list(self._all.values()):  # others may begin and end meanwhile
            await self._update_state(one)
        return [{"id": e.id, "name": e.name, "state": e.state, "said": e.message} for e in self._all.values()]

    async def _update_state(self, one: RunningEngine) -> None:
        if one.child.poll() is not None:
            one.state = "ended"
            one.socket.unlink(missing_ok=True)  # it was killed
            text = one.log.read_text(encoding="utf-8", errors="replace") if one.log.is_file() else ""
            one.message = text.strip()[-600:]
            return
        if one.state == "ready":
            return
        try:
            status, body = await request_json(str(one.socket), "GET", "/readyz")
        except APIError:
            return
        one.state = "ready" if status == 200 else "loading"
        one.message = "" if status == 200 else f"{json.loads(body).get('loaded', 0):.0%}"

    def end(self, identity: str) -> None:
        one = self._all.pop(identity, None)
        if one is not None and one.child.poll() is None:
            one.child.send_signal(signal.SIGTERM)

    def end_idle(self) -> None:
        for one in list(self._all.values()):
            if time.monotonic() - one.used > IDLE_S:
                self.end(one.id)

    def end_all(self) -> None:
        for identity in list(self._all):
            self.end(identity)
