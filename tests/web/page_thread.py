"""The web UI in a thread, and a signed-in client."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from burnish.serve.page.app import application
from burnish.serve.page.home import Home
from burnish.serve.page.options import WebOptions
from burnish.serve.page.session import Sessions
from burnish.serve.page.site import Site, _source_version
from serve.server_thread import serve_app


@dataclass
class Page:
    port: int
    site: Site
    sessions: Sessions
    loop: asyncio.AbstractEventLoop
    cookie: str = ""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the page's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
        """Send a request with the page's cookie and Origin. ``headers`` override them; "" removes one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        defaults = {"Cookie": f"{self.sessions.cookie}={self.cookie}", "Origin": f"http://127.0.0.1:{self.port}"}
        if body is not None:
            defaults["Content-Type"] = "application/json"
        options = {name: value for name, value in {**defaults, **headers}.items() if value}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, options)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, text

    def get(self, path: str) -> Any:
        status, _, text = self.send("GET", path)
        assert status == 200, text
        return json.loads(text)

    def id_of(self, name: str) -> str:
        return next(run["id"] for run in self.get("/api/runs")["runs"] if run["name"] == name)


@cache
def described_options() -> str:
    """Return the planner's description of the options, cached so that not every test starts a planner."""
    from burnish.serve.page.planner_process import form

    return json.dumps({"mark": _source_version(), **form()})


@contextmanager
def start_page(root: Path, home: Path, key: str | None, **options: Any) -> Iterator[Page]:
    overrides = WebOptions(web_roots=[str(root)], web_home=str(home), **options)
    loop, sessions = asyncio.new_event_loop(), Sessions(key)
    site = Site(overrides, Home(overrides.web_home))
    site.home.write("form.json", described_options())
    port, end = serve_app(application(site, sessions), loop)
    page = Page(port, site, sessions, loop, sessions.new_cookie())
    yield page
    page.run(site.planner.stop())
    site.engines.end_all()
    end()
