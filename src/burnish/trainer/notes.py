"""Warnings of the Trainer classes, issued by the main process only."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, cast

from transformers.utils import logging as transformers_logging

from burnish.report.console import is_main_process

_OURS = str(Path(__file__).parents[1])


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """``warnings.warn`` with the same meaning of ``stacklevel``."""
    if is_main_process():
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def _is_for_a_person(record: logging.LogRecord) -> bool:
    return is_main_process() or not record.pathname.startswith(_OURS)


logger = transformers_logging.get_logger("transformers.trainer")
"""The log of the Trainer classes. It is transformers' own, so that the log level that a script sets applies here."""
logger.addFilter(cast(Any, _is_for_a_person))
