"""Options of ``burnish api``, and checks before a socket is opened.

They are set in YAML, as ``key=value``, or with LLaMA-Factory's environment variables. The API key is not accepted on
the command line, which every user of the machine can read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.config.errors import Problem, UserError
from burnish.config.options import RawValue, option
from burnish.run.plan.config_files import from_variables
from burnish.serve.http.hosts import is_loopback

ENVIRONMENT = {
    "API_HOST": "api_host",
    "API_PORT": "api_port",
    "API_KEY": "api_key",
    "API_MODEL_NAME": "api_model_name",
    "FASTAPI_ROOT_PATH": "api_root_path",
}
_VERBOSE = {"0": "lines", "false": "lines", "1": "content", "true": "content"}
LEAST_KEY = 8
_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*(:[0-9]{1,5})?")


@dataclass
class ApiOptions:
    """API server."""

    api_host: str = option("127.0.0.1", "Address to listen on. Any address other than localhost requires a key.")
    api_port: int = option(8000, "Port to listen on. 0: any free port.", ge=0, le=65535)
    api_socket: str | None = option(
        None, "Unix socket to listen on instead of a port; accessible to its owner only.", names_place=True
    )
    api_key: str | None = option(
        None,
        "API key required from clients, also read from a file or from API_KEY. Generated and printed once "
        "if the server is not on localhost.", is_secret=True,
    )  # fmt: skip
    api_model_name: str | None = option(None, "Model name in requests. Default: the name of its folder.")
    api_aliases: list[str] = option([], "Additional names of the model, such as gpt-3.5-turbo for older clients.")
    api_origins: list[str] = option([], "Allowed origins of browser requests (CORS), such as https://chat.example.org.")
    api_hosts: list[str] = option([], "Allowed host names besides localhost and api_host.")
    api_root_path: str = option("", "Path prefix under which a proxy serves the API, such as /llm.")
    api_max_body: int = option(32 * 2**20, "Maximum size of a request body.", unit="bytes", ge=1024)
    allow_image_urls: list[str] = option(
        [],
        "Hosts from which image URLs of requests are fetched, such as images.example.org. Only public addresses are "
        "allowed, and redirects are not followed.",
    )
    media_root: str | None = option(
        None,
        "Folder from which requests may read images by path or file:// URL. Default: none.",
        names_place=True,
    )
    max_image_bytes: int = option(20_000_000, "Maximum size of an image in a request.", unit="bytes", ge=1)
    api_max_waiting: int = option(64, "Maximum number of queued requests. Additional requests receive HTTP 429.", ge=0)
    api_max_choices: int = option(8, "Maximum number of choices per request (n).", ge=1, le=128)
    api_max_tokens: int = option(
        4096, "Maximum number of generated tokens, and the default if a request sets none.", unit="tokens", ge=1
    )
    api_timeout: float = option(
        600.0, "Maximum duration of a request, including the time in the queue.", unit="s", gt=0
    )
    api_drain: float = option(
        10.0, "Time limit for running requests to finish when the server shuts down.", unit="s", ge=0
    )
    api_reasoning: Literal["field", "inline", "drop"] = option(
        "field",
        "Where the model's reasoning is returned: in reasoning_content (field), in the text (inline), or "
        "not at all (drop).",
    )
    api_strict: bool = option(False, "Reject requests with unknown fields instead of listing these fields in a header.")
    api_log: Literal["lines", "content"] = option(
        "lines", "Log one line per request (lines), or also the content of the request (content)."
    )
    api_metrics: bool = option(True, "Serve Prometheus metrics at /metrics.")


def from_environment(
    values: Mapping[str, RawValue], environment: Mapping[str, str] = os.environ
) -> dict[str, RawValue]:
    """Return the options that are set by environment variables only."""
    found = from_variables(ENVIRONMENT, values, environment)
    verbose = environment.get("API_VERBOSE", "").lower()
    if "api_log" not in values and verbose in _VERBOSE:
        found["api_log"] = RawValue(_VERBOSE[verbose], "environment variable API_VERBOSE")
    return found


def problems_of_key(values: Mapping[str, RawValue], command_line: str) -> list[Problem]:
    """Return a problem if the key is on the command line, because it would be visible in the process list."""
    if "api_key" in values and values["api_key"].where == command_line:
        return [
            Problem(
                '"api_key" must not be set on the command line: other users could read it in the process list.',
                remedy="Set it in a YAML file or in the environment: API_KEY=... burnish api ...",
            )
        ]
    return []


def check_api(options: ApiOptions) -> list[Problem]:
    """Return the problems of the server's options."""
    problems = []
    if options.api_key is not None and len(options.api_key) < LEAST_KEY:
        problems.append(
            Problem(
                f'"api_key" must have at least {LEAST_KEY} characters.', remedy="Remove it to have a key generated."
            )
        )
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.isprintable()):
        problems.append(Problem('"api_key" must be printable ASCII, because it is sent in an HTTP header.'))
    if "*" in options.api_origins:
        problems.append(
            Problem(
                '"api_origins" must list origins: "*" would allow every website you visit to send requests.',
                remedy="Example: api_origins: [https://chat.example.org]",
            )
        )
    problems += check_images(options)
    problems += [
        Problem(f'"api_origins" must be like https://chat.example.org. Received: "{origin}".')
        for origin in options.api_origins
        if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.rstrip("/").count("/") != 2)
    ]
    return problems


def check_images(options: ApiOptions) -> list[Problem]:
    """Return the problems of the options for images."""
    problems = [
        Problem(f'"allow_image_urls" must list host names like images.example.org. Received: "{host}".')
        for host in options.allow_image_urls
        if not _HOST.fullmatch(host.lower())
    ]
    root = options.media_root
    if root is not None and not os.path.isdir(os.path.expanduser(root)):
        problems.append(Problem(f'"media_root" must be a folder. Received: "{root}".', option="media_root"))
    return problems


def needs_key(options: ApiOptions) -> bool:
    """Return whether other machines could send requests."""
    return options.api_socket is None and not is_loopback(options.api_host)


def with_adapters(argv: Sequence[str]) -> list[str]:
    """Convert every ``--adapter name=folder`` to the single option ``served_adapters``."""
    left: list[str] = []
    named: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        if word != "--adapter":
            left.append(word)
            continue
        values = next(rest, "")
        name, _, folder = values.partition("=")
        if not (name and folder):
            raise UserError(f'--adapter must be name=folder. Received: "{values}".')
        if name in named:
            raise UserError(
                f'--adapter names "{name}" twice: {named[name]} and {folder}.', remedy="Rename one of them."
            )
        named[name] = folder
    return [*left, "--served_adapters", json.dumps(named)] if named else left
