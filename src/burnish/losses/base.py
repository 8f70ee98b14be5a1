"""The family of objectives, by the name of the stage.

A member is a class ``(options, template, tokenizer) -> Objective``. A run calls, in this order:

    objective.encode(examples, stats)         rows, before a weight is read
    objective.inspect(rows, rows_per_step)    remarks on the training rows
    objective.fit(capabilities, collate)            takes over what the model can do; sentences for the user
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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from torch import nn

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.registry import Registry
from burnish.kernels.probe import Capabilities
from burnish.loop.protocols import Engine, Objective
from burnish.loop.types import IGNORE_INDEX, TOKEN_COLUMNS, Batch, Example, Ids, Row

Collate: TypeAlias = Callable[[Sequence[Row]], Batch]


class RowEncoder(Protocol):
    """The part of a template (``data/``) that objectives use."""

    @property
    def fingerprint(self) -> str: ...
    def encode_flat(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def encode_text(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> list[Row | None]: ...
    def encode_pairs(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def encode_verdicts(self, examples: Sequence[Example], stats: Any) -> list[Row | None]: ...
    def encode_prompts(self, examples: Sequence[Example], stats: Any) -> list[Ids | None]: ...
    def stop_token_ids(self) -> list[int]: ...


class StageObjective(Objective, Protocol):
    """An objective that can be chosen as a stage: what it declares, and what a run needs of it.

    The class attributes are the declaration. The rest of the package reads them and knows no stage by its name.

    Attributes:
        records: the kind of records that it learns from: "answers", "pairs" (two answers), "verdicts" (an answer with a
            label), "prompts" (no answer needed), or a kind of its own, which formats declare with ``holds``.
        record_columns: further columns of a record that it asks for; ``Example.extra`` holds them. "*": all of them.
        reads_images: whether rows may hold images.
        row_columns: the columns of a row that ``collate`` needs -> their values in the row of a blank micro-batch.
        token_columns: further columns with a value per token, which batches get too -> the value where a row has none.
        batch_keys: keys that it adds to batches and that are no input of the model.
        separate_sequences: sequences of a row, by the prefix of their columns, that have a micro-batch of their own.
        default_packing: the strategy by which rows are packed if no option says otherwise; None packs no rows.
        has_prompts: whether its examples have prompts that a model can answer.
        uses_lm_head: whether the head of the language model is needed.
        disables_dropout: whether ``disable_dropout`` applies.
        logs_rewards: whether it logs rewards/chosen and rewards/margins.
        learning_rates: the default learning rate of ``burnish train`` for all weights and for an adapter, where it is
            not the usual one.
        option_names: names of options that mean another option under this stage: {"beta": "rl_beta"}.
        variants: options that, where they are true, make another stage of this one: {"online": "online_dpo"}.
        title: how a model card names it; the name of the stage if empty.
        needs_reference: whether the loss compares with a reference model. Whoever assembles the run then sets
            ``reference``, or fills the columns of ``reference_columns`` before training.
    """

    records: ClassVar[str] = "answers"
    record_columns: ClassVar[Sequence[str]] = ()
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
                    f"{cls.__name__}: token column {name!r} has the value {TOKEN_COLUMNS[name]} elsewhere."
                )

    def __init__(self, choices: Any, template: RowEncoder, tokenizer: Any = None, /) -> None: ...

    @classmethod
    def mismatched_responses(cls, choices: Any, /) -> Literal["set", "step"] | None:
        """Where ``Example.other`` or the kl columns of a row come from: the record before in the set, the row before in
        the same step, or nowhere."""
        return None

    @classmethod
    def default_options(cls, choices: Any, /) -> Mapping[str, Any]:
        """Defaults of options that differ under this stage; they may depend on others (a preset)."""
        return {}

    def sequence_title(self, row: Row, name: str) -> str:
        """Describe a sequence of a row for ``explain``, with a comma or semicolon and a space at the end.

        Args:
            name: the prefix of its columns ("chosen"); "" for the sequence of ``input_ids``.
        """
        return ""

    def module_of_reference(self, model: nn.Module) -> nn.Module:
        """A second model as a module that answers as the policy's does. Asked for where ``needs_reference``."""
        raise NotImplementedError

    def reference_columns(self, module: nn.Module, rows: Sequence[Row], engine: Engine) -> dict[str, list[float]]:
        """Numbers of the reference for each row, by column. Asked for under ``precompute_ref_log_probs``."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the rows of the same examples would change."""
        return f"{type(self).__name__} {self.template.fingerprint}"

    @property
    def contents(self) -> Mapping[str, Any]:
        """JSON data by name on which the weights depend besides options and data, for the fingerprints of a run."""
        return {}

    @property
    def metrics(self) -> Sequence[str] | None:
        """Names of the metrics of an evaluation; None where they are not known beforehand."""
        return None

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]: ...
    def inspect(self, rows: Sequence[Row], rows_per_step: int) -> list[str]:
        """Remarks on the training rows. Raises UserError where there is nothing to train on."""
        return []

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        """Tell whether tokens that no loss depends on may be left out. Args: model: need have no weights."""
        return False

    def fit(self, capabilities: Capabilities, collate: Collate) -> list[str]: ...


OBJECTIVES: Registry[type[StageObjective]] = Registry("stage")
"""Trait ``reads``: option groups, and names of options, that a member reads besides its own ``options``."""


class StageChoices(Protocol):
    """The options read here."""

    predict_with_generate: bool
    stage: str


@check
def check_stage(options: StageChoices) -> list[Problem]:
    if not options.predict_with_generate or OBJECTIVES[options.stage].has_prompts:
        return []
    what = f'"predict_with_generate" needs prompts, but stage: {options.stage} has none.'
    remedy = "Set stage: sft, or remove predict_with_generate to compute the loss."
    return [Problem(what, remedy=remedy, option="predict_with_generate")]
