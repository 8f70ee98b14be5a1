"""Suppress the output of transformers while it loads and saves, and convert its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from burnish.config.errors import UserError


@contextmanager
def explain_conversion_errors(where: str) -> Iterator[None]:
    """Convert transformers' error about tensors that it cannot combine to a UserError about the files."""
    try:
        yield
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise UserError(
            "a tensor of the model is combined from several tensors in the files (such as experts), and some of "
            "those are missing or have a different shape.", where, remedy="Download the model again.",
        ) from error  # fmt: skip


@contextmanager
def suppress_loading_messages() -> Iterator[None]:
    """Suppress transformers' progress bar and report in the ``with`` block. burnish prints their content once."""
    from transformers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if level != logging.ERROR:  # setting a level clears the cache of every logger of the process
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if logging.get_verbosity() != level:
            logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
