"""``DataCollatorForCompletionOnlyLM``, the collator of TRL before 0.20, which finds the responses in token ids.

In: rows with ``input_ids``. Out: a batch on the CPU whose labels are the tokens of responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.loop.types import IGNORE_INDEX, Batch
from burnish.trainer import notes
from burnish.trainer.trl.sft.collator import DataCollatorForLanguageModeling

Marker = str | Sequence[int]


class DataCollatorForCompletionOnlyLM:
    """Computes the loss on responses only, which follow ``response_template`` in the text.

    Without ``instruction_template``, everything after the last ``response_template`` of a row is trained. With it, the
    row is a conversation: everything between a ``response_template`` and the next ``instruction_template`` is trained.
    A row without them has no loss, with a warning. Unlike in TRL, an EOS token that is also the padding token is
    trained.

    Args:
        response_template: text before a response, or its ids. A text is tokenized without its context, so that its
            first and last tokens may differ from those in a row; ids avoid this.
        instruction_template: text before an instruction, or its ids.
        tokenizer: tokenizes texts, and has the padding token.
        mlm: must be False.
        ignore_index: label of tokens without loss; must be -100.
        padding_free: concatenate the rows to one.
        pad_to_multiple_of: round the width up to a multiple.
        return_tensors: only "pt" is supported.

    Raises:
        ValueError: for a missing tokenizer, one without a padding token, an empty text, or another value than those.
    """

    def __init__(
        self, response_template: Marker, instruction_template: Marker | None = None, tokenizer: Any = None,
        mlm: bool = False, ignore_index: int = IGNORE_INDEX, padding_free: bool = False,
        pad_to_multiple_of: int | None = None, return_tensors: str = "pt",
    ) -> None:  # fmt: skip
        if tokenizer is None or tokenizer.pad_token_id is None:
            received = "None" if tokenizer is None else "a tokenizer without one"
            raise ValueError(f"`tokenizer` must be a tokenizer with a padding token. Received: {received}.")
        for name, value, only in (
            ("mlm", mlm, False), ("ignore_index", ignore_index, IGNORE_INDEX), ("return_tensors", return_tensors, "pt")
        ):  # fmt: skip
            if value != only:
                raise ValueError(f"`{name}` must be {only!r}. Received: {value!r}.")
        self.tokenizer, self.ignore_index = tokenizer, ignore_index
        self.response_template, self.instruction_template = response_template, instruction_template
        self.response_token_ids = self._ids("response_template", response_template)
        self.instruction_token_ids = (
            None if instruction_template is None else self._ids("instruction_template", instruction_template)
        )
        self._collate = DataCollatorForLanguageModeling(
            tokenizer.pad_token_id, padding_free, pad_to_multiple_of=pad_to_multiple_of
        )

    def _ids(self, name: str, marker: Marker) -> list[int]:
        ids = self.tokenizer.encode(marker, add_special_tokens=False) if isinstance(marker, str) else list(marker)
        if not ids:
            raise ValueError(f"`{name}` must have at least one token. Received: {marker!r}.")
        return ids

    def __call__(self, examples: Sequence[Any]) -> Batch:
        ids = [list(map(int, example["input_ids"])) for example in examples]
        return self._collate([{"input_ids": row, "labels": self.labels_of(row)} for row in ids])

    torch_call = __call__

    def labels_of(self, ids: list[int]) -> list[int]:
        """The ids of a row, ``ignore_index`` outside of its responses."""
        begins = _ends_of(ids, self.response_token_ids)
        if not begins:
            self._warn("response", self.response_template)
            return [self.ignore_index] * len(ids)
        if self.instruction_token_ids is None:
            spans = [(begins[-1], len(ids))]
        else:
            size = len(self.instruction_token_ids)
            instructions = [end - size for end in _ends_of(ids, self.instruction_token_ids)]
            if not instructions:
                self._warn("instruction", self.instruction_template)
                return [self.ignore_index] * len(ids)
            spans = [(begin, next((at for at in instructions if at >= begin), len(ids))) for begin in begins]
        labels = [self.ignore_index] * len(ids)
        for begin, end in spans:
            labels[begin:end] = ids[begin:end]
        return labels

    def _warn(self, kind: str, marker: Marker | None) -> None:
        notes.warn(
            f"A row has no loss, because its tokens do not contain the {kind}_template {marker!r}. The tokens of a "
            "text depend on its context: pass the ids that the template has in a row, or increase max_length if rows "
            "are truncated.",
            UserWarning,
        )


def _ends_of(ids: Sequence[int], marker: Sequence[int]) -> list[int]:
    """The index after each occurrence of ``marker``."""
    size = len(marker)
    return [at + size for at in range(len(ids) - size + 1) if list(ids[at : at + size]) == list(marker)]
