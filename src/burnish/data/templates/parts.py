"""The seams of a template: the formatting of its conversations, and what encoders of other rows read of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from burnish.core.types import Example, Ids
from burnish.data.tally import Tally
from burnish.data.templates.labels import Ends, TemplateChoices, Turn
from burnish.data.templates.table import TemplateSpec
from burnish.data.tokens.encoder import Encoder


class TemplateFormat(Protocol):
    """The formatting of conversations: by a named template (``slots.py``) or by Jinja (``chat_template.py``)."""

    encoder: Encoder

    @property
    def closing_word(self) -> str | None:
        """The token that closes a row, where turns have no end token of their own."""
        ...

    def fit(self) -> None: ...
    def answering_last(self) -> TemplateFormat:
        """The same where only the last answer is learned, so that thoughts of earlier ones may go."""
        ...

    def turns(self, examples: Sequence[Example], tally: Tally) -> list[list[Turn] | None]: ...
    def prompt(self, example: Example) -> list[int]: ...
    def end_words(self) -> tuple[str, ...]: ...
    def jinja(self) -> str | dict[str, str]: ...
    def identity(self) -> Any: ...


class TemplateParts(Protocol):
    """A template (``rows.py``), as far as rows of preferences are made with it."""

    form: TemplateFormat
    options: TemplateChoices
    tokenizer: Any
    spec: TemplateSpec | None
    cutoff_len: int

    def end_ids(self) -> frozenset[int]: ...
    def opening_ids(self) -> Ids: ...


def ends_of(template: TemplateParts, form: TemplateFormat) -> tuple[int | None, Ends]:
    """The id that closes a row, where turns have no end token of their own, and the ids of end tokens."""
    word = form.closing_word
    closing = None if word is None else int(template.tokenizer.convert_tokens_to_ids(word))
    return closing, Ends(template.end_ids(), closing if template.spec else None)
