"""What transformers prints and raises while it loads and saves, held back or put into a sentence of burnish's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from burnish.core.errors import Problem, UserError


@contextmanager
def refused_conversions(where: str) -> Iterator[None]:
    """What transformers says of tensors that it cannot put together, as a sentence about the files."""
    try:
        yield
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        problem = Problem(
            "a tensor in memory is made of several in the files (experts, say), and some of those are missing or of "
            "another shape.",
            where=where,
            remedy="Fetch the model again.",
        )
        raise UserError(problem) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bar and report: what it would say is said by burnish, once."""
    from transformers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
