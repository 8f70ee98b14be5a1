"""``burnish webui``: from the first word to the exit status.

In: the words after the command. Out: 128 + the signal that ended it. Runs that were started from the page go on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import fields

from burnish.app.config import COMMAND_LINE, merge, read_arguments
from burnish.core.errors import MissingExtraError, Problem, UserError, did_you_mean
from burnish.core.options import build, raise_if
from burnish.report.streams import say
from burnish.web.options import WebOptions, check_web, from_environment


def webui(words: Sequence[str]) -> int:
    """The command.

    Raises:
        UserError: for options, a port or a folder that cannot be had.
    """
    options, page = read_options(words)
    try:
        from burnish.web.app import application
        from burnish.web.home import Home
        from burnish.web.session import Sessions
        from burnish.web.site import Site
        from burnish.wire.serving import serve
        from burnish.wire.sockets import listen, shown_address
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "burnish webui", "web") from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    home = Home(options.web_home)
    found = listen(options.web_host, options.web_port, "web_port")
    address = shown_address(found).replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    home.hold(address)
    key = None if options.web_no_key else options.web_key or home.key()
    site = Site(options, home)
    address += options.web_root_path
    link = f"{address}/{page}" if key is None else f"{address}/sign-in#key={key}"
    shown = f"{address}/sign-in" if options.web_key else link  # one that was made here is known from nowhere else
    for line in _lines(shown, site.places.first, key is None):
        say(line, sys.stdout, blots=False)
    if options.web_open:
        webbrowser.open(home.leading_to(link))

    async def drain() -> None:
        site.planner.end()
        site.engines.end_all()

    return asyncio.run(serve(application(site, Sessions(key)), found, site.look_after, drain))


def read_options(words: Sequence[str]) -> tuple[WebOptions, str]:
    """The options, and the page to open first.

    Raises:
        UserError: with all that is wrong.
    """
    left, page = [], "runs"
    rest = iter(words)
    for word in rest:
        if word == "--page":
            page = {"chat": "talk"}.get(name := next(rest, ""), name)
        else:
            left.append(word)
    file, flags = read_arguments(left)
    given = merge(file, flags, {})
    own = [field.name for field in fields(WebOptions)]
    problems = [
        Problem(f'burnish webui has no option "{name}".{did_you_mean(name, own)}', where=item.where)
        for name, item in given.items()
        if name not in own
    ]
    known = {name: item for name, item in given.items() if name in own}
    options, wrong = build(WebOptions, {**known, **from_environment(known)})
    raise_if([*problems, *wrong, *check_web(options, known, COMMAND_LINE)])
    if page not in ("runs", "new", "talk", "export", "compare"):
        raise UserError(Problem(f'There is no page "{page}".', remedy="Known: runs, new, talk, export, compare."))
    assert isinstance(options, WebOptions)
    return options, page


def _lines(link: str, root: object, is_open: bool) -> list[str]:
    warning = ["Everybody who reaches this address may start processes here (web_no_key)."] if is_open else []
    return [f"page     {link}", f"runs     below {root}; they go on when this ends (Ctrl-C)", *warning]
