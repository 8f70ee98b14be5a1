"""Checks and notes of ``TrainingArguments``.

In: an instance during ``__post_init__``. Raises ``ValueError`` for the first problem, as transformers does. Integral
step counts are converted to ``int``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from burnish.config.options import check_bounds
from burnish.parallel.checks import parallel_notes
from burnish.trainer import notes
from burnish.trainer.arguments.fields import Fields
from burnish.trainer.arguments.values import plain

LARGE = 1_000_000  # fractions are compared as integers in millionths


def check_arguments(args: Fields) -> None:
    _check_intervals(args)
    _check_best_model(args)
    if args.fp16 and args.bf16:
        raise ValueError("At most one of fp16 and bf16 can be True.")
    if args.fp16_full_eval and args.bf16_full_eval:
        raise ValueError("At most one of fp16_full_eval and bf16_full_eval can be True.")
    if args.eval_strategy == "no" and args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"`lr_scheduler_type` {SchedulerType(args.lr_scheduler_type).value} requires an `eval_strategy`."
        )
    if args.dataloader_num_workers == 0 and args.dataloader_prefetch_factor is not None:
        raise ValueError("`dataloader_prefetch_factor` requires `dataloader_num_workers` above 0.")
    if args.parallelism_config is not None:
        raise ValueError(
            "`parallelism_config` is not supported, because tensor and context parallelism are not. Remove it, and use "
            "`fsdp` or `deepspeed` to shard the weights."
        )
    check_numbers(args)


def check_numbers(args: Fields) -> None:
    """Raise ValueError for the first number that is out of bounds."""
    for name, spec in args.declared.items():
        value = getattr(args, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or (value <= 0 and _disables(args, name)):
            continue
        try:
            check_bounds(spec, value)
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None


def _disables(args: Fields, name: str) -> bool:
    """Whether 0 or less is allowed and means "disabled" (no limit, no clipping, never), or is not used."""
    if name in ("logging_steps", "eval_steps"):
        return bool(getattr(args, name.replace("steps", "strategy")) != "steps")
    if name == "num_train_epochs":
        return bool(args.max_steps > 0)
    return name in ("save_steps", "save_total_limit", "max_grad_norm", "max_steps")


def _check_intervals(args: Fields) -> None:
    cache_steps = args.torch_empty_cache_steps
    if cache_steps is not None and not (isinstance(cache_steps, int) and cache_steps > 0):
        raise ValueError(f"`torch_empty_cache_steps` must be a positive integer. Received: {cache_steps}.")
    if args.eval_strategy == "steps" and not args.eval_steps:
        raise ValueError("`eval_strategy` steps requires a non-zero `eval_steps` or `logging_steps`.")
    if args.logging_strategy == "steps" and args.logging_steps == 0:
        raise ValueError("`logging_strategy` steps requires a non-zero `logging_steps`.")
    for kind in ("logging", "eval", "save"):
        name = f"{kind}_steps"
        value = getattr(args, name)
        if getattr(args, f"{kind}_strategy") == "steps" and value > 1:
            if not float(value).is_integer():  # also infinity
                raise ValueError(f"`{name}` must be an integer if it is greater than 1. Received: {value}.")
            setattr(args, name, int(value))


def _check_best_model(args: Fields) -> None:
    """Check that the best checkpoint will have been saved when it is loaded."""
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    if args.eval_strategy != args.save_strategy:
        raise ValueError(
            "`load_best_model_at_end` requires `save_strategy` to be the same as `eval_strategy`, or best. "
            f"Received: save_strategy {plain(args.save_strategy)}, eval_strategy {plain(args.eval_strategy)}."
        )
    if args.eval_strategy != "steps":
        return
    save, evaluation = args.save_steps, cast(float, args.eval_steps)  # _check_intervals has checked them
    if (save < 1) != (evaluation < 1):
        raise ValueError(
            "`load_best_model_at_end` requires `save_steps` and `eval_steps` to be both numbers of steps or both "
            f"fractions below 1. Received: save_steps {save}, eval_steps {evaluation}."
        )
    if (save * LARGE) % (evaluation * LARGE) != 0:
        raise ValueError(
            "`load_best_model_at_end` requires `save_steps` to be a multiple of `eval_steps`. "
            f"Received: save_steps {save}, eval_steps {evaluation}."
        )


def warn_about_unused_arguments(args: Fields) -> None:
    """Warn once about each argument that has no effect, or that makes training ineffective."""
    for text in _ineffective_settings(args):
        notes.warn(text, UserWarning)
    for name, (defaults, reason) in _NO_EFFECT.items():
        if getattr(args, name) not in defaults:
            notes.warn(f"`{name}` has no effect: {reason}", UserWarning)
    for note in parallel_notes(cast(Any, args)):
        notes.warn(note, UserWarning)
    settings = cast(AcceleratorConfig, args.accelerator_config).to_dict()
    # transformers removes use_configured_state from a configuration that it has processed.
    changed = [name for name, value in AcceleratorConfig().to_dict().items() if settings.get(name, value) != value]
    idle = [name for name in changed if name != "gradient_accumulation_kwargs"]
    if idle:
        notes.warn(
            f"`accelerator_config`: {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect; burnish "
            "distributes the data itself.",
            UserWarning,
        )


def _ineffective_settings(args: Fields) -> Iterator[str]:
    """Sentences about values with which a run trains nothing, or has an unexpected meaning."""
    if args.learning_rate == 0:
        yield "`learning_rate` is 0: weights will not change."
    if args.num_train_epochs == 0 and args.max_steps <= 0:
        yield "`num_train_epochs` is 0: no training steps will run."
    if args.max_grad_norm is not None and args.max_grad_norm < 0:
        yield f"`max_grad_norm` is {args.max_grad_norm:g}: gradients are not clipped. Use 0 to disable clipping."


_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "average_tokens_across_devices": ((True,), "the loss is always averaged over the tokens of all processes."),
    "eval_use_gather_object": ((False,), "predictions are gathered tensor by tensor."),
    "save_on_each_node": ((False,), "checkpoints are saved once. Use a folder that all nodes share."),
}
