"""Base of objectives that compare the log-probabilities of responses under the policy and under a reference.

Nothing is a mean over a micro-batch. The reference's log-probabilities are computed once per step, before the first
backward pass.
"""

# S sequences

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from burnish.checkpoint.parts import Stateful
from burnish.config.errors import UserError
from burnish.kernels.elementwise import rounding_as_trained
from burnish.kernels.probe import Capabilities, Head, find_head, makes_some_logits, unwrap_peft
from burnish.kernels.token_logps import LogpRules
from burnish.loop.modes import evaluating
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Row
from burnish.losses.base import Collate, RowEncoder, StageObjective
from burnish.losses.lm import LossChoices, aux_coefficient, head_for_loss, not_configured
from burnish.losses.preference_options import PairLossChoices
from burnish.losses.reference import MovingReference, Reference
from burnish.losses.sequence_logps import SequenceModel, SequenceValues
from burnish.utils.patching import PatchOptions


class PairChoices(PairLossChoices, PatchOptions, LossChoices):
    """Options of losses over responses."""


class AnswersObjective(StageObjective):
    """Base of training on pairs and on labelled responses: log-probabilities under policy and reference.

    Args:
        options: the flat options.
        template: examples -> rows.
        tokenizer: not used; part of the interface.

    Attributes:
        reference: set by the caller if ``needs_reference``.
    """

    learning_rates = (5e-7, 5e-6)
    batch_keys = frozenset({"reference", "mean_row", "baseline", "factors"})
    disables_dropout = True
    logs_rewards = True
    needs_sum_of_squares = False
    needs_reference = True

    def __init__(self, options: PairChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        self.options = options
        self.template = template
        self.reference: Reference | None = None
        self.head: Head | None = None
        self.makes_some_logits = False
        self.value_head: nn.Module | None = None
        self.aux_coefficient = 0.0
        self.collate: Collate = not_configured

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The objective's own parts of a checkpoint."""
        return {} if self.reference is None else self.reference.parts

    def setup(self, module: nn.Module) -> None:
        if self.reference is not None:
            self.reference.setup(module)

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        """Store how the model computes its logits, as ``LmObjective.configure``."""
        self.collate = partial(self._collate, collate)
        self.makes_some_logits = capabilities.makes_some_logits
        self.head, notes = head_for_loss(capabilities, self.options)
        return notes

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        return not aux_coefficient(unwrap_peft(model), self.options.router_aux_loss_coef)

    @property
    def rules(self) -> LogpRules:
        """What is computed for each token of the policy, without the softcap of the model."""
        return LogpRules(accuracy=True, entropy=True, sum_squared_probs=self.needs_sum_of_squares)

    def module(self, model: nn.Module) -> SequenceModel:
        """The model wrapped so that it returns log-probabilities of responses. Requires ``configure`` first."""
        rules = replace(self.rules, softcap=self.head.softcap if self.head else None)
        self.aux_coefficient = aux_coefficient(unwrap_peft(model), self.options.router_aux_loss_coef)
        return SequenceModel(
            model, self.head, self.makes_some_logits, rules, bool(self.aux_coefficient), self.options, self.batch_keys,
            self.value_head,
        )  # fmt: skip

    def module_of_reference(self, model: nn.Module) -> SequenceModel:
        """A second model (the reference) wrapped in the same way."""
        head = None if self.options.fused_loss is False else find_head(model)
        rules = LogpRules(head.softcap if head else None, temperature=self.rules.temperature)
        makes_some = head is None and makes_some_logits(model)
        return SequenceModel(model, head, makes_some, rules, False, self.options, self.batch_keys)

    def num_items(self, batch: Batch) -> Tensor:
        """() number of pairs or records."""
        items: Tensor = batch["items"]
        return items.sum()

    def policy_values(self, module: nn.Module, batch: Batch) -> SequenceValues:
        """Log-probabilities under the policy, in evaluation with the same rounding as in training. So an untrained
        policy equals its reference exactly.
        """
        with rounding_as_trained():
            values: SequenceValues = module(batch)
        return values

    def end_step(self) -> None:
        if isinstance(self.reference, MovingReference):
            self.reference.end_step()

    def _collate(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        raise NotImplementedError

    def _reference_logps(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> list[Tensor]:
        """(S,) reference log-probabilities of each micro-batch: precomputed ones of its rows, or computed now."""
        if all("reference" in batch for batch in batches):
            return [batch["reference"] for batch in batches]
        if self.reference is None:
            what = (
                "The reference log-probabilities were computed before training, and these examples were not included."
            )
            raise UserError(what, remedy="Configure them as an evaluation set before training starts.")
        with self.reference.answering(module) as answering, parallel.other_modules(), scoring(answering, parallel):
            return [answering(batch).logps for batch in batches]


@contextmanager
def scoring(module: nn.Module, parallel: Parallel) -> Iterator[None]:
    """Context for a forward pass without gradient whose results are compared with those of training."""
    with evaluating(module), rounding_as_trained(), parallel.precision():
        yield
