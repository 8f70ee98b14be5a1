"""The family of objectives, by the name of the stage.

A member is a class ``(options, template, tokenizer) -> Objective``. A run calls, in this order:

    objective.encode(examples, tally)         rows, before a weight is read
    objective.inspect(rows, rows_per_step)    remarks on the training rows
    objective.fit(fitted, collate)            takes over what the model can do; sentences for the user
    objective.module(model)                   the model and its loss as one module, for the engine to wrap
    objective.setup(module)                   once, with the module as the engine prepared it
    objective.collate(rows)                   a micro-batch
    objective.rollout(module, step_batch)     the step batches to train on in place of one: responses to prompts
    objective.prepare_step(module, batches)   adds to batches what depends on the whole step
    objective.num_items(batch)                the number of items that share the mean
    objective.loss(module, batch)             their loss, as a sum
    objective.report(values)                  completes the metrics of a log or an evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import nn

from burnish.config.registry import Registry
from burnish.kernels.probe import Fitted
from burnish.loop.protocols import Objective
from burnish.loop.types import Batch, Example, Row

Collate: TypeAlias = Callable[[Sequence[Row]], Batch]


class RowEncoder(Protocol):
    """The part of a template (``data/``) that objectives use."""

    @property
    def fingerprint(self) -> str: ...
    def encode_flat(self, examples: Sequence[Example], tally: Any) -> list[Row | None]: ...
    def encode_text(self, examples: Sequence[Example], tally: Any, truncate: bool = True) -> list[Row | None]: ...
    def encode_pairs(self, examples: Sequence[Example], tally: Any) -> list[Row | None]: ...
    def encode_verdicts(self, examples: Sequence[Example], tally: Any) -> list[Row | None]: ...


class StageObjective(Objective, Protocol):
    """``core.protocols.Objective`` with the methods that a run needs besides."""

    collate: Collate
    template: RowEncoder

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the rows of the same examples would change."""
        return f"{type(self).__name__} {self.template.fingerprint}"

    @property
    def metrics(self) -> Sequence[str] | None:
        """Names of the metrics of an evaluation; None where they are not known beforehand."""
        return None

    def encode(self, examples: Sequence[Example], tally: Any, truncate: bool = True) -> Sequence[Row | None]: ...
    def inspect(self, rows: Sequence[Row], rows_per_step: int) -> list[str]:
        """Remarks on the training rows. Raises UserError where nothing can be learned from them."""
        return []

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        """Tell whether tokens that no loss depends on may be left out. Args: model: need have no weights."""
        return False

    def fit(self, fitted: Fitted, collate: Collate) -> list[str]: ...


OBJECTIVES: Registry[Callable[[Any, Any, Any], StageObjective]] = Registry("stage")
