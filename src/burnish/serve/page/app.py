"""Routes of the web UI: HTML that is readable without JavaScript, and the JSON API of its scripts (``api.py``).

In: options. Out: an ASGI application. No model library is imported here, and a GET request changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from burnish import __version__
from burnish.config.secrets import without_secrets
from burnish.report.pace import short_time
from burnish.serve.http.bodies import json_object, whole_body
from burnish.serve.http.errors import APIError, page_error
from burnish.serve.http.guards import Guard, Rules, as_api_error, with_and_without_prefix
from burnish.serve.http.hosts import LOOPBACK_NAMES, host_name, is_loopback
from burnish.serve.http.json_response import ShownJson
from burnish.serve.http.static import MemoryFiles
from burnish.serve.page.api import Api
from burnish.serve.page.jobs.commands import QUANTIZED, export_formats
from burnish.serve.page.runs.completions import COMPLETIONS
from burnish.serve.page.runs.files import run_yaml_text
from burnish.serve.page.runs.listing import joined
from burnish.serve.page.runs.predictions import prediction_files
from burnish.serve.page.runs.report import curves, table
from burnish.serve.page.runs.run_warnings import warnings_of
from burnish.serve.page.runs.runs import ALIVE
from burnish.serve.page.runs.series import line_chart, series, small_line_chart
from burnish.serve.page.session import SESSION_LIFETIME_S, Sessions, is_place
from burnish.serve.page.site import Site
from burnish.serve.page.words import FOLDER as WORDS
from burnish.serve.page.words import LANGUAGES, page_words, requested_language, translator

HERE = Path(__file__).parent
SHEETS: Mapping[str, tuple[str, ...]] = {
    "common": ("tokens", "base", "frame", "parts", "layers"),
    "chat": ("chat", "images", "answers"),
    "compare": ("uPlot.min", "charts", "compare"),
    "evaluate": ("jobs", "images"),
    "export": ("jobs",),
    "new": ("charts", "new", "picker", "images"),
    "run": ("uPlot.min", "charts", "run", "images"),
    "runs": ("runs",),
    "settings": ("runs",),
}
"""The style sheets of every page, and those of some pages; each row is one response, ``sheets-NAME.css``."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Default headers of a response."""
DOCUMENT_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
"""Headers of documents. They weigh more than most scripts, for which they mean nothing."""


def application(site: Site, sessions: Sessions) -> ASGIApp:
    """All routes, behind their guard."""
    options = site.options
    names = {host_name(host) for host in (options.web_host, *options.web_hosts)}
    rules = Rules(
        hosts=LOOPBACK_NAMES | (names - {"0.0.0.0", "::"}),  # noqa: S104  (compared with, not bound to)
        any_address=not is_loopback(options.web_host), own_origin=True, effects_need_origin=True,
        max_body_bytes=32 * 2**20,
    )  # fmt: skip
    pages = GZipMiddleware(Pages(site, sessions).router, minimum_size=1024)  # streams of events are left as they are
    return with_and_without_prefix(
        options.web_root_path, Guard(pages, rules, sessions.authenticate, page_error, HEADERS)
    )


class Pages:
    """One method per page."""

    def __init__(self, site: Site, sessions: Sessions) -> None:
        self.site, self.sessions = site, sessions
        joined_sheets = {f"sheets-{page}.css": [f"{sheet}.css" for sheet in sheets] for page, sheets in SHEETS.items()}
        self.static = MemoryFiles([HERE / "static", HERE / "bundled", WORDS], joined_sheets)
        self.templates = Environment(
            loader=FileSystemLoader(HERE / "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        self.templates.filters.update(short=_short, figure=_figure, duration=_duration, joined=joined)
        pages: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self.start, "/runs": self.runs, "/runs/{id}": self.run, "/new": self.new, "/compare": self.compare,
            "/chat": self.chat, "/evaluate": self.evaluate, "/export": self.export, "/settings": self.settings,
            "/api/runs/{id}/report": self.report, "/sign-in": self.sign_in_page,
            "/healthz": self.healthz,
        }  # fmt: skip
        api = Api(site)
        self.router = Router(
            [
                Route("/static/{version}/{name}", self.static.answer, methods=["GET"]),
                *(Route(path, self._document(page), methods=["GET"]) for path, page in pages.items()),
                Route("/sign-in", self.sign_in, methods=["POST"]),
                Route("/sign-out", self.sign_out, methods=["POST"]),
                *(Route(path, route, methods=[method]) for method, path, route in api.routes()),
            ],
            redirect_slashes=False, default=self._unknown,
        )  # fmt: skip

    # --- pages --------------------------------------------------------------------------------------------------------

    async def start(self, request: Request) -> Response:
        return Response(status_code=303, headers={"location": f"{request.scope.get('burnish.root', '')}runs"})

    async def runs(self, request: Request) -> Response:
        found = await self.site.find_runs()
        shown = self.site.facts(found)
        trained = [run for run in found if run.kind == "train"][:60]
        pictures = await asyncio.to_thread(lambda: {run.id: small_line_chart(run.folder) for run in trained})
        return self._page(
            "runs", request, pictures=pictures, queue=self.site.starter.queued_jobs(),
            runs=[run for run in shown if run["kind"] == "train"],
            others=[run for run in shown if run["kind"] != "train"],
            alive=[run for run in shown if run["state"] in ALIVE],
        )  # fmt: skip

    async def run(self, request: Request) -> Response:
        run = await self.site.run(request.path_params["id"])
        columns, _ = await asyncio.to_thread(series, run.folder)
        language = requested_language(request)
        return self._page(
            "run", request, run=self.site.facts([run])[0],
            line_chart=line_chart(columns, 640, 160), columns=_summary(columns),
            has_completions=(run.folder / COMPLETIONS).is_file(), has_predictions=bool(prediction_files(run.folder)),
            warnings=[warning.text(language) for warning in warnings_of(run, columns)],
        )  # fmt: skip

    async def report(self, request: Request) -> Response:
        """A run as a self-contained HTML file without scripts."""
        run = await self.site.run(request.path_params["id"])
        columns, _ = await asyncio.to_thread(series, run.folder)
        language = requested_language(request)
        text = self.templates.get_template("report.html").render(
            t=translator(language), language=language, run=self.site.facts([run])[0],
            launch=run.launch, curves=list(curves(columns)), options=table(run_yaml_text(run.folder)),
            warnings=[warning.text(language) for warning in warnings_of(run, columns)],
        )  # fmt: skip
        name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in run.name)
        headers = {**DOCUMENT_HEADERS, "content-disposition": f'attachment; filename="{name}.html"'}
        return HTMLResponse(without_secrets(text).encode("utf-8", "replace"), headers=headers)

    async def new(self, request: Request) -> Response:
        return self._page("new", request, start=request.query_params.get("from", ""))

    async def compare(self, request: Request) -> Response:
        return self._page("compare", request, chosen=request.query_params.get("runs", ""))

    async def chat(self, request: Request) -> Response:
        return self._page("chat", request, target=request.query_params.get("target", ""))

    async def evaluate(self, request: Request) -> Response:
        return self._page("evaluate", request, target=request.query_params.get("target", ""))

    async def export(self, request: Request) -> Response:
        formats, target = list(export_formats()), request.query_params.get("target", "")
        return self._page("export", request, target=target, formats=formats, quantized=list(QUANTIZED))

    async def settings(self, request: Request) -> Response:
        site = self.site
        return self._page(
            "settings", request, roots=[str(root) for root in site.places.roots], version=__version__,
            home=str(site.home.folder), allow=sorted(site.starter.allow),
            commands=site.starter.started_commands()[::-1],
        )  # fmt: skip

    async def healthz(self, request: Request) -> Response:
        return ShownJson({"status": "alive"})

    # --- sign in ------------------------------------------------------------------------------------------------------

    async def sign_in_page(self, request: Request) -> Response:
        to = request.query_params.get("to", "")
        return self._page("sign-in", request, to=to if is_place(to) else "", wrong="")

    async def sign_in(self, request: Request) -> Response:
        """Sign in with JSON (scripts) or form data (without JavaScript)."""
        is_form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
        if is_form:
            fields = urllib.parse.parse_qs((await whole_body(request)).decode("utf-8", "replace"), max_num_fields=4)
            key, to = fields.get("key", [""])[0], fields.get("to", [""])[0]
        else:
            body = await json_object(request)
            key, to = str(body.get("key", "")), ""
        try:
            self.sessions.check_key(key.strip())
        except APIError as refusal:
            if not is_form:
                raise
            wrong = _message(request, refusal)
            return self._page("sign-in", request, refusal.status, to=to if is_place(to) else "", wrong=wrong)
        headers = {"set-cookie": self._cookie(request, self.sessions.new_cookie(), SESSION_LIFETIME_S)}
        if is_form:
            return Response(status_code=303, headers={**headers, "location": to if is_place(to) else "runs"})
        return ShownJson({"status": "ok"}, headers=headers)

    async def sign_out(self, request: Request) -> Response:
        return ShownJson({"status": "ok"}, headers={"set-cookie": self._cookie(request, "", 0)})

    def _cookie(self, request: Request, value: str, lifetime_s: int) -> str:
        secure = "; Secure" if request.scope.get("scheme") == "https" else ""
        return f"{self.sessions.cookie}={value}; Path=/; Max-Age={lifetime_s}; HttpOnly; SameSite=Strict{secure}"

    # --- errors -------------------------------------------------------------------------------------------------------

    def _document(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A page whose errors are shown as a page to browsers, and are JSON for other clients."""

        async def answer(request: Request) -> Response:
            try:
                return await page(request)
            except APIError as error:
                if not _wants_document(request):
                    raise
                return self._error_page(request, error)

        return answer

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise HTTPException(404)
        request = Request(scope)
        if request.method != "GET" or scope["path"].startswith(("/api/", "/static/")) or not _wants_document(request):
            raise HTTPException(404)
        await self._error_page(request, as_api_error(HTTPException(404)))(scope, receive, send)

    def _error_page(self, request: Request, refusal: APIError) -> Response:
        return self._page("error", request, refusal.status, message=_message(request, refusal))

    # --- how --------------------------------------------------------------------------------------------------------

    def _page(self, name: str, request: Request, status: int = 200, **values: Any) -> Response:
        language, theme = requested_language(request), request.cookies.get("theme", "")
        up = "../" * (request.scope["path"].count("/") - 1)
        text = self.templates.get_template(f"{name}.html").render(
            t=translator(language), language=language, languages=LANGUAGES, up=up, page=name,
            theme=theme if theme in ("dark", "light") else "", has_key=self.sessions.key is not None,
            static=lambda file: up + self.static.address(file), sheets=SHEETS.keys() & {"common", name}, **values,
        )  # fmt: skip
        # Without script the form is sent with the Origin "null" where there is to be no referrer at all.
        headers = {**DOCUMENT_HEADERS, **({"referrer-policy": "same-origin"} if name == "sign-in" else {})}
        return HTMLResponse(without_secrets(text).encode("utf-8", "replace"), status, headers)


def _message(request: Request, refusal: APIError) -> str:
    """The message of an error in the language of the request, if it has a translation."""
    return page_words(requested_language(request)).get(f"error_{refusal.code}", refusal.message)


def _wants_document(request: Request) -> bool:
    """Whether a request is that of a browser for a page."""
    return "text/html" in request.headers.get("accept", "")


def _summary(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """First, last and lowest loss, for the text summary of the chart."""
    pairs = [
        (s, v) for s, v in zip(columns["step"], columns.get("loss", ()), strict=False) if isinstance(v, int | float)
    ]
    if len(pairs) < 2:
        return {}
    low = min(pairs, key=lambda pair: pair[1])
    return {"first": f"{pairs[0][1]:.3g}", "last": f"{pairs[-1][1]:.3g}", "steps": pairs[-1][0], "low": f"{low[1]:.3g}",
            "at": low[0]}  # fmt: skip


def _short(value: float | None) -> str:
    """Integers in full, other numbers with up to four significant digits, as in ``static/format.js``."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    is_whole, size = value == int(value), abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    if size >= (1e7 if is_whole else 1e5):
        limit, unit = next(one for one in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if size >= one[0])
        return f"{value / limit:.4g}{unit}"
    if is_whole or size >= 1000:
        return f"{value if is_whole else float(f'{value:.4g}'):,.0f}"
    return f"{value:.4g}"


def _figure(value: float | None) -> Markup:
    """A number, with its exact value as a tooltip."""
    return Markup('<span title="{}">{}</span>').format("" if value is None else value, _short(value))


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else short_time(seconds)
