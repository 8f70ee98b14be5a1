"""The commands ``burnish webui`` and ``burnish webchat``.

In: command-line arguments. Out: exit status 128 + signal. Runs that were started from the page continue after it ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from urllib.parse import quote

from burnish.config.errors import MissingExtraError, Problem, UserError, did_you_mean
from burnish.config.options import RawValue, build, raise_if
from burnish.report.streams import say
from burnish.run.plan.config_files import COMMAND_LINE, from_variables, merge, path_of, read_arguments, split_arguments
from burnish.serve.api.options import with_adapters
from burnish.serve.page.options import ENVIRONMENT, NamedModel, WebOptions, check_web
from burnish.utils.collection import collect_garbage_as_usual

_PAGES = ("runs", "new", "compare", "chat", "evaluate", "export", "settings")
_OWN = tuple(field.name for field in fields(WebOptions))


def webui(argv: Sequence[str]) -> int:
    """The command.

    Raises:
        UserError: for invalid options, or a port or folder that cannot be used.
    """
    return _serve(*read_options(argv))


def webchat(argv: Sequence[str]) -> int:
    """The web UI, opened at a chat with one model, like LLaMA-Factory's command of the same name.

    Raises:
        UserError: as ``webui``, and if no model is given.
    """
    options, named = read_named(argv)
    return _serve(options, "chat", named)


def _serve(options: WebOptions, page: str, named: NamedModel | None = None) -> int:
    try:
        from burnish.serve.http.guards import path_prefix
        from burnish.serve.http.server import log_to_stderr, serve
        from burnish.serve.http.sockets import listen, shown_address
        from burnish.serve.page.app import application
        from burnish.serve.page.home import Home
        from burnish.serve.page.session import Sessions
        from burnish.serve.page.site import Site
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "burnish webui", "web") from error
    log_to_stderr()
    home = Home(options.web_home)
    found = listen(options.web_host, options.web_port, "web_port")
    address = shown_address(found).replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    home.hold(address)
    key = None if options.web_no_key else options.web_key or home.key()
    site = Site(options, home, named)
    address += path_prefix(options.web_root_path)
    link = _link(address, page, key)
    shown = link.partition("#")[0] if options.web_key else link  # one that was made here is known from nowhere else
    for line in _lines(shown, site.places.first, key is None):
        say(line, sys.stdout, masks_secrets=False)
    if options.web_open:
        webbrowser.open(home.redirecting_file(link))

    async def drain() -> None:
        await site.planner.stop()
        site.engines.end_all()

    collect_garbage_as_usual()
    return asyncio.run(serve(application(site, Sessions(key)), found, site.look_after, drain))


def _link(address: str, page: str, key: str | None) -> str:
    """URL that signs in with the key and opens a page. Without a key: the URL of the page."""
    if key is None:
        return f"{address}/{page}"
    return f"{address}/sign-in{'' if page == 'runs' else f'?to={page}'}#key={quote(key, safe='')}"


def read_options(argv: Sequence[str]) -> tuple[WebOptions, str]:
    """The options, and the page to open first.

    Raises:
        UserError: with all problems.
    """
    left, page = [], "runs"
    rest = iter(argv)
    for word in rest:
        if word == "--page":
            page = next(rest, "")
        else:
            left.append(word)
    file, flags = read_arguments(left)
    values = merge(file, flags, {})
    problems = [
        Problem(f'burnish webui has no option "{name}".{did_you_mean(name, _OWN)}', where=item.where)
        for name, item in values.items()
        if name not in _OWN
    ]
    options = _build_options({name: item for name, item in values.items() if name in _OWN}, problems)
    if page not in _PAGES:
        raise UserError(f'Unknown page "{page}".', remedy=f"Choose one of: {', '.join(_PAGES)}.")
    return options, page


def read_named(argv: Sequence[str]) -> tuple[WebOptions, NamedModel]:
    """The options of the web UI, and the model given by the other arguments, as for ``burnish api`` and ``chat``.

    Raises:
        UserError: with all invalid options, or if no model is given.
    """
    path, rest = path_of(with_adapters(argv))
    _, flags = split_arguments(rest)
    options = _build_options({name: item for name, item in flags.items() if name in _OWN}, [])
    others = {name: item.value for name, item in flags.items() if name not in _OWN}
    if not path and "model_name_or_path" not in others:
        raise UserError("burnish webchat requires a model.", remedy="Usage: burnish webchat PATH")
    here = [str(Path(path).absolute()) if Path(path).exists() else path] if path else []
    flat = [word for name, value in others.items() for word in (f"--{name}", *_as_strings(value))]
    name = path or str(others["model_name_or_path"])
    return options, NamedModel(name, (*here, *flat), Path.cwd())


def _as_strings(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _build_options(values: Mapping[str, RawValue], problems: Sequence[Problem]) -> WebOptions:
    options, wrong = build(WebOptions, {**values, **from_variables(ENVIRONMENT, values, os.environ)})
    raise_if([*problems, *wrong, *check_web(options, values, COMMAND_LINE)])
    assert isinstance(options, WebOptions)
    return options


def _lines(link: str, root: object, is_open: bool) -> list[str]:
    warning = (
        ["warning: authentication is disabled (web_no_key). Anyone who can reach this address can start processes."]
        if is_open
        else []
    )
    return [f"page     {link}", f"runs     in {root}; they continue after the server stops (Ctrl-C)", *warning]
