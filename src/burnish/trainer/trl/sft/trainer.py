"""``SFTTrainer``, with the constructor and behavior of TRL's class, based on burnish's ``Trainer``.

In: a model or its name, arguments, datasets of texts, prompts with completions, conversations or token ids. Out: the
trained model. The data is prepared in ``rows.py``, constructor arguments in ``setup.py``; ``loss.py`` has the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.adapters.peft import is_peft_model
from burnish.data.batches.loader import num_tokens
from burnish.kernels.cross_entropy import TokenLoss, TokenSums
from burnish.kernels.probe import Capabilities, Head
from burnish.loop.types import IGNORE_INDEX, Batch, Loss
from burnish.losses.logits import target_positions
from burnish.losses.targets import Targets, sums_of_logits
from burnish.models.patches.attention import make_padding_free
from burnish.parallel.single import set_seed
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.data.prefix_sharing import probe_prefix_sharing
from burnish.trainer.inspection import has_virtual_tokens
from burnish.trainer.notes import logger
from burnish.trainer.reporting import Count
from burnish.trainer.trl.base import TrlTrainer, for_each_set, sets_by_name
from burnish.trainer.trl.old_arguments import resolve_arguments
from burnish.trainer.trl.prepared import column_names, first_row
from burnish.trainer.trl.sft.checks import (
    check_objective,
    check_sft_sets,
    learns_completions,
    skips_preparation,
)
from burnish.trainer.trl.sft.collator import DataCollatorForLanguageModeling
from burnish.trainer.trl.sft.config import SFTConfig
from burnish.trainer.trl.sft.loss import flat_inputs, sums_without_logits
from burnish.trainer.trl.sft.rows import Preparation
from burnish.trainer.trl.sft.setup import (
    attach_peft,
    finish_peft,
    inner_tokenizer,
    resolve_model,
    set_pad,
)
from burnish.trainer.trl.vision import MEDIA, PLACEHOLDERS_MASKED, VisionCollator, family_for


class CountAlways(Count):
    """Counts rows, and always tokens; by default without padding."""

    def __call__(self, batch: Batch) -> tuple[int, int]:
        rows, tokens = super().__call__(batch)
        if self.how != "all":
            tokens = num_tokens(batch)
        return rows, tokens


class SFTTrainer(TrlTrainer):
    """Trainer for supervised fine-tuning of causal language models. Accepts the arguments of TRL's ``SFTTrainer``
    (https://huggingface.co/docs/trl/sft_trainer), with these differences:

    Args:
        args: ``SFTConfig``, or ``TrainingArguments`` and defaults for the rest.
        old: arguments of earlier versions, each accepted with a warning: ``tokenizer``, ``max_seq_length``,
            ``dataset_text_field``, ``packing``, ...

    Logged with the loss: ``num_tokens`` (number of attended tokens of the run, saved in checkpoints),
    ``mean_token_accuracy`` and ``entropy`` (means over trained tokens), ``aux_loss`` of a mixture of experts.
    """

    args: SFTConfig
    tag = "sft"
    _counter = CountAlways
    _own_collators = (DataCollatorForLanguageModeling,)
    card_stage, card_title = "sft", "supervised fine-tuning"

    def __init__(
        self, model: Any, args: object = None, data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None, compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None, optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, quantization_config: Any = None,
        peft_config: Any = None, formatting_func: Callable[[Any], str] | None = None, **old: Any,
    ) -> None:  # fmt: skip
        args, processing_class = resolve_arguments(type(self), SFTConfig, args, model, processing_class, old)
        check_sft_sets(train_dataset)
        set_seed(args.seed, args.full_determinism)  # an adapter's weights are initialized when it is attached
        model, processing_class, added = resolve_model(model, args, processing_class, quantization_config)
        sample, datasets = first_row(train_dataset), [train_dataset, *sets_by_name(eval_dataset).values()]
        self.family = family_for(model, processing_class, inner_tokenizer(processing_class), datasets)
        if peft_config is not None:
            model = attach_peft(model, peft_config, added)
        self.completion_only_loss = learns_completions(args, sample)
        has_images = self.family is not None
        check_objective(args, sample, data_collator, compute_loss_func, formatting_func, has_images)
        packs = args.packing or bool(args.eval_packing)  # examples of a pack must not attend to each other
        self.padding_free = args.padding_free or (packs and args.packing_strategy != "wrapped")
        # As in TRL, the collator of a script gets the records with their images.
        self._skip_prepare_dataset = skips_preparation(args) if not has_images else data_collator is not None
        if data_collator is None:
            data_collator = self._own_collator(model, processing_class, args)
            if self.family is not None:
                data_collator = VisionCollator(
                    model, self.family, data_collator, data_collator.pad_token_id, data_collator.pad_to_multiple_of,
                    self.padding_free, args.dataloader_num_workers, type(self) is SFTTrainer,
                )  # fmt: skip
        tokenizer = inner_tokenizer(processing_class)
        self._prepare = Preparation(tokenizer, args, self.completion_only_loss, formatting_func, self.family)
        self._refuse_masks_without_labels({"train": train_dataset, **sets_by_name(eval_dataset)}, data_collator)
        if not self._skip_prepare_dataset:
            if has_images and not args.assistant_only_loss and not self.completion_only_loss:
                logger.warning(PLACEHOLDERS_MASKED)
            self._formatting_func = formatting_func
            train_dataset = self._prepare_dataset(
                train_dataset, processing_class, args, args.packing, formatting_func, "train"
            )
            eval_dataset = self._prepared_evals(eval_dataset, processing_class, args)
        if is_peft_model(model):
            finish_peft(model, args)
        self._set_router(model, args.router_aux_loss_coef)
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        if isinstance(data_collator, VisionCollator):
            data_collator.join_processes(self.model, self._parallel)
        self._eval_sums: dict[str, Tensor] = {}

    def _own_collator(self, model: Any, processing_class: Any, args: SFTConfig) -> DataCollatorForLanguageModeling:
        """Padding-free if requested and supported by the model; else padded, with packs split into sequences."""
        pad = set_pad(model, processing_class, args.pad_token)
        multiple: Any = args.pad_to_multiple_of
        if not self.padding_free:
            return DataCollatorForLanguageModeling(pad, pad_to_multiple_of=multiple)
        sets_attention = isinstance(args.model_init_kwargs, dict) and "attn_implementation" in args.model_init_kwargs
        layout = make_padding_free(model, own_attention=not sets_attention)
        if layout.note:
            logger.warning(layout.note)
        return DataCollatorForLanguageModeling(
            pad,
            padding_free=layout.is_padding_free,
            pad_to_multiple_of=multiple,
            takes_packs_apart=not layout.is_padding_free,
        )

    def _set_router(self, model: Any, coefficient: float | None) -> None:
        super()._set_router(model, coefficient)
        config = model.config.get_text_config()
        if hasattr(config, "router_aux_loss_coef"):  # the model's own loss uses these values
            config.output_router_logits = self.aux_loss_enabled
            config.router_aux_loss_coef = self.router_aux_loss_coef

    # --- data ---------------------------------------------------------------------------------------------------------

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """A dataset of token ids with labels (``rows.py``). An override may map it before, or return such rows
        itself."""
        return self._prepare(dataset, dataset_name, packing)

    def _prepared_evals(self, evals: Any, processing_class: Any, args: SFTConfig) -> Any:
        packing = args.packing if args.eval_packing is None else args.eval_packing
        more = (processing_class, args, packing, self._formatting_func)
        return for_each_set(evals, lambda dataset, name: self._prepare_dataset(dataset, *more, name))

    def _refuse_masks_without_labels(self, datasets: dict[str, Any], collator: Any) -> None:
        """Raise for masks without labels. Masks are converted to labels during preparation; without it all tokens
        would be trained."""
        if not (self._skip_prepare_dataset and isinstance(collator, DataCollatorForLanguageModeling)):
            return
        for name, dataset in datasets.items():
            columns = column_names(dataset)
            if "labels" not in columns and ("completion_mask" in columns or "assistant_masks" in columns):
                raise ValueError(
                    f"The {name} dataset has mask columns but no 'labels', and `skip_prepare_dataset=True` skips label "
                    "building, so it would train on the full sequence. Add a 'labels' column (-100 for non-loss "
                    "tokens) or drop `skip_prepare_dataset`."
                )

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels", "seq_lengths", "images"]
            if self.family is not None and self._skip_prepare_dataset:
                self._signature_columns = ["messages", "prompt", "completion", *MEDIA]

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """On a GPU the collator adds the target positions, because finding them there would wait for the device. Not if
        a subclass overrides a method between loader and loss.
        """
        loader = super()._get_dataloader(*args, **kwargs)
        if self._parallel.device.type == "cpu":
            return loader
        between = ("compute_loss", "training_step", "prediction_step", "_prepare_inputs")
        if not any(map(self._overrides, between)):
            loader.collate_fn = CollateWithTargets(loader.collate_fn)
        return loader

    def _examples_in_packs(self, loader: Any) -> int | None:
        dataset: Any = getattr(loader, "dataset", None)
        if not is_datasets_set(dataset) or "seq_lengths" not in dataset.column_names:
            return None
        return sum(len(lengths) for lengths in dataset["seq_lengths"])

    def _find_capabilities(self) -> Capabilities:
        return probe_prefix_sharing(self.model, self._skips_tokens and not self.aux_loss_enabled, needs_head=True)

    # --- loss ---------------------------------------------------------------------------------------------------------

    def _loss(self, model: nn.Module, inputs: Any) -> Loss:
        """The loss of a micro-batch, a sum over its trained tokens, and its metrics."""
        sums, targets, aux, _ = self._sums(model, inputs, needs_logits=False)
        num_items = self._num_items(inputs) if self._step.own_items is None else self._step.own_items
        total = sums.total if aux is None else sums.total + self.router_aux_loss_coef * aux * num_items
        return Loss(total, self._metric_sums(sums, targets, aux, num_items))

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a micro-batch over its trained tokens, for evaluations and scripts.

        Args:
            inputs: the micro-batch.
            return_outputs: whether to return the outputs, including logits.
            num_items_in_batch: () divisor of the sum. Default: number of trained tokens of the batch.

        Returns:
            () the loss, or (loss, outputs).
        """
        needs_logits = return_outputs or self.compute_loss_func is not None
        sums, num_targets, aux, outputs = self._sums(model, inputs, needs_logits)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, inputs["labels"], num_items_in_batch=num_items_in_batch)
        else:
            items = num_targets if num_items_in_batch is None else num_items_in_batch
            loss = sums.total / torch.as_tensor(items).clamp(min=1)
            if aux is not None:
                loss = loss + self.router_aux_loss_coef * aux
        if model.training:
            self._step.sums.update(self._metric_sums(sums, num_targets, aux, self._num_items(inputs)))
        else:
            measured = {**self._metric_sums(sums, num_targets, aux), "items": num_targets}
            for name, value in measured.items():
                self._eval_sums[name] = self._eval_sums.get(name, 0) + value.detach().float()
        return (loss, outputs) if return_outputs else loss

    def _sums(self, model: nn.Module, inputs: Any, needs_logits: bool) -> tuple[TokenSums, Tensor, Tensor | None, Any]:
        """Sums over the trained tokens of a micro-batch.

        Returns:
            The sums, () the number of trained tokens, () the router's loss if it is used, the model's output.
        """
        model_inputs = {**inputs, "use_cache": False}
        labels, positions = model_inputs.pop("labels"), model_inputs.pop("target_positions", None)
        if has_virtual_tokens(self.model):  # the last virtual token predicts the first id
            labels, positions = F.pad(labels, (1, 0), value=IGNORE_INDEX), None
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        targets = Targets.of(labels, positions)
        head = None if needs_logits else self._capabilities().head
        flat, rules = None if head is None else self._padding_free_inputs(inputs), self._rules(head)
        if flat is not None and head is not None:
            sums, outputs = sums_without_logits(model, *flat_inputs(flat), head, rules)
        elif head is not None:
            sums, outputs = sums_without_logits(model, model_inputs, targets, labels.shape[1], head, rules)
        else:
            outputs = model(**model_inputs)
            logits = outputs.logits[:, -labels.shape[1] :].flatten(0, 1)[targets.positions]
            sums = sums_of_logits(logits, targets, rules)
        aux = outputs.aux_loss if self.aux_loss_enabled and outputs is not None else None
        return sums, targets.token_weights.sum(), aux, outputs

    def _rules(self, head: Head | None) -> TokenLoss:
        is_dft = self.args.loss_type == "dft"
        smoothing = 0.0 if is_dft else self.args.label_smoothing_factor
        softcap = head.softcap if head else None
        return TokenLoss(smoothing, softcap, accuracy=True, entropy=True, factor="dft" if is_dft else None)

    def _metric_sums(
        self, sums: TokenSums, num_targets: Tensor, aux: Tensor | None, num_items: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sums over the trained tokens, for the log.

        Args:
            sums: sums of loss and metrics.
            num_targets: () number of trained tokens.
            aux: () the router's loss, or None.
            num_items: () the loop's number of items of the batch, which is slightly larger for models whose first
                labels transformers counts as well; the sums are scaled to it. None in evaluation.
        """
        measured = {"mean_token_accuracy": sums.correct, "entropy": sums.entropy}
        if aux is not None:
            measured["aux_loss"] = aux.detach() * num_targets
        if num_items is None:
            return measured
        share = num_items / num_targets.clamp(min=1)
        return {name: value * share for name, value in measured.items()}

    # --- evaluation and logs ------------------------------------------------------------------------------------------

    def _prepare_passed(self, dataset: Any) -> Any:
        self._refuse_masks_without_labels({"eval": dataset}, self.data_collator)
        if self._skip_prepare_dataset:
            return dataset
        return self._prepared_evals(dataset, self.processing_class, self.args)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        self._eval_sums = {}
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._eval_sums:
            names = list(self._eval_sums)
            totals = self._parallel.sum(torch.stack([self._eval_sums[name] for name in names])).tolist()
            means = dict(zip(names, totals, strict=True))
            items = max(means.pop("items"), 1.0)
            metrics: Any = output.metrics
            metrics.update({f"{metric_key_prefix}_{name}": value / items for name, value in means.items()})
            metrics[f"{metric_key_prefix}_num_tokens"] = self._num_tokens_so_far()
        return output


@dataclass
class CollateWithTargets:
    """A collator that adds the target positions to batches while they are on the CPU."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim() == 2:
            batch["target_positions"] = target_positions(labels)
        return batch
