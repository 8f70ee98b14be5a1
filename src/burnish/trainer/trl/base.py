"""``TrlTrainer``: what TRL's trainers add to transformers': a model card after training, tokens in the log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.models.images.processor import copy_companions
from burnish.trainer.trainer import Trainer
from burnish.trainer.trl.lengths import refuse_long_rows


class argument:
    """An attribute of a trainer that reads its arguments: by default the one of the same name.

    A script may set it. In a constructor before TRL's, this has no effect, as in TRL. A value that the run cannot take
    over later is refused.

    Args:
        read: arguments -> value, if it is not the argument of this name.
        write: applies a new value: (trainer, value). None: the value is fixed when the trainer is created.
    """

    def __init__(
        self, read: Callable[[Any], Any] | None = None, write: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._read, self.write = read, write

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def read(self, args: Any) -> Any:
        return getattr(args, self.name) if self._read is None else self._read(args)

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        return self if trainer is None else self.read(trainer.args)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "args" not in vars(trainer) or value == self.read(trainer.args):
            return
        if self.write is None:
            now, config = self.read(trainer.args), type(trainer.args).__name__
            what = f"`{self.name}` of a trainer cannot be changed. Current: {now!r}. Received: {value!r}."
            raise UserError(what, remedy=f"Pass the value to {config} before the trainer is created.")
        self.write(trainer, value)


def for_each_set(evals: Any, prepare: Callable[[Any, str], Any]) -> Any:
    """Apply ``prepare`` to an evaluation set and its name, or to each set of a dict. None if there is none."""
    if isinstance(evals, dict):
        return {name: prepare(dataset, name) for name, dataset in evals.items()}
    return None if evals is None else prepare(evals, "eval")


def sets_by_name(evals: Any) -> dict[str, Any]:
    """Return evaluation sets by name; {} if there are none."""
    return evals if isinstance(evals, dict) else {"eval": evals} if evals else {}


class TrlTrainer(Trainer):
    """Base class of TRL's trainers.

    Attributes:
        router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts.
        aux_loss_enabled: whether the model returns that loss and it is used.
        _metrics: "train" or "eval" -> name -> values added by a script; the next log has their mean.
    """

    tag: ClassVar[str]
    """Tag of the model card."""
    router_aux_loss_coef = 0.0
    aux_loss_enabled = False
    _own_collators: ClassVar[tuple[type, ...]] = ()
    """Collators that do not change the length of a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._metrics: dict[str, defaultdict[str, list[float]]] = {
            "train": defaultdict(list), "eval": defaultdict(list),
        }  # fmt: skip
        super().__init__(*args, **kwargs)
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)
        evals = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        self._refuse_long_rows({"train": self.train_dataset, **evals})

    def _refuse_long_rows(self, datasets: Mapping[str, Any]) -> None:
        if type(self.data_collator) in self._own_collators:
            refuse_long_rows(self.model, datasets)

    @property
    def _tag_names(self) -> list[str]:
        """Tags of the model card; TRL's trainers use this name."""
        return ["burnish", self.tag]

    def _set_router(self, model: Any, coefficient: float | None) -> None:
        """Enable the loss of a router by default, as in TRL, independent of the model's config.

        Args:
            coefficient: weight of the loss; None: the model's own.

        Raises:
            ValueError: if a weight is given and the model has no such loss.
        """
        config = model.config.get_text_config()
        self.router_aux_loss_coef = getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
        if coefficient and not hasattr(config, "output_router_logits"):
            raise ValueError(
                f"`router_aux_loss_coef` is set to {coefficient}, but {type(model).__name__} is not a "
                "Mixture-of-Experts model that returns its router logits, so there is no auxiliary loss to weight."
            )
        self.aux_loss_enabled = hasattr(config, "output_router_logits") and self.router_aux_loss_coef != 0.0

    def _write_companions(self, folder: Path) -> None:
        """Also save the files of the image processor, which TRL saves with the whole processor."""
        super()._write_companions(folder)
        if not hasattr(self._saved_processing_class, "image_processor"):
            copy_companions(self.accelerator.unwrap_model(self.model), folder)

    def _write_final_files(self) -> None:
        """Write the model card, unless nothing is saved."""
        if self.args.save_strategy != "no":
            name = (self.args.hub_model_id or str(self.args.output_dir)).rstrip("/").rpartition("/")[-1]
            self.create_model_card(model_name=name)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **more: Any
    ) -> None:
        """Write ``README.md`` to ``output_dir``. Accepts TRL's arguments, and those of ``Trainer`` by name."""
        fields = {"model_name": model_name, "dataset": dataset_name, "tags": tags, **more}
        super().create_model_card(**{name: value for name, value in fields.items() if value is not None})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as in ``Trainer``. A dataset passed here is prepared like those of the constructor."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):  # the sets of a dict come separately
            eval_dataset = self._prepare_passed(eval_dataset)
            self._refuse_long_rows({"eval": eval_dataset})
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as in ``Trainer``, for a dataset that is prepared like those of the constructor."""
        return super().predict(self._prepare_passed(test_dataset), ignore_keys, metric_key_prefix)

    _requests_loss_only: ClassVar[bool] = True
    """Whether an evaluation calls ``compute_loss`` without ``return_outputs`` if only the loss is needed."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict one batch. Outputs are only computed if they are used."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if prediction_loss_only and self._requests_loss_only:
                return self.compute_loss(model, inputs).detach(), None, None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), *self._predictions_of(outputs, inputs)

    def _predictions_of(self, outputs: Any, inputs: Any) -> tuple[Any, Any]:
        """Predictions and labels of a micro-batch, from the outputs of ``compute_loss``."""
        return outputs.logits.detach(), inputs.get("labels")

    def _prepare_passed(self, dataset: Any) -> Any:
        """Return a dataset passed to ``evaluate`` or ``predict``, prepared like those of the constructor."""
        return dataset

    def _num_tokens_so_far(self) -> float:
        """Return the number of tokens of the run, including those since the last log. Called on every process."""
        if self._loop is None:
            return float(self.state.num_input_tokens_seen)
        meter = self._loop.meter
        unlogged = self._parallel.sum(meter.loss.new_tensor([meter.tokens])).item()
        return float(self.state.num_input_tokens_seen) + unlogged

    def _last_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return super()._last_metrics(metrics) | {"num_tokens": float(self.state.num_input_tokens_seen)}

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        mode = "train" if self.model.training else "eval"
        for name, values in self._metrics[mode].items():
            known = [value for value in values if not math.isnan(value)]
            if known:  # a script that only reads a name has an empty list
                name = f"eval_{name.removeprefix('eval_')}" if mode == "eval" else name
                logs[name] = sum(known) / len(known)
        self._metrics[mode].clear()
        super().log(logs, start_time)
