"""Base class of ``GRPOTrainer`` and ``RLOOTrainer``: burnish's ``Trainer`` with the objective of ``rollouts/``.

Prompts are processed in ``prompts.py``, rewards in ``reward_methods.py``, completions and advantages in ``rollouts/``,
and the loss in ``losses/rollouts``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from burnish.adapters.peft import is_peft_model
from burnish.config.errors import UserError
from burnish.config.options import raise_if
from burnish.data.batches.batching import collate_padded
from burnish.data.batches.loader import num_tokens
from burnish.inference.images.reading import ImageReader
from burnish.kernels.token_logps import LogpRules
from burnish.loop.meter import EvalSums
from burnish.loop.types import Batch, Loss, Metric, Row
from burnish.losses.reference import InitialWeights, MovingReference
from burnish.models.load import context_length
from burnish.models.patches.packed import packing
from burnish.parallel.single import set_seed
from burnish.rollouts.completions import SlotSource
from burnish.rollouts.metrics import as_metrics
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.rewards.models import RewardModel
from burnish.rollouts.samples import ScoredCompletion
from burnish.run.rollouts import merging, slots_of
from burnish.trainer import reporting
from burnish.trainer.data.in_step import equalize_batches
from burnish.trainer.data.loaders import is_streamed_set
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.methods.base import StepInProgress
from burnish.trainer.methods.data import call_with_accepted
from burnish.trainer.notes import logger
from burnish.trainer.reporting import Count
from burnish.trainer.trl.base import TrlTrainer
from burnish.trainer.trl.old_arguments import resolve_arguments
from burnish.trainer.trl.preferences.objective import capabilities_and_collator, padding_batch, reference_for
from burnish.trainer.trl.rollouts.config import RolloutConfig
from burnish.trainer.trl.rollouts.environments import Environments
from burnish.trainer.trl.rollouts.prompts import (
    PromptRows,
    PromptTemplate,
    blank_prompts,
    prompt_rows,
    room_for_prompts,
    without_repeats,
)
from burnish.trainer.trl.rollouts.reward_methods import RewardMethods
from burnish.trainer.trl.rollouts.rewards import check_reward_models, reward_list
from burnish.trainer.trl.rollouts.script_source import ScriptSource, check_rollout_func
from burnish.trainer.trl.rollouts.scripted import (
    RecordsOfBatch,
    RolloutBatch,
    ScriptedRollouts,
    record_of,
    token_values_of,
)
from burnish.trainer.trl.rollouts.tables import CompletionTablesCallback, empty_logs, fill_logs
from burnish.trainer.trl.rollouts.tool_functions import Tool, check_tools, schemas
from burnish.trainer.trl.rollouts.tools import ToolDialogue, ToolSource
from burnish.trainer.trl.sft.checks import check_sft_sets
from burnish.trainer.trl.sft.setup import end_tokens, inner_tokenizer, resolve_model
from burnish.trainer.trl.vision import MEDIA_READER, VisionCollator, family_for

_LONGEST = 1 << 20


class CountPrompts(Count):
    """Counts the prompts of a step batch of the loader, or the completions of a step batch of the objective."""

    def __call__(self, batch: Batch) -> tuple[int, int]:
        return len(batch["items"]), num_tokens(batch) if "input_ids" in batch else 0


class RolloutTrainer(RewardMethods):
    """Base class of the rollout trainers. The arguments are those of TRL's (https://huggingface.co/docs/trl/grpo_trainer),
    except for:

    Args:
        rollout_func: generates the completions, see ``ScriptSource``.
        environment_factory: creates an object for each completion, or several such callables by the name in the column
            ``environment``: its public methods are tools, ``reset(**record)`` starts it, ``get_reward()`` is a reward.

    A subclass may override ``_calculate_rewards``, with TRL's signature. If it overrides a method of TRL with a batch
    or the model as argument (``compute_loss``, ``_compute_loss``, ``training_step``, ``prediction_step``,
    ``_get_per_token_logps_and_entropies``, ...), that method gets the bare model, and TRL's padded batch or its list of
    records (``scripted.py``).

    Attributes:
        _logs: texts, rewards and advantages of the newest generation batch, as in TRL. On the main process.
    """

    args: RolloutConfig
    config_class: ClassVar[type[RolloutConfig]]
    objective_class: ClassVar[type[RolloutObjective]]
    _counter = CountPrompts
    _uncalled = frozenset({"_remove_unused_columns"})
    """Methods of ``Trainer`` that are not called by these trainers: records keep their columns."""
    _loss_methods = (*TrlTrainer._loss_methods, "_compute_loss", "_get_per_token_logps_and_entropies",
                     "_generate_and_score_completions")  # fmt: skip

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: object = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None, optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None, peft_config: Any = None, tools: list[Tool] | None = None,
        rollout_func: Callable[..., Mapping[str, Any]] | None = None, environment_factory: Any = None,
        **old: Any,
    ) -> None:  # fmt: skip
        args, processing_class = resolve_arguments(type(self), self.config_class, args, model, processing_class, old)
        tools = check_tools(tools)
        self.environments = None if environment_factory is None else Environments(environment_factory, tools)
        self.tools = tools if self.environments is None else self.environments.every_tool()
        if rollout_func is not None:
            check_rollout_func(rollout_func)
        self.rollout_func = rollout_func
        if train_dataset is None:
            train_dataset = blank_prompts(args, self.environments)
        elif not isinstance(train_dataset, list):
            check_sft_sets(train_dataset)
        datasets = [train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])]
        calls_rewards = not self._overrides("_calculate_rewards")
        if calls_rewards:
            check_reward_models(reward_funcs, reward_processing_classes, datasets)
        set_seed(args.seed, args.full_determinism)  # the weights of an adapter are initialized when it is attached
        model, processing_class, added = resolve_model(model, args, processing_class, quantization_config)
        self._tokenizer = inner_tokenizer(processing_class)
        model, choices = self._attach(model, args, processing_class, peft_config, added)
        self.family = family_for(model, processing_class, self._tokenizer, [one for one in datasets if one is not None])
        template = PromptTemplate(self._tokenizer, room_for_prompts(model, args), end_tokens(model), self.family)
        self.objective = self.objective_class(choices, template, self._tokenizer)
        self.reward_funcs = reward_list(reward_funcs, reward_processing_classes)
        if calls_rewards:
            check_reward_models(self.reward_funcs, None, datasets)  # those that had to be downloaded
        if self.family is not None:
            self._check_images(rollout_func)
        self.reward_processing_classes = [getattr(one, "tokenizer", None) for one in self.reward_funcs]
        self.objective.functions = self._functions()
        self.objective.compute_rewards = self._compute_rewards
        self.objective.before_generation = self._apply_generation_config
        self._limit_completions(cast("dict[str, Any]", args.generation_kwargs or {}))
        of_environments = {"environments"} if self.environments is not None else set()
        is_known = rollout_func is None and calls_rewards  # both may pass other columns
        self.objective.passed_arguments = frozenset({"trainer_state"} | of_environments) if is_known else None
        self.objective.logs_clipping_of_evaluations = True  # as in TRL
        self._logged_extra: dict[str, list[Any]] = {}
        self._logged_metrics: dict[str, list[float]] = {}
        super().__init__(
            model=model, args=args, data_collator=self._collate, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
        )  # fmt: skip
        self.add_callback(self.objective.times)
        self._logs = empty_logs(args.generation_batch_size or 0)
        self._tables = CompletionTablesCallback(choices, Path(args.output_dir)) if args.log_completions else None
        self.objective.on_generation = self._log_generation
        if self._tables is not None:
            self.add_callback(self._tables)
        self._eval_rows: list[tuple[Any, PromptRows]] = []
        self._read_rows = self._prompts = self._rows_of(train_dataset, "train", self._prompts_of_run)
        self._numbered: tuple[PromptRows, Mapping[int, Row]] | None = None
        self._given: RecordsOfBatch | None = None
        self._configure_objective(peft_config)
        if rollout_func is None:
            for note in self.objective.inspect(self._prompts, self.objective.rows_per_rank):
                logger.warning(note)
        if not self._overrides("get_eval_dataloader"):
            sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
            self._eval_rows = [(one, self._rows_of(one, name)) for name, one in sets.items() if one is not None]

    def _check_images(self, rollout_func: Any) -> None:
        """Raise UserError for something that does not support prompts with images."""
        unsupported = {
            "`rollout_func`": rollout_func is not None, "`tools`": bool(self.tools),
            "`environment_factory`": self.environments is not None,
            "an override of a method with a batch": self._is_scripted,
            "a reward model": any(isinstance(function, RewardModel) for function in self.reward_funcs),
        }  # fmt: skip
        if found := [name for name, is_used in unsupported.items() if is_used]:
            raise UserError(
                f"{' and '.join(found)} cannot be used with images in {type(self).__name__}.",
                remedy="Remove it, or remove the images from the dataset.",
            )

    def _log_generation(self, samples: Sequence[ScoredCompletion], names: Sequence[str], *numbers: int) -> None:
        fill_logs(self._logs, samples, names)
        if self._tables is not None:
            self._tables.add(samples, names, *numbers)

    # --- the objective ------------------------------------------------------------------------------------------------

    @property
    def ref_model(self) -> Any:
        """The reference as a model; None if β is 0 or if the reference is the model without its adapter."""
        reference = self.objective.reference
        start = reference.start if isinstance(reference, MovingReference) else reference
        if not isinstance(start, InitialWeights) or is_peft_model(self.model):
            return None
        return start.as_model(self.model)

    def _configure_objective(self, peft_config: Any) -> None:
        objective, model, parallel = self.objective, self.model, self._parallel
        skips_tokens = self._skips_tokens and objective.allows_prefix_sharing(model)
        capabilities, collate = capabilities_and_collator(model, None, self.args, self._pad, skips_tokens, False)
        if self.family is not None:
            capabilities = replace(capabilities, is_padding_free=False, shares_prefixes=False)
            text = partial(collate_padded, pad_id=self._pad)
            collate = VisionCollator(model, self.family, text, self._pad, one_by_one=True)
            collate.join_processes(model, self._parallel)
            objective.images = ImageReader(model, self.family, MEDIA_READER)
        for note in objective.configure(capabilities, collate):
            logger.warning(note)
        choices: Any = objective.choices
        objective.reference = reference_for(objective, choices, model, None, peft_config, parallel)
        self._known_capabilities = replace(capabilities, model=model)
        self.model_wrapped = self._made = objective.module(model)
        context = context_length(model.config) or _LONGEST
        slots = slots_of(objective, parallel.device, model.config, min(context, 4 * self.args.max_completion_length))
        objective.source = SlotSource(
            model, slots, context, parallel.precision, merging=merging(model, parallel),
            packing=packing(model, self.args.torch_compile),
        )  # fmt: skip
        if self.tools or self.environments is not None:
            variables: Any = self.args.chat_template_kwargs
            form = ToolDialogue(self._tokenizer, schemas(self.tools), variables or {})
            by_name = {tool.__name__: tool for tool in self.tools}
            most, timeout_s = self.args.max_tool_calling_iterations, self.args.reward_timeout_s
            objective.source = ToolSource(objective.source, form, by_name, most, context, timeout_s, self.environments)
        if self.rollout_func is not None:
            vocab_size = model.get_input_embeddings().num_embeddings
            objective.source = ScriptSource(self.rollout_func, self, vocab_size)

    def _padding_batch(self, batch: Batch) -> PaddingBatch:
        return padding_batch(batch)

    # --- methods of a script: scripted.py -----------------------------------------------------------------------------

    @cached_property
    def _scripted(self) -> ScriptedRollouts:
        self._warn_of_overrides()
        own = self._token_values if self._overrides("_get_per_token_logps_and_entropies") else None
        generates = self._overrides("_generate_and_score_completions")
        generate = self._generate_by_script if generates else None
        return ScriptedRollouts(self.objective, self._over, self._pad, self._parallel, own, generate)

    def _generate_by_script(self, inputs: list[dict[str, Any]]) -> Mapping[str, Any]:
        with self.autocast_smart_context_manager():  # as in accelerate's wrapper, which scripts of TRL call
            output: Any = self._generate_and_score_completions(inputs)
        if not isinstance(output, Mapping):
            what = f"_generate_and_score_completions must return a dict of tensors. Received: {type(output).__name__}."
            raise UserError(what, remedy="Return the result of the original method, with your changes.")
        return output

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score the completions of a generation batch of this rank. May be overridden.

        Args:
            inputs: the record of each completion, with its prompt. An override passes them on unchanged.

        Returns:
            TRL's padded batch: ``prompt_ids``, ``completion_ids``, their masks, ``advantages`` (one per completion; an
            override may return one per token), and log-probabilities. Further tensors of an override with a value per
            completion are passed to its other methods.
        """
        return self._scripted.generate_batch(inputs)

    def _token_values(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values of the tokens of a padded batch from a script's ``_get_per_token_logps_and_entropies``."""
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        ids, mask = (torch.cat([inputs[name] for name in both], 1) for both in names)
        logps, entropies, *aux = self._get_per_token_logps_and_entropies(
            model, ids, mask, inputs["completion_ids"].shape[1], compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )  # fmt: skip
        return logps, entropies, aux[0] if aux else None

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Log-probabilities (S, T) of the last ``logits_to_keep`` tokens of padded rows, their entropies (S, T) or
        None, and the router's loss () or None.

        Args:
            batch_size: rows of one forward pass; None: all.
            images: arguments for images, which these trainers do not support; None each.
        """
        size = batch_size or len(input_ids)
        rules = LogpRules(
            temperature=self.args.temperature, entropy=compute_entropy,
            entropy_gradient=self.objective.token_loss.has_bonus,
        )  # fmt: skip
        found = [
            token_values_of(model, ids, mask, logits_to_keep, rules, compute_aux_loss)
            for ids, mask in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True)
        ]
        logps, entropies = torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])
        aux = [one[2] for one in found if one[2] is not None]
        return logps, entropies if compute_entropy else None, torch.stack(aux).mean() if aux else None

    # --- data ---------------------------------------------------------------------------------------------------------

    def _rows_of(self, dataset: Any, name: str, most: int | None = None) -> PromptRows:
        known = next((rows for one, rows in self._eval_rows if one is dataset and not isinstance(one, list)), None)
        if known is not None:
            return known
        kwargs: Any = self.args.chat_template_kwargs
        tools = json.dumps(schemas(self.tools)) if self.tools else ""
        rows = prompt_rows(dataset, name, self.objective, kwargs, tools, most)
        records = [json.loads(row["record"]) for row in rows] if self.tools or self.environments is not None else []
        for record in records:
            if isinstance(record["prompt"], str):
                what = "tools and environments require a prompt as a list of messages. Received: a string."
                remedy = 'Write it as [{"role": "user", "content": ...}].'
                raise UserError(what, where=record["place"], remedy=remedy)
        if self.environments is not None:
            self.environments.check_records(records)
        if name != "train":
            raise_if(self.objective.inspect_columns(rows, f"The {name} dataset"))
        return rows

    @property
    def _prompts_of_run(self) -> int:
        """Number of prompts of ``max_steps``, for streamed datasets."""
        batches = -(-self.args.max_steps // self.objective.inner_steps)
        return batches * self.objective.rows_per_rank * self._parallel.world_size

    @property
    def _accumulation(self) -> int:
        """Gradient accumulation of the loader: a step batch is one micro-batch of prompts, from which a generation
        batch is created."""
        return 1

    @property
    def _inner_steps(self) -> int:  # type: ignore[override]
        return self.objective.inner_steps

    @property
    def _collate_for_loader(self) -> Callable[[list[Any]], Any]:
        return self._collate

    def _collate(self, rows: Sequence[Any]) -> Batch:
        batch: Batch = self.objective.collate(rows)
        return batch

    def get_train_dataloader(self) -> Any:
        """Return a loader of prompts, with the prompts of one generation batch of this rank per batch."""
        return self._get_dataloader(
            dataset=self._prompts, description="Training", batch_size=self.objective.rows_per_rank,
            sampler_fn=self._prompt_sampler, is_training=True,
        )  # fmt: skip

    def _prompt_sampler(self, dataset: Any) -> Any:
        sampler, args = call_with_accepted(self._get_train_sampler, dataset), self.args
        if not self._overrides("_get_train_sampler"):
            return sampler
        size, repeats = args.generation_batch_size or 1, args.num_iterations * self.objective.micro_batches
        return without_repeats(sampler, args.num_generations, size, repeats)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return a sampler of prompts. An override may return one of TRL, which yields a prompt for each completion."""
        strategy = "random" if self.args.shuffle_dataset and not is_streamed_set(self.train_dataset) else "sequential"
        dataset = self._prompts if train_dataset is None else train_dataset
        return self._sampler_for(dataset, strategy, self.objective.rows_per_rank, 1)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return self._sampler_for(eval_dataset, "sequential", self.args.eval_batch_size, 1)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of the prompts of an evaluation dataset."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        return super().get_eval_dataloader(self._rows_of(dataset, "eval"))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of the prompts of a dataset passed to ``predict``."""
        return super().get_test_dataloader(self._rows_of(test_dataset, "test"))

    # --- loss and evaluation ------------------------------------------------------------------------------------------

    def _inputs_for_script(self, batch: Batch) -> Any:
        """The record of each completion, as in TRL, if a script overrides a method. A padding batch has that of the
        first prompt of the dataset."""
        if not isinstance(batch, RolloutBatch) or not all(row in self._rows_by_number for row in batch.rows):
            return batch
        rows = [self._rows_by_number[row] for row in batch.rows] or self._read_rows[:1]
        self._given = RecordsOfBatch(map(record_of, rows), batch)
        return self._given

    @property
    def _rows_by_number(self) -> Mapping[int, Row]:
        """The rows of the dataset in use, by their ``row``."""
        if self._numbered is None or self._numbered[0] is not self._read_rows:
            self._numbered = self._read_rows, {row["row"]: row for row in self._read_rows}
        return self._numbered[1]

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The padded batch of the completions of these records. Those of a generation batch are generated together.

        Raises:
            UserError: for other records.
        """
        return super()._prepare_inputs(self._padded_of(inputs))

    def _padded_of(self, inputs: Any) -> Any:
        """A padded batch as it is; that of the records of the micro-batch."""
        if isinstance(inputs, RecordsOfBatch):
            return inputs.batch
        if not isinstance(inputs, list):
            return inputs
        if self._given is None or inputs != self._given:
            what = "The records of a micro-batch cannot be changed. Received: other records."
            raise UserError(what, remedy="Change the dataset, or override _generate_and_score_completions.")
        return self._given.batch

    def _num_items(self, inputs: Any) -> Tensor:
        inputs = self._padded_of(inputs)
        if "token_mask" in inputs:
            return self.objective.num_items(inputs)
        return inputs["items"].sum() if "items" in inputs else self._scripted.num_items(inputs)

    def _sums_of(self, batch: Batch) -> dict[str, Metric]:
        """Return rewards and lengths of a generation batch, with its first micro-batch."""
        metrics = batch.ready["metrics"] if isinstance(batch, RolloutBatch) else {}
        return as_metrics(metrics, self._parallel.device)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return () the loss of a micro-batch: for RLOO a mean over its completions; for GRPO its part of the step's
        loss.

        Args:
            model: the bare model.
            inputs: TRL's padded batch. If no method is overridden: the objective's module, and a batch from its
                ``prepare_step``.
        """
        if return_outputs:
            raise ValueError(f"The {type(self).__name__} does not support returning outputs")
        if "token_mask" not in inputs:
            return self._compute_loss(model, inputs)
        loss = self.objective.loss(model, inputs)
        self._step.sums.update(loss.sums)
        return loss.total / self._num_items(inputs).clamp(min=1)

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the result of ``compute_loss``, as in TRL."""
        found = self._scripted.loss(model, inputs)
        self._step.sums.update(found.sums)
        divisor = self._scripted.num_items(inputs)
        if self.loss_is_scaled_for_ga and self._step.num_items is not None:
            divisor = self._step.num_items / self._parallel.world_size
        return found.total / divisor.clamp(min=1)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a micro-batch of completions that ``evaluation_loop`` has generated."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """Generate completions of the prompts of a dataset, and measure rewards and lengths. The noise is the same each
        time."""
        module, totals, rows = self._model_for_evaluation(), EvalSums(), getattr(dataloader, "dataset", None)
        self._read_rows = rows if isinstance(rows, PromptRows) else PromptRows()
        reporting.announce_evaluation(description, self.num_examples(dataloader), self.args.eval_batch_size)
        prompts = (batch for batch, is_own in equalize_batches(dataloader, self._parallel) if is_own)
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                for batch in self._objective().iter_eval(module, prompts, self._parallel):
                    totals.add(self._loss_for_evaluation(module, batch), self._num_items(batch))
                    self._call_event("on_prediction_step")
        finally:
            self._read_rows = self._prompts
        means = self.objective.report(totals.means(self._parallel))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        metrics[f"{metric_key_prefix}_num_tokens"] = self._num_tokens_so_far()
        if self.is_in_train:
            module.train()
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))  # type: ignore[arg-type]

    def _loss_for_evaluation(self, module: nn.Module, batch: Batch) -> Loss:
        if not self._is_scripted:
            return self.objective.loss(module, batch)
        self._step = StepInProgress(sums=self._sums_of(batch))
        value = self.prediction_step(module, self._inputs_for_script(batch), True, ignore_keys=None)[0]
        return Loss(value * self._num_items(batch), self._step.sums)
