"""``Seq2SeqTrainer`` and ``Seq2SeqTrainingArguments``: evaluation and prediction with generated text.

With ``predict_with_generate`` the predictions of a set are generated token ids instead of logits. ``eval_loss`` is
still that of the labels. Everything else is the same as in ``Trainer``.

In: arguments of generation: from the call, else from ``generation_max_length`` and ``generation_num_beams``, else from
the model's ``generation_config``. Out: ids padded with the tokenizer's padding token. Refuses a generation config that
transformers could not save with the model.
"""

# B rows of a batch, T tokens
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.trainer_utils import PredictionOutput

from burnish.config.errors import UserError
from burnish.config.options import option
from burnish.trainer import notes
from burnish.trainer.arguments.training import TrainingArguments, for_argument_parser
from burnish.trainer.data.generation import (
    DEFAULT_MAX_LENGTH,
    GenerationSettings,
    generate_with_slots,
    generation_settings_of,
)
from burnish.trainer.trainer import Trainer

_PREFETCHED_BATCHES = 16
"""Number of batches that are generated at once."""


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """The arguments of a ``Seq2SeqTrainer``, as in transformers 5."""

    sortish_sampler: bool = option(False, "No effect, as in transformers; see train_sampling_strategy.")
    predict_with_generate: bool = option(
        False, "Use generated sequences instead of logits in evaluation and prediction."
    )
    generation_max_length: int | None = option(
        None, "Maximum length of generated sequences in evaluation. Default: max_length of the generation config."
    )
    generation_num_beams: int | None = option(
        None, "Number of beams in evaluation. Default: num_beams of the generation config."
    )
    generation_config: str | Path | GenerationConfig | None = option(
        None, "Generation config: an object, a file or folder with one, or the name of a model that has one."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            notes.warn(
                '`sortish_sampler` has no effect. Use train_sampling_strategy="group_by_length" to group by length.',
                UserWarning,
            )


for_argument_parser(Seq2SeqTrainingArguments)


class Seq2SeqTrainer(Trainer):
    """A ``Trainer`` whose ``evaluate`` and ``predict`` can generate, with arguments of ``model.generate``."""

    args: Seq2SeqTrainingArguments
    arguments_class = Seq2SeqTrainingArguments
    _gen_kwargs: dict[str, Any] | None = None  # of the current evaluation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._written: dict[int, Tensor] = {}  # id() of a batch -> generated ids, created ahead
        if self.args.generation_config is not None:
            self.model.generation_config = self.load_generation_config(self.args.generation_config)

    @staticmethod
    def load_generation_config(gen_config_arg: str | Path | GenerationConfig) -> GenerationConfig:
        """A copy of the config, or the config of a file, folder or model.

        Raises:
            UserError: if it is inconsistent, because saving it with the model would fail after training.
        """
        if isinstance(gen_config_arg, GenerationConfig):
            config = deepcopy(gen_config_arg)
        elif Path(gen_config_arg).is_file():
            config = GenerationConfig.from_pretrained(Path(gen_config_arg).parent, Path(gen_config_arg).name)
        else:
            config = GenerationConfig.from_pretrained(gen_config_arg)
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise UserError(str(error), remedy="Correct generation_config.") from error
        return config

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:  # fmt: skip
        """Evaluate like ``Trainer``. ``gen_kwargs`` are arguments of ``model.generate``, used for all sets of a
        dict."""
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:  # fmt: skip
        """Predict like ``Trainer``. ``gen_kwargs`` are arguments of ``model.generate``."""
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextmanager
    def _generating(self, kwargs: dict[str, Any]) -> Iterator[None]:
        before = self._gen_kwargs
        if kwargs or before is None:
            self._gen_kwargs = self._with_defaults(kwargs)
        try:
            yield
        finally:
            self._gen_kwargs = before

    def _with_defaults(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the call, with the defaults that ``args`` may set."""
        args, merged = self.args, {name: value for name, value in overrides.items() if value is not None}
        if args.generation_max_length is not None and not {"max_length", "max_new_tokens"} & set(merged):
            merged["max_length"] = args.generation_max_length
        if args.generation_num_beams is not None:
            merged.setdefault("num_beams", args.generation_num_beams)
        return merged

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:  # fmt: skip
        """Compute loss, predictions and labels of a batch, without gradients.

        Returns:
            () the mean loss or None; (B, T) the generated ids, including the prompt for decoder-only models; (B, T) the
            labels or None.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        ids = self._written.pop(id(inputs), None)
        inputs = self._prepare_inputs(inputs)
        if ids is None:
            ids = self._generate(inputs, self._with_defaults(gen_kwargs or self._gen_kwargs or {}))
        labels = inputs.get("labels")
        loss = None if labels is None else super().prediction_step(model, inputs, True, ignore_keys)[0]
        if self.args.prediction_loss_only:
            return loss, None, None
        return loss, self._pad(ids), None if labels is None else self._pad(labels)

    def _read_ahead(self, dataloader: Any, only_loss: bool) -> Iterable[Any]:
        """Yield the batches of an evaluation. If slots support it, several batches are generated at once
        (``generation.py``)."""
        batches, settings = iter(dataloader), None if only_loss else self._generation_settings()
        while settings is not None and (some := list(islice(batches, _PREFETCHED_BATCHES))):
            ids = generate_with_slots(
                self.model, [self._prepare_inputs(one) for one in some], settings, self.args.eval_batch_size
            )
            if ids is None:
                settings = None
            else:
                self._written |= {id(one): own_ids for one, own_ids in zip(some, ids, strict=True)}
            yield from some
        yield from batches

    def _generation_settings(self) -> GenerationSettings | None:
        """Settings for generation with slots in this evaluation; None if ``model.generate`` is used."""
        is_whole = self._parallel.world_size == 1 and not self._parallel.is_sharded
        if self._overrides("prediction_step") or not is_whole or not self.args.predict_with_generate:
            return None
        return generation_settings_of(self.model, self._with_defaults(self._gen_kwargs or {}))

    def _generate(self, inputs: Any, kwargs: dict[str, Any]) -> Tensor:
        """Generate (B, T) ids. Decoder inputs are omitted if the collator created them from the labels."""
        model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        labels, begun = inputs.get("labels"), model_inputs.get("decoder_input_ids")
        if labels is not None and begun is not None and labels.shape == begun.shape:
            model_inputs = {name: value for name, value in model_inputs.items() if not name.startswith("decoder_")}
        model: Any = self.model
        ids: Tensor = model.generate(**model_inputs, **kwargs)
        return ids

    def _pad(self, ids: Tensor) -> Tensor:
        """Pad (B, T) to the maximum length that the model's config allows, so that all batches have the same width."""
        config: Any = self.model.generation_config
        longest = [config.max_length or DEFAULT_MAX_LENGTH, (config.max_new_tokens or 0) + 1]
        width = next((width for width in longest if width > ids.shape[-1]), ids.shape[-1])
        missing = width - ids.shape[-1]
        return torch.nn.functional.pad(ids, (0, missing), value=self._padding_id()) if missing else ids

    def _padding_id(self) -> int:
        """The tokenizer's padding token, else its EOS token, else the model's padding token."""
        tokenizer, config = self.processing_class, getattr(self.model, "config", None)
        candidates = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        candidates.append(getattr(config, "pad_token_id", None))
        for identifier in candidates:
            if identifier is not None:
                return int(identifier)
        raise UserError(
            "predictions cannot be padded: neither the tokenizer nor the model's config has a pad_token_id.",
            remedy="Pass the tokenizer as processing_class, or set model.config.pad_token_id.",
        )
