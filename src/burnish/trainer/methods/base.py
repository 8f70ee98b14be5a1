"""What the methods of a ``Trainer`` share: its components, callbacks, state and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.trainer_utils import TrainerMemoryTracker, speed_metrics, validate_quantization_for_training
from transformers.utils import can_return_loss, find_labels, logging

from burnish.config.errors import UserError
from burnish.kernels.probe import Capabilities
from burnish.loop.loop import Loop
from burnish.loop.state import TrainerControl, TrainerState
from burnish.loop.types import Metric
from burnish.parallel.accelerate import initialize_accelerator_state, share_with_accelerate
from burnish.parallel.create import create_parallel
from burnish.parallel.single import set_seed
from burnish.report.trackers import tracker_callbacks
from burnish.run.hub import Hub
from burnish.trainer import constructor, inspection, notes, search
from burnish.trainer.accelerator import ParallelAccelerator
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.callbacks import DefaultFlowCallback, TrainerCallbackHandler, display_callback
from burnish.trainer.data.in_step import CONTAINERS, map_items


@dataclass
class StepInProgress:
    """Numbers of the current step and micro-batch that are not arguments of the methods that a script may override.

    Args:
        num_items: () over all micro-batches and processes of the step; None outside of ``training_step``.
        sums: metrics of the current micro-batch, as in ``Loss.sums``; ``compute_loss`` may add to it.
        own_items: () number of items of the current micro-batch, counted before ``_prepare_inputs``.
    """

    num_items: Tensor | None = None
    sums: dict[str, Metric] = field(default_factory=dict)
    own_items: Tensor | None = None

    def share(self, num_items: Tensor) -> Tensor:
        """() the share of a micro-batch with ``num_items`` () items in the step's mean; 1 outside of a step."""
        return torch.ones_like(num_items) if self.num_items is None else num_items / self.num_items


class _EarlierTokenizer:
    """``Trainer.tokenizer``, the earlier name of ``processing_class``. A script may set an attribute of this name."""

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        if trainer is None:
            return self
        notes.warn("`Trainer.tokenizer` is deprecated. Use `Trainer.processing_class` instead.", FutureWarning)
        return trainer.processing_class


class TrainerBase:
    """Components of a ``Trainer``, callbacks, state and logs."""

    arguments_class: type[TrainingArguments] = TrainingArguments
    """The config class that transformers' arguments are converted to, by their names."""

    card_stage, card_title = "training", ""
    """Name of the training in the model card."""

    _num_averaged_losses = 1
    """Divisor of a loss that ``compute_loss`` has already divided by the items of the step: the number of processes if
    each divides by its own items, so that the losses are averaged; 1 if each divides by the items of all, so that they
    are summed."""

    loss_is_scaled_for_ga: bool | None = None
    """True if ``compute_loss`` divides by the number of items of the whole step itself; see ``methods/loss.py``."""
    tokenizer = _EarlierTokenizer()

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
        constructor.warn_about_unused_overrides(type(self))
        self.args: TrainingArguments = constructor.as_training_arguments(args, self.arguments_class)
        args = self.args
        set_seed(args.seed, args.full_determinism)
        constructor.apply_accelerator_accumulation(args)
        self.create_accelerator_and_postprocess()
        constructor.check_accelerator(self.accelerator)
        self._memory_tracker = TrainerMemoryTracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        logging.set_verbosity(args.get_process_log_level())

        constructor.check_model_argument(model, model_init)
        self.model_init = model_init
        self.model: Any = self.call_model_init() if model is None else model
        self._set_model()
        self.processing_class = constructor.resolve_processing_class(tokenizer, processing_class)
        self.data_collator = constructor.collator_for(data_collator, self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = constructor.optimizer_pair(optimizers)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._validate_args()
        self._init_state()

        trackers = tracker_callbacks(args.report_to, args.logging_dir)
        self.callback_handler = TrainerCallbackHandler(
            [DefaultFlowCallback(), *trackers, *constructor.callback_list(callbacks)], args, self.state, self.control,
            model=self.model, processing_class=self.processing_class, optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )  # fmt: skip
        self.add_callback(display_callback(args))
        if args.push_to_hub:
            self.init_hf_repo()
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        self._call_event("on_init_end")
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = args.use_cache
        self._memory_tracker.stop_and_update_metrics()

    def create_accelerator_and_postprocess(self) -> None:
        """Create ``accelerator``. An override calls this method, and may change its result."""
        self._parallel = create_parallel(plain_options(self.args))
        if self._parallel.world_size > 1 and self._parallel.device.type == "cpu":
            share_with_accelerate()
        initialize_accelerator_state(self.args.use_cpu)
        self.accelerator = ParallelAccelerator(
            self._parallel, self.args.mixed_precision, self.args.accelerator_config, self.log, self._save_now,
            self._load_now,
        )  # fmt: skip

    def _validate_args(self) -> None:
        """Raise for arguments that contradict each other, with the exceptions of transformers."""
        constructor.check_sets(self.args, self.train_dataset, self.eval_dataset, self.compute_metrics)
        constructor.check_optimizers(
            (self.optimizer, self.lr_scheduler), self.optimizer_cls_and_kwargs, self.model_init
        )

    def _set_model(self) -> None:
        """Move ``self.model`` to its device, and set the attributes that depend on it."""
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
        kind = type(inspection.base_model(model))
        self.label_names = list(find_labels(kind)) if args.label_names is None else args.label_names
        self.can_return_loss = can_return_loss(kind)
        self.label_smoother = inspection.smoother_of(model, args.label_smoothing_factor)
        self.neftune_noise_alpha = args.neftune_noise_alpha
        self._known_capabilities: Capabilities | None = None
        self._num_parameters: int | None = None

    def _init_state(self) -> None:
        self.state = TrainerState()
        self._set_process_flags(self.state)
        self.control = TrainerControl()
        self.is_in_train = False
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size: int = self.args.train_batch_size  # auto_find_batch_size may halve it
        self._step = StepInProgress()
        self.current_flos = 0.0  # on this process, since the last ``store_flos``
        self._scripted_num_items: Any = None  # of the step, if a script's get_batch_samples counts them
        self._loop: Loop | None = None  # of the current or last train()
        self._signature_columns: list[str] | None = None
        self._created_lr_scheduler = False
        self._eval_dataloaders: dict[str, Any] = {}
        self._initial_num_input_tokens_seen = 0
        self._hub = Hub()
        self._trial: Any = None
        self._search: search.Search | None = None
        self.hp_search_backend: Any = None
        self.hp_name: Callable[[Any], str] | None = None
        self.gather_function: Callable[..., Any] = self.accelerator.gather_for_metrics

    def add_callback(self, callback: Any) -> None:
        """Add a callback object, or an instance of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback object, or the first one of a class, and return it. None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    def _call_event(self, event: str, **details: Any) -> None:
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **details)

    def end(self) -> None:
        """Leave the process group, at the very end of a script."""
        self.accelerator.end_training()

    def _overrides(self, name: str) -> bool:
        """Whether a script has overridden a method, in a subclass or on this object."""
        return name in vars(self) or not getattr(type(self), name).__module__.startswith("burnish.")

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from ``model_init``, which may take the trial as argument."""
        assert self.model_init is not None
        return search.fresh_model(self.model_init, trial)

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)

    def _set_process_flags(self, state: TrainerState) -> None:
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model, or another model of a script, such as the teacher of a distillation."""
        model.to(device)

    def _prepare_input(self, data: Any) -> Any:
        """Move a batch to the device. Called for each of its items too, as in transformers."""
        if isinstance(data, CONTAINERS):
            return map_items(data, self._prepare_input)
        return data.to(self._parallel.device) if hasattr(data, "to") else data

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
        self._call_event("on_log", logs=logs)

    def _last_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the steps since the last log, for the summary of the run."""
        return {name: value for name, value in metrics.items() if name not in ("loss", "grad_norm")}

    @property
    def hub_model_id(self) -> str | None:
        return self._hub.repository

    @hub_model_id.setter
    def hub_model_id(self, name: str | None) -> None:
        self._hub.repository = name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository ``hub_model_id``, or use the existing one."""
        if self.args.process_index == 0:
            self._hub.make_repository(self.args, token, private)

    def _save_now(self) -> str:
        """Save a checkpoint of the current step. Returns its folder."""
        if self._loop is None:
            raise RuntimeError("accelerator.save_state() can only be called during training.")
        self._loop.save()
        self._loop.checkpoints.wait()
        return str(self._loop.checkpoints.path(self.state.global_step))

    def _load_now(self, folder: Any) -> None:
        """Load weights, optimizer, schedule, generators and registered objects. Args: folder: None for the newest
        checkpoint."""
        if self._loop is None or not self.is_in_train:
            raise ValueError(
                "accelerator.load_state can only be called during training. Call "
                "trainer.train(resume_from_checkpoint=folder) to resume from a checkpoint."
            )
        self._loop.checkpoints.wait()
        found = self._loop.checkpoints.newest()[0] if folder is None else Path(folder)
        if found is None:
            raise UserError("There is no checkpoint to load.", remedy="Call accelerator.save_state() before.")
        cast(Any, self._loop).load_objects(found)
