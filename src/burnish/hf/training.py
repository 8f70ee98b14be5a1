"""``Trainer.train``: the parts of a run put together, and handed to the loop.

    prepare the model           model_init, checkpointing, special tokens, noise
    find the checkpoint         resume_from_checkpoint
    build                       loader -> steps -> optimizer, engine, schedule -> state -> Run
    continue                    every part gets its state back
    train                       core/loop.py

Nothing of what training *is* happens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.debug_utils import DebugOption, DebugUnderflowOverflow
from transformers.integrations import activate_neftune, deactivate_neftune
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from burnish.core import checkpoint, loop
from burnish.core.checkpoint import RngState, only_writer
from burnish.core.comparison import compare_fingerprints
from burnish.core.errors import Problem, UserError
from burnish.core.schedule import StepPlan, plan_steps, steps_of
from burnish.core.state import TrainerState
from burnish.core.types import Batch, Run
from burnish.data.stream import num_tokens
from burnish.engine.base import set_seed
from burnish.hf.face import Face
from burnish.hf.foreign import is_foreign, load_foreign
from burnish.hf.losses import LossMethods, TrainerObjective
from burnish.hf.reporting import FaceMeter
from burnish.hf.saving import FaceCheckpoints, ModelPart, SavingMethods
from burnish.hf.stream import LoaderStream, num_batches
from burnish.models.fused import fuse, give_back
from burnish.models.liger import apply_liger, liger_problems
from burnish.ops.kernels import kernel_notes

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class TrainingMethods(LossMethods, SavingMethods, Face):
    """Training."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None, **kwargs: Any,
    ) -> loop.TrainOutput:  # fmt: skip
        """Train from the start, or from a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint folder; True for the newest in ``output_dir``.
            trial: of a hyperparameter search.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.
        """
        resume_from_checkpoint = take_old_keywords(kwargs, resume_from_checkpoint)
        self._memory_tracker.start()
        self._ignore_keys_for_eval = ignore_keys_for_eval
        self.is_in_train = True
        try:
            self._renew_model(trial)
            self._hp_search_setup(trial)  # type: ignore[attr-defined]
            self._train_batch_size = self.args.train_batch_size
            self._accumulation = self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            folder = self._checkpoint_to_resume(resume_from_checkpoint)
            with self._prepared_model(), self._writing_alone():
                return self._train_from(folder)
        finally:
            self.is_in_train = False

    def _train_from(self, folder: Path | None) -> loop.TrainOutput:
        """One attempt after another, with half the micro-batch each time that memory runs out and halving was asked."""
        if not self.args.auto_find_batch_size:
            return self._attempt(folder)
        if folder is not None:
            self._cut_to(checkpoint.load_state(folder).train_batch_size or self._train_batch_size)
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        while True:
            try:
                return self._attempt(folder)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self._train_batch_size == 1:
                    raise
            self._cut_to(self._train_batch_size // 2)
            logger.warning(f"Memory ran out. Beginning anew with micro-batches of {self._train_batch_size}.")
            self.model.load_state_dict(before)
            self.optimizer = self.lr_scheduler = None
            self.accelerator.free_memory()

    def _cut_to(self, batch_size: int) -> None:
        """Smaller micro-batches, more of them: the rows of a step stay the same where they can be divided so."""
        rows = self._train_batch_size * self._accumulation
        self._train_batch_size, self._accumulation = batch_size, -(-rows // batch_size)

    def _attempt(self, folder: Path | None) -> loop.TrainOutput:
        run, plan = self._build_run()
        self._run = run
        if folder is not None:
            self._continue_from(folder, run, plan)
        self._start_clock()  # type: ignore[attr-defined]
        self._announce_training(run, plan)
        output = loop.train(run, self.args)
        logger.info("\n\nTraining completed.\n\n")
        self._drop_surplus(run.checkpoints)
        self._finish_current_push()  # type: ignore[attr-defined]
        return output

    # --- the model ----------------------------------------------------------------------------------------------------

    def _renew_model(self, trial: Any) -> None:
        """A fresh model, optimizer and schedule where there is a ``model_init``."""
        if self.model_init is None:
            return
        set_seed(self.args.seed, self.args.full_determinism)
        self.model = self.call_model_init(trial)  # type: ignore[attr-defined]
        self.optimizer = self.lr_scheduler = None
        self._signature_columns = None

    @contextmanager
    def _prepared_model(self) -> Iterator[None]:
        """What is done to a model for the time of its training."""
        args, model = self.args, self.model
        if self.place_model_on_device or self.model_init is not None:
            model.to(self._engine.device)
        if args.use_liger_kernel:
            if problems := liger_problems(self._engine.device):
                raise UserError(problems)
            for note in apply_liger(model, args.liger_kernel_config):
                logger.warning(note)
        if hasattr(model, "config") and hasattr(self.processing_class, "save_pretrained"):
            from transformers.trainer_utils import align_special_tokens

            align_special_tokens(model, self.processing_class)
        if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
            DebugUnderflowOverflow(model)
        alpha = self.neftune_noise_alpha
        noise = activate_neftune(model, alpha, self.accelerator) if alpha is not None else None
        # A compiler fuses by itself. On a CPU it spares a twentieth of the memory, and no time for rows of 86 tokens.
        fused = [] if args.torch_compile or self._engine.device.type == "cpu" else fuse(model)
        for note in kernel_notes(self._engine.device):
            logger.warning(note)
        try:
            yield
        finally:
            give_back(fused)
            if noise is not None:
                deactivate_neftune(model, noise, self.accelerator)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _build_run(self) -> tuple[Run, StepPlan]:
        args = self.args
        loader = self.get_train_dataloader()  # type: ignore[attr-defined]
        plan = self._plan(loader)
        model = self._prepare_parts(plan.max_steps)
        self.state = self._new_state(plan)
        handler = self.callback_handler
        handler.state, handler.args, handler.control = self.state, args, self.control
        handler.parts |= {
            "model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler,
            "train_dataloader": loader,
        }  # fmt: skip
        total = num_batches(loader) or plan.max_steps * self._accumulation
        stream = LoaderStream(loader, self._accumulation, total, self._count, self._stop_empty)
        meter = FaceMeter(self._engine.device, args.logging_nan_inf_filter)
        parts: dict[str, Any] = {
            "model": ModelPart(self.model), "optimizer": self.optimizer, "scheduler": self.lr_scheduler,
            "stream": stream, "state": self.state, "meter": meter, "rng": RngState(),
            **getattr(self._engine, "parts", {}),
        }  # fmt: skip
        if args.save_only_model:
            parts = {name: parts[name] for name in ("model", "state")}
        self._checkpoints = FaceCheckpoints(
            self, Path(self._get_output_dir(self._trial)), fingerprints=self._fingerprints(plan),
            write_extras=self._write_extras, limit=max(args.save_total_limit or 0, 0) or None,
            in_background=args.save_in_background, rank=self._engine.rank, barrier=self._engine.barrier,
        )  # fmt: skip
        run = Run(
            model=model, objective=TrainerObjective(self), engine=self._engine, stream=stream,
            optimizer=self.optimizer, scheduler=self.lr_scheduler, state=self.state, control=self.control,
            callbacks=handler, meter=meter, checkpoints=self._checkpoints, parts=parts,
            eval_sets={"": ()}, evaluate=lambda run, batches, prefix: self._evaluate(),
            microstep=self._microstep, log=lambda run, values: self._log_from_loop(values),  # type: ignore[attr-defined]
        )  # fmt: skip
        return run, plan

    def _plan(self, loader: Any) -> StepPlan:
        """Steps and epochs, counted in micro-batches of this rank. The last group of an epoch may be incomplete."""
        batches = num_batches(loader)
        if not batches and self.args.max_steps <= 0:
            raise ValueError(
                "args.max_steps must be set to a positive value if dataloader does not have a length, was "
                f"{self.args.max_steps}"
            )
        counted: Any = SimpleNamespace(
            per_device_train_batch_size=1, gradient_accumulation_steps=self._accumulation,
            num_train_epochs=self.args.num_train_epochs, max_steps=self.args.max_steps, dataloader_drop_last=False,
        )  # fmt: skip
        return plan_steps(counted, batches or None)

    def _prepare_parts(self, max_steps: int) -> nn.Module:
        """Optimizer, then the engine's preparation, then the schedule."""
        from burnish.hf.trainer import Trainer

        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if type(self).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:  # type: ignore[attr-defined]
            self.create_optimizer_and_scheduler(max_steps)  # type: ignore[attr-defined]
        self.create_optimizer()  # type: ignore[attr-defined]
        model, self.optimizer = self._engine.prepare(self.model, self.optimizer)
        self.model_wrapped = model
        self.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)  # type: ignore[attr-defined]
        return model

    def _new_state(self, plan: StepPlan) -> TrainerState:
        state = TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.args.process_index == 0,
            is_hyper_param_search=self._trial is not None,
        )  # fmt: skip
        if self._trial is not None:
            state.trial_name = self.hp_name(self._trial) if self.hp_name is not None else None
            state.trial_params = getattr(self._trial, "params", self._trial)
        self._set_intervals(state, plan)
        return state

    def _set_intervals(self, state: TrainerState, plan: StepPlan) -> None:
        """What the arguments say of the whole run; a resumed run follows the arguments too."""
        args = self.args
        state.max_steps, state.num_train_epochs = plan.max_steps, plan.num_train_epochs
        state.train_batch_size = self._train_batch_size
        state.logging_steps = steps_of(args.logging_steps, plan.max_steps, 500)
        state.eval_steps = steps_of(args.eval_steps, plan.max_steps, args.logging_steps)
        state.save_steps = steps_of(args.save_steps, plan.max_steps, 500)

    def _count(self, batch: Batch) -> tuple[int, int]:
        """Rows and tokens of a batch; tokens only where they are counted."""
        rows, how = find_batch_size(batch) or 0, self.args.include_num_input_tokens_seen
        ids = batch.get(getattr(self.model, "main_input_name", "input_ids"))
        if how == "no" or not isinstance(ids, torch.Tensor):
            return rows, 0
        return rows, self._num_without_padding(batch, ids) if how == "non_padding" else ids.numel()

    _padding_is_unknown = False

    def _num_without_padding(self, batch: Batch, ids: torch.Tensor) -> int:
        """Tokens by the mask, or by the id of padding; where neither is known all of them, which is said once."""
        if "attention_mask" in batch:
            return num_tokens(batch)
        padding = getattr(self.processing_class, "pad_token_id", None)
        if padding is not None:
            return int(ids.ne(padding).sum())
        if not self._padding_is_unknown:
            self._padding_is_unknown = True
            logger.warning(
                "Could not determine method to count non-padding tokens, falling back to counting all tokens: the "
                "batches have no attention_mask, and the processing class no pad_token_id."
            )
        return ids.numel()

    def _stop_empty(self) -> None:
        logger.warning(
            "There seems not to be a single sample in your epoch_iterator, stopping training at step "
            f"{self.state.global_step}! This is expected if you're using an IterableDataset and set num_steps "
            f"({self.state.max_steps}) higher than the number of available samples."
        )
        self.control.should_training_stop = True

    def _evaluate(self) -> dict[str, float]:
        """An evaluation that the loop asks for, by way of ``evaluate``."""
        metrics: dict[str, float] = self.evaluate(ignore_keys=self._ignore_keys_for_eval)  # type: ignore[attr-defined]
        self._report_to_hp_search(self._trial, self.state.global_step, metrics)  # type: ignore[attr-defined]
        return metrics

    # --- resume -------------------------------------------------------------------------------------------------------

    def _checkpoint_to_resume(self, asked: str | bool | None) -> Path | None:
        folder = self._get_output_dir(self._trial)
        goes_on = asked is None and self.args.resume in ("auto", "must")
        if asked is True or goes_on:
            found = get_last_checkpoint(folder) if Path(folder).is_dir() else None
            if found is not None:
                return self._newest_whole(Path(found))
            if asked is True:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
            if self.args.resume == "must":
                raise UserError(Problem(f'"resume" is must, and there is no checkpoint in {folder}.'))
            return None
        if not asked:
            return None
        if not Path(asked).is_dir():
            raise ValueError(f"Can't find a valid checkpoint at {asked}")
        return Path(asked)

    def _newest_whole(self, found: Path) -> Path:
        """``found``, or where it is damaged the newest checkpoint beside it that is whole, and a word on the others."""
        if is_foreign(found):
            return found
        whole, skipped = checkpoint.Checkpoints(found.parent).newest()
        for sentence in skipped:
            logger.warning(sentence)
        if whole is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        return whole

    def _continue_from(self, folder: Path, run: Run, plan: StepPlan) -> None:
        """Give every part its state back, then let the arguments have their say."""
        if is_foreign(folder):
            notes = load_foreign(folder, run, self.model, plan.steps_per_epoch, self._accumulation)
        else:
            notes = compare_fingerprints(folder, self._fingerprints(plan), despite=True)
            checkpoint.load(folder, run.parts, run.engine.rank)
        for note in [*notes, *self._differences(run.state)]:
            logger.warning(note)
        self._set_intervals(run.state, plan)
        best = run.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning(f"The best checkpoint so far, {best}, is gone; it is not loaded at the end.")
            run.state.best_model_checkpoint = None
        if self.args.ignore_data_skip:
            run.stream.load_state_dict({"epoch": run.stream.state_dict()["epoch"], "position": 0})
        self._load_callback_state()

    def _load_callback_state(self) -> None:
        """Callbacks and control go on with their state, where that is asked for."""
        if not self.args.restore_callback_states_from_checkpoint:
            return
        states, handler = self.state.stateful_callbacks, self.callback_handler
        here = {type(callback).__name__ for callback in handler.callbacks} | {"TrainerControl"}
        lost = [name for name in states if name not in here]
        if lost:
            logger.warning(
                f"Checkpoint included callbacks not included in current configuration. Ignoring. ({', '.join(lost)})"
            )
        handler.load_state_dict(states)

    def _differences(self, state: TrainerState) -> list[str]:
        """Sentences on arguments that differ from the checkpoint's. The arguments are followed."""
        now = {name: getattr(self.args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
        pairs = [(name, value, getattr(state, name)) for name, value in now.items() if value is not None and value >= 1]
        pairs.append(("per_device_train_batch_size", self.args.per_device_train_batch_size, state.train_batch_size))
        return [
            f"{name}: {value} (from args) != {before} (from trainer_state.json)"
            for name, value, before in pairs
            if before is not None and value != before
        ]

    def _fingerprints(self, plan: StepPlan) -> dict[str, Any]:
        """What the run depends on, for the sentences at a resume."""
        args = self.args
        rows = self._train_batch_size * self._accumulation * self._engine.world_size
        return {
            "learning_rate": args.learning_rate, "max_steps": plan.max_steps, "rows_per_step": rows,
            "seed": args.seed, "data_seed": args.data_seed, "steps_per_epoch": plan.steps_per_epoch,
            "logging_steps": args.logging_steps, "eval_steps": args.eval_steps, "save_steps": args.save_steps,
        }  # fmt: skip

    @contextmanager
    def _writing_alone(self) -> Iterator[None]:
        """No two runs write checkpoints into one folder."""
        if self.args.save_strategy == "no" or not self.args.should_save:
            yield
            return
        with only_writer(Path(self._get_output_dir(self._trial))):
            yield

    def _announce_training(self, run: Run, plan: StepPlan) -> None:
        args, across = self.args, self._engine.world_size
        rows = self._train_batch_size * self._accumulation * across
        logger.info("***** Running training *****")
        logger.info(f"  Num examples = {self._num_rows_said(run):,}")
        logger.info(f"  Num Epochs = {plan.num_train_epochs:,}")
        logger.info(f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}")
        logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {rows:,}")
        logger.info(f"  Gradient Accumulation steps = {args.gradient_accumulation_steps}")
        logger.info(f"  Total optimization steps = {plan.max_steps:,}")
        trainable = self.get_num_trainable_parameters()  # type: ignore[attr-defined]
        logger.info(f"  Number of trainable parameters = {trainable:,}")

    def _num_rows_said(self, run: Run) -> int:
        loader = self.callback_handler.parts["train_dataloader"]
        if num_batches(loader) is None:
            rows = self._train_batch_size * self._accumulation * self._engine.world_size
            return int(run.state.max_steps * rows)
        return int(self.num_examples(loader))  # type: ignore[attr-defined]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the machine says that memory ran out; torch has a class for it on some devices only."""
    words = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def take_old_keywords(kwargs: dict[str, Any], resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """``model_path``, the name that ``resume_from_checkpoint`` had. TypeError for any other keyword."""
    if "model_path" in kwargs:
        import warnings

        warnings.warn("`model_path` is now `resume_from_checkpoint`.", FutureWarning, stacklevel=3)
        resume_from_checkpoint = kwargs.pop("model_path")
    if kwargs:
        raise TypeError(f"train() got unexpected keyword arguments: {', '.join(kwargs)}.")
    return resume_from_checkpoint
