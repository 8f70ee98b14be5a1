"""Chromium from the system's packages, controlled by Playwright. Without either, the tests are skipped with a message,
or fail if ``BURNISH_BROWSER=required``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
EXPECTED_ERRORS = re.compile(r"status of 4|net::ERR_(CONNECTION|INCOMPLETE|EMPTY|INTERNET)")
"""Console errors about rejected requests and killed servers, which some tests cause."""
IS_AVAILABLE = bool(CHROMIUM) and find_spec("playwright") is not None and find_spec("starlette") is not None


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not IS_AVAILABLE:
        reason = "Chromium, playwright or starlette is not installed: the page was not tested in a browser"
        if os.environ.get("BURNISH_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Server:
    """A ``burnish webui`` process that serves a folder."""

    root: Path
    home: Path
    child: subprocess.Popen[str] | None = None
    link: str = ""

    @property
    def address(self) -> str:
        return self.link.partition("/sign-in")[0]

    def start(self, port: int = 0) -> Server:
        import burnish

        environment = {
            **os.environ, "PYTHONPATH": str(Path(burnish.__file__).parents[1]), "BURNISH_HOME": str(self.home),
            "BURNISH_CACHE": str(self.home / "cache"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        argv = [sys.executable, "-m", "burnish", "webui", f"web_port={port}"]
        self.child = subprocess.Popen(argv, cwd=self.root, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        self.link = self.child.stdout.readline().split()[1]
        return self

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()
        self.child.wait(10)

    def end(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    import burnish

    root = tmp_path / "root"
    (root / "saves").mkdir(parents=True)
    demo = Path(burnish.__file__).parent / "demo"
    shutil.copytree(demo / "model", root / "model")
    shutil.copytree(demo / "data", root / "data")
    result = Server(root, tmp_path / "home").start()
    yield result
    result.end()
    _end_runs(root)


@pytest.fixture
def sample_runs(server: Server) -> None:
    """Runs of every state, written before the browser opens the list of runs, which reloads itself when runs change."""
    from web.conftest import make_runs

    make_runs(server.root)


def _end_runs(root: Path) -> None:
    """Kill the runs that a test started, which would continue without the server."""
    import signal

    from burnish.serve.http.child import send_signal
    from burnish.serve.page.runs.runs import find, is_alive

    for run in find([root]):
        if run.is_alive:
            send_signal(run.launch, signal.SIGKILL, is_alive)


@pytest.fixture
def visitor(chromium: Any, server: Server) -> Iterator[Any]:
    """A page that is signed in. The test fails on console errors and on requests to other hosts."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda output: (
            errors.append(output.text) if output.type == "error" and not EXPECTED_ERRORS.search(output.text) else None
        ),
    )
    page.on(
        "request",
        lambda requested: (
            errors.append(requested.url) if not requested.url.startswith((server.address, "data:", "blob:")) else None
        ),
    )
    page.goto(server.link)
    page.wait_for_url("**/runs")
    yield page
    context.close()
    assert not errors


def wait_for(condition: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        time.sleep(0.1)
