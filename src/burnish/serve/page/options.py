"""The options of ``burnish webui``, and what is wrong with them before a socket is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import Problem
from burnish.config.options import Given, option
from burnish.serve.http.hosts import is_loopback

ENVIRONMENT = {"GRADIO_SERVER_NAME": "web_host", "GRADIO_SERVER_PORT": "web_port", "BURNISH_KEY": "web_key"}
LEAST_KEY = 16


@dataclass
class WebOptions:
    """Web page."""

    web_host: str = option("127.0.0.1", "The address to listen on.")
    web_port: int = option(7860, "The port to listen on; 0 takes a free one.", ge=0, le=65535)
    web_key: str | None = option(
        None, "What a visitor must show; by default one that is made once and kept. Given in a file, or in the "
        "environment as BURNISH_KEY.", is_secret=True,
    )  # fmt: skip
    web_no_key: bool = option(
        False, "Let everybody in who reaches the address; for loopback in a container of one's own."
    )
    web_roots: list[str] = option(["."], "Folders below which runs, models and data are looked for.", names_place=True)
    web_hosts: list[str] = option([], "Names under which the page is reached besides localhost and web_host.")
    web_allow: list[str] = option([], "Options that a page may not set unless they are named here.")
    web_root_path: str = option("", "The path under which a proxy shows the page, such as /proxy/7860.")
    web_home: str | None = option(None, "Where the page keeps its key, presets and conversations.", names_place=True)
    web_open: bool = option(False, "Open a browser.")


@dataclass(frozen=True)
class NamedModel:
    """The model that ``burnish webchat`` is told to talk to, besides those that the page finds below its roots.

    Args:
        words: that ``burnish api`` takes for it.
        folder: where their relative paths begin.
    """

    name: str
    words: tuple[str, ...]
    folder: Path


def check_web(options: WebOptions, given: Mapping[str, Given], command_line: str) -> list[Problem]:
    """Find what is wrong with the options of the page."""
    problems = []
    if "web_key" in given and given["web_key"].where == command_line:
        what = '"web_key" stands in the list of processes when it is given on the command line.'
        problems.append(Problem(what, remedy="Give it in the environment: BURNISH_KEY=... burnish webui"))
    if options.web_key is not None and len(options.web_key) < LEAST_KEY:
        problems.append(Problem(f'"web_key" must have at least {LEAST_KEY} characters.', remedy="Leave it to burnish."))
    if options.web_no_key and not is_loopback(options.web_host) and not os.environ.get("BURNISH_CONTAINER"):
        what = f'"web_no_key" would let everybody who reaches {options.web_host} start processes here.'
        problems.append(Problem(what, remedy="Leave it out, or keep web_host: 127.0.0.1."))
    problems += [
        Problem(f'"web_roots" names "{root}", which is no folder.')
        for root in options.web_roots
        if not os.path.isdir(os.path.expanduser(root))
    ]
    if os.environ.get("GRADIO_SHARE", "").lower() in {"1", "true"}:
        what = "GRADIO_SHARE asks for a public tunnel, and there is none."
        problems.append(Problem(what, remedy="Unset it; from another machine: ssh -L 7860:127.0.0.1:7860 HOST"))
    return problems
