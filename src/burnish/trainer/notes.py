"""Warnings of the Trainer classes, issued by the main process only."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

from transformers.utils import logging as transformers_logging

from burnish.report.console import is_main_process
from burnish.utils.library_warnings import hide_library_warnings

_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_PACKAGE = __name__.partition(".")[0]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn``, located at the line of the script that called burnish."""
    if is_main_process():
        frames = walk_stack(sys._getframe(1))
        level = next((n for n, (frame, _) in enumerate(frames, 2) if not _is_burnish_frame(frame)), 2)
        warnings.warn(message, category, stacklevel=level)


def _is_burnish_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of burnish, including the generated methods of its dataclasses."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def _is_shown(record: logging.LogRecord) -> bool:
    return is_main_process() or not record.pathname.startswith(_PACKAGE_FOLDER)


hide_library_warnings()

logger = transformers_logging.get_logger("transformers.trainer")
"""The log of the Trainer classes. It is transformers' own, so that the log level that a script sets applies here."""
logger.addFilter(cast(Any, _is_shown))
