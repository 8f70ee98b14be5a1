"""The interface and the registry of objectives. Each is registered under the name of its stage.

A member is a class ``(options, template, tokenizer) -> Objective``. A run calls, in this order:

    objective.encode(examples, stats)         rows, before a weight is read
    objective.inspect(rows, rows_per_step)    notes on the training rows
    objective.configure(capabilities, collate)      takes the capabilities of the model; returns notes
    objective.module(model)                   the model and its loss as one module, for the backend to wrap
    objective.setup(module)                   once, with the module as the backend prepared it
    objective.collate(rows)                   a micro-batch
    objective.rollout(module, step_batch)     the step batches to train on instead, such as responses to prompts
    objective.prepare_step(module, batches)   adds to batches what depends on the whole step
    objective.num_items(batch)                the number of items that share the mean
    objective.loss(module, batch)             their loss, as a sum
    objective.report(values)                  completes the metrics of a log or an evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from torch import nn

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import changed_options, specs
from burnish.config.registry import Registry
from burnish.kernels.probe import Capabilities
from burnish.loop.protocols import Objective, Parallel
from burnish.loop.types import IGNORE_INDEX, TOKEN_COLUMNS, Batch, Example, Row

Collate: TypeAlias = Callable[[Sequence[Row]], Batch]


class WrappedModel(nn.Module):
    """A module around a model of transformers, with the attributes of the model that callbacks read."""

    model: Any

    @property
    def device(self) -> Any:
        return self.model.device

    @property
    def config(self) -> Any:
        return self.model.config


class RowEncoder(Protocol):
    """The part of a template (``data/``) that objectives use."""

    @property
    def fingerprint(self) -> str: ...
    def encode_arrays(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> list[Row | None]: ...
    def encode_text(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> list[Row | None]: ...
    def encode_pairs(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def encode_unpaired(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def encode_prompts(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def stop_token_ids(self) -> list[int]: ...


class StageObjective(Objective, Protocol):
    """An objective that can be selected as a stage.

    The class attributes declare its properties. The rest of the package reads them and knows no stage by name.

    Attributes:
        records: kind of records: "answers", "pairs" (two responses), "unpaired" (a response with a label), "prompts"
            (no response needed), or its own kind, which formats declare with ``holds``.
        record_columns: further columns of a record that are stored in ``Example.extra``. "*": all columns.
        without_pairs: what to do with a dataset of single responses, if records are pairs.
        reads_images: whether rows may contain images.
        row_columns: columns of a row that ``collate`` needs -> their values in the row of a padding batch.
        token_columns: further per-token columns, also added to batches -> default value.
        batch_keys: keys that it adds to batches and that are not model inputs.
        separate_sequences: sequences of a row, by the prefix of their columns, that form a separate micro-batch.
        default_packing: default packing strategy; None: no packing.
        has_prompts: whether its examples have prompts that a model can respond to.
        uses_lm_head: whether the language model head is needed.
        disables_dropout: whether ``disable_dropout`` applies.
        logs_rewards: whether it logs rewards/chosen and rewards/margins.
        learning_rates: default learning rates of ``burnish train`` for full training and for adapters, if they differ
            from the general defaults.
        option_names: option names with another meaning under this stage: {"beta": "rl_beta"}.
        variants: options that select another stage if true: {"online": "online_dpo"}.
        title: name in model cards; the name of the stage if empty.
        needs_reference: whether the loss compares with a reference model. The caller then sets ``reference``, or fills
            the columns of ``reference_columns`` before training.
    """

    records: ClassVar[str] = "answers"
    record_columns: ClassVar[Sequence[str]] = ()
    without_pairs: ClassVar[str] = ""
    reads_images: ClassVar[bool] = True
    row_columns: ClassVar[Mapping[str, Any]] = {"input_ids": (0, 0), "labels": (IGNORE_INDEX, 0)}
    token_columns: ClassVar[Mapping[str, float]] = {}
    batch_keys: ClassVar[frozenset[str]] = frozenset()
    learning_rates: ClassVar[tuple[float, float] | None] = None
    separate_sequences: ClassVar[frozenset[str]] = frozenset()
    default_packing: ClassVar[str | None] = None
    has_prompts: ClassVar[bool] = True
    uses_lm_head: ClassVar[bool] = True
    disables_dropout: ClassVar[bool] = False
    logs_rewards: ClassVar[bool] = False
    option_names: ClassVar[Mapping[str, str]] = {}
    variants: ClassVar[Mapping[str, str]] = {}
    title: ClassVar[str] = ""

    needs_reference: bool = False
    reference: Any = None
    collate: Collate
    template: RowEncoder

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, filler in cls.token_columns.items():
            if TOKEN_COLUMNS.setdefault(name, filler) != filler:
                raise ValueError(
                    f"{cls.__name__}: another objective declares the per-token column {name!r} with the padding value "
                    f"{TOKEN_COLUMNS[name]}."
                )

    def __init__(self, choices: Any, template: RowEncoder, tokenizer: Any = None, /) -> None: ...

    @classmethod
    def mismatched_responses(cls, choices: Any, /) -> Literal["set", "step"] | None:
        """Source of ``Example.other`` or the kl columns of a row.

        Returns:
            "set": the previous record of the dataset. "step": the previous row of the same step. None: not used.
        """
        return None

    @classmethod
    def default_options(cls, choices: Any, /) -> Mapping[str, Any]:
        """Defaults of options that differ under this stage. They may depend on other options (a preset)."""
        return {}

    def sequence_title(self, row: Row, name: str) -> str:
        """Title of a sequence of a row for ``explain``; ends with a comma or semicolon and a space.

        Args:
            row: an encoded row.
            name: prefix of its columns ("chosen"); "" for the sequence of ``input_ids``.
        """
        return ""

    def module_of_reference(self, model: nn.Module) -> nn.Module:
        """Wrap a second model so that it returns the same values as the policy. Called if ``needs_reference``."""
        raise NotImplementedError

    def reference_columns(self, module: nn.Module, rows: Sequence[Row], parallel: Parallel) -> dict[str, list[float]]:
        """Values of the reference for each row, by column. Called if ``precompute_ref_log_probs`` is set."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the same examples would give other rows."""
        return f"{type(self).__name__} {self.template.fingerprint}"

    @property
    def contents(self) -> Mapping[str, Any]:
        """JSON data by name on which the weights depend besides options and data, for the run's fingerprints."""
        return {}

    @property
    def metrics(self) -> Sequence[str] | None:
        """Names of the metrics of an evaluation; None if they are not known in advance."""
        return None

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]: ...
    def inspect(self, rows: Sequence[Row], rows_per_step: int) -> list[str]:
        """Notes on the training rows. Raises UserError if there is nothing to train on."""
        return []

    def inspect_columns(self, rows: Sequence[Row], source: str) -> list[Problem]:
        """Problems with the columns of the records of a dataset, of which ``source`` is the name in messages."""
        return []

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        """Whether tokens without influence on a loss may be skipped. ``model`` may have no weights (meta device)."""
        return False

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]: ...


OBJECTIVES: Registry[type[StageObjective]] = Registry("stage")
"""Trait ``reads``: option groups and names of options that a member reads besides its own ``options``."""


def options_of(stage: str) -> set[str]:
    """Return the names of all options that a stage uses."""
    member = OBJECTIVES.get(stage)
    known = (member.options, *member.metadata.get("reads", ()))
    return {name for each in known if each for name in ([each] if isinstance(each, str) else specs(each))}


class StageChoices(Protocol):
    """Options that this module reads."""

    predict_with_generate: bool
    stage: str


@check
def check_stage(options: StageChoices) -> Iterator[Problem]:
    if not options.predict_with_generate or OBJECTIVES[options.stage].has_prompts:
        return
    what = f'"predict_with_generate" requires prompts, but stage: {options.stage} has none.'
    remedy = "Set stage: sft, or remove predict_with_generate to compute the loss."
    yield Problem(what, remedy=remedy, option="predict_with_generate")


@notes
def stage_notes(options: StageChoices) -> list[str]:
    """Return notes on options that belong to stages of other packages, if another stage is selected."""
    read = options_of(options.stage)
    of_others = {name for each in OBJECTIVES if each.options and not each.is_ours for name in specs(each.options)}
    unread = of_others - read
    return [f'"{name}" has no effect: stage is {options.stage}.' for name in changed_options(options) if name in unread]
