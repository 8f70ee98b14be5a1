"""``Trainer``, with the constructor, methods and behaviour of transformers' class, on burnish's loop.

Nothing is inherited from transformers. The chapters are the classes it is made of; what it is and what may be
overridden is in its docstring.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import TrainerMemoryTracker, has_length, validate_quantization_for_training
from transformers.utils import can_return_loss, find_labels, logging

from burnish.core.state import TrainerControl, TrainerState
from burnish.engine.base import create_engine, set_seed
from burnish.hf.accelerator import EngineAccelerator
from burnish.hf.argument_values import plain_options
from burnish.hf.arguments import TrainingArguments
from burnish.hf.callbacks import FaceHandler, default_callbacks, display_callback
from burnish.hf.evaluating import EvaluationMethods
from burnish.hf.hub import HubMethods
from burnish.hf.loaders import LoaderMethods, base_model
from burnish.hf.losses import LossMethods
from burnish.hf.optimizing import OptimizerMethods
from burnish.hf.reporting import ReportMethods
from burnish.hf.saving import SavingMethods
from burnish.hf.search import SearchMethods
from burnish.hf.training import TrainingMethods

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class Trainer(
    TrainingMethods, EvaluationMethods, LossMethods, LoaderMethods, OptimizerMethods, SavingMethods, ReportMethods,
    HubMethods, SearchMethods,
):  # fmt: skip
    """Train and evaluate a model: any ``nn.Module`` that returns a loss.

    Args:
        model: the model, or give ``model_init``.
        args: ``TrainingArguments``, burnish's or transformers'.
        data_collator: rows -> batch; by the processing class if not given.
        train_dataset, eval_dataset: ``datasets.Dataset``, torch ``Dataset`` or ``IterableDataset`` (with
            ``max_steps``), lists of rows; ``eval_dataset`` may be a dict of them.
        processing_class: tokenizer or processor, saved with the model; ``tokenizer=`` is its older name.
        model_init: makes the model anew for every ``train()``; may take a trial.
        compute_loss_func: (outputs, labels, num_items_in_batch=) -> loss.
        compute_metrics: ``EvalPrediction`` -> metrics.
        callbacks: beside the usual ones; transformers' and burnish's.
        optimizers: (optimizer, schedule) instead of those that the arguments describe.
        optimizer_cls_and_kwargs: the optimizer's class and arguments.
        preprocess_logits_for_metrics: (logits, labels) -> what is kept of the logits.

    A subclass may override, and the run goes by it: ``compute_loss``, ``training_step``, ``prediction_step``,
    ``evaluation_loop``, ``evaluate``, ``predict``, ``get_train_dataloader``, ``get_eval_dataloader``,
    ``get_test_dataloader``, ``_get_train_sampler``, ``create_optimizer``, ``create_scheduler``,
    ``create_optimizer_and_scheduler``, ``get_decay_parameter_names``, ``get_optimizer_cls_and_kwargs``, ``log``,
    ``save_model``, ``_save``, ``_save_checkpoint``, ``_prepare_inputs``, ``floating_point_ops``, ``num_examples``,
    ``compute_loss_context_manager``.
    """

    arguments_class: type[TrainingArguments] = TrainingArguments
    """What arguments of transformers are made into, by their names."""

    loss_is_scaled_for_ga: bool | None = None
    """True where ``compute_loss`` divides by the items of the whole step itself; see ``losses.py``."""

    def __init__(
        self, model: nn.Module | None = None, args: Any = None, data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None, compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None, callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        say_what_is_never_called(type(self))
        self.args = args = own_arguments(args, self.arguments_class)
        set_seed(args.seed, args.full_determinism)
        take_accumulation(args)
        self._engine = create_engine(plain_options(args))
        self.accelerator = EngineAccelerator(self._engine, args.mixed_precision, args.accelerator_config)
        self._memory_tracker = TrainerMemoryTracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        logging.set_verbosity(args.get_process_log_level())
        if tokenizer is not None:
            warnings.warn("`tokenizer` is now `processing_class`.", FutureWarning, stacklevel=2)
            processing_class = tokenizer if processing_class is None else processing_class

        self._take_model(model, model_init)
        self.data_collator = data_collator or default_collator(processing_class)
        if not callable(self.data_collator):
            raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._validate_args()
        self._start_state()

        self.callback_handler = FaceHandler(
            [*default_callbacks(args), *(callbacks or [])], args, self.state, self.control, model=self.model,
            processing_class=processing_class, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
        )  # fmt: skip
        self.add_callback(display_callback(args))
        if args.push_to_hub:
            self.init_hf_repo()
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        self.callback_handler.call_event("on_init_end", args, self.state, self.control)
        if getattr(self.model, "config", None) is not None:
            self.model.config.use_cache = args.use_cache  # type: ignore[union-attr]
        self._memory_tracker.stop_and_update_metrics()

    def _take_model(self, model: nn.Module | None, model_init: Callable[..., nn.Module] | None) -> None:
        """The model, on its device, and what is to be known about it."""
        self.model_init = model_init
        if model is None and model_init is None:
            raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
        if model is not None and model_init is not None:
            raise ValueError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        self.model = model = self.call_model_init() if model is None else model
        validate_quantization_for_training(model)
        args, base = self.args, base_model(model)
        asked = args.place_model_on_device
        is_split = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        waits = is_split or args.fp16_full_eval or args.bf16_full_eval  # for its dtype, or stays where it lies
        self.place_model_on_device = not waits if asked is None else asked
        if self.place_model_on_device and not getattr(model, "is_quantized", False):
            model.to(self._engine.device)
        self.model_wrapped = model
        parameters = inspect.signature(base.forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.model_accepts_loss_kwargs = getattr(base, "accepts_loss_kwargs", takes_any)
        self.label_names = find_labels(type(base)) if args.label_names is None else args.label_names
        self.can_return_loss = can_return_loss(type(base))
        self._loss_shifts_labels = loss_shifts_labels(base)
        self.label_smoother = self._smoother()
        self._allows_needed, self._heads = WeakKeyDictionary(), WeakKeyDictionary()
        self.neftune_noise_alpha = args.neftune_noise_alpha

    def _smoother(self) -> Any:
        if not self.args.label_smoothing_factor:
            return None
        if getattr(getattr(self.model, "config", None), "problem_type", None) == "multi_label_classification":
            warnings.warn(
                "Label smoothing is not compatible with multi-label classification. Disabling label smoothing for this "
                "training run.",
                UserWarning,
                stacklevel=4,
            )
            return None
        return LabelSmoother(epsilon=self.args.label_smoothing_factor)

    def _validate_args(self) -> None:
        """What does not go together."""
        args = self.args
        by_batch = self.compute_metrics if args.batch_eval_metrics else None
        if by_batch is not None and "compute_result" not in inspect.signature(by_batch).parameters:
            raise ValueError(
                "When using `batch_eval_metrics`, your `compute_metrics` function must take a `compute_result` boolean "
                "argument which will be triggered after the last batch of the eval set to signal that the summary "
                "statistics should be returned by the function."
            )
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise ValueError(
                f"You have set `args.eval_strategy` to {args.eval_strategy} but you didn't pass an `eval_dataset` to "
                "`Trainer`. Either set `args.eval_strategy` to `no` or pass an `eval_dataset`. "
            )
        if (args.save_strategy == "best" or args.load_best_model_at_end) and args.metric_for_best_model is None:
            raise ValueError(
                "`args.metric_for_best_model` must be provided when using 'best' save_strategy or if "
                "`args.load_best_model_at_end` is set to `True`."
            )
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise RuntimeError(
                "Passing a `model_init` is incompatible with providing the `optimizers` argument. "
                "You should subclass `Trainer` and override the `create_optimizer_and_scheduler` method."
            )
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise ValueError(
                "The train_dataset does not implement __len__, so the number of training steps cannot be inferred; "
                "max_steps has to be specified. The total number of steps must be known in advance to bound the "
                "training loop and to configure the learning rate scheduler."
            )

    def _start_state(self) -> None:
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.control = TrainerControl()
        self.is_in_train = False
        self.hp_name = self.hp_search_backend = self.hub_model_id = self._trial = self._run = None
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._signature_columns = self._ignore_keys_for_eval = self._step_weight = None
        self._created_lr_scheduler = False
        self._sums, self._pushes = {}, []
        self._train_batch_size = self.args.train_batch_size
        self._accumulation = self.args.gradient_accumulation_steps

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add an object, or an object of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove an object, or the first of a class, and return it; None where there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    def end(self) -> None:
        """At the very end of a script: leave the group of processes."""
        self.accelerator.end_training()


_NEVER_CALLED = (
    "_clip_grad_norm", "_determine_best_metric", "_get_grad_norm", "_get_num_items_in_batch", "_init_training_state",
    "_inner_training_loop", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_load_rng_state", "_load_scaler", "_maybe_log_save_evaluate", "_move_model_to_device", "_prepare_for_training",
    "_run_epoch", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "_track_num_input_tokens",
    "_update_auto_batch_size", "_wrap_model", "create_accelerator_and_postprocess", "get_batch_samples",
)  # fmt: skip
"""Methods of transformers' inner loop, which subclasses override now and then. There is no such loop here."""


def say_what_is_never_called(kind: type) -> None:
    """One warning for overrides of methods that burnish's loop does not have."""
    idle = [name for name in _NEVER_CALLED if hasattr(kind, name)]
    if idle:
        warnings.warn(
            f"{kind.__name__} overrides {', '.join(idle)}: never called, because burnish trains with its own loop. "
            "Override one of the methods that the docstring of burnish.Trainer names, or use a callback.",
            UserWarning,
            stacklevel=3,
        )


def own_arguments(args: Any, kind: type[TrainingArguments] = TrainingArguments) -> Any:
    """burnish's arguments: as given, made into ``kind`` by their names where they are not, or its defaults."""
    if args is None:
        logger.info(f"No {kind.__name__} were given: output_dir is tmp_trainer.")
        return kind(output_dir="tmp_trainer")
    if isinstance(args, kind):
        return args
    given = {name: value for name, value in vars(args).items() if name in kind.__dataclass_fields__}
    if not isinstance(args, TrainingArguments):
        given["gradient_checkpointing"] = given["gradient_checkpointing_kwargs"] = None
    return kind(**given)


def take_accumulation(args: Any) -> None:
    """``num_steps`` of ``accelerator_config`` is another way to write ``gradient_accumulation_steps``."""
    asked = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps")
    if asked is None or asked == args.gradient_accumulation_steps:
        return
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1 in the "
            f"passed `TrainingArguments`. Received: {asked} and {args.gradient_accumulation_steps}. Give one of them."
        )
    args.gradient_accumulation_steps = asked


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    if isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return DataCollatorWithPadding(processing_class)  # type: ignore[no-any-return]
    return default_data_collator  # type: ignore[no-any-return]


def loss_shifts_labels(model: Any) -> bool:
    """Whether position t of the logits is held against label t + 1, so that the first label is never learned."""
    is_shifted = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return is_shifted and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
