"""The nouns of a training run, in the order in which data becomes weights.

record (as read) -> example (typed) -> row (encoded, plain lists) -> batch (one micro-batch of tensors)
-> step batch (the micro-batches of one step) -> step (one weight update).
"""

# B sequences in a micro-batch, T tokens per sequence, V vocabulary

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_COLUMNS: dict[str, float] = {"loss_weights": 1.0, "sequence": 0}
"""Columns of a row, and keys of a batch, with a value per token -> the value where a row has none. Objectives add
theirs (``StageObjective.token_columns``)."""

INPUT_COLUMNS = {
    "content_hashes": 0, "image_features": 0, "rope_time": 0, "rope_height": 0, "rope_width": 0, "attention_rows": -1,
    "attention_blocks": 0,
}  # fmt: skip
"""Those of them that belong to a token as an input of the model; the others belong to it as a label."""
TOKEN_COLUMNS |= INPUT_COLUMNS

IGNORE_INDEX = -100
"""The label of a position that is not learned (torch's default ``ignore_index``)."""

Ids: TypeAlias = "array[int]"
"""Token ids, or labels, as 32-bit numbers: joined and written at the speed of memory, as no list is."""
RoleName: TypeAlias = Literal["system", "user", "assistant", "function", "observation"]


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of a message's content.

    Args:
        kind: ``text``, ``image``, ``audio`` or ``video``.
        value: the text; of an image a ``data.images.image.ImageFile``; of others where they lie.
    """

    kind: str
    value: Any


IMAGE = "\ufdd1"
"""Stands for an image in the text of a message: a Unicode noncharacter, never assigned."""

Content: TypeAlias = "str | tuple[ContentPart, ...]"
"""The content of a message: a text, or parts in their order where some are not text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``function`` is an assistant's tool call (its content is JSON: one call or a list of calls), ``observation`` is a
    tool's answer. ``train`` overrides whether this turn is learned; ``weight`` scales the loss of its tokens. ``raw``
    is the message as its record has it, for chat templates that are given messages unchanged.
    """

    role: RoleName
    content: Content
    train: bool | None = None
    weight: float = 1.0
    raw: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[ContentPart, ...]:
        """The content as parts; a text is one part."""
        return (ContentPart("text", self.content),) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The content as one text, ``IMAGE`` for each image. Raises UserError where a part is something else."""
        if isinstance(self.content, str):
            return self.content
        if others := sorted({part.kind for part in self.content} - {"text", "image"}):
            what = f"a message holds {', '.join(others)}; only text and images are supported here."
            raise UserError(what, remedy="Remove these parts, or write an objective that encodes them.")
        return "".join(IMAGE if part.kind == "image" else part.value for part in self.content)

    @property
    def images(self) -> list[Any]:
        """The images of the content, in their order."""
        return [] if isinstance(self.content, str) else [part.value for part in self.content if part.kind == "image"]


Answer: TypeAlias = "tuple[Message, ...] | str"
"""The answer to a prompt: messages, usually one, or a text where the prompt is a text."""


@dataclass(frozen=True, slots=True)
class Example:
    """One record, typed. Exactly one of ``messages``, ``text``, ``completion`` is filled; of a pair ``messages`` or
    ``prompt``, which is what its two answers follow.

    Args:
        messages: the conversation, without the system message.
        system: its system message; None or "" lets the template's default speak.
        tools: JSON text of the list of tools the assistant may call, or "".
        text: plain text, for pretraining or already rendered.
        prompt: what precedes ``completion``; not learned.
        completion: what is learned, given ``prompt``.
        chosen, rejected: the two answers of a pair, of one kind.
        tag: whether the last answer of ``messages``, or ``completion``, is a desirable one.
        other: an answer to another prompt, which a verdict is held against (KTO).
        margin: how much better the chosen answer is.
        source: where it was read: file or data set name.
        number: 1-based record number in ``source``, as a person would count.
        extra: further columns that an objective may ask for.
    """

    messages: tuple[Message, ...] = ()
    system: str | None = None
    tools: str = ""
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chosen: Answer | None = None
    rejected: Answer | None = None
    tag: bool | None = None
    other: Answer | None = None
    margin: float | None = None
    source: str = ""
    number: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """``data/train.json, record 17``: how an error names this example."""
        return f"{self.source}, record {self.number}"


Row: TypeAlias = dict[str, Any]
"""One encoded example: column -> value. An objective may add columns of its own: numbers, booleans, texts, lists.

Columns of token ids are arrays on their way from the template to the row store, and lists from there on (``as_lists``).
Those that burnish knows:

- ``input_ids``, ``labels``: T numbers each; a label is IGNORE_INDEX where nothing is learned, and not shifted:
  ``labels[t]`` belongs to ``input_ids[t]``.
- ``loss_weights``: T floats, only where a message has a weight other than 1.
- ``images``: only with images, what an ``ImageFile`` holds, with the tokens that stand for it; in a pair those of the
  prompt, which both sequences begin with. ``kl_images``: those of the second sequence of KTO.
- ``seq_lengths``: only in a pack, the lengths of the rows that were concatenated to it.
- ``sequence``: T numbers, only where sums are needed of each sequence in a batch: which one a token belongs to.
- ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels``: the two sequences of a pair.
- ``margin``: how much better the chosen answer is.
- ``tag``, ``kl_input_ids``, ``kl_labels``: the label of KTO, and the prompt with another record's answer.
- ``reference_logps`` and its like: in nats, where the reference's log-probabilities were computed before.
"""


def as_lists(row: Row | None) -> Row | None:
    """Convert the columns of a row to plain lists."""
    columns: Mapping[str, Any] = row or {}
    lists: Any = {name: values.tolist() if isinstance(values, array) else values for name, values in columns.items()}
    return None if row is None else lists


Batch: TypeAlias = dict[str, Any]
"""One micro-batch, ready for the model: ``input_ids`` (B, T), ``labels`` (B, T), and either ``attention_mask`` (B, T)
or, if padding-free (all sequences concatenated to one row), ``position_ids`` (1, T) that restart at each sequence and
``cu_seq_lens_q`` (sequences + 1,)."""


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step, and where the stream stands once they have been used."""

    batches: Sequence[Batch]
    cursor: Mapping[str, Any] | None  # what Stream.load_state_dict takes; None: the stream stays where it is
    epoch: float  # epochs passed once this step is done, fraction included
    num_rows: int = 0  # on this rank, blanks not counted
    num_tokens: int = 0  # on this rank, padding not counted
    items: Sequence[int] = ()  # rows or packs of the step, over all ranks, by their index in the training set


Reduction: TypeAlias = Literal["mean", "min", "max", "last"]


@dataclass(frozen=True)
class Sum:
    """A metric over items of its own.

    Args:
        total: () the sum over them; for a reduction other than "mean" the number itself.
        count: () how many they are; 0 where a micro-batch has none.
        reduction: how two values become one. "last" is the mean over ranks of the last value of each.
    """

    total: Tensor
    count: Tensor
    reduction: Reduction = "mean"


Metric: TypeAlias = "Tensor | Sum"
"""A plain tensor () is a sum over the items of the loss, and is divided by their number."""


@dataclass(frozen=True)
class Loss:
    """The part of one micro-batch in the loss of its step.

    ``total`` is a sum over items, never a mean: the loop divides by the items of the whole step, so the update does
    not depend on how the step was cut.
    """

    total: Tensor  # () sum over items, in nats
    sums: Mapping[str, Metric] = field(default_factory=dict)  # metric -> its sum, and the count that divides it
    outputs: Any = None  # numbers of each row that an evaluation keeps beside the loss, such as rewards
