"""The types of a training run, in the order in which data becomes weights.

record (as read) -> example (typed) -> row (encoded, plain lists) -> batch (one micro-batch of tensors)
-> step batch (the micro-batches of one step) -> step (one weight update).
"""

# B sequences in a micro-batch, T tokens per sequence, V vocabulary

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_COLUMNS: dict[str, float] = {"loss_weights": 1.0, "sequence": 0}
"""Per-token columns of a row, and keys of a batch -> default value. Objectives add theirs
(``StageObjective.token_columns``).
"""

INPUT_COLUMNS = {
    "content_hashes": 0, "image_features": 0, "rope_time": 0, "rope_height": 0, "rope_width": 0, "attention_rows": -1,
    "attention_blocks": 0,
}  # fmt: skip
"""The token columns that are inputs of the model. The others belong to a token as a label."""
TOKEN_COLUMNS |= INPUT_COLUMNS

IGNORE_INDEX = -100
"""Label of a position without loss (torch's default ``ignore_index``)."""

Ids: TypeAlias = "array[int]"
"""Token ids or labels as 32-bit integers. Arrays are faster than lists to concatenate and write."""
RoleName: TypeAlias = Literal["system", "user", "assistant", "function", "observation"]
REQUEST_ROLES: Final = ("user", "observation")
"""Roles of the messages that a response follows."""
RESPONSE_ROLES: Final = ("assistant", "function")
"""Roles of the messages that a model writes: answers and tool calls."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """One part of a message's content.

    Args:
        kind: ``text``, ``image``, ``audio`` or ``video``.
        value: the text; for an image or a video a ``data.images.image_file.ImageFile``; for audio the path or URL.
    """

    kind: str
    value: Any


IMAGE = "\ufdd1"
"""Placeholder of an image in the text of a message: a Unicode noncharacter."""
VIDEO = "\ufdd2"
"""The same for a video."""
_MARKS = {"image": IMAGE, "video": VIDEO}

Content: TypeAlias = "str | tuple[ContentPart, ...]"
"""Content of a message: a text, or a sequence of parts."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``function`` is an assistant's tool call (its content is JSON: one call or a list of calls), ``observation`` is a
    tool's result. ``train`` overrides whether this turn is trained on; ``weight`` scales the loss of its tokens.
    ``raw`` is the message as in its record, for chat templates that expect unchanged messages. With ``has_reasoning``,
    the content begins with reasoning between ``<think>`` and ``</think>`` that the record had in a key of its own.
    """

    role: RoleName
    content: Content
    train: bool | None = None
    weight: float = 1.0
    raw: Mapping[str, Any] | None = field(default=None, repr=False)
    has_reasoning: bool = False

    @property
    def parts(self) -> tuple[ContentPart, ...]:
        """The content as parts. A text is one part."""
        return (ContentPart("text", self.content),) if isinstance(self.content, str) else self.content

    @property
    def texts(self) -> list[str]:
        """The texts of the content, in order."""
        if isinstance(self.content, str):
            return [self.content]
        return [part.value for part in self.content if part.kind == "text"]

    @property
    def text(self) -> str:
        """The content as one text, with ``IMAGE`` for each image and ``VIDEO`` for each video.

        Raises:
            UserError: if a part is none of text, image and video.
        """
        if isinstance(self.content, str):
            return self.content
        if others := sorted({part.kind for part in self.content} - {"text", *_MARKS}):
            what = f"a message contains {', '.join(others)}; only text, images and videos are supported here."
            raise UserError(what, remedy="Remove these parts, or write an objective that encodes them.")
        return "".join(_MARKS.get(part.kind) or part.value for part in self.content)

    @property
    def images(self) -> list[Any]:
        """The images and videos of the content, in order."""
        return [] if isinstance(self.content, str) else [part.value for part in self.content if part.kind in _MARKS]


Answer: TypeAlias = "tuple[Message, ...] | str"
"""The response to a prompt: messages, usually one, or a text if the prompt is a text."""


@dataclass(frozen=True, slots=True)
class Example:
    """One typed record. Exactly one of ``messages``, ``text``, ``completion`` is set. For a pair, ``messages`` or
    ``prompt`` holds what precedes its two responses.

    Args:
        messages: the conversation, without the system message.
        system: the system message; None or "" selects the template's default.
        tools: JSON text of the list of available tools, or "".
        text: plain text, for pretraining or already rendered.
        prompt: text before ``completion``, without loss.
        completion: text to train on, given ``prompt``.
        chosen, rejected: the two responses of a pair, of the same type.
        tag: whether the last response of ``messages``, or ``completion``, is desirable.
        other: a response to another prompt, for KTO's KL term.
        margin: margin between the chosen and the rejected response.
        source: file or dataset name that it was read from.
        number: 1-based record number in ``source``.
        extra: further columns, for objectives that use them.
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
        """``data/train.json, record 17``: the location of this example for error messages."""
        return f"{self.source}, record {self.number}"

    @property
    def response(self) -> Message | None:
        """The last message if the model writes it, else None."""
        return self.messages[-1] if self.messages and self.messages[-1].role in RESPONSE_ROLES else None

    @property
    def request(self) -> tuple[Message, ...]:
        """The messages before ``response``; all messages if there is none."""
        return self.messages if self.response is None else self.messages[:-1]

    def with_answer(self, side: str) -> Example:
        """Return the conversation or text with one response of a pair. Args: side: "chosen" or "rejected"."""
        alone, answer = replace(self, chosen=None, rejected=None, margin=None), getattr(self, side)
        if isinstance(answer, str):
            return replace(alone, completion=answer)
        return replace(alone, messages=(*self.messages, *answer))


Row: TypeAlias = dict[str, Any]
"""One encoded example: column -> value. An objective may add columns: numbers, booleans, texts, lists.

Columns of token ids are arrays between the template and the row store, and lists from there on (``as_lists``). Columns
used by burnish:

- ``input_ids``, ``labels``: T numbers each. A label is IGNORE_INDEX at positions without loss. Labels are not shifted:
  ``labels[t]`` belongs to ``input_ids[t]``.
- ``loss_weights``: T floats, only if a message has a weight other than 1.
- ``images``: only with images; the fields of each ``ImageFile`` and its tokens. For a pair, the images of the prompt,
  which both sequences start with. ``kl_images``: those of the second sequence of KTO.
- ``seq_lengths``: only in a pack; the lengths of the concatenated rows.
- ``sequence``: T numbers, only if sums per sequence are needed; the index of the sequence of each token.
- ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels``: the two sequences of a pair.
- ``margin``: margin between the chosen and the rejected response.
- ``tag``, ``kl_input_ids``, ``kl_labels``: the label of KTO, and the prompt with another record's response.
- ``reference_logps`` and similar: in nats, if the reference's log-probabilities were precomputed.
"""


def as_lists(row: Row | None) -> Row | None:
    """Convert the columns of a row to plain lists."""
    columns: Mapping[str, Any] = row or {}
    lists: Any = {name: values.tolist() if isinstance(values, array) else values for name, values in columns.items()}
    return None if row is None else lists


Batch: TypeAlias = dict[str, Any]
"""One micro-batch for the model: ``input_ids`` (B, T), ``labels`` (B, T), and ``attention_mask`` (B, T). If
padding-free (all sequences concatenated to one row), it has ``position_ids`` (1, T), which restart at each sequence,
and ``cu_seq_lens_q`` (sequences + 1,) in place of the mask."""


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step, and the loader's cursor (its position in the data) after them."""

    batches: Sequence[Batch]
    cursor: Mapping[str, Any] | None  # for Loader.load_state_dict; None: the loader does not move
    epoch: float  # epochs completed after this step, as a fraction
    num_rows: int = 0  # examples on this rank, including each of a pack, without padding rows
    num_tokens: int = 0  # on this rank, without padding
    indices: Sequence[int] = ()  # of the rows or packs of the step in the training set, over all ranks


Reduction: TypeAlias = Literal["mean", "min", "max", "last"]


@dataclass(frozen=True)
class Sum:
    """A metric with its own count.

    Args:
        total: () sum over the counted items; the value itself if ``reduction`` is not "mean".
        count: () number of items; 0 if a micro-batch has none.
        reduction: how two values are combined. "last" is the mean over ranks of the last value of each.
    """

    total: Tensor
    count: Tensor
    reduction: Reduction = "mean"


Metric: TypeAlias = "Tensor | Sum"
"""A plain tensor () is a sum over the items of the loss and is divided by their number."""


@dataclass(frozen=True)
class Loss:
    """The contribution of one micro-batch to the loss of its step.

    ``total`` is a sum over items, never a mean. The loop divides it by the number of items of the whole step, so the
    update does not depend on how the step was divided.
    """

    total: Tensor  # () sum over items, in nats
    sums: Mapping[str, Metric] = field(default_factory=dict)  # metric name -> its sum, and its count
    outputs: Any = None  # per-row values that an evaluation collects, such as rewards
