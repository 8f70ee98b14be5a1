"""Parts of ``Trainer.train``: preparing the model, number of steps, and the checkpoint to resume from.

The training loop is in ``loop/loop.py``. The functions here do not depend on ``Trainer``; each takes the arguments that
it needs.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.debug_utils import DebugOption, DebugUnderflowOverflow
from transformers.integrations import activate_neftune
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens, get_last_checkpoint

from burnish.checkpoint import checkpoint
from burnish.config.errors import UserError
from burnish.config.options import raise_if
from burnish.kernels.lora import is_plain_lora_layer
from burnish.loop.protocols import Parallel
from burnish.loop.schedule import StepOptions, StepPlan, plan_steps
from burnish.loop.spikes import spike_problems
from burnish.loop.state import TrainerState
from burnish.losses.neftune import NOISE
from burnish.models.patches.fused import patch_forwards
from burnish.models.patches.liger import apply_liger, liger_problems
from burnish.parallel.precision import compute_sentence, has_fast_products, slow_products
from burnish.run.recovery.interrupt import InterruptCallback
from burnish.trainer import notes
from burnish.trainer.accelerator import ParallelAccelerator
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.callbacks import TrainerCallbackHandler
from burnish.trainer.data.torch_loader import num_batches, order_in
from burnish.trainer.files.transformers_checkpoints import is_foreign
from burnish.trainer.notes import logger
from burnish.utils.files import exclusive_writer_lock
from burnish.utils.patching import Reason, record, restore

OUTPUT_CHECK = Reason("module", "its outputs are checked (debug)")


@contextmanager
def prepare_for_training(
    model: nn.Module, args: TrainingArguments, accelerator: ParallelAccelerator, processing_class: Any,
    noise: float | None,
) -> Iterator[None]:  # fmt: skip
    """Context with the changes of a model that apply during its training.

    Args:
        args: the arguments of the Trainer.
        accelerator: the Trainer's accelerator.
        processing_class: tokenizer or processor.
        noise: noise scale of NEFTune; None: disabled.
    """
    device = accelerator.device
    if args.use_liger_kernel:
        raise_if(liger_problems(device))
        for note in apply_liger(model, args.liger_kernel_config):
            logger.warning(note)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    # Image processors and feature extractors have no special tokens.
    if hasattr(model, "config") and isinstance(tokenizer, PreTrainedTokenizerBase):
        align_special_tokens(model, tokenizer)
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        record(model, lambda: DebugUnderflowOverflow(model), OUTPUT_CHECK)
    records = [] if noise is None else record(model, lambda: activate_neftune(model, noise, accelerator), NOISE)
    # A compiler fuses operations itself. On a CPU only adapters benefit: with rows of 86 tokens nothing else is faster.
    if not args.torch_compile and (device.type != "cpu" or any(map(is_plain_lora_layer, model.modules()))):
        records += patch_forwards(model, args)
    log_compute_dtype(model, accelerator.parallel.dtype, device)
    try:
        yield
    finally:
        restore(records)


def log_compute_dtype(model: nn.Module, autocast: torch.dtype | None, device: torch.device) -> None:
    """Log the compute dtype. Warns if float32 is faster, because a script's own weights keep their dtype."""
    of_weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    compute = autocast or of_weights
    logger.info(compute_sentence(compute, of_weights, device))
    if not has_fast_products(compute, device):
        remedy = "Set bf16=False" if autocast else "Load the model with dtype=torch.float32"
        logger.warning(f"{slow_products(compute)} {remedy}, unless memory is limited.")


def steps_of_loader(loader: Any, args: TrainingArguments, accumulation: int, inner_steps: int = 1) -> StepPlan:
    """Number of steps and epochs, computed from this rank's micro-batches, which take the place of rows in the result.
    The last step of an epoch may be incomplete.

    Args:
        loader: the training loader.
        args: the arguments of the Trainer.
        accumulation: micro-batches per step.
        inner_steps: optimizer steps per step batch (``Objective.inner_steps``).
    """
    batches = num_batches(loader)
    if batches == 0:
        what = "The training data loader has no batches: `train_dataset` is empty"
        remedy = "Pass a dataset with rows."
        if args.dataloader_drop_last:
            what += ", or has fewer rows than a batch, which `dataloader_drop_last` drops"
            remedy = "Pass more rows, lower per_device_train_batch_size, or set dataloader_drop_last=False."
        raise UserError(f"{what}.", remedy=remedy)
    if batches is None and args.max_steps <= 0:
        raise ValueError(f"`max_steps` must be positive if the data loader has no length. Received: {args.max_steps}.")
    counted = StepOptions(
        per_device_train_batch_size=1, gradient_accumulation_steps=accumulation,
        num_train_epochs=args.num_train_epochs, max_steps=args.max_steps,
    )  # fmt: skip
    return plan_steps(counted, batches, inner_steps=inner_steps)


def plan_of(values: tuple[int, int, int, int, int, int | None, int], loader: Any) -> StepPlan:
    """The plan for the result of ``Trainer.set_initial_training_values`` (see ``loaders.training_numbers``)."""
    num_train_epochs, steps_per_epoch, num_rows, _, rows_per_step, _, max_steps = values
    has_rows = num_batches(loader) is not None
    return StepPlan(num_rows if has_rows else None, rows_per_step, steps_per_epoch, max_steps, num_train_epochs)


def check_spikes(args: TrainingArguments, loader: Any, inner_steps: int) -> None:
    """Raise UserError if the run rolls back after spikes, and this is not possible or the rows of a step are not
    known."""
    raise_if(spike_problems(args, inner_steps))
    if args.on_spike != "no" and order_in(loader) is None:
        raise UserError(
            "`on_spike` requires a map-style train_dataset and the Trainer's own data loader.",
            remedy="Set on_non_finite to skip instead.",
        )


def trainer_fingerprints(args: TrainingArguments, plan: StepPlan, rows_per_step: int) -> dict[str, Any]:
    """Fingerprints of everything that the run depends on, for messages when it resumes."""
    return {
        "learning_rate": args.learning_rate, "max_steps": plan.max_steps, "rows_per_step": rows_per_step,
        "seed": args.seed, "data_seed": args.data_seed, "steps_per_epoch": plan.steps_per_epoch,
        "logging_steps": args.logging_steps, "eval_steps": args.eval_steps, "save_steps": args.save_steps,
    }  # fmt: skip


def exclusive_writer(folder: str, args: TrainingArguments) -> AbstractContextManager[None]:
    """Context that prevents two runs from writing checkpoints to the same folder."""
    writes = args.save_strategy != "no" and args.should_save
    return exclusive_writer_lock(Path(folder)) if writes else nullcontext()


@contextmanager
def stop_on_signals(trainer: Any, args: TrainingArguments, parallel: Parallel) -> Iterator[None]:
    """After Ctrl-C or SIGTERM, save a checkpoint after the current step and raise KeyboardInterrupt. Signals with a
    script's own handler are not changed. Without checkpoints all signals keep their behavior.

    With ``enable_jit_checkpoint``, SIGTERM always saves a checkpoint, and training ends without an exception.
    """
    if args.save_strategy == "no" and not args.enable_jit_checkpoint:
        yield
        return
    with InterruptCallback(parallel.any, leaves_handlers=not args.enable_jit_checkpoint) as interrupt:
        trainer.add_callback(interrupt)
        try:
            yield
        finally:
            trainer.remove_callback(interrupt)
    ends_quietly = args.enable_jit_checkpoint and interrupt.received != signal.SIGINT
    if interrupt.exit_code is not None and not ends_quietly:
        raise KeyboardInterrupt


# --- resume -----------------------------------------------------------------------------------------------------------


def requested_checkpoint(requested: str | bool | None, folder: str, args: TrainingArguments) -> Path | None:
    """The requested checkpoint, or the latest valid one in ``folder``. None to start from scratch."""
    is_resuming = requested is None and args.resume in ("auto", "must")
    if requested is True or is_resuming:
        newest = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if newest is not None:
            return _newest_complete(Path(newest), args)
        if requested is True:
            raise ValueError(f"No valid checkpoint found in output directory ({args.output_dir})")
        if args.resume == "must":
            raise UserError(f'`resume="must"` requires a checkpoint, but {folder} contains none.')
        return None
    if not requested:
        return None
    if not Path(requested).is_dir():
        raise ValueError(f"Can't find a valid checkpoint at {requested}")
    if note := checkpoint.later_checkpoints_note(Path(requested)):
        logger.warning(note)
    return Path(requested)


def _newest_complete(newest: Path, args: TrainingArguments) -> Path:
    """``newest``, or if it is damaged the latest valid checkpoint next to it. Logs the skipped ones."""
    if is_foreign(newest):
        return newest
    complete, skipped = checkpoint.Checkpoints(newest.parent).newest()
    for sentence in skipped:
        logger.warning(sentence)
    if complete is None:
        raise ValueError(f"No valid checkpoint found in output directory ({args.output_dir})")
    return complete


def differences(before: TrainerState, args: TrainingArguments) -> list[str]:
    """Sentences about arguments that differ from the checkpoint's. The arguments take precedence."""
    names = ("logging_steps", "eval_steps", "save_steps")
    now = {name: value for name in names if (value := getattr(args, name)) is not None and value >= 1}
    pairs = [(name, value, getattr(before, name)) for name, value in now.items()]
    pairs.append(("per_device_train_batch_size", args.per_device_train_batch_size, before.train_batch_size))
    return [
        f"{name}: {value} (from args) != {earlier} (from trainer_state.json)"
        for name, value, earlier in pairs
        if earlier is not None and value != earlier
    ]


def restore_callbacks(handler: TrainerCallbackHandler, states: dict[str, Any]) -> None:
    """Restore the state of callbacks and control."""
    here = {type(callback).__name__ for callback in handler.callbacks} | {"TrainerControl"}
    lost = [name for name in states if name not in here]
    if lost:
        logger.warning(
            f"The checkpoint contains the state of callbacks that this Trainer does not have: {', '.join(lost)}."
        )
    handler.load_state_dict(states)


def resolve_old_keywords(kwargs: dict[str, Any], resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """Take ``model_path``, the earlier name of ``resume_from_checkpoint``. Raises TypeError for other keywords."""
    if "model_path" in kwargs:
        notes.warn("`model_path` is deprecated. Use `resume_from_checkpoint` instead.", FutureWarning)
        resume_from_checkpoint = kwargs.pop("model_path")
    if kwargs:
        raise TypeError(f"train() got unexpected keyword arguments: {', '.join(kwargs)}.")
    return resume_from_checkpoint
