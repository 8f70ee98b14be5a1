"""``Trainer``, with the constructor, methods and behavior of transformers' class, based on burnish's loop.

It does not inherit from transformers. Here: training, hyperparameter search, and the loop that calls the methods. The
other methods, by subject: ``methods/``. A method collects the components of a run, and functions of other modules do
the work.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.trainer_utils import BestRun, default_compute_objective, default_hp_space_optuna

from burnish.checkpoint import checkpoint
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.checkpoint.comparison import compare_with_checkpoint
from burnish.checkpoint.parts import Part
from burnish.config.errors import is_out_of_memory, skipped_steps_message
from burnish.loop.loop import Loop, TrainOutput
from burnish.loop.protocols import Objective
from burnish.loop.schedule import StepPlan
from burnish.loop.state import TrainerState, load_state, preserve_plan
from burnish.loop.types import Batch, Loss, StepBatch
from burnish.parallel.selection import parallel_name
from burnish.parallel.single import set_seed
from burnish.run.recovery.spikes import train_with_rollback
from burnish.trainer import reporting, search, training
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.data.torch_loader import PaddingBatch, TorchLoader, num_batches
from burnish.trainer.files.transformers_checkpoints import is_foreign, load_foreign
from burnish.trainer.methods.base import StepInProgress
from burnish.trainer.methods.copied import CopiedMethods
from burnish.trainer.methods.data import call_with_accepted
from burnish.trainer.methods.evaluation import EvaluationMethods
from burnish.trainer.methods.files import FileMethods, TrainerModel
from burnish.trainer.methods.loss import (
    call_accepting,
    call_training_step,
    explain_index_errors,
    refuse_no_gradient,
    weight_by_zero,
    without_gradient,
)
from burnish.trainer.notes import logger


class Trainer(EvaluationMethods, FileMethods, CopiedMethods):
    """Train and evaluate a model: any ``nn.Module`` that returns a loss.

    The arguments are those of transformers' ``Trainer``
    (https://huggingface.co/docs/transformers/main_classes/trainer). In addition, ``args`` may be burnish's or
    transformers' ``TrainingArguments``, a dataset may be a list of rows, ``callbacks`` may be those of either library,
    and ``tokenizer=`` is accepted as the earlier name of ``processing_class``.

    A subclass may override these methods, which the run calls: ``compute_loss``, ``training_step``,
    ``prediction_step``, ``evaluation_loop``, ``evaluate``, ``predict``, ``get_train_dataloader``,
    ``get_eval_dataloader``, ``get_test_dataloader``, ``_get_train_sampler``, ``create_optimizer``,
    ``create_scheduler``, ``create_optimizer_and_scheduler``, ``get_decay_parameter_names``,
    ``get_optimizer_cls_and_kwargs``, ``log``, ``save_model``, ``_save``, ``_save_checkpoint``, ``_prepare_inputs``,
    ``floating_point_ops``, ``num_examples``, ``compute_loss_context_manager``, ``autocast_smart_context_manager``,
    ``get_batch_samples``, ``_get_num_items_in_batch``, ``set_initial_training_values``,
    ``get_total_train_batch_size``, ``_get_learning_rate``, ``store_flos``, ``create_accelerator_and_postprocess``,
    ``_validate_args``.
    """

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
            ready = training.prepare_for_training(
                self.model, self.args, self.accelerator, self.processing_class, self.neftune_noise_alpha
            )
            signals = training.stop_on_signals(self, self.args, self._parallel)
            attempt = self._train_reducing_batch_size if self.args.auto_find_batch_size else self._train_once
            with ready, training.exclusive_writer(into, self.args), signals:
                output = attempt(folder, ignore_keys_for_eval)
        finally:
            self.is_in_train = False
        self._write_final_files()
        return output

    def _write_final_files(self) -> None:
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
        if self.model_init is not None:
            self._move_model_to_device(self.model, self._parallel.device)
        elif self.place_model_on_device:
            self.model.to(self._parallel.device)

    def _train_reducing_batch_size(self, folder: Path | None, ignore_keys: list[str] | None) -> TrainOutput:
        """Run attempts with half the micro-batch size each time that memory runs out."""
        if folder is not None:
            self._train_batch_size = load_state(folder).train_batch_size or self._train_batch_size
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        while True:
            try:
                return self._train_once(folder, ignore_keys)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self._train_batch_size == 1:
                    raise
            self._train_batch_size //= 2
            logger.warning(f"Out of memory. Restarting with a micro-batch size of {self._train_batch_size}.")
            self.model.load_state_dict(before)
            self.optimizer = self.lr_scheduler = None
            self.accelerator.free_memory()

    def _train_once(self, folder: Path | None, ignore_keys: list[str] | None) -> TrainOutput:
        loop = self._make_loop(ignore_keys)
        if folder is not None:
            loop.load(folder)
            if self.args.restore_callback_states_from_checkpoint:
                training.restore_callbacks(self.callback_handler, self.state.stateful_callbacks)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        loader, rows = self.callback_handler.arguments["train_dataloader"], self._rows_per_step
        num_rows = loop.plan.max_steps * rows if num_batches(loader) is None else self.num_examples(loader)
        reporting.announce_training(self.args, loop.plan, num_rows, rows, self.get_num_trainable_parameters())
        try:
            output = train_with_rollback(loop, logger.warning)
        finally:
            loop.checkpoints.wait()  # finish a checkpoint in the background before the folder is unlocked
        logger.info("\n\nTraining completed.\n\n")
        best = self.state.best_model_checkpoint
        if self.args.save_total_limit == 1 and best is not None and self.args.should_save:
            for path in loop.checkpoints.all():
                if path.name != Path(best).name:
                    shutil.rmtree(path)
        self._hub.wait()
        return output

    def _make_loop(self, ignore_keys: list[str] | None) -> TrainerLoop:
        """The loop at step 0. Components are created in the order of their dependencies."""
        args, parallel, handler = self.args, self._parallel, self.callback_handler
        loader = self._loader_of(self.get_train_dataloader)
        plan = training.plan_of(self.set_initial_training_values(args, loader), loader)
        training.check_spikes(args, loader, self._inner_steps)
        if not self._overrides("compute_loss"):
            self._capabilities()  # probe the model here rather than inside the first step
        objective = self._objective()
        handler.args, handler.control, handler.arguments["train_dataloader"] = args, self.control, loader
        weights, batches = TrainerModel(self.model), self._step_batches(loader, plan)
        module, self.optimizer = parallel.prepare(self._module(), self._optimizer_for(plan.max_steps))
        objective.setup(module)
        scheduler = self._scheduler_for(plan.max_steps)
        self.model_wrapped = module
        self.state = TrainerState.at_start(args, plan, self._train_batch_size)
        self._set_process_flags(self.state)
        self.current_flos = 0.0
        self._name_trial(self.state)
        handler.state = self.state
        handler.arguments |= {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": scheduler}
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
        is_counted_by_script = self._overrides("get_batch_samples") or self._overrides("_get_num_items_in_batch")
        return TorchLoader(
            loader, self._accumulation, total, count, self._stop_empty, self._parallel, self._padding_batch,
            self._scripted_batch_samples if is_counted_by_script else None,
        )  # fmt: skip

    def _converted_step(self, step_batch: StepBatch) -> StepBatch:
        """The batches of a step in the form that the objective reads."""
        return step_batch

    def _padding_batch(self, batch: Batch) -> PaddingBatch:
        """A batch without items, for a rank that has no more rows."""
        return PaddingBatch(batch)

    _counter: type[reporting.Count] = reporting.Count

    def _optimizer_for(self, max_steps: int) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if self._overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(max_steps)
            if self.optimizer is not None:
                return self.optimizer
        return self.create_optimizer()

    def _scheduler_for(self, max_steps: int) -> Any:
        if self._overrides("create_optimizer_and_scheduler") and self.lr_scheduler is not None:
            return self.lr_scheduler
        return call_accepting(
            "optimizer", self.create_scheduler, num_training_steps=max_steps, optimizer=self.optimizer
        )

    def _stop_empty(self) -> None:
        logger.warning(
            f"The dataset has no more examples, stopping training at step {self.state.global_step}! This is expected "
            f"for an IterableDataset with fewer examples than max_steps ({self.state.max_steps}) requires."
        )
        self.control.should_training_stop = True

    def _get_output_dir(self, trial: Any = None) -> str:
        """``output_dir``, or the subfolder of a trial."""
        if trial is None or self._search is None:
            return str(self.args.output_dir)
        name = f"run-{getattr(trial, 'number', trial)}" if self.hp_name is None else self.hp_name(trial)
        return str(Path(self.args.output_dir) / name)

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

    def hyperparameter_search(
        self, hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None, n_trials: int = 20,
        direction: str | list[str] = "minimize", backend: Any = None, hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:  # fmt: skip
        """The best of ``n_trials`` runs. Arguments as in transformers' ``Trainer``; ``backend`` must be "optuna"."""
        self.hp_search_backend, self.hp_name = search.check_backend(backend, self.model_init), hp_name
        self._search = search.Search(
            hp_space or default_hp_space_optuna, compute_objective or default_compute_objective
        )
        try:
            return self._search.run(partial(self.train, None), self.evaluate, n_trials, direction, kwargs)
        finally:
            self._search = self.hp_search_backend = None

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments to the values of this trial."""
        self._trial = trial
        if self._search is not None and trial is not None:
            self._search.apply_values(trial, self.args)

    def _name_trial(self, state: TrainerState) -> None:
        state.is_hyper_param_search = self._trial is not None
        if self._trial is not None:
            state.trial_name = None if self.hp_name is None else self.hp_name(self._trial)
            state.trial_params = getattr(self._trial, "params", self._trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the objective of an evaluation to the search, which may prune the trial."""
        if self._search is not None and trial is not None:
            self._search.report(trial, step, metrics, give_up=lambda: self._call_event("on_train_end"))


# --- the loop of a Trainer --------------------------------------------------------------------------------------------


class TrainerLoop(Loop):
    """The loop of a ``Trainer``, which calls the trainer's methods that a script may override.

    step         in training mode, also after an evaluation
    microstep    ``training_step`` if a script computes the loss, else the loop's own
    loss         ``_prepare_inputs``, then the objective, within ``compute_loss_context_manager``
    evaluate     ``evaluate``
    log          ``store_flos`` first
    record       ``log``
    save         ``_save_checkpoint``
    load         also checkpoints of transformers

    Args:
        plan: number of steps of the run.
        accumulation: micro-batches per step.
        ignore_keys: outputs of the model that evaluations ignore.
        components: other arguments of ``Loop``.
    """

    def __init__(
        self, trainer: Trainer, plan: StepPlan, accumulation: int, ignore_keys: list[str] | None, **components: Any
    ) -> None:
        super().__init__(trainer.args, **components)
        self.trainer, self.plan, self.accumulation, self.ignore_keys = trainer, plan, accumulation, ignore_keys
        self.started_s = time.time()

    def step(self, step_batch: StepBatch) -> None:
        """As ``Loop.step``, in training mode. Evaluations, also of callbacks, leave the model in evaluation mode."""
        self.set_training_mode(True)
        super().step(self.trainer._converted_step(step_batch))

    def microstep(self, batch: Batch, divisor: Tensor, is_last: bool) -> Loss:
        """The loop's microstep, or ``training_step`` (a mean) if a script computes the loss."""
        trainer = self.trainer
        trainer.accelerator.begin_micro_batch(is_last)
        if not isinstance(batch, PaddingBatch):
            trainer.current_flos += float(trainer.floating_point_ops(batch))
        with explain_index_errors(trainer.model, batch):
            if not trainer.loss_is_scripted:
                return super().microstep(batch, divisor, is_last)
            trainer._step = StepInProgress(divisor, trainer._sums_of(batch))
            num_items_in_batch = None if trainer._num_items_in_batch(batch, divisor) is None else divisor
            with self.parallel.microbatch(self.model, last=is_last):
                inputs = trainer._inputs_for_script(batch)
                value = call_training_step(trainer.training_step, self.model, inputs, num_items_in_batch)
        sums, trainer._step = trainer._step.sums, StepInProgress()
        return Loss(without_gradient(value, self.parallel.device) * (divisor / self.parallel.world_size), sums)

    def loss(self, batch: Batch) -> Loss:
        """The objective's loss for the inputs that the trainer prepares. A padding batch counts as zero."""
        trainer = self.trainer
        self.set_training_mode(True)  # a callback may have run an evaluation
        trainer._step = StepInProgress(own_items=self.objective.num_items(batch))
        inputs = trainer._prepare_inputs(trainer._inputs_for_script(batch))
        with trainer.compute_loss_context_manager():
            loss = self.objective.loss(self.model, inputs)
        refuse_no_gradient(loss.total)
        trainer._step = StepInProgress()
        trainer._empty_cache_if_due()
        return weight_by_zero(loss) if isinstance(batch, PaddingBatch) else loss

    def evaluate(self) -> dict[str, float]:
        """Evaluate with ``Trainer.evaluate``, which logs each set and calls the callbacks."""
        metrics = self.trainer.evaluate(ignore_keys=self.ignore_keys)
        self.trainer._report_to_hp_search(self.trainer._trial, self.state.global_step, metrics)
        return metrics

    def learning_rate(self) -> float:
        return self.trainer._get_learning_rate()

    def log(self) -> None:
        """Log the means since the last log, after ``store_flos``, as in transformers."""
        self.trainer.store_flos()
        super().log()

    def record(self, values: dict[str, Any]) -> None:
        """Pass ``values`` to ``Trainer.log``; logs of steps with the start time of training, for tokens per second."""
        if "skipped_steps" in values:
            logger.warning(skipped_steps_message(values["skipped_steps"], self.state.global_step))
        if "loss" in values:
            call_with_accepted(self.trainer.log, values, self.started_s)
        else:
            self.trainer.log(values)

    def summary(self, unlogged: Mapping[str, float]) -> dict[str, float]:
        """The loop's summary, with the metrics of unlogged steps (as in TRL) and memory metrics."""
        metrics = self.trainer._last_metrics(self.objective.report({**unlogged})) if unlogged else {}
        self.trainer.store_flos()
        values = {**super().summary(unlogged), **metrics}
        _finalize_training(self.trainer, values)
        return values

    def write_checkpoint(self) -> Path:
        self._add_registered_objects()
        return super().write_checkpoint()

    def _add_registered_objects(self) -> None:
        """Add the objects that a script has registered with the accelerator to the parts of a checkpoint."""
        registered, generators = self.trainer.accelerator.registered, self.parts.pop("rng")
        is_saved = bool(registered.objects) and not self.options.save_only_model
        self.parts |= {"registered": Part(registered, "registered_objects", is_saved=is_saved), "rng": generators}

    def load_objects(self, folder: Path) -> None:
        """Load what accelerate's ``load_state`` loads: not the step and the position in the data."""
        self._add_registered_objects()
        names = ("model", "optimizer", "scheduler", "registered", "rng")
        checkpoint.load(folder, self._parts_there(folder, names), self.parallel.rank)

    def _parts_there(self, folder: Path, names: Iterable[str]) -> dict[str, Part]:
        """The parts that this run saves, and others that the checkpoint has."""
        parts = ((name, self.parts[name]) for name in names)
        return {n: part for n, part in parts if part.is_saved or checkpoint.has_part(folder, part.stem_of(0))}

    def save(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model, self.trainer._trial)
        self.callbacks.fire("on_save")

    def load(self, folder: Path) -> None:
        """Load a checkpoint of burnish or transformers. Arguments take precedence over its values."""
        with preserve_plan(self.state):
            if is_foreign(folder):
                notes = load_foreign(folder, self, self.trainer.model, self.plan.steps_per_epoch, self.accumulation)
            else:
                notes = compare_with_checkpoint(folder, self.checkpoints.fingerprints, allows_changes=True)
                self._add_registered_objects()
                checkpoint.load(folder, self._parts_there(folder, self.parts), self.parallel.rank)
            for note in [*notes, *training.differences(self.state, self.trainer.args)]:
                logger.warning(note)
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning(f"The best checkpoint {best} was deleted and will not be loaded at the end.")
            self.state.best_model_checkpoint = None
        if self.trainer.args.ignore_data_skip:
            kept = {"epoch", "has_short_epochs", "attributes"}
            state = {name: value for name, value in self.loader.state_dict().items() if name in kept}
            self.loader.load_state_dict({**state, "position": 0})

    def describe_rows(self, indices: Sequence[int]) -> str:
        return f"rows {', '.join(map(str, indices))} of train_dataset"


def _finalize_training(trainer: Trainer, summary: dict[str, Any]) -> None:
    """Add memory metrics to the summary. transformers' tracker determines the stage from the name of its caller."""
    trainer._memory_tracker.stop_and_update_metrics(summary)


class TrainerObjective(Objective):
    """The loss of a ``Trainer`` or its model as an objective of the loop."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def num_items(self, batch: Batch) -> Tensor:
        return self.trainer._num_items(batch) * (not isinstance(batch, PaddingBatch))

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        return self.trainer._loss(module, batch)
