"""Record on an exception the activity that it interrupted.

    with annotate_errors(Activity.BACKWARD):
        parallel.backward(loss)

An exception that leaves the block gets the activity as an attribute. The innermost block counts. Messages about lack of
memory, and their suggestions, depend on it (``run/recovery/failure.py``).
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import TracebackType
from typing import Any, NamedTuple


class Activity(Enum):
    LOAD_MODEL = auto()
    FORWARD = auto()
    BACKWARD = auto()
    UPDATE = auto()
    EVALUATE = auto()
    PREDICT = auto()
    SAVE = auto()


class Interrupted(NamedTuple):
    """The activity that an exception interrupted, and the number of tokens of its micro-batch, or None."""

    activity: Activity
    num_tokens: int | None


_NAME = "burnish_activity"


class annotate_errors:
    """Context manager that records ``activity`` on exceptions that leave the block.

    Args:
        activity: what the block does.
        batch: the micro-batch; its tokens are counted only if an exception is raised.
    """

    def __init__(self, activity: Activity, batch: Mapping[str, Any] | None = None) -> None:
        self.activity, self.batch = activity, batch

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        inner = interrupted_activity(error)
        ids = (self.batch or {}).get("input_ids")
        num_tokens = None if ids is None else int(ids.numel())
        activity, tokens = inner or (self.activity, None)
        setattr(error, _NAME, Interrupted(activity, num_tokens if tokens is None else tokens))


def interrupted_activity(error: BaseException) -> Interrupted | None:
    """The activity that ``error`` interrupted; None if it was raised outside of all blocks."""
    return getattr(error, _NAME, None)
