"""The nouns of a training run, in the order in which data becomes weights.

record (as read) -> example (typed) -> row (encoded, plain lists) -> batch (one micro-batch of tensors)
-> group (the micro-batches of one step) -> step (one weight update).
"""

# B sequences in a micro-batch, T tokens per sequence, V vocabulary

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from burnish.core.parts import Part
    from burnish.core.run import Run

IGNORE_INDEX = -100
"""The label of a position that is not learned (torch's default ``ignore_index``)."""

Ids: TypeAlias = "array[int]"
"""Token ids, or labels, as 32-bit numbers: joined and written at the speed of memory, as no list is."""
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


class Row(TypedDict, total=False):
    """One encoded example: plain lists of the same length T, or of several sequences those of each."""

    input_ids: list[int]
    labels: list[int]  # IGNORE_INDEX where nothing is learned; not shifted: labels[t] belongs to input_ids[t]
    loss_weights: list[float]  # only where a message carried a weight other than 1
    seq_lengths: list[int]  # only in a pack: the lengths of the rows that were concatenated to it
    sequence: list[int]  # only where sums are wanted of each sequence in a batch: which one a token belongs to
    chosen_input_ids: list[int]  # a pair is a row of two sequences, each with labels of its own
    chosen_labels: list[int]
    rejected_input_ids: list[int]
    rejected_labels: list[int]
    margin: float
    reference_logps: float
    reference_kl_logps: float
    reference_chosen_logps: float  # in nats, where the reference's were computed before
    reference_rejected_logps: float
    tag: bool  # the verdict on an answer, and beside it the same prompt with another record's answer
    kl_input_ids: list[int]
    kl_labels: list[int]


FlatRow: TypeAlias = "dict[str, array[Any]]"
"""A row whose columns are arrays, as it goes from the template to the row store without becoming lists."""


def as_lists(row: Row | FlatRow | None) -> Row | None:
    """Convert the columns of a row to plain lists."""
    columns: Mapping[str, Any] = row or {}
    lists: Any = {name: values.tolist() if isinstance(values, array) else values for name, values in columns.items()}
    return None if row is None else lists


Batch: TypeAlias = dict[str, Any]
"""One micro-batch, ready for the model: ``input_ids`` (B, T), ``labels`` (B, T), and either ``attention_mask`` (B, T)
or, if padding-free (all sequences concatenated to one row), ``position_ids`` (1, T) that restart at each sequence and
``cu_seq_lens_q`` (sequences + 1,)."""


@dataclass(frozen=True)
class Group:
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
"""A plain tensor () is a sum over the items of the loss, and shares their weight."""


@dataclass(frozen=True)
class Loss:
    """The part of one micro-batch in the loss of its step.

    ``total`` is a sum over items, never a mean: the loop divides by the weight of the whole step, so the update does
    not depend on how the step was cut.
    """

    total: Tensor  # () sum over items, in nats
    sums: Mapping[str, Metric] = field(default_factory=dict)  # metric -> its sum, and the count that divides it
    outputs: Any = None  # the model's output, kept only where evaluation asked for it


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint can hold. Its dict may nest, and hold tensors, numbers, strings, lists and None."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> Any: ...


class Objective(Protocol):
    """A training objective as the loop sees it. ``objectives/base.py`` says how examples become rows and batches.

    A class that names this protocol as its base has the usual answers to all but ``weight`` and ``loss``.
    """

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The objective's own parts of a checkpoint: a moving baseline, a reference that follows the policy."""
        return {}

    def module(self, model: nn.Module) -> nn.Module:
        """The model, and what else is trained with it (a value head), as one module: the one that the engine prepares,
        whose parameters the optimizer moves, and whose ``state_dict`` a checkpoint holds."""
        return model

    def expand(self, run: Run, group: Group) -> Iterator[Group]:
        """The groups that are trained on in place of ``group``: itself, or what was made of it (answers to its
        prompts). The cursor of all but the last is None: the stream moves on after the last of them."""
        yield group

    def ready(self, module: nn.Module, batches: Sequence[Batch], engine: Engine) -> Sequence[Batch]:
        """Look at all micro-batches of a step on this rank before the first of them: add what is a function of the
        whole step (means, counts over ranks) or of another model (log-probabilities of a reference).

        Called once per step, before ``weight``. Whoever computes here does it without gradient, in evaluation mode
        (``burnish.core.modes.evaluating``).
        """
        return batches

    def evaluated(self, module: nn.Module, batches: Iterable[Batch], engine: Engine) -> Iterator[Batch]:
        """The batches of an evaluation set, ready one by one; what is a function of a whole step is one of the set."""
        for batch in batches:
            yield from self.ready(module, [engine.to_device(batch)], engine)

    def shown(self, values: dict[str, float]) -> dict[str, float]:
        """Complete the metrics of a log or an evaluation with those that follow from others."""
        return values

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters that train beside the model's: those of a head."""
        return ()

    def weight(self, batch: Batch) -> Tensor:
        """() the items of the batch that share the step's mean: label-bearing tokens, pairs, ..."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Compute the loss of one micro-batch as a sum over those items."""
        ...


class Engine(Protocol):
    """Processes, devices and precision of a run."""

    device: torch.device
    rank: int
    world_size: int
    scales_loss: bool  # float16 with a loss scale that finds its own size: a skipped step is part of that

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The engine's own parts of a checkpoint, such as a loss scale."""
        ...

    frees_weights: bool  # weights are there within a forward pass of the module from ``prepare`` alone: ZeRO-3
    splits_weights: bool  # between two passes each rank holds a part of each weight: FSDP, ZeRO-3
    is_sharded: bool  # each rank holds a part of the weights, and all have to ask together for whole ones

    def sharded(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts of a run as a checkpoint takes them, where each rank holds a piece of their tensors."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A weight as one tensor, where each rank holds a part. All ranks ask for the same ones in the same order."""
        ...

    def pieces(self, model: nn.Module) -> list[Tensor]:
        """This rank's tensors from which weights that train are gathered: what is written to them is in the next pass,
        behind ``drop_gathered``. Called where ``splits_weights``."""
        ...

    def drop_gathered(self, model: nn.Module) -> None:
        """Let go of weights that were gathered for a pass."""
        ...

    def other_modules(self) -> AbstractContextManager[None]:
        """The context of passes that call other modules than a pass of training does, as where an adapter is off."""
        ...

    def generating(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context of answers that the bare model gives, outside of the module that ``prepare`` returned."""
        ...

    def place(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Give the weights that train their format, and all of them their device, before the optimizer is made, which
        may keep copies of them; or keep in mind to do so when ``prepare`` shards them."""
        ...

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]: ...
    def to_device(self, batch: Batch) -> Batch: ...
    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of forward and backward of one micro-batch: gradients are synced on the last of a group only."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: the autocast of the run."""
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
        """Concatenation over ranks along dimension 0, of which each may have any number of rows, padded with
        IGNORE_INDEX along the others where needed."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Plain data of every rank, in the order of the ranks."""
        ...

    def barrier(self) -> None: ...
    def leave(self) -> None:
        """Leave the group of processes after a run that went well; no process waits for another any more."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module: ...


class Stream(Stateful, Protocol):
    """The stream of groups of an epoch, from the cursor on, each with the cursor that follows it."""

    def groups(self) -> Iterator[Group]:
        """Yield the groups from the cursor to the end of the current epoch. May read ahead of the loop."""
        ...

    def advance(self, group: Group) -> None:
        """Move the cursor, which a checkpoint holds, to that of ``group``, which has been used, if it has one."""
        ...

    @property
    def is_used_up(self) -> bool:
        """Return whether the cursor stands behind the last group of its epoch."""
        ...

    def end_epoch(self) -> None:
        """Move the cursor to the start of the next epoch, wherever it stands in this one."""
        ...

    def leave_out(self, items: Sequence[int]) -> None:
        """Take these items, as groups name them, in no step from the cursor on, in later epochs neither."""
        ...


class Adapter(Protocol):
    """A choice of the weights that are trained, and how: whole model, some layers, LoRA."""

    def attach(self, model: nn.Module) -> nn.Module: ...
    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The context in which the model computes as it did before training."""
        ...

    def save(self, model: nn.Module, folder: str) -> None: ...
