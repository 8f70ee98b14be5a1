"""The family of objectives: what is learned, by the name of the stage.

A member is a class ``(options, template, tokenizer) -> Objective``. What a run asks of it, in order:

    objective.encode(examples, tally)   rows, before a weight is read
    objective.fit(model, collate)       questions to the model; sentences for a person
    objective.module(model)             the model and its loss as one module, for the engine to wrap
    objective.collate(rows)             a micro-batch
    objective.weight(batch)             how many items share the mean
    objective.loss(module, batch)       their loss, as a sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from burnish.core.registry import Registry
from burnish.core.types import Batch, Example, FlatRow, Loss, Row

Collate: TypeAlias = Callable[[Sequence[Row]], Batch]


class Encoder(Protocol):
    """What an objective asks of a template (``data/``)."""

    @property
    def fingerprint(self) -> str: ...
    def encode_flat(self, examples: Sequence[Example], tally: Any) -> list[FlatRow | None]: ...
    def encode_text(self, examples: Sequence[Example], tally: Any, cut: bool = True) -> list[FlatRow | None]: ...


class StageObjective(Protocol):
    """``core.types.Objective`` with what a run asks of it besides."""

    collate: Collate

    @property
    def fingerprint(self) -> str: ...
    def encode(self, examples: Sequence[Example], tally: Any, cut: bool = True) -> Sequence[Row | FlatRow | None]: ...
    def fit(self, model: nn.Module, collate: Collate) -> list[str]: ...
    def module(self, model: nn.Module) -> nn.Module: ...
    def weight(self, batch: Batch) -> Tensor: ...
    def loss(self, module: nn.Module, batch: Batch) -> Loss: ...


OBJECTIVES: Registry[Callable[[Any, Any, Any], StageObjective]] = Registry("stage")
