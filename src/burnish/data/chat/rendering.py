"""Render conversations with a chat template, in worker processes with time and memory limits.

A chat template is a program from an untrusted source. Jinja's sandbox protects files, but limits neither time nor
memory, and a looping thread cannot be stopped. Each process therefore renders in worker processes
(``render_worker.py``): one that starts with the first rendering, and more if several threads render at the same time.
A worker ends a rendering that exceeds its time or memory.
burnish's named templates are data rather than programs and are rendered in the main process (``slots.py``).

    (found,) = render(tokenizer, [Conversation(chat)])
    (ids,) = chat_ids(tokenizer, [Conversation(chat, parts=[PROMPT])])
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from burnish.config.bounds import RENDERING_S
from burnish.config.errors import UserError
from burnish.data.images.family import Family
from burnish.loop.types import IMAGE, VIDEO

_REMEDY = "Correct the template, or set a different one."


class UnreadableTemplate(ValueError):
    """Raised if the chat template cannot render a conversation. The message completes a sentence "dropped: ..."."""


class RenderingTimeout(UserError):
    """Raised if a rendering exceeds its time limit."""


Part: TypeAlias = "tuple[int | None, bool]"
"""The first messages of a conversation: their number (None for all), and whether to add a generation prompt."""
WHOLE: Part = (None, False)
PROMPT: Part = (None, True)


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template.

    Args:
        chat: messages.
        tools: tools, or None.
        parts: prefixes of the conversation to render separately.
        marks: also return the spans of ``{% generation %}`` blocks.
        variables: further template variables.
    """

    chat: Sequence[Mapping[str, Any]]
    tools: Any = None
    parts: Sequence[Part] = (WHOLE,)
    marks: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    Args:
        text: output of the template.
        spans: [start, end) of ``{% generation %}`` blocks in characters, if requested.
        error: set if the template cannot render the conversation.
    """

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    error: UnreadableTemplate | None = None


def render(tokenizer: Any, conversations: Sequence[Conversation], template: str | None = None) -> list[Rendering]:
    """Return the texts of ``tokenizer.apply_chat_template``, for each part of each conversation in order.

    Args:
        conversations: inputs of the template.
        template: Jinja text. Default: the tokenizer's own template.
    Raises:
        RenderingTimeout: if a rendering exceeds its time limit.
    """
    named = [tokenizer.get_chat_template(template, each.tools) for each in conversations]
    templates = sorted(set(named))
    request = {
        "templates": templates, "variables": tokenizer.special_tokens_map, "seconds": _workers.limit_s,
        "conversations": [
            (templates.index(name), each.chat, each.tools, each.parts, each.marks, each.variables)
            for name, each in zip(named, conversations, strict=True)
        ],
    }  # fmt: skip
    replies = _workers.ask(json.dumps(request, default=_placeholder).encode() + b"\n")
    if replies is None:
        what = f"the chat template took more than {_workers.limit_s:g} s to render one conversation."
        raise RenderingTimeout(what, why="It may contain nested loops.", remedy=_REMEDY)
    return [_rendering(reply) for reply in replies]


def _rendering(reply: Mapping[str, Any]) -> Rendering:
    kind = reply.get("error")
    if kind is None:
        return Rendering(reply["text"], [(start, end) for start, end in reply["spans"]])
    if kind == "memory":
        why = "the chat template exceeded its memory limit"
    elif kind == "syntax":
        why = f"line {reply['line']} of the chat template is not valid Jinja: {reply['message']}"
    else:
        why = f"the chat template raised an error: {reply['message']}"
    return Rendering(error=UnreadableTemplate(why))


def _texts(tokenizer: Any, found: Sequence[Rendering]) -> Any:
    """Return the encoding of texts. Raises UnreadableTemplate if one could not be rendered."""
    _raise_first(found)
    return tokenizer([each.text for each in found], add_special_tokens=False)


def _raise_first(found: Sequence[Rendering]) -> None:
    """Raise the error of the first conversation that could not be rendered."""
    for each in found:
        if each.error is not None:
            raise each.error


def text_to_parts(text: str) -> list[dict[str, str]]:
    """Return a text with image placeholders as the parts that chat templates accept."""
    kinds = {IMAGE: "image", VIDEO: "video"}
    pieces = [piece for piece in re.split(f"([{IMAGE}{VIDEO}])", text) if piece]
    return [{"type": kinds[p]} if p in kinds else {"type": "text", "text": p} for p in pieces]


def with_processor_text(found: Rendering, family: Family) -> Rendering:
    """Return a rendering with the text that the family's processor adds around the placeholder of each image."""
    pieces = found.text.split(family.mark)
    added = len(family.chat_template_text) - len(family.mark)
    places: list[int] = []
    for piece in pieces[:-1]:
        places.append((places[-1] + len(family.mark) if places else 0) + len(piece))
    spans = [(a + added * bisect_left(places, a), b + added * bisect_left(places, b)) for a, b in found.spans]
    return replace(found, text=family.chat_template_text.join(pieces), spans=spans)


def chat_ids(tokenizer: Any, conversations: Sequence[Conversation]) -> list[list[int]]:
    """Return the ids of ``tokenizer.apply_chat_template``.

    Args:
        conversations: inputs with one part each.

    Raises:
        UserError: if a rendering exceeds its time limit.
        UnreadableTemplate: if the template cannot render a conversation.
    """
    if not _renders_with_transformers(tokenizer):
        return [list(_custom_chat_template(tokenizer, each, return_dict=True)["input_ids"]) for each in conversations]
    return _texts(tokenizer, render(tokenizer, conversations))["input_ids"]  # type: ignore[no-any-return]


def chat_texts(tokenizer: Any, conversations: Sequence[Conversation]) -> list[str]:
    """Return the texts of ``tokenizer.apply_chat_template``. Arguments and errors as of ``chat_ids``."""
    if not _renders_with_transformers(tokenizer):
        return [_custom_chat_template(tokenizer, each, tokenize=False) for each in conversations]
    found = render(tokenizer, conversations)
    _raise_first(found)
    return [each.text for each in found]


def _renders_with_transformers(tokenizer: Any) -> bool:
    """Whether ``apply_chat_template`` is transformers' method, which renders a Jinja template."""
    return bool(type(tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base")


def _custom_chat_template(tokenizer: Any, one: Conversation, **how: Any) -> Any:
    """Return the result of a tokenizer that overrides ``apply_chat_template``. Mistral's has no Jinja template."""
    return tokenizer.apply_chat_template(
        one.chat, tools=one.tools, add_generation_prompt=one.parts[0][1], **how, **one.variables
    )


def marked_ids(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Return ids, and a mask with 1 for each token inside a ``{% generation %}`` block. Raises like ``chat_ids``."""
    found = render(tokenizer, [replace(conversation, marks=True)])
    encoded = _texts(tokenizer, found)
    ids = list(encoded["input_ids"][0])
    mask = [0] * len(ids)
    for start, end in found[0].spans:
        first, last = encoded.char_to_token(0, start), encoded.char_to_token(0, end - 1)
        if first is not None:
            stop = last + 1 if last is not None else len(ids)
            mask[first:stop] = [1] * (stop - first)
    return ids, mask


@contextmanager
def limit_rendering(seconds: float) -> Iterator[None]:
    """Set the time limit of a rendering in this process, and restore it at the end."""
    before, _workers.limit_s = _workers.limit_s, seconds
    try:
        yield
    finally:
        _workers.limit_s = before


def start_rendering() -> None:
    """Start a worker ahead of the first rendering, which then does not wait for its imports (about a second)."""
    _workers.start()


def stop_rendering() -> None:
    """Kill the worker processes, which also ends renderings that other threads are waiting for."""
    _workers.stop()


def _placeholder(value: Any) -> Any:
    """Replace a value that JSON cannot represent, as transformers does for templates."""
    item = getattr(value, "item", None)
    return item() if type(value).__module__ == "numpy" and item and not value.ndim else f"<{type(value).__name__}>"


class _Workers:
    """The worker processes of this process, at most ``LIMIT``. Another one starts if all are rendering.

    Attributes:
        limit_s: time limit of a rendering in seconds.
        processes: workers, idle or rendering.
    """

    LIMIT = 4

    def __init__(self) -> None:
        self.limit_s = RENDERING_S
        self.reset()

    def reset(self) -> None:
        """Drop the references to the processes without killing them: after a fork they belong to the parent."""
        self._slots = threading.BoundedSemaphore(self.LIMIT)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, request: bytes) -> list[dict[str, Any]] | None:
        """Return the replies, or None if the worker exceeded its time limit or was stopped.

        Raises:
            UserError: if the worker ended otherwise, for example because it cannot import its libraries.
        """
        with self._slots:
            process = self._take()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # interrupted: a later request must not read the reply to this one
                _kill(process)
                raise
            if not line.endswith(b"\n"):
                status = _exit_status(process)
                self.processes.remove(process)
                if status == -signal.SIGKILL:
                    return None
                what = f"the process that renders chat templates ended with exit status {status}."
                raise UserError(what, why="Its error is printed above.")
            self._idle.append(process)
            replies: list[dict[str, Any]] | None = json.loads(line)
            return replies

    def _take(self) -> subprocess.Popen[bytes]:
        """Return an idle worker, the last used one first, or a new one."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                break
            if process.poll() is None:
                return process
        return self._new()

    def _new(self) -> subprocess.Popen[bytes]:
        process = _start()
        self.processes.append(process)
        return process

    def start(self) -> None:
        """Start a worker if there is none."""
        if not self.processes:
            self._idle.append(self._new())

    def stop(self) -> None:
        for process in list(self.processes):
            _kill(process)


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process that has closed its output, and kill it if it does not end."""
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and the process that it forked."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _start() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "burnish.data.chat.render_worker"], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,  # Ctrl-C goes to the parent only
    )  # fmt: skip


_workers = _Workers()
os.register_at_fork(after_in_child=_workers.reset)
atexit.register(stop_rendering)
