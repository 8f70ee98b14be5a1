"""Options of ``burnish webui`` and their validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import Problem
from burnish.config.options import RawValue, option
from burnish.serve.http.hosts import is_loopback

ENVIRONMENT = {"GRADIO_SERVER_NAME": "web_host", "GRADIO_SERVER_PORT": "web_port", "BURNISH_KEY": "web_key"}
LEAST_KEY = 16


@dataclass
class WebOptions:
    """Web UI."""

    web_host: str = option("127.0.0.1", "Address to listen on.")
    web_port: int = option(7860, "Port to listen on. 0: any free port.", ge=0, le=65535)
    web_key: str | None = option(
        None,
        "Key required to sign in, also read from a file or from BURNISH_KEY. Default: generated once and"
        " stored.", is_secret=True,
    )  # fmt: skip
    web_no_key: bool = option(False, "Disable authentication. Use only on localhost or inside a private container.")
    web_roots: list[str] = option(
        ["."], "Folders in which runs, models and datasets are found. Nothing outside is accessible.", names_place=True
    )
    web_hosts: list[str] = option([], "Allowed host names besides localhost and web_host.")
    web_allow: list[str] = option(
        [],
        "Options to allow in the web UI that are blocked by default because they can run code or send data, such as "
        "trust_remote_code.",
    )
    web_root_path: str = option("", "Path prefix under which a proxy serves the page, such as /proxy/7860.")
    web_home: str | None = option(
        None, "Folder for the key, presets and conversations of the web UI.", names_place=True
    )
    web_open: bool = option(False, "Open a browser.")


@dataclass(frozen=True)
class NamedModel:
    """The model given to ``burnish webchat``, in addition to those found inside the roots.

    Args:
        argv: command-line arguments of ``burnish api``.
        folder: working directory for relative paths.
    """

    name: str
    argv: tuple[str, ...]
    folder: Path


def check_web(options: WebOptions, values: Mapping[str, RawValue], command_line: str) -> list[Problem]:
    """Problems with the options of the web UI."""
    problems = []
    if "web_key" in values and values["web_key"].where == command_line:
        what = '"web_key" on the command line is visible to all users in the process list.'
        problems.append(Problem(what, remedy="Set it in the environment: BURNISH_KEY=... burnish webui"))
    if options.web_key is not None and len(options.web_key) < LEAST_KEY:
        problems.append(
            Problem(f'"web_key" must have at least {LEAST_KEY} characters.', remedy="Remove it to generate a key.")
        )
    if options.web_no_key and not is_loopback(options.web_host) and not os.environ.get("BURNISH_CONTAINER"):
        what = f'"web_no_key" would let anyone who can reach {options.web_host} start processes on this machine.'
        problems.append(Problem(what, remedy="Remove it, or use web_host: 127.0.0.1."))
    problems += [
        Problem(f'"web_roots" must contain existing folders. Received: "{root}".')
        for root in options.web_roots
        if not os.path.isdir(os.path.expanduser(root))
    ]
    if os.environ.get("GRADIO_SHARE", "").lower() in {"1", "true"}:
        what = "GRADIO_SHARE is not supported: burnish has no public tunnel."
        problems.append(
            Problem(what, remedy="Unset it. To connect from another machine: ssh -L 7860:127.0.0.1:7860 HOST")
        )
    return problems
