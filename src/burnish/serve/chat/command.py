"""``burnish chat PATH``: the command.

Arguments are PATH and options as for ``burnish train``, and ``--adapter name=folder``, ``--url http://…/v1``,
``--model NAME``, ``--system TEXT``, ``--once TEXT``, ``--image PATH`` (of that message), ``--no-history``. If standard
input is not a terminal, it is read as one message, and only the response is printed.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from burnish.config.errors import MissingExtraError, UserError
from burnish.config.secrets import without_secrets
from burnish.report.streams import say
from burnish.serve.api.options import with_adapters
from burnish.serve.chat.backends import SETTINGS, Backend, LocalBackend, Request, ServerBackend
from burnish.serve.chat.console import Console, history_file, is_typed
from burnish.serve.chat.records import read_image, user_message
from burnish.serve.chat.session import ChatSession
from burnish.utils.files import expand_user
from burnish.utils.sigint import interruptible

NEEDED = ("pydantic",)
"""Libraries of the extra that a chat needs."""


@dataclass
class _ChatArguments:
    """Options of this command only."""

    others: list[str]
    url: str = ""
    model: str = ""
    system: str = ""
    once: str | None = None
    images: list[str] = field(default_factory=list)
    keeps_history: bool = True


def chat(argv: Sequence[str]) -> int:
    """Run ``burnish chat``. Returns 1 if a response failed."""
    for library in NEEDED:
        if find_spec(library) is None:
            raise MissingExtraError(library, "burnish chat", "serve")
    own = _read(argv)
    once = own.once
    if once is None and not is_typed():
        once = _standard_input()
    if once == "":
        raise UserError("The message is empty.", remedy='Pass one: --once "text", or through standard input.')
    _check_characters({"The message": once or "", "--system": own.system})
    if own.images and once is None:
        raise UserError("--image has no effect without --once.", remedy="In the chat, add an image with /image PATH.")
    images = [read_image(expand_user(path))[0] for path in own.images]
    backend, settings, lines = _backend(own, is_quiet=once is not None)
    try:
        if once is not None:
            for image in images:
                backend.num_tokens(image)  # refuses images for a text-only model
            first = [{"role": "system", "content": own.system}] if own.system else []
            return _answer_once(backend, Request([*first, user_message(once, images)], settings))
        console = Console(history_file() if own.keeps_history else None)
        for line in lines:
            console.say(without_secrets(line), "dim")
        interruptible()  # Ctrl-C ends a response or a line, not the chat
        status = ChatSession(backend, console, settings, own.system).run()
        console.keep_history()
        return status
    finally:
        backend.close()


def _standard_input() -> str:
    """Return the text of standard input; bytes that are not UTF-8 become surrogates."""
    if sys.stdin is None:
        return ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin.read().strip()


def _check_characters(texts: Mapping[str, str]) -> None:
    """Raise UserError for a text with bytes that are not UTF-8. Args: texts: name -> text."""
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"{name} is not valid UTF-8 text, at character {error.start + 1}."
            raise UserError(what, remedy="Convert it to UTF-8, for example with iconv.") from None


def _read(argv: Sequence[str]) -> _ChatArguments:
    found = _ChatArguments([])
    rest = iter(with_adapters(argv))
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--no-history":
            found.keeps_history = False
        elif name in ("--url", "--model", "--system", "--once", "--image"):
            text = value if equals else next(rest, None)
            if text is None:
                raise UserError(f"{name} requires a value.")
            if name == "--image":
                found.images.append(text)
            else:
                setattr(found, name[2:], text)
        else:
            found.others.append(word)
    return found


def _backend(own: _ChatArguments, is_quiet: bool) -> tuple[Backend, dict[str, Any], list[str]]:
    """Return the backend, the settings from the command line, and introductory lines."""
    if own.url:
        if own.others:
            what = f"model options have no effect with --url. Received: {' '.join(own.others)}."
            raise UserError(what, remedy="Remove them. In the chat, /set changes sampling settings.")
        away = ServerBackend(own.url, own.model)
        return away, {}, [f"{away.name} at {away.url}", "/help lists the commands"]
    from burnish.inference.loading import engine_of, load_for_inference
    from burnish.run.plan.plan import locate_problems
    from burnish.serve.command_line import notes_of_chat, serving_of

    serving = serving_of(own.others)
    with locate_problems(serving.provenance):
        loaded = load_for_inference(serving.options, serving.name, explicit=serving.provenance)
    engine = engine_of(loaded)
    settings = {name: getattr(serving.options, name) for name in SETTINGS if name in serving.provenance}
    facts, notes = engine.facts(), notes_of_chat(serving)
    template = f"template: {loaded.template.name}"
    adapters = f"; adapters: {', '.join(loaded.adapters)}" if loaded.adapters else ""
    weights = facts.memory_bytes.get("weights", 0) / 2**20
    where = f"{weights:,.0f} MiB of weights" if weights else f"engine {facts.backend}"
    engine_note = getattr(engine, "note", "")
    lines = [
        f"{loaded.name}: {where}, {loaded.context:,} tokens of context{adapters}",
        template + "".join(f"; {note}" for note in loaded.template_notes),
        *([engine_note] if engine_note else []),
        *notes,
        "/help lists the commands",
    ]
    if is_quiet:
        for note in (*notes, *loaded.template_notes):
            say(note, sys.stderr)
    return LocalBackend(loaded, engine), settings, lines


def _answer_once(backend: Backend, request: Request) -> int:
    """Print one response and nothing else."""
    console, status = Console(), 0
    for event in backend.answer(request):
        if event.kind == "content":
            console.stream(event.text)
        elif event.call is not None:
            console.say(json.dumps(event.call, ensure_ascii=False))
        elif event.end is not None and event.end.reason == "failed":
            say(str(event.end.error), sys.stderr)
            status = 1
    console.end_stream()
    return status
