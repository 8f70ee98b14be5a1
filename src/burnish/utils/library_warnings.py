"""Hide warnings of libraries about each other, which a user of burnish cannot act on.

Every other warning of a library is shown.
"""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    # peft 0.21 reads a property that transformers 5.2x renamed.
    (r"`is_gradient_checkpointing` is deprecated", FutureWarning),
)
_LOGGED = {
    # transformers sets the loss type from the class's name; a class without one has the loss of causal models anyway.
    "transformers.modeling_utils": "`loss_type=None` was set in the config but it is unrecognized.",
}
"""Logger -> the beginning of its message."""


def hide_library_warnings() -> None:
    """Add filters for these warnings. Calling it again has no effect. A filter that a script adds later precedes."""
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    for name in _LOGGED:
        logging.getLogger(name).addFilter(_is_not_hidden)


def _is_not_hidden(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LOGGED[record.name])
