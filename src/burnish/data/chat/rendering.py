"""Render conversations with a chat template, in a process that can be stopped.

A chat template is a small program that comes with a model, from strangers. Jinja's sandbox keeps it from the files of
the machine, but not from its time and memory, and a thread that loops cannot be ended. So one worker process per
process of burnish renders (``render_worker.py``): it is started at the first rendering, takes any number of them, and
ends itself where one exceeds its time or its memory. Templates of burnish's own table are no programs and are
written in this process (``slots.py``).

    (found,) = render(tokenizer, [Conversation(chat)])
    (ids,) = chat_ids(tokenizer, [Conversation(chat, parts=[PROMPT])])
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from burnish.config.bounds import RENDERING_S
from burnish.config.errors import UserError
from burnish.data.images.family import Family
from burnish.loop.types import IMAGE

_REMEDY = "Correct the template, or set another one."


class UnreadableTemplate(ValueError):
    """The chat template cannot render a conversation. The text continues a sentence that begins with "dropped: "."""


Part: TypeAlias = "tuple[int | None, bool]"
"""A beginning of a conversation: its number of messages (None: all), and whether the prompt of an answer follows."""
WHOLE: Part = (None, False)
PROMPT: Part = (None, True)


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template.

    Args:
        parts: what is rendered, each by itself.
        marks: return the spans of the ``{% generation %}`` marks as well.
        variables: further variables of the template.
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
        spans: [start, end) in characters of what stands between ``{% generation %}`` marks, where asked for.
        error: set where the template cannot render it.
    """

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    error: UnreadableTemplate | None = None


def render(tokenizer: Any, conversations: Sequence[Conversation], template: str | None = None) -> list[Rendering]:
    """The texts of ``tokenizer.apply_chat_template``, for each part of each conversation in order.

    Args:
        template: Jinja text; default: the tokenizer's own.
    Raises:
        UserError: if a rendering exceeds its time limit.
    """
    named = [tokenizer.get_chat_template(template, each.tools) for each in conversations]
    templates = sorted(set(named))
    request = {
        "templates": templates, "variables": tokenizer.special_tokens_map, "seconds": RENDERING_S,
        "conversations": [
            (templates.index(name), each.chat, each.tools, each.parts, each.marks, each.variables)
            for name, each in zip(named, conversations, strict=True)
        ],
    }  # fmt: skip
    replies = _worker.ask(json.dumps(request, default=_placeholder).encode() + b"\n")
    if replies is None:
        what = f"the chat template took more than {RENDERING_S:g} s to render one conversation."
        raise UserError(what, why="It may contain nested loops.", remedy=_REMEDY)
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
    """The encoding of texts. Raises UnreadableTemplate."""
    for each in found:
        if each.error is not None:
            raise each.error
    return tokenizer([each.text for each in found], add_special_tokens=False)


def in_parts(text: str) -> list[dict[str, str]]:
    """A text with images as the parts that chat templates take."""
    first, *others = text.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def marked(found: Rendering, family: Family) -> Rendering:
    """A rendering in which the mark of each image has the text around it that the family's processor adds."""
    pieces = found.text.split(family.mark)
    added = len(family.own) - len(family.mark)
    places: list[int] = []
    for piece in pieces[:-1]:
        places.append((places[-1] + len(family.mark) if places else 0) + len(piece))
    spans = [(a + added * bisect_left(places, a), b + added * bisect_left(places, b)) for a, b in found.spans]
    return replace(found, text=family.own.join(pieces), spans=spans)


def chat_ids(tokenizer: Any, conversations: Sequence[Conversation]) -> list[list[int]]:
    """The ids of ``tokenizer.apply_chat_template``. Args: conversations: of one part each.

    Raises:
        UserError: as ``render``.
        UnreadableTemplate: if the template cannot render a conversation.
    """
    if type(tokenizer).apply_chat_template.__module__ != "transformers.tokenization_utils_base":
        return [_own_ids(tokenizer, each) for each in conversations]
    return _texts(tokenizer, render(tokenizer, conversations))["input_ids"]  # type: ignore[no-any-return]


def _own_ids(tokenizer: Any, one: Conversation) -> list[int]:
    """The ids of a tokenizer that overrides ``apply_chat_template``, as Mistral's does: it has no Jinja template."""
    found = tokenizer.apply_chat_template(
        one.chat, tools=one.tools, add_generation_prompt=one.parts[0][1], return_dict=True, **one.variables
    )
    return list(found["input_ids"])


def marked_ids(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids, and 1 for each token between ``{% generation %}`` marks. Errors as ``chat_ids``."""
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


def stop_rendering() -> None:
    """End the worker process, and with it the rendering that another thread waits for."""
    _worker.stop()


def _placeholder(value: Any) -> Any:
    """Replace a value that JSON has no type for, as transformers does for templates."""
    item = getattr(value, "item", None)
    return item() if type(value).__module__ == "numpy" and item and not value.ndim else f"<{type(value).__name__}>"


class _Worker:
    """The worker process of this process. Threads take turns."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the process, without ending it: after a fork it is the parent's."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> list[dict[str, Any]] | None:
        """The replies, None where the worker ended over one."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = _start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # interrupted: a later request must not read the reply to this one
                process.kill()
                raise
            if not line.endswith(b"\n"):
                process.kill()
                process.wait()
                return None
            replies: list[dict[str, Any]] = json.loads(line)
            return replies

    def stop(self) -> None:
        process = self._process
        if process is not None:
            process.kill()


def _start() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "burnish.data.chat.render_worker"], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,  # Ctrl-C is for the parent
    )  # fmt: skip


_worker = _Worker()
os.register_at_fork(after_in_child=_worker.reset)
atexit.register(stop_rendering)
