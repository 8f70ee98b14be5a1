"""The nouns of a training run, in the order in which data becomes weights.

record (as read) -> example (typed) -> row (encoded, plain lists) -> batch (one micro-batch of tensors)
-> group (the micro-batches of one step) -> step (one weight update).
"""

# B sequences in a micro-batch, T tokens per sequence, V vocabulary

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from burnish.core.checkpoint import Checkpoints
    from burnish.core.events import CallbackHandler
    from burnish.core.meter import Meter
    from burnish.core.state import TrainerControl, TrainerState

IGNORE_INDEX = -100
"""The label of a position that is not learned (torch's default ``ignore_index``)."""

RoleName: TypeAlias = Literal["system", "user", "assistant", "function", "observation"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``function`` is an assistant's tool call (its content is JSON: one call or a list of calls), ``observation`` is a
    tool's answer. ``train`` overrides whether this turn is learned; ``weight`` scales the loss of its tokens.
    """

    role: RoleName
    content: str
    train: bool | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Example:
    """One record, typed. Exactly one of ``messages``, ``text``, ``completion`` is filled.

    Args:
        messages: the conversation, without the system message.
        system: its system message; None or "" lets the template's default speak.
        tools: JSON text of the list of tools the assistant may call, or "".
        text: plain text, for pretraining or already rendered.
        prompt: what precedes ``completion``; not learned.
        completion: what is learned, given ``prompt``.
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
    source: str = ""
    number: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """``data/train.json, record 17``: how an error names this example."""
        return f"{self.source}, record {self.number}"


class Row(TypedDict, total=False):
    """One encoded example: plain lists of the same length T."""

    input_ids: list[int]
    labels: list[int]  # IGNORE_INDEX where nothing is learned; not shifted: labels[t] belongs to input_ids[t]
    loss_weights: list[float]  # only where a message carried a weight other than 1
    seq_lengths: list[int]  # only in a pack: the lengths of the rows laid end to end in it


FlatRow: TypeAlias = "dict[str, array[Any]]"
"""A row whose columns are arrays, between the template and the place where rows are kept: no list is made of it."""


def as_lists(row: Row | FlatRow | None) -> Row | None:
    """The row with plain lists."""
    columns: Mapping[str, Any] = row or {}
    lists: Any = {name: values.tolist() if isinstance(values, array) else values for name, values in columns.items()}
    return None if row is None else lists


Batch: TypeAlias = dict[str, Any]
"""One micro-batch, ready for the model: ``input_ids`` (B, T), ``labels`` (B, T), and either ``attention_mask`` (B, T)
or, where sequences lie flat in one row, ``position_ids`` (1, T) that restart and ``cu_seq_lens_q`` (sequences + 1,)."""


@dataclass(frozen=True)
class Group:
    """The micro-batches of one step, and where the stream stands once they have been used."""

    batches: Sequence[Batch]
    cursor: Mapping[str, int]  # what Stream.load_state_dict takes
    epoch: float  # epochs passed once this step is done, fraction included
    num_rows: int = 0  # on this rank, blanks not counted
    num_tokens: int = 0  # on this rank, padding not counted


@dataclass(frozen=True)
class Loss:
    """What one micro-batch adds to the loss of its step.

    ``total`` is a sum over items, never a mean: the loop divides by the weight of the whole step, so the update does
    not depend on how the step was cut.
    """

    total: Tensor  # () sum over items, in nats
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # metric -> () sum over the same items
    outputs: Any = None  # the model's output, kept only where evaluation asked for it


@runtime_checkable
class Stateful(Protocol):
    """Something a checkpoint holds. The dict may nest and may hold tensors, numbers, strings, lists and None."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> Any: ...


class Objective(Protocol):
    """What is learned, as the loop asks it. How examples become rows and batches is said in ``objectives/base.py``."""

    def weight(self, batch: Batch) -> Tensor:
        """() the items of the batch that share the step's mean: label-bearing tokens, pairs, ..."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Of one micro-batch, as a sum over those items."""
        ...


class Engine(Protocol):
    """Where it runs: processes, devices, precision."""

    device: torch.device
    rank: int
    world_size: int
    scales_loss: bool  # float16 with a loss scale that finds its own size: a skipped step is part of that

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]: ...
    def to_device(self, batch: Batch) -> Batch: ...
    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: gradients are synced only on the last of a group."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """Around a forward pass: the autocast of the run."""
        ...

    def backward(self, loss: Tensor) -> None: ...
    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """() the gradient norm before clipping; ``max_norm`` 0 measures and does not clip."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, is_finite: Tensor) -> bool:
        """Apply the update unless ``is_finite`` () bool is false. Returns false where it is known, without a device
        read, that nothing was applied: the schedule stays where it is then."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """Concatenation over ranks along dimension 0, padded with IGNORE_INDEX along dimension 1 where needed."""
        ...

    def barrier(self) -> None: ...
    def unwrap(self, model: nn.Module) -> nn.Module: ...


class Stream(Stateful, Protocol):
    """What comes next: the groups of an epoch from where it stands, each with the cursor after it."""

    def groups(self) -> Iterator[Group]:
        """From the cursor to the end of the current epoch. May read ahead of what the loop has used."""
        ...

    def advance(self, group: Group) -> None:
        """``group`` has been used: the cursor, which a checkpoint holds, moves behind it."""
        ...

    @property
    def is_used_up(self) -> bool:
        """Whether the cursor stands behind the last group of its epoch."""
        ...

    def end_epoch(self) -> None:
        """The cursor moves to the start of the next epoch, wherever it stands in this one."""
        ...


class Adapter(Protocol):
    """Which weights move."""

    def attach(self, model: nn.Module) -> nn.Module: ...
    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Inside it the model computes what it did before training."""
        ...

    def save(self, model: nn.Module, folder: str) -> None: ...


@dataclass
class Run:
    """The parts of one training run, and no behaviour."""

    model: nn.Module  # as the engine prepared it
    objective: Objective
    engine: Engine
    stream: Stream
    optimizer: Any
    scheduler: Any
    state: TrainerState
    control: TrainerControl
    callbacks: CallbackHandler
    meter: Meter
    checkpoints: Checkpoints
    parts: dict[str, Stateful]  # everything a checkpoint holds, by name
    eval_sets: Mapping[str, Iterable[Batch]] = field(default_factory=dict)  # name ("" for a single one) -> batches
    evaluate: Callable[[Run, Iterable[Batch], str], dict[str, float]] = field(default=lambda run, batches, prefix: {})
    microstep: Callable[[Run, Batch, Tensor, bool], Loss] | None = None  # in place of the loop's own
    log: Callable[[Run, dict[str, Any]], None] | None = None  # in place of the loop's own
    flos_per_token: int = 0  # floating-point operations of forward and backward for one token
    logs_tokens: bool = False  # num_input_tokens_seen in every log
