"""``stage: kto``: train on single responses, each labelled desirable or undesirable.

In: labelled responses, and for each the same prompt with another record's response (``kl`` rows). Out: KTO's loss per
response, as a sum over records.

The baseline z of a step is a mean over the mismatched responses of the whole step on all ranks, under policy and
reference. ``prepare_step`` computes it without gradient. The mismatched responses are chosen when the data is read
(``data/sets/preferences.py``), so they depend neither on the order of the data nor on the micro-batches.
"""

# P records in a micro-batch, S = P sequences

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from burnish.config.checks import check, notes
from burnish.config.errors import OptionText, Problem, UserError
from burnish.config.options import option, shared_options
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Example, Loss, Metric, Row, Sum
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder, StageObjective
from burnish.losses.preference_losses import kto
from burnish.losses.preference_options import PreferenceOptions, ReferenceOptions
from burnish.losses.responses import AnswersObjective, PairChoices, scoring
from burnish.losses.sequence_logps import SequenceValues, collate_sequences, mean_row, with_images

MIN_EXAMPLES_PER_STEP = 8
"""With fewer records per step the mean over them is unreliable."""
_LEAST, _MOST = 1.0, 4 / 3
"""Recommended range of desirable weight times count over undesirable weight times count (Ethayarajh et al. 2024, eq.
8)."""


@shared_options
@dataclass
class KtoFields:
    """The option of KTO's KL term, also of TRL's ``KTOConfig``."""

    kl_pairing: str = option(
        "neighbour",
        "Source of the mismatched responses for KTO's KL term: the previous example of the dataset (neighbour), or the"
        " previous example of the same step (group).",
        choices=("neighbour", "group"),
    )  # fmt: skip


@dataclass
class KtoOptions(KtoFields):
    """KTO."""

    kto_chosen_weight: float = option(1.0, "Loss weight of desirable examples.", ge=0, aliases=("desirable_weight",))
    kto_rejected_weight: float = option(
        1.0, "Loss weight of undesirable examples.", ge=0, aliases=("undesirable_weight",)
    )
    kto_loss: str = option(
        "kto", "KTO loss, or its variant without a KL term (apo_zero_unpaired).", choices=("kto", "apo_zero_unpaired")
    )


@check
def check_kto(options: KtoChoices) -> list[Problem]:
    """Report options that would need the other responses of a step before its rows are assigned."""
    if OBJECTIVES[options.stage] is not KtoObjective or options.kl_pairing == "neighbour":
        return []
    requested = {
        "precompute_ref_log_probs": options.precompute_ref_log_probs,
        "max_tokens_per_batch": options.max_tokens_per_batch,
    }
    return [
        Problem(f'"{name}" requires all examples before the first step, but kl_pairing: group creates examples in '
        'each step.',
                remedy="Remove one of them.", option=(name, "kl_pairing"))
        for name, is_requested in requested.items() if is_requested
    ]  # fmt: skip


@notes
def kto_notes(options: KtoChoices) -> Iterator[str]:
    if OBJECTIVES[options.stage] is not KtoObjective or options.kl_pairing == "neighbour" or options.kto_loss == "kto":
        return
    yield f'"kl_pairing" has no effect: kto_loss {options.kto_loss} does not use mismatched responses.'


class KtoChoices(PairChoices, KtoOptions, ReferenceOptions):
    """Options of KTO."""

    max_tokens_per_batch: int | None
    stage: str


UNPAIRED_COLUMNS = {**StageObjective.row_columns, "tag": False}
"""Columns of a labelled response, and their values in the row of a padding batch."""


@OBJECTIVES.register("kto", options=KtoOptions, reads=(PreferenceOptions, ReferenceOptions))
class KtoObjective(AnswersObjective):
    """Single responses with a label each (KTO)."""

    records = "unpaired"
    row_columns = UNPAIRED_COLUMNS
    separate_sequences = frozenset({"kl"})
    batch_keys = AnswersObjective.batch_keys | {"tag", "kl"}
    options: KtoChoices

    @classmethod
    def mismatched_responses(cls, options: KtoChoices, /) -> Literal["set", "step"] | None:
        if options.kl_pairing == "neighbour":
            return "set"
        return "step" if options.kto_loss == "kto" else None

    def __init__(self, options: KtoChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.has_baseline = options.kto_loss == "kto"

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation."""
        sides = [f"{name}/{side}" for name in ("rewards", "logps") for side in ("chosen", "rejected")]
        return ["loss", *sides, "rewards/margins", "kl"]

    def sequence_title(self, row: Row, name: str) -> str:
        if name:
            return "its prompt with another example's response, for the KL term; "
        return f"{'a desirable' if row['tag'] else 'an undesirable'} response, "

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]:
        """Encode labelled responses. They are always truncated to ``cutoff_len``; ``truncate`` has no effect."""
        return self.template.encode_unpaired(examples, stats)

    def inspect(self, rows: Sequence[Row], rows_per_step: int) -> list[str]:
        """Notes on the labels of the training rows.

        Raises:
            UserError: if all labels or all responses are equal.
        """
        desirable = sum(bool(row["tag"]) for row in rows)
        others = len(rows) - desirable
        if not desirable or not others:
            raise UserError(_one_kind(len(rows), bool(desirable)))
        if all("labels" in row for row in islice(rows, 1)) and self.has_baseline:
            refuse_identical([token for token in row["labels"] if token != IGNORE_INDEX] for row in rows)
        options = self.options
        if not (options.kto_chosen_weight or options.kto_rejected_weight or options.pref_ftx):
            what = OptionText("{kto_chosen_weight} and {kto_rejected_weight} are 0: nothing would be learned.")
            remedy = "Set at least one of them to a positive number."
            raise UserError(what, remedy=remedy, option=("kto_chosen_weight", "kto_rejected_weight"))
        return [*self._imbalance(desirable, others), *self._small_step_notes(rows_per_step)]

    def _imbalance(self, desirable: int, others: int) -> Iterator[str]:
        options = self.options
        up, down = options.kto_rejected_weight * others / desirable, options.kto_chosen_weight * desirable / others
        if not up and not down:
            return
        of_weights = (("kto_chosen_weight", "desirable", up), ("kto_rejected_weight", "undesirable", down))
        for name, kind, other in of_weights:
            if not getattr(options, name):
                low = other if kind == "desirable" else other / _MOST
                template = f"{{{name}}} is 0: {kind} responses have no KTO loss. KTO recommends a weighted ratio of "
                template += f"1:1 to 1.33:1. Set {{{name}}}: {{:.2f}} to {{:.2f}}."
                yield OptionText(template, low, low * _MOST)
                return
        ratio = down / options.kto_rejected_weight
        if _LEAST <= ratio <= _MOST:
            return
        yield OptionText(
                "{:,} responses are desirable and {:,} are not; the weighted ratio is {:.2f}:1, but KTO recommends "
                "1:1 to 1.33:1. Set {kto_chosen_weight}: {:.2f} to {:.2f}, or {kto_rejected_weight}: {:.2f} to {:.2f}.",
                desirable, others, ratio, up, up * _MOST, down / _MOST, down)  # fmt: skip

    def _small_step_notes(self, rows_per_step: int) -> Iterator[str]:
        if rows_per_step >= MIN_EXAMPLES_PER_STEP or not self.has_baseline:
            return
        number = f"{rows_per_step} example{'s' if rows_per_step > 1 else ''}"
        yield (
            f"A step contains {number}; KTO's KL term is a mean over the examples of a step. Raise "
            "gradient_accumulation_steps."
        )

    def _collate(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        """The micro-batch, with ``items`` (P,) and ``tag`` (P,) bool of its records. ``kl`` is a separate micro-batch
        of the mismatched responses with its own ``items``.
        """
        batch = collate_sequences(collate, list(map(_answer, rows)))
        batch["items"] = torch.ones(len(rows))
        batch["tag"] = torch.tensor([bool(row["tag"]) for row in rows])
        if "reference_logps" in rows[0]:
            batch["reference"] = torch.tensor([row["reference_logps"] for row in rows])
        if self.has_baseline:
            batch["kl"] = self._collated_others(collate, rows)
            if "images" in batch and "images" in batch["kl"]:
                batch["images"].share_with(batch["kl"]["images"])
        return batch

    def _collated_others(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        """The mismatched responses. If there are none, a response with ``items`` 0, because all ranks must run a
        forward pass."""
        beside = [row for row in rows if row.get("kl_input_ids")]
        others = [_answer(row, "kl_") for row in beside]
        batch = collate_sequences(collate, others or [_answer(rows[0])])
        batch["items"] = torch.ones(len(others)) if others else torch.zeros(1)
        if "reference_kl_logps" in rows[0]:
            batch["reference"] = torch.tensor([row["reference_kl_logps"] for row in beside] or [0.0])
        return batch

    def reference_columns(self, module: nn.Module, rows: Sequence[Row], parallel: Parallel) -> dict[str, list[float]]:
        """Reference log-probabilities of the response and of the mismatched response, by column."""
        batch = parallel.to_device(self.collate(rows))
        (logps,) = self._reference_logps(module, [batch], parallel)
        if "kl" not in batch:
            return {"reference_logps": logps.tolist()}
        (of_others,) = self._reference_logps(module, [parallel.to_device(batch["kl"])], parallel)
        others = iter(of_others.tolist())
        beside = [next(others) if row.get("kl_input_ids") else float("nan") for row in rows]
        return {"reference_logps": logps.tolist(), "reference_kl_logps": beside}

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        """Add the reference's log-probabilities to each micro-batch, and z, () the baseline of the step."""
        total, count = self._ratios_of_others(module, batches, parallel)
        return self._batches_with_reference(self._baseline(total, count, parallel), module, batches, parallel)

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        """Two passes over the set, because z is the mean over the whole set."""
        total, count = torch.zeros((), device=parallel.device), torch.zeros((), device=parallel.device)
        for batch in batches:
            more = self._ratios_of_others(module, [parallel.to_device(batch)], parallel)
            total, count = total + more[0], count + more[1]
        baseline = self._baseline(total, count, parallel)
        for batch in batches:
            yield from self._batches_with_reference(baseline, module, [parallel.to_device(batch)], parallel)

    def _ratios_of_others(
        self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel
    ) -> tuple[Tensor, Tensor]:
        """() the sum of r over the mismatched responses of these micro-batches, and () their number."""
        others = [parallel.to_device(batch["kl"]) for batch in batches if "kl" in batch]
        total, count = torch.zeros((), device=parallel.device), torch.zeros((), device=parallel.device)
        if not others:
            return total, count
        reference = self._reference_logps(module, others, parallel)
        with scoring(module, parallel):
            for batch, of_reference in zip(others, reference, strict=True):
                total = total + ((module(batch).logps - of_reference) * batch["items"]).sum()
                count = count + batch["items"].sum()
        return total, count

    def _baseline(self, total: Tensor, count: Tensor, parallel: Parallel) -> Tensor:
        """() z: the mean over all ranks, clamped at 0 from below."""
        if not self.has_baseline:
            return torch.zeros((), device=parallel.device)
        total, count = parallel.sum(torch.stack([total, count])).unbind()
        return (total / count.clamp(min=1)).clamp(min=0)

    def _batches_with_reference(
        self, baseline: Tensor, module: nn.Module, batches: Sequence[Batch], parallel: Parallel
    ) -> list[Batch]:
        more: dict[str, Any] = {"baseline": baseline}
        if (row := mean_row(self.head, parallel)) is not None:
            more["mean_row"] = row
        own = [{name: value for name, value in batch.items() if name != "kl"} for batch in batches]
        reference = self._reference_logps(module, own, parallel)
        return [{**batch, "reference": logps, **more} for batch, logps in zip(own, reference, strict=True)]

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        options = self.options
        values = self.policy_values(module, batch)
        ratio, items, tag = values.logps - batch["reference"], batch["items"], batch["tag"]
        weights = (options.kto_chosen_weight, options.kto_rejected_weight)
        losses = kto(ratio, tag, batch["baseline"], options.pref_beta, weights)
        if options.pref_ftx:
            losses = losses - options.pref_ftx * tag * values.logps / batch["lengths"]
        metrics = self._response_metrics(values, ratio.detach(), batch)
        total = (losses * items).sum()
        if values.aux is not None:
            metrics["aux_loss"] = (values.aux * items.sum()).detach()
            total = total + self.aux_coefficient * values.aux * items.sum()
        return Loss(total, metrics, outputs=options.pref_beta * ratio.detach())

    def _response_metrics(self, values: SequenceValues, ratio: Tensor, batch: Batch) -> dict[str, Metric]:
        """Means over the desirable responses and over the undesirable ones."""
        items, found = batch["items"], dict[str, Metric]()
        for name, mask in (("chosen", batch["tag"]), ("rejected", ~batch["tag"])):
            counted = items * mask
            found[f"rewards/{name}"] = Sum((self.options.pref_beta * ratio * counted).sum(), counted.sum())
            found[f"logps/{name}"] = Sum((values.logps.detach() * counted).sum(), counted.sum())
            if "mean_row" in batch:
                of_tokens = (batch["lengths"] * counted).sum()
                found[f"logits/{name}"] = Sum((values.mean_logits * counted).sum(), of_tokens)
        if self.has_baseline:
            found["kl"] = batch["baseline"] * items.sum()
        found["entropy"] = Sum((values.entropy * items).sum(), (batch["lengths"] * items).sum())
        return found

    def report(self, values: dict[str, float]) -> dict[str, float]:
        """Add the margin between the mean rewards of both labels, if both are present."""
        chosen, rejected = values.get("rewards/chosen"), values.get("rewards/rejected")
        if chosen is None or rejected is None:
            return values
        return {**values, "rewards/margins": chosen - rejected}


def _one_kind(count: int, is_desirable: bool) -> Problem:
    kind = "desirable" if is_desirable else "undesirable"
    remedy = (
        OptionText("With desirable responses only, use {stage=sft}.") if is_desirable else "Add desirable responses."
    )
    return Problem(f"All {count:,} examples are {kind}; KTO requires desirable and undesirable ones.", remedy=remedy)


def refuse_identical(responses: Iterable[Sequence[int]]) -> None:
    """Raise UserError if there are several responses, all with the same tokens."""
    groups = [sum(1 for _ in group) for _, group in islice(groupby(responses), 2)]
    if len(groups) == 1 and groups[0] > 1:
        what = f"All {groups[0]:,} responses are identical; KTO compares each with a response of another record."
        raise UserError(what, remedy=OptionText("Add other responses, or set {kto_loss=apo_zero_unpaired}."))


def _answer(row: Row, prefix: str = "") -> Row:
    """A sequence of a row. ``prefix`` "kl_" selects the prompt with another record's response."""
    ids, labels = row[f"{prefix}input_ids"], row[f"{prefix}labels"]
    return {"input_ids": ids, "labels": labels, **with_images(row, prefix)}
