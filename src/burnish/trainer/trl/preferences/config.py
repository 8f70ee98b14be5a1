"""``DPOConfig``, ``KTOConfig``, ``RewardConfig``, ``ORPOConfig``, ``CPOConfig``: TRL's fields with name, type and
default, each mapped to an option of burnish (``losses/preference_options.py``, ``kto.py``, ``reward.py``).

Out: the config, and the options for the objectives. Errors contain the script's names of fields. Fields of earlier
versions without meaning are refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from burnish.config.errors import Problem, UserError, rename_options
from burnish.config.options import RawValue, build, option, raise_if, specs
from burnish.losses.kto import KtoFields, KtoOptions
from burnish.losses.preference_losses import PAIR_LOSSES
from burnish.losses.preference_options import (
    DpoFields,
    PrecomputeFields,
    PreferenceOptions,
    ReferenceOptions,
    ReferenceSyncFields,
    check_pairs,
    check_reference,
    pair_notes,
)
from burnish.losses.responses import PairChoices
from burnish.losses.reward import RewardOptions
from burnish.trainer.arguments.training import for_argument_parser
from burnish.trainer.arguments.trl import TrlArguments


@dataclass
class Choices(PairChoices, KtoOptions, RewardOptions, ReferenceOptions):
    """The options of objectives and references, under burnish's names."""

    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None


_IGNORED_FIELDS = ("label_smoothing_factor", "neftune_noise_alpha")  # a mean over all labels; handled by the Trainer
_TRUNCATED_TOGETHER = "prompt and completion are truncated together, to max_length."


@dataclass
class PreferenceConfig(TrlArguments):
    """Fields shared by the preference configs."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "max_prompt_length": _TRUNCATED_TOGETHER,
        "max_completion_length": _TRUNCATED_TOGETHER,
        "max_target_length": _TRUNCATED_TOGETHER,
        "label_pad_token_id": "labels are created internally.",
        "use_logits_to_keep": "logits of prompt tokens are never computed.",
        "use_num_logits_to_keep": "logits of prompt tokens are never computed.",
        "use_liger_loss": "the full logits are never materialized.",
        "base_model_attribute_name": "the full logits are never materialized.",
        "is_encoder_decoder": "it is read from the model's config.",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "rpo_alpha": 'Use loss_type=["sigmoid", "sft"] and loss_weights=[1.0, alpha].',
        "reference_free": "Use CPOTrainer or ORPOTrainer to train without a reference model.",
        "force_use_ref_model": "A ref_model is always used if it is passed.",
        "model_adapter_name": "The active adapter of the model is trained.",
        "ref_adapter_name": "The reference model has the adapter's initial weights. Pass another one as ref_model.",
        "ref_model_init_kwargs": "Load the reference model yourself and pass it as ref_model.",
        "generate_during_eval": "Use Seq2SeqTrainer, or burnish predict.",
        "padding_value": "Set tokenizer.pad_token.",
    }  # fmt: skip
    option_of_field: ClassVar[Mapping[str, str]] = {}  # field -> burnish's option, if it has no such alias

    learning_rate: float = 1e-6
    disable_dropout: bool = option(True, "Disable dropout in preference training, including LoRA dropout.")
    on_bad_record: str = option(
        "raise",
        "What to do with a record that does not match its format: stop with an error that names it, or drop"
        " and count it.",
        choices=("raise", "drop"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing_factor:
            raise ValueError("`label_smoothing_factor` applies to tokens. Use `label_smoothing` for pairs.")
        self.choices()

    def choices(self) -> Choices:
        """The options for objectives and references.

        Raises:
            UserError: with all problems.
        """
        known = {word for spec in specs(Choices).values() for word in (spec.name, *spec.aliases)} - {*_IGNORED_FIELDS}
        options = {name: self.option_of_field.get(name, name) for name in self.__dataclass_fields__}
        values = {name: self._option_value(word) for word, name in options.items() if name in known}
        built, problems = build(Choices, {name: RawValue(value) for name, value in values.items()})
        raise_if(self.with_own_names([*problems, *self._contradictions(built)]))
        return built

    def notes(self) -> list[str]:
        """Notes on options without effect, or with a probably unintended value."""
        return []

    def _option_value(self, name: str) -> Any:
        """The value of a field in the form of burnish's option."""
        value = getattr(self, name)
        return getattr(value, "value", value)

    def _contradictions(self, choices: Choices) -> Iterable[Problem]:
        return ()

    def with_own_names(self, problems: Iterable[Problem]) -> list[Problem]:
        names = self._field_names()
        return [
            replace(one, what=rename_options(one.what, names), remedy=rename_options(one.remedy, names))
            for one in problems
        ]

    def _field_names(self) -> Mapping[str, str]:
        """burnish's option -> the name of the field."""
        fields = self.__dataclass_fields__
        names = {spec.name: word for spec in specs(Choices).values() for word in spec.aliases if word in fields}
        names |= {name: word for word, name in self.option_of_field.items()}
        return names | {"stage=kto": "a KTOTrainer", "stage=sft": "an SFTTrainer"}


@dataclass
class WithReference(PrecomputeFields, ReferenceSyncFields, PreferenceConfig):
    precompute_ref_batch_size: int | None = option(
        None, "Batch size for precomputing reference log-probabilities. Default: as in evaluation.", ge=1
    )
    beta: float = option(
        0.1, "β of the preference loss. A larger β keeps the policy closer to the reference model.", gt=0
    )

    def _contradictions(self, choices: Choices) -> Iterable[Problem]:
        return check_reference(choices, streams=False)


@dataclass
class DPOConfig(DpoFields, WithReference):
    """The arguments of a ``DPOTrainer``, as in TRL 1."""

    loss_type: list[str] = option(
        ["sigmoid"], "Preference loss. Several losses are summed.", choices=tuple(PAIR_LOSSES)
    )
    loss_weights: list[float] | None = option(None, "Weights of several preference losses. Default: 1 each.")
    label_smoothing: float = option(0.0, "Assumed fraction of pairs with swapped labels.", ge=0, lt=0.5)

    def __post_init__(self) -> None:
        loss_type: Any = self.loss_type
        self.loss_type = [loss_type] if isinstance(loss_type, str) else loss_type
        super().__post_init__()

    def _contradictions(self, choices: Choices) -> Iterable[Problem]:
        return [*super()._contradictions(choices), *check_pairs(choices)]

    def notes(self) -> list[str]:
        choices = self.choices()
        return [rename_options(note, self._field_names()) for note in pair_notes(choices, choices.pref_loss)]


@dataclass
class KTOConfig(KtoFields, WithReference):
    """The arguments of a ``KTOTrainer``, as in TRL 1."""

    option_of_field: ClassVar[Mapping[str, str]] = {"loss_type": "kto_loss"}

    train_sampling_strategy: str = option(
        "sequential",
        "Order of the examples within an epoch. Any order is possible: the mismatched responses are "
        "selected beforehand.",
        choices=("random", "sequential", "group_by_length"),
    )  # fmt: skip
    loss_type: str = option(
        "kto", "KTO loss, or its variant without a KL term (apo_zero_unpaired).", choices=("kto", "apo_zero_unpaired")
    )
    desirable_weight: float = option(1.0, "Loss weight of desirable examples.", ge=0)
    undesirable_weight: float = option(1.0, "Loss weight of undesirable examples.", ge=0)

    def _contradictions(self, choices: Choices) -> Iterator[Problem]:
        yield from super()._contradictions(choices)
        if self.kl_pairing == "group" and self.precompute_ref_log_probs:
            what = '"precompute_ref_log_probs" cannot be combined with "kl_pairing": group.'
            yield Problem(what, remedy="Remove one of them.")


@dataclass
class RewardConfig(PreferenceConfig):
    """The arguments of a ``RewardTrainer``, as in TRL 1."""

    learning_rate: float = 1e-4
    center_rewards_coefficient: float | None = option(
        None,
        "Coefficient of an auxiliary loss that centers the scores around 0: the squared sum of the two scores of a "
        "pair.",
        ge=0,
    )


def _without(names: Mapping[str, str], *fields: str) -> dict[str, str]:
    return {name: label for name, label in names.items() if name not in fields}


@dataclass
class WithoutReference(PreferenceConfig):
    """Fields of TRL's ORPO and CPO for its command lines. Values that would enable an unsupported feature are
    refused."""

    without_effect: ClassVar[Mapping[str, str]] = _without(
        PreferenceConfig.without_effect, "max_completion_length", "is_encoder_decoder"
    )
    refused: ClassVar[Mapping[str, str]] = _without(PreferenceConfig.refused, "generate_during_eval")

    max_completion_length: int | None = option(None, f"No effect: {_TRUNCATED_TOGETHER}", ge=1)
    generate_during_eval: bool = option(False, "Not supported. Use burnish predict.")
    is_encoder_decoder: bool | None = option(
        None, "Whether the model is an encoder-decoder, which is not supported. Default: detected from the model."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_completion_length is not None:
            self._warn(f"`max_completion_length` has no effect: {_TRUNCATED_TOGETHER}")
        if self.generate_during_eval:
            remedy = PreferenceConfig.refused["generate_during_eval"]
            raise UserError("`generate_during_eval` must be False. Received: True.", remedy=remedy)
        if self.is_encoder_decoder:
            remedy = "Use a causal language model."
            raise UserError("`is_encoder_decoder` must be False. Received: True.", remedy=remedy)


@dataclass
class ORPOConfig(WithoutReference):
    """The arguments of an ``ORPOTrainer``. Only the response of a chosen example is trained, not its prompt."""

    refused: ClassVar[Mapping[str, str]] = _without(WithoutReference.refused, "padding_value")

    padding_value: int | None = option(None, "Padding token id of batches. Default: the tokenizer's.", ge=0)
    beta: float = option(0.1, "Weight of the odds ratio loss (λ in the paper).", gt=0)

    def choices(self) -> Any:
        built = super().choices()
        built.pref_loss = ["orpo"]
        return built


_CPO_LOSSES = {"sigmoid": "cpo", "hinge": "cpo_hinge", "ipo": "cpo_ipo", "simpo": "simpo"}
"""TRL's name of a loss without a reference -> burnish's name."""


@dataclass
class CPOConfig(WithoutReference):
    """The arguments of a ``CPOTrainer``: CPO, SimPO, AlphaPO."""

    option_of_field: ClassVar[Mapping[str, str]] = {"alpha": "alphapo_alpha"}

    beta: float = option(0.1, "β of the preference loss.", gt=0)
    loss_type: str = option("sigmoid", "Preference loss.", choices=(*_CPO_LOSSES, "alphapo"))
    label_smoothing: float = option(0.0, "Assumed fraction of pairs with swapped labels.", ge=0, lt=0.5)
    cpo_alpha: float = option(
        1.0, "Weight of the supervised loss on chosen responses in CPO (mean over the tokens of the step).", ge=0
    )
    simpo_gamma: float = option(0.5, "Target reward margin of SimPO.", ge=0)
    alpha: float = option(0.0, "Alpha of AlphaPO. 0: off.")

    def __post_init__(self) -> None:
        if self.loss_type == "alphapo":  # as in TRL
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        super().__post_init__()

    def _option_value(self, name: str) -> Any:
        value = super()._option_value(name)
        return _CPO_LOSSES.get(value, value) if name == "loss_type" else value

    def _contradictions(self, choices: Choices) -> Iterable[Problem]:
        return check_pairs(choices)

    def notes(self) -> list[str]:
        choices = self.choices()
        return [rename_options(note, self._field_names()) for note in pair_notes(choices, choices.pref_loss)]


for _kind in (DPOConfig, KTOConfig, RewardConfig, ORPOConfig, CPOConfig):
    for_argument_parser(_kind)


def set_beta(trainer: Any, value: float) -> None:
    """Change ``beta`` of a trainer on preferences, from the next step on."""
    args: WithReference | ORPOConfig | CPOConfig = trainer.args
    options: PreferenceOptions = trainer.objective.options
    args.beta = options.pref_beta = value
