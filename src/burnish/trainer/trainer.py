"""``Trainer``, with the constructor, methods and behavior of transformers' class, based on burnish's loop.

It does not inherit from transformers. A method collects the components of a run, and functions of other modules do the
work. Order of the methods: constructor, callbacks, training, loss, evaluation, data, optimizer, files, logs, hub,
search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import metrics_format
from transformers.trainer_utils import (
    BestRun,
    EvalLoopOutput,
    PredictionOutput,
    TrainerMemoryTracker,
    default_compute_objective,
    default_hp_space_optuna,
    has_length,
    speed_metrics,
    validate_quantization_for_training,
)
from transformers.utils import can_return_loss, logging

from burnish.checkpoint import checkpoint
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.checkpoint.comparison import compare_with_checkpoint
from burnish.config.errors import is_out_of_memory, skipped_steps_message
from burnish.kernels.probe import Capabilities
from burnish.loop.loop import Loop, TrainOutput, set_optimizer_mode
from burnish.loop.protocols import Objective
from burnish.loop.schedule import StepPlan
from burnish.loop.state import TrainerControl, TrainerState, keeping_plan, load_state
from burnish.loop.types import Batch, Loss
from burnish.optim.builtin import create_optimizer, create_scheduler
from burnish.parallel.create import create_parallel
from burnish.parallel.precision import full_eval_dtype
from burnish.parallel.selection import local_rank, parallel_name
from burnish.parallel.single import set_seed
from burnish.report import results
from burnish.run.recovery.spikes import train_with_rollback
from burnish.trainer import constructor as given
from burnish.trainer import evaluation, inspection, optimizer, reporting, search, training
from burnish.trainer.accelerator import ParallelAccelerator
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.callbacks import TrainerCallbackHandler, default_callbacks, display_callback
from burnish.trainer.data import loaders
from burnish.trainer.data.in_step import in_step, map_tensors, mark_last, tensors_by_name
from burnish.trainer.data.prefix_sharing import has_plain_loss, probe_prefix_sharing, shared_prefixes_of
from burnish.trainer.data.torch_loader import PaddingBatch, TorchLoader, num_batches
from burnish.trainer.files import card, files
from burnish.trainer.files.hub import Hub
from burnish.trainer.files.transformers_checkpoints import is_foreign, load_foreign, write_transformers_files
from burnish.trainer.loss import (
    StepInProgress,
    accepting,
    explain_index_errors,
    loss_of,
    num_items_of,
    refuse_empty,
    refuse_no_loss,
    weighted_by_zero,
    without_gradient,
)
from burnish.trainer.trl.sft.loss import mean_of_padding_free, sum_of_padding_free

logger = logging.get_logger("transformers.trainer")  # so that the log level that a script sets applies here as well


class Trainer:
    """Train and evaluate a model: any ``nn.Module`` that returns a loss.

    Args:
        model: the model; or pass ``model_init``.
        args: ``TrainingArguments``, burnish's or transformers'.
        data_collator: rows -> batch. Default: depends on the processing class.
        train_dataset, eval_dataset: ``datasets.Dataset``, torch ``Dataset`` or ``IterableDataset`` (with
            ``max_steps``), lists of rows; ``eval_dataset`` may be a dict of them.
        processing_class: tokenizer or processor, saved with the model; ``tokenizer=`` is its earlier name.
        model_init: creates a new model for every ``train()``; may take a trial.
        compute_loss_func: (outputs, labels, num_items_in_batch=) -> loss.
        compute_metrics: ``EvalPrediction`` -> metrics.
        callbacks: in addition to the default ones; transformers' and burnish's.
        optimizers: (optimizer, scheduler) instead of those that the arguments select.
        optimizer_cls_and_kwargs: the optimizer's class and arguments.
        preprocess_logits_for_metrics: (logits, labels) -> the logits to keep.

    A subclass may override, and the run goes by it: ``compute_loss``, ``training_step``, ``prediction_step``,
    ``evaluation_loop``, ``evaluate``, ``predict``, ``get_train_dataloader``, ``get_eval_dataloader``,
    ``get_test_dataloader``, ``_get_train_sampler``, ``create_optimizer``, ``create_scheduler``,
    ``create_optimizer_and_scheduler``, ``get_decay_parameter_names``, ``get_optimizer_cls_and_kwargs``, ``log``,
    ``save_model``, ``_save``, ``_save_checkpoint``, ``_prepare_inputs``, ``floating_point_ops``, ``num_examples``,
    ``compute_loss_context_manager``, ``autocast_smart_context_manager``, ``get_batch_samples``,
    ``set_initial_training_values``, ``get_total_train_batch_size``, ``_get_learning_rate``, ``store_flos``,
    ``create_accelerator_and_postprocess``, ``_validate_args``.
    """

    arguments_class: type[TrainingArguments] = TrainingArguments
    """The config class that transformers' arguments are converted to, by their names."""

    card_stage, card_title = "training", ""
    """Name of the training in the model card."""

    _num_averaged_losses = 1
    """Over so many processes a loss is averaged that is scaled by ``compute_loss`` itself; 1: it is summed."""

    loss_is_scaled_for_ga: bool | None = None
    """True if ``compute_loss`` divides by the number of items of the whole step itself; see ``loss.py``."""

    def __init__(
        self, model: nn.Module | None = None, args: object = None,
        data_collator: Callable[[list[Any]], Any] | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: Any = None, model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None, callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        given.warn_about_unused_overrides(type(self))
        self.args: TrainingArguments = given.own_arguments(args, self.arguments_class)
        args = self.args
        set_seed(args.seed, args.full_determinism)
        given.apply_accelerator_accumulation(args)
        self.create_accelerator_and_postprocess()
        given.check_accelerator(self.accelerator)
        self._memory_tracker = TrainerMemoryTracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        logging.set_verbosity(args.get_process_log_level())

        given.check_model_argument(model, model_init)
        self.model_init = model_init
        self.model: Any = self.call_model_init() if model is None else model
        self._take_model()
        self.processing_class = given.resolve_processing_class(tokenizer, processing_class)
        self.data_collator = given.collator_for(data_collator, self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._validate_args()
        self._start_state()

        self.callback_handler = TrainerCallbackHandler(
            [*default_callbacks(args), *(callbacks or [])], args, self.state, self.control, model=self.model,
            processing_class=self.processing_class, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
        )  # fmt: skip
        self.add_callback(display_callback(args))
        if args.push_to_hub:
            self.init_hf_repo()
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        self._tell("on_init_end")
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = args.use_cache
        self._memory_tracker.stop_and_update_metrics()

    def create_accelerator_and_postprocess(self) -> None:
        """Create ``accelerator``. An override calls this method, and may change its result."""
        self._parallel = create_parallel(plain_options(self.args))
        self.accelerator = ParallelAccelerator(
            self._parallel, self.args.mixed_precision, self.args.accelerator_config, self.log, self._save_now
        )

    def _validate_args(self) -> None:
        """Raise for arguments that contradict each other, with transformers' messages."""
        given.check_sets(self.args, self.train_dataset, self.eval_dataset, self.compute_metrics)
        given.check_optimizers((self.optimizer, self.lr_scheduler), self.optimizer_cls_and_kwargs, self.model_init)

    def _take_model(self) -> None:
        """Move the model to its device, and inspect it."""
        args, model = self.args, self.model
        validate_quantization_for_training(model)
        requested = args.place_model_on_device
        self.place_model_on_device = (
            not inspection.defers_device_placement(model, args) if requested is None else requested
        )
        if self.place_model_on_device and not getattr(model, "is_quantized", False):
            self._move_model_to_device(model, self._parallel.device)
        self.model_wrapped = model  # replaced by the backend's prepared model
        self.model_accepts_loss_kwargs = inspection.takes_loss_arguments(model)
        self.label_names = inspection.labels_of(model, args.label_names)
        self.can_return_loss = can_return_loss(type(inspection.base_model(model)))
        self.label_smoother = inspection.smoother_of(model, args.label_smoothing_factor)
        self.neftune_noise_alpha = args.neftune_noise_alpha
        self._asked: Capabilities | None = None
        self._num_parameters: int | None = None

    def _start_state(self) -> None:
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        self.is_in_train = False
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size: int = self.args.train_batch_size  # auto_find_batch_size may halve it
        self._step = StepInProgress()
        self._given_items: Any = None  # number of items of the current step, as counted by a script's get_batch_samples
        self._loop: TrainerLoop | None = None  # of the current or last train()
        self._signature_columns: list[str] | None = None
        self._created_lr_scheduler = False
        self._eval_dataloaders: dict[str, Any] = {}
        self._initial_num_input_tokens_seen = 0
        self._hub = Hub()
        self._trial: Any = None
        self._search: search.Search | None = None
        self.hp_search_backend: Any = None

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback object, or an instance of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback object, or the first one of a class, and return it. None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    def _tell(self, event: str, **details: Any) -> None:
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **details)

    def end(self) -> None:
        """Leave the process group, at the very end of a script."""
        self.accelerator.end_training()

    # --- training: training.py, loop.py, loop/loop.py ---------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None, **kwargs: Any,
    ) -> TrainOutput:  # fmt: skip
        """Train from the start, or from a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint folder; True: the latest in ``output_dir``.
            trial: a trial of a hyperparameter search.
            ignore_keys_for_eval: outputs of the model that evaluations ignore.
        """
        resume_from_checkpoint = training.resolve_old_keywords(kwargs, resume_from_checkpoint)
        self._memory_tracker.start()
        self.is_in_train = True
        try:
            self._begin(trial)
            into = self._get_output_dir(trial)
            folder = training.requested_checkpoint(resume_from_checkpoint, into, self.args)
            ready = training.prepared_for_training(
                self.model, self.args, self.accelerator, self.processing_class, self.neftune_noise_alpha
            )
            signals = training.stop_on_signals(self, self.args, self._parallel)
            attempt = self._attempts if self.args.auto_find_batch_size else self._attempt
            with ready, training.exclusive_writer(into, self.args), signals:
                output = attempt(folder, ignore_keys_for_eval)
        finally:
            self.is_in_train = False
        self._write_at_the_end()
        return output

    def _write_at_the_end(self) -> None:
        """Write files in addition to the trained model. Does nothing here; subclasses may write a model card."""

    def _begin(self, trial: Any) -> None:
        """Create a new model, optimizer and scheduler if there is a ``model_init``, and apply the values of a trial."""
        if self.model_init is not None:
            set_seed(self.args.seed, self.args.full_determinism)
            self.model = self.call_model_init(trial)
            self.optimizer = self.lr_scheduler = self._signature_columns = None
        self._hp_search_setup(trial)
        self._train_batch_size = self.args.train_batch_size
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        if self.place_model_on_device or self.model_init is not None:
            self.model.to(self._parallel.device)

    def _attempts(self, folder: Path | None, ignore_keys: list[str] | None) -> TrainOutput:
        """Run attempts with half the micro-batch size each time that memory runs out."""
        if folder is not None:
            self._train_batch_size = load_state(folder).train_batch_size or self._train_batch_size
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        while True:
            try:
                return self._attempt(folder, ignore_keys)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self._train_batch_size == 1:
                    raise
            self._train_batch_size //= 2
            logger.warning(f"Out of memory. Restarting with a micro-batch size of {self._train_batch_size}.")
            self.model.load_state_dict(before)
            self.optimizer = self.lr_scheduler = None
            self.accelerator.free_memory()

    def _attempt(self, folder: Path | None, ignore_keys: list[str] | None) -> TrainOutput:
        loop = self._make_loop(ignore_keys)
        if folder is not None:
            loop.load(folder)
            if self.args.restore_callback_states_from_checkpoint:
                training.restore_callbacks(self.callback_handler, self.state.stateful_callbacks)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        loader, rows = self.callback_handler.parts["train_dataloader"], self._rows_per_step
        num_rows = loop.plan.max_steps * rows if num_batches(loader) is None else self.num_examples(loader)
        reporting.announce_training(self.args, loop.plan, num_rows, rows, self.get_num_trainable_parameters())
        output = train_with_rollback(loop, logger.warning)
        logger.info("\n\nTraining completed.\n\n")
        best = self.state.best_model_checkpoint
        if self.args.save_total_limit == 1 and best is not None and self.args.should_save:
            files.keep_only(loop.checkpoints, Path(best).name)
        self._hub.wait()
        return output

    @property
    def _accumulation(self) -> int:
        """Micro-batches per step. More of them if the micro-batch size was reduced, so that the rows per step stay
        the same."""
        rows: int = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return -(-rows // self._train_batch_size)

    _inner_steps = 1
    """Optimizer steps per step batch (``Objective.inner_steps``)."""

    @property
    def _rows_per_step(self) -> int:
        return self._train_batch_size * self._accumulation * self._parallel.world_size

    def _make_loop(self, ignore_keys: list[str] | None) -> TrainerLoop:
        """The loop at step 0. Components are created in the order of their dependencies."""
        args, parallel, handler, loader = self.args, self._parallel, self.callback_handler, self.get_train_dataloader()
        plan = training.plan_of(self.set_initial_training_values(args, loader), loader, self._accumulation)
        training.check_spikes(args, loader)
        if not self._overrides("compute_loss"):
            self._fitted()  # probe the model here rather than inside the first step
        objective = self._objective()
        handler.args, handler.control, handler.parts["train_dataloader"] = args, self.control, loader
        weights, batches = files.TrainerModel(self.model), self._step_batches(loader, plan)
        module, self.optimizer = parallel.prepare(self._module(), self._optimizer_for(plan.max_steps))
        objective.setup(module)
        scheduler = self.create_scheduler(num_training_steps=plan.max_steps, optimizer=self.optimizer)
        self.model_wrapped = module
        self.state = TrainerState.at_start(args, plan, self._train_batch_size, parallel.rank, local_rank())
        self._name_trial(self.state)
        handler.state = self.state
        handler.parts |= {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": scheduler}
        checkpoints = Checkpoints(
            self._get_output_dir(self._trial), limit=args.save_total_limit, in_background=args.save_in_background,
            fingerprints=training.trainer_fingerprints(args, plan, self._rows_per_step),
            write_extras=self._write_extras, processes=parallel, listeners=handler,
        )  # fmt: skip
        self._loop = TrainerLoop(
            self, plan, self._accumulation, ignore_keys, model=module, weights=weights, objective=objective,
            parallel=parallel, loader=batches, optimizer=self.optimizer, scheduler=scheduler, callbacks=handler,
            checkpoints=checkpoints,
        )  # fmt: skip
        return self._loop

    def _module(self) -> nn.Module:
        """The module that is trained."""
        module: nn.Module = self.model
        return module

    def _objective(self) -> Objective:
        return TrainerObjective(self)

    def _step_batches(self, loader: Any, plan: StepPlan) -> TorchLoader:
        main = getattr(self.model, "main_input_name", "input_ids")
        padding = getattr(self.processing_class, "pad_token_id", None)
        count = self._counter(str(self.args.include_num_input_tokens_seen), main, padding)
        total = num_batches(loader) or plan.max_steps * self._accumulation
        return TorchLoader(
            loader, self._accumulation, total, count, self._stop_empty, self._parallel, self._padding_batch,
            self._samples if self._overrides("get_batch_samples") else None,
        )  # fmt: skip

    def _padding_batch(self, batch: Batch) -> PaddingBatch:
        """A batch without items, for a rank that has no more rows."""
        return PaddingBatch(batch)

    _counter: type[reporting.Count] = reporting.Count

    def _optimizer_for(self, max_steps: int) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if type(self).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:
            self.create_optimizer_and_scheduler(max_steps)
        return self.create_optimizer()

    def _stop_empty(self) -> None:
        training.warn_empty_dataset(self.state)
        self.control.should_training_stop = True

    # --- loss: loss.py, prefix_sharing.py -----------------------------------------------------------------------------

    @property
    def loss_is_scripted(self) -> bool:
        """Whether a script computes the loss. It is then a mean until the backward pass."""
        if self.compute_loss_func is not None or self.loss_is_scaled_for_ga:
            return True
        return any(map(self._overrides, self._loss_methods))

    _loss_methods: tuple[str, ...] = ("compute_loss", "training_step", "get_batch_samples")
    """Methods with which a script computes the loss or its divisor."""

    def _overrides(self, name: str) -> bool:
        """Whether a script has overridden a method, in a subclass or on this object."""
        return name in vars(self) or not getattr(type(self), name).__module__.startswith("burnish.")

    def _loss(self, model: nn.Module, inputs: Any) -> Loss:
        """The loss of a micro-batch as a sum over its items: without logits, or the model's own mean times its
        items."""
        flat = None if self.label_smoother is not None or not has_plain_loss(self.model) else self._flat(inputs)
        if flat is not None and (head := self._fitted().head) is not None:
            return Loss(sum_of_padding_free(model, flat, head))
        num_items = self._num_items(inputs)
        mean = self.compute_loss(model, inputs, num_items_in_batch=self._items(inputs, num_items))
        refuse_no_loss(mean)
        return Loss(mean * num_items)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            model: the model.
            inputs: the micro-batch.
            num_items_in_batch: () number of items of the whole step, if the loss is a mean over labels.

        Returns:
            () the contribution of the micro-batch to the loss of the step, detached. An override runs the backward pass
            itself (``self.accelerator.backward``); its gradient and its return value are used unchanged.
        """
        model.train()
        set_optimizer_mode(self.optimizer, is_training=True)
        counts = not isinstance(inputs, PaddingBatch)
        inputs = self._prepare_inputs(inputs)
        own = self._num_items(inputs) * counts
        share, items = self._step.share(own), self._items(inputs, own)
        if self.loss_is_scaled_for_ga:
            share, items = torch.ones_like(own) * counts / self._num_averaged_losses, num_items_in_batch
        elif items is not None and self._given_items is not None:
            share, items = torch.ones_like(own), self._given_items
        with self.compute_loss_context_manager():
            loss = accepting(self.compute_loss, "num_items_in_batch")(model, inputs, num_items_in_batch=items)
        refuse_no_loss(loss)
        self._empty_cache_if_due()
        loss = loss * (share * self._parallel.world_size)  # the backend averages over processes, but a sum is needed
        self.accelerator.backward(loss)
        detached: Tensor = loss.detach()
        return detached

    def _empty_cache_if_due(self) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self.accelerator.free_memory()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a micro-batch: the model's own, with label smoothing, or from ``compute_loss_func``.

        Args:
            model: the model.
            inputs: the micro-batch.
            return_outputs: whether to return the model's outputs as well.
            num_items_in_batch: () number of labels of this micro-batch, by which models and functions divide their sum.

        Returns:
            () the loss, or (loss, outputs).
        """
        is_own = self.label_smoother is not None or self.compute_loss_func is not None
        flat = None if is_own or return_outputs or not has_plain_loss(self.model) else self._flat(inputs)
        if flat is not None and (head := self._fitted().head) is not None:
            return mean_of_padding_free(model, flat, head, num_items_in_batch)
        labels = inputs.pop("labels") if is_own and "labels" in inputs else None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None:
            # Before transformers 5.16 it counts the labels itself.
            smoothed = accepting(self.label_smoother.__call__, "num_items_in_batch")
            shifts = inspection.is_causal_lm(self.accelerator.unwrap_model(model))
            loss = smoothed(outputs, labels, shift_labels=shifts, num_items_in_batch=num_items_in_batch)
        else:
            loss = loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _fitted(self) -> Capabilities:
        """Results of the probes of the model's forward pass, which run once."""
        if self._asked is None or self._asked.model is not self.model:
            found = self._ask()
            self._asked = replace(found, head=None, shares_prefixes=False) if self._parallel.frees_weights else found
        return self._asked

    def _ask(self) -> Capabilities:
        return probe_prefix_sharing(self.model, self._skips_tokens and has_plain_loss(self.model))

    @property
    def _skips_tokens(self) -> bool:
        """Whether tokens without influence on a loss are skipped: as set by the arguments; by default on a CPU."""
        is_requested = self.args.needed_tokens_only
        is_usual = self._parallel.device.type == "cpu" and not self.args.torch_compile
        return bool(is_usual if is_requested is None else is_requested) and self.neftune_noise_alpha is None

    def _flat(self, inputs: Batch) -> Batch | None:
        """The micro-batch without padding and unneeded tokens. None if this is not supported."""
        return shared_prefixes_of(inputs) if self._fitted().shares_prefixes else None

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Context for a forward pass."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The autocast of the run. ``cache_enabled`` has no effect."""
        return self._parallel.precision()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move the batch to the device. Override it to change the inputs of the model."""
        inputs = self._prepare_input(inputs)
        refuse_empty(inputs, self._signature_columns)
        return inputs

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model, or another model of a script, such as the teacher of a distillation."""
        model.to(device)

    def _prepare_input(self, data: Any) -> Any:
        device = self._parallel.device
        return map_tensors(
            data, lambda tensor: tensor.to(device), lambda value: value.to(device) if hasattr(value, "to") else value
        )

    def _num_items(self, inputs: Batch) -> Tensor:
        """() number of items of a micro-batch."""
        return num_items_of(inputs, inspection.loss_shifts_labels(self.model), self._parallel.device)

    def _items(self, inputs: Batch, num_items: Tensor) -> Tensor | None:
        """() ``num_items_in_batch``: at least 1, so that a micro-batch without labels adds 0 rather than 0/0."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return num_items.clamp(min=1) if counts and isinstance(tensors_by_name(inputs).get("labels"), Tensor) else None

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward, for ``total_flos``: 6 x tokens x parameters without embeddings."""
        main = getattr(self.model, "main_input_name", "input_ids")
        if main not in tensors_by_name(inputs) or not hasattr(self.model, "num_parameters"):
            return 0
        if self._num_parameters is None:
            self._num_parameters = int(self.model.num_parameters(exclude_embeddings=True))
        return 6 * int(inputs[main].numel()) * self._num_parameters

    # --- evaluation: evaluation.py ------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a set, or on each set of a dict, log the metrics and call the callbacks.

        Returns:
            The metrics, with names that start with ``metric_key_prefix``, and the epoch.
        """
        is_own = eval_dataset is None
        dataset = self.eval_dataset if is_own else eval_dataset
        if isinstance(dataset, dict):
            together: dict[str, float] = {}
            for name, one in dataset.items():
                together |= self.evaluate(name if is_own else one, ignore_keys, f"{metric_key_prefix}_{name}")
            return together
        self._memory_tracker.start()
        only_loss = True if self.compute_metrics is None else None
        loader = self.get_eval_dataloader(eval_dataset)
        output = self._measured(loader, "Evaluation", only_loss, ignore_keys, metric_key_prefix)
        metrics = cast("dict[str, float]", output.metrics)
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a set, with labels and metrics if the set has labels."""
        self._memory_tracker.start()
        loader = self.get_test_dataloader(test_dataset)
        output = self._measured(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        self._tell("on_predict", metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _measured(
        self, loader: Any, description: str, only_loss: bool | None, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """Run ``evaluation_loop`` and add its runtime to the metrics."""
        started, at_once = time.time(), self.args.eval_batch_size * self._parallel.world_size
        output = self.evaluation_loop(loader, description, only_loss, ignore_keys, prefix)
        num_rows = cast(int, output.num_samples)
        cast("dict[str, float]", output.metrics).update(evaluation.rates(prefix, started, num_rows, at_once))
        return output

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Iterate over a loader once. Used by ``evaluate`` and ``predict``; labels are optional."""
        args = self.args
        only_loss = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._model_for_evaluation()
        num_rows = self.num_examples(dataloader) if has_length(dataloader) else "Unknown"
        reporting.announce_evaluation(description, num_rows, args.eval_batch_size)
        self.callback_handler.parts["eval_dataloader"] = dataloader
        keeps_all = description == "Prediction"
        gathered = evaluation.Gathered(args, self._parallel, self.accelerator.gather, self.compute_metrics, keeps_all)
        main = getattr(self.model, "main_input_name", "input_ids")
        for inputs, is_own, is_last in mark_last(in_step(self._read_ahead(dataloader, only_loss), self._parallel)):
            weight = self._num_items(self._prepare_input(inputs))
            loss, logits, labels = self.prediction_step(model, inputs, only_loss, ignore_keys=ignore_keys)
            main_inputs = self._prepare_input(inputs[main]) if "inputs" in args.include_for_metrics else None
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            gathered.add(weight, loss, logits, labels, inputs, main_inputs, is_own, is_last)
            self._tell("on_prediction_step")
        return gathered.output(dataloader, metric_key_prefix)

    def _read_ahead(self, dataloader: Any, only_loss: bool) -> Iterable[Any]:
        """The batches of an evaluation. A subclass may process several of them ahead."""
        yield from dataloader

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict one batch without gradients.

        Returns:
            () the mean loss or None, the logits or None, the labels or None; tuples if there are several.
        """
        has_loss = evaluation.has_loss(inputs, self.label_names, self.can_return_loss)
        inputs = self._prepare_inputs(inputs)
        labels = evaluation.labels_in(inputs, self.label_names) if has_loss else None
        compute = accepting(self.compute_loss, "num_items_in_batch")
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager(), explain_index_errors(self.model, inputs):
            if has_loss:
                items = self._items(inputs, self._num_items(inputs))
                if prediction_loss_only and type(self).compute_loss is Trainer.compute_loss:
                    return compute(model, inputs, num_items_in_batch=items).detach().mean(), None, None
                loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        ignored = evaluation.ignored_outputs(self.model) if ignore_keys is None else ignore_keys
        return loss, evaluation.logits_of(outputs, ignored, has_loss), labels

    def _model_for_evaluation(self) -> nn.Module:
        """The model in evaluation mode, outside of training also in half precision if requested."""
        model, dtype = self.model_wrapped, full_eval_dtype(self.args)
        if not self.is_in_train and dtype is not None:
            model = model.to(dtype=dtype, device=self._parallel.device)
        elif not self.is_in_train and self.place_model_on_device:
            model = model.to(self._parallel.device)
        model.eval()
        set_optimizer_mode(self.optimizer, is_training=False)
        return model  # type: ignore[no-any-return]

    # --- data: loaders.py, torch_loader.py ---------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Batches of the training set. Override it to return your own loader, which is used unchanged."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of an evaluation set: the given one, the one of that name, or the Trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self._eval_dataloaders and self.args.dataloader_persistent_workers:
            return self._eval_dataloaders[key]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        loader = self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler)
        if self.args.dataloader_persistent_workers:
            self._eval_dataloaders[key] = loader
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    @property
    def _collate_for_loader(self) -> Callable[[list[Any]], Any]:
        return self.data_collator

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False
    ) -> Any:
        collate = self._collate_for_loader
        if loaders.is_datasets_set(dataset):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        sampled = sampler_fn is not None and not isinstance(dataset, torch.utils.data.IterableDataset)
        sampler = sampler_fn(dataset) if sampled else None
        return loaders.make_loader(dataset, collate, batch_size, self.args, self._parallel, sampler, is_training)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The sampler for training. A subclass may return another one."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        strategy = self.args.train_sampling_strategy
        return self._order(dataset, strategy, self._train_batch_size, self._accumulation)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The sampler for an evaluation set: sequential, or by length if training is."""
        by_length = self.args.train_sampling_strategy == "group_by_length"
        strategy = "group_by_length" if by_length else "sequential"
        return self._order(eval_dataset, strategy, self.args.eval_batch_size, 1)

    def _order(self, dataset: Any, strategy: str, batch_size: int, accumulation: int) -> Any:
        return loaders.order_of_rows(
            dataset, strategy, batch_size, accumulation, self.args, self._parallel, self.processing_class
        )

    def num_examples(self, dataloader: Any) -> int:
        """Number of rows of a loader's set; if unknown, its batches times the batch size."""
        return loaders.num_rows_of(dataloader, self.args.per_device_train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Number of rows per step, over its micro-batches and all processes."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._parallel.world_size)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]:
        """The numbers of steps and rows of a training over ``dataloader`` (``loaders.training_numbers``)."""
        plan = training.steps_of_loader(dataloader, self.args, self._accumulation, self._inner_steps)
        rows = self.get_total_train_batch_size(args)
        return loaders.training_numbers(dataloader, plan, args, rows, self.num_examples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and () the number of their labels over all processes, or None without labels.

        An override may take other batches from the iterator, or count differently: a loss that uses
        ``num_items_in_batch`` is divided by the returned number.
        """
        samples = list(islice(epoch_iterator, num_batches))
        if not samples or not isinstance(tensors_by_name(samples[0]).get("labels"), Tensor):
            return samples, None
        return samples, self._parallel.sum(
            torch.stack([self._num_items(self._prepare_input(one)) for one in samples]).sum()
        )

    def _samples(self, batches: Iterator[Any], num_batches: int) -> list[Any]:
        """The micro-batches of the next step, using an override of ``get_batch_samples``."""
        samples, self._given_items = self.get_batch_samples(batches, num_batches, self._parallel.device)
        return samples

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = inspection.model_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A ``datasets.Dataset`` without the columns that the model does not accept. ValueError if none is left."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return loaders.without_unused(dataset, self._signature_columns or [], type(self.model).__name__, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """A collator that drops the columns that the model does not accept from each row."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        name = type(self.model).__name__
        return loaders.collator_without_unused(data_collator, self._signature_columns or [], name, description)

    # --- optimizer and schedule: optimizer.py, optim/ -----------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create optimizer and scheduler. Override it, or one of the two methods that it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer, unless it exists."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        if self.optimizer_cls_and_kwargs is None and not self._chooses_itself():
            self.optimizer = create_optimizer(model.named_parameters(), model, plain_options(self.args))
            return self.optimizer
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        groups = optimizer.two_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
        self.optimizer = optimizer.optimizer_of(kind, arguments, model, groups)
        return self.optimizer

    def _chooses_itself(self) -> bool:
        """Whether a subclass selects the optimizer or the parameters with weight decay."""
        names = ("get_optimizer_cls_and_kwargs", "get_decay_parameter_names")
        return any(getattr(type(self), name) is not getattr(Trainer, name) for name in names)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all except biases and norms."""
        return optimizer.decaying_names(model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The class selected by ``args.optim`` and its arguments, from transformers' table."""
        from transformers import Trainer as Theirs

        kind, arguments = Theirs.get_optimizer_cls_and_kwargs(cast(Any, args), cast(Any, model))
        return kind, arguments

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler, unless it exists."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            peak = optimizer.defaults.get("lr", self.args.learning_rate)
            self.lr_scheduler = create_scheduler(optimizer, plain_options(self.args), num_training_steps, peak)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        """The learning rate of the next step, for the log."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def current_flos(self) -> float:
        """Number of floating-point operations of the run up to now."""
        return float(self.state.total_flos)

    def get_num_trainable_parameters(self) -> int:
        return inspection.num_trainable(self.model)

    def get_learning_rates(self) -> list[float]:
        return [group["lr"] for group in optimizer.groups_of(self.optimizer)]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group that contains ``param``; by default the parameters of all groups."""
        return optimizer.group_with(self.optimizer, param)

    # --- files: files.py ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, configuration and tokenizer for ``from_pretrained``. Only the main process writes."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        writes, folder = self.args.should_save, Path(self.args.output_dir if output_dir is None else output_dir)
        if self._parallel.is_sharded:
            files.write_gathered(self.model, folder, self._parallel.whole, writes)
        elif writes:
            files.write_model(self.accelerator.unwrap_model(self.model), folder, state_dict)
        if writes:
            files.write_tokenizer_and_arguments(folder, self._companion, self.args)

    @property
    def _companion(self) -> Any:
        """The tokenizer or processor that is saved with the model."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save ``checkpoint-<step>`` with everything that the run needs to resume."""
        assert self._loop is not None
        self.store_flos()
        folder = self._loop.write_checkpoint()
        if self.args.push_to_hub:
            self._loop.checkpoints.wait()
            self._push_from_checkpoint(str(folder))

    def _save_now(self) -> str:
        """Save a checkpoint of the current step. Returns its folder."""
        if self._loop is None:
            raise RuntimeError("accelerator.save_state() can only be called during training.")
        self._loop.save()
        self._loop.checkpoints.wait()
        return str(self._loop.checkpoints.path(self.state.global_step))

    def _write_extras(self, folder: Path) -> None:
        """Write the files with which other libraries can load a checkpoint. ``Checkpoints`` writes its weights."""
        if type(self).save_model is not Trainer.save_model or type(self)._save is not Trainer._save:
            self.save_model(str(folder), _internal_call=True)
            return
        files.write_configs(self.accelerator.unwrap_model(self.model), folder)
        files.write_tokenizer_and_arguments(folder, self._companion, self.args)
        if self.args.save_hf_format:
            write_transformers_files(folder, self.optimizer, self.lr_scheduler)

    def _get_output_dir(self, trial: Any = None) -> str:
        """``output_dir``, or the subfolder of a trial."""
        if trial is None or self._search is None:
            return str(self.args.output_dir)
        name_of = self._search.name_of or (lambda trial: f"run-{getattr(trial, 'number', trial)}")
        return str(Path(self.args.output_dir) / name_of(trial))

    # --- logs: reporting.py, report/results.py ------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Append ``logs`` to ``state.log_history`` and call every callback. Override it to add or change values.

        Args:
            logs: the values.
            start_time: start time of training, to add tokens per second if tokens are counted.
        """
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _finalize_training(self, summary: dict[str, Any]) -> None:
        """Add memory metrics to the summary. transformers' tracker determines the stage from the name of its caller."""
        self._memory_tracker.stop_and_update_metrics(summary)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics in readable form: memory in MB, runtimes as h:mm:ss, operations in GF."""
        return dict(metrics_format(metrics))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test") as aligned lines."""
        if self.is_world_process_zero():
            print(results.format_metrics(split, metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and, if ``combined``, ``all_results.json``."""
        if self.is_world_process_zero():
            results.save_metrics(split, metrics, self.args.output_dir, combined)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to ``output_dir``."""
        if self.is_world_process_zero():
            results.save_state(self.state, self.args.output_dir)

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine around the model during training; None without DeepSpeed."""
        return getattr(self._parallel, "runner", None)

    @property
    def is_deepspeed_enabled(self) -> bool:
        return parallel_name(plain_options(self.args)) == "deepspeed"

    @property
    def is_fsdp_enabled(self) -> bool:
        return parallel_name(plain_options(self.args)) == "fsdp"

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)

    def store_flos(self) -> None:
        """Called before a checkpoint and at the end. Does nothing, because ``state.total_flos`` is always up to
        date."""

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: Any = None, model_name: str | None = None,
        finetuned_from: str | None = None, tasks: Any = None, dataset_tags: Any = None, dataset: Any = None,
        dataset_args: Any = None,
    ) -> None:  # fmt: skip
        """Write ``README.md`` to ``output_dir``, in the format of the hub."""
        fields = {"language": language, "license": license, "tags": tags, "model_name": model_name,
                "finetuned_from": finetuned_from, "tasks": tasks, "dataset_tags": dataset_tags, "dataset": dataset,
                "dataset_args": dataset_args}  # fmt: skip
        if self.is_world_process_zero():
            card.write_trainer_card(self, Path(self.args.output_dir), fields)

    # --- hub: hub.py --------------------------------------------------------------------------------------------------

    @property
    def hub_model_id(self) -> str | None:
        return self._hub.repository

    @hub_model_id.setter
    def hub_model_id(self, name: str | None) -> None:
        self._hub.repository = name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository ``hub_model_id``, or use the existing one."""
        self._hub.make_repository(self.args, token, private)

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, private: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Save the model, write its card and upload ``output_dir``.

        Args:
            commit_message: message of the commit.
            blocking: whether to wait for the upload.
            token: access token of the hub.
            revision: branch to push to.
            private: whether a new repository is private. Default: ``hub_private_repo``.
            kwargs: arguments of the model card.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if self.args.process_index != 0:
            return None
        kwargs.setdefault("model_name", Path(self.args.output_dir).name)
        self.create_model_card(**kwargs)
        self._tell("on_push_begin")
        self._hub.wait()
        return self._hub.upload(
            self.args.output_dir, commit_message, self.args, blocking=blocking, token=token, revision=revision,
            ignore=[".*", "checkpoint-*"],
        )  # fmt: skip

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._hub.is_due(self.args):
            self._tell("on_push_begin")
            message = f"Training in progress, step {self.state.global_step}"
            self._hub.push_checkpoint(checkpoint_folder, message, self.args)

    # --- hyperparameter search: search.py -----------------------------------------------------------------------------

    def hyperparameter_search(
        self, hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None, n_trials: int = 20,
        direction: str | list[str] = "minimize", backend: Any = None, hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:  # fmt: skip
        """The best of ``n_trials`` runs.

        Args:
            hp_space: trial -> values of arguments. Default: learning rate, epochs, seed and batch size.
            compute_objective: metrics of an evaluation -> value to minimize or maximize. Default: the sum of the
                metrics, or the loss if there are none.
            n_trials: number of trials.
            direction: "minimize" or "maximize", or one for each of several objectives.
            backend: "optuna".
            hp_name: trial -> name of the run.
            kwargs: arguments of ``optuna.create_study`` and, as timeout, n_jobs and gc_after_trial, of ``optimize``.
        """
        self.hp_search_backend = search.check_backend(backend, self.model_init)
        self._search = search.Search(
            hp_space or default_hp_space_optuna, compute_objective or default_compute_objective, hp_name
        )
        try:
            return self._search.run(partial(self.train, None), self.evaluate, n_trials, direction, kwargs)
        finally:
            self._search = self.hp_search_backend = None

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from ``model_init``, which may take the trial as argument."""
        assert self.model_init is not None
        return search.fresh_model(self.model_init, trial)

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments to the values of this trial."""
        self._trial = trial
        if self._search is not None and trial is not None:
            self._search.take_values(trial, self.args)

    def _name_trial(self, state: TrainerState) -> None:
        state.is_hyper_param_search = self._trial is not None
        if self._trial is not None:
            name_of = None if self._search is None else self._search.name_of
            state.trial_name = None if name_of is None else name_of(self._trial)
            state.trial_params = getattr(self._trial, "params", self._trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the objective of an evaluation to the search, which may prune the trial."""
        if self._search is not None and trial is not None:
            self._search.report(trial, step, metrics, give_up=lambda: self._tell("on_train_end"))


# --- the loop of a Trainer --------------------------------------------------------------------------------------------


class TrainerLoop(Loop):
    """The loop of a ``Trainer``, which calls the trainer's methods that a script may override.

    microstep    ``training_step`` if a script computes the loss, else the loop's own
    loss         ``_prepare_inputs``, then the objective, within ``compute_loss_context_manager``
    evaluate     ``evaluate``
    record       ``log``
    save         ``_save_checkpoint``
    load         also checkpoints of transformers

    Args:
        plan: number of steps of the run.
        accumulation: micro-batches per step.
        ignore_keys: outputs of the model that evaluations ignore.
        parts: other arguments of ``Loop``.
    """

    def __init__(
        self, trainer: Trainer, plan: StepPlan, accumulation: int, ignore_keys: list[str] | None, **parts: Any
    ) -> None:
        super().__init__(trainer.args, **parts)
        self.trainer, self.plan, self.accumulation, self.ignore_keys = trainer, plan, accumulation, ignore_keys
        self.started_s = time.time()

    def microstep(self, batch: Batch, num_items: Tensor, is_last: bool) -> Loss:
        """The loop's microstep, or ``training_step`` (a mean) if a script computes the loss."""
        trainer = self.trainer
        self.state.total_flos += float(trainer.floating_point_ops(batch))
        with explain_index_errors(trainer.model, batch):
            if not trainer.loss_is_scripted:
                return super().microstep(batch, num_items, is_last)
            trainer._step = StepInProgress(num_items)
            items = None if trainer._items(batch, num_items) is None else num_items
            with self.parallel.microbatch(self.model, last=is_last):
                value = accepting(trainer.training_step, "num_items_in_batch")(
                    self.model, batch, num_items_in_batch=items
                )
        sums, trainer._step = trainer._step.sums, StepInProgress()
        return Loss(without_gradient(value, self.parallel.device) * (num_items / self.parallel.world_size), sums)

    def loss(self, batch: Batch) -> Loss:
        """The objective's loss for the inputs that the trainer prepares. A padding batch has the weight 0."""
        trainer = self.trainer
        self.set_training_mode(True)  # a callback may have run an evaluation
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = self.objective.loss(self.model, inputs)
        trainer._empty_cache_if_due()
        return weighted_by_zero(loss) if isinstance(batch, PaddingBatch) else loss

    def evaluate(self) -> dict[str, float]:
        """Evaluate with ``Trainer.evaluate``, which logs each set and calls the callbacks."""
        metrics = self.trainer.evaluate(ignore_keys=self.ignore_keys)
        self.trainer._report_to_hp_search(self.trainer._trial, self.state.global_step, metrics)
        return metrics

    def learning_rate(self) -> float:
        return self.trainer._get_learning_rate()

    def record(self, values: dict[str, Any]) -> None:
        """Pass ``values`` to ``Trainer.log``; logs of steps with the start time of training, for tokens per second."""
        if "skipped_steps" in values:
            logger.warning(skipped_steps_message(values["skipped_steps"], self.state.global_step))
        if "loss" in values:
            self.trainer.log(values, self.started_s)
        else:
            self.trainer.log(values)

    def summary(self, unlogged: Mapping[str, float]) -> dict[str, float]:
        """The loop's summary, with the metrics of unlogged steps (as in TRL) and memory metrics."""
        metrics = {name: value for name, value in unlogged.items() if name not in ("loss", "grad_norm")}
        self.trainer.store_flos()
        values = {**super().summary(unlogged), **metrics}
        self.trainer._finalize_training(values)
        return values

    def save(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model, self.trainer._trial)
        self.callbacks.fire("on_save")

    def load(self, folder: Path) -> None:
        """Load a checkpoint of burnish or transformers. Arguments take precedence over its values."""
        with keeping_plan(self.state):
            if is_foreign(folder):
                notes = load_foreign(folder, self, self.trainer.model, self.plan.steps_per_epoch, self.accumulation)
            else:
                notes = compare_with_checkpoint(folder, self.checkpoints.fingerprints, despite=True)
                there = {n: p for n, p in self.parts.items() if p.is_saved or checkpoint.has_part(folder, p.stem_of(0))}
                checkpoint.load(folder, there, self.parallel.rank)
            for note in [*notes, *training.differences(self.state, self.trainer.args)]:
                logger.warning(note)
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning(f"The best checkpoint {best} was deleted and will not be loaded at the end.")
            self.state.best_model_checkpoint = None
        if self.trainer.args.ignore_data_skip:
            self.loader.load_state_dict({"epoch": self.loader.state_dict()["epoch"], "position": 0})

    def describe_rows(self, items: Sequence[int]) -> str:
        return f"rows {', '.join(map(str, items))} of train_dataset"


class TrainerObjective(Objective):
    """The loss of a ``Trainer`` or its model as an objective of the loop."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def num_items(self, batch: Batch) -> Tensor:
        return self.trainer._num_items(batch) * (not isinstance(batch, PaddingBatch))

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        return self.trainer._loss(module, batch)
