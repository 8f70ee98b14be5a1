"""Bounds on what a chat template may take: it is a small program, and comes with a model or from a stranger.

    refuse_excess(text)         no product or power with a number beyond all use, which would be computed at once
    with within(): ...            no rendering longer than that

transformers renders templates in Jinja's sandbox, which keeps them from the machine, and not from its time and memory.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from burnish.config.bounds import LARGEST_FACTOR, LARGEST_POWER, RENDERING_S
from burnish.config.errors import UserError

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class TooLong(BaseException):
    """A rendering that is stopped. No template and no library catches it."""


@lru_cache(maxsize=64)
def refuse_excess(text: str) -> None:
    """Raise UserError for a template that multiplies by, or raises to, a number that fills all memory. What cannot be
    read as Jinja is left to whoever renders it."""
    from jinja2 import Environment, TemplateError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(_GENERATION.sub("", text))
    except (TemplateError, RecursionError):
        return
    for node in tree.find_all((nodes.Mul, nodes.Pow)):
        limit = LARGEST_POWER if isinstance(node, nodes.Pow) else LARGEST_FACTOR
        for side in (node.left, node.right):
            value = getattr(side, "value", 0)
            if isinstance(value, int | float) and abs(value) > limit:
                sign = "**" if isinstance(node, nodes.Pow) else "*"
                what = f"line {node.lineno} of the chat template computes {sign} {value}, which fills the memory."
                raise UserError(what, remedy="Correct the template, or name another one.")


@contextmanager
def within(seconds: float = RENDERING_S) -> Iterator[None]:
    """Raise UserError where the block takes longer. In a thread, or under somebody else's alarm, there is no bound."""
    is_free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None)
    if threading.current_thread() is not threading.main_thread() or not is_free:
        yield
        return
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TooLong:
        what = f"the chat template did not come to an end within {seconds:g} s for one conversation."
        raise UserError(
            what, why="It may hold loops within loops.", remedy="Correct the template, or name another one."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


@contextmanager
def bounded(tokenizer: Any) -> Iterator[None]:
    """Both bounds, around a rendering by the tokenizer's own template or templates.

    Raises:
        UserError: as ``refuse_excess`` and ``within``.
    """
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template or ""]:
        refuse_excess(text)
    with within():
        yield
