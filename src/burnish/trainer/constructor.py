"""Validate and normalize the constructor arguments of a ``Trainer``.

Raises errors of the same classes as transformers, because scripts and tests expect them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import has_length

from burnish.config.errors import UserError
from burnish.trainer import notes
from burnish.trainer.accelerator import ParallelAccelerator
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain
from burnish.trainer.notes import logger

Config = TypeVar("Config", bound=TrainingArguments)

PEER_METHODS = Path(__file__).parent / "peer_methods.json"
"""Class -> methods that transformers' or TRL's class of that name calls on itself; created by
``scripts/peer_methods.py``."""


_EARLIER_METHODS = {
    "DPOTrainer": ("concatenated_forward", "dpo_loss", "get_batch_loss_metrics", "process_row", "tokenize_row"),
    "GRPOTrainer": ("_get_per_token_logps",),
    "KTOTrainer": ("get_batch_loss_metrics", "kto_loss"),
    "SFTTrainer": ("_prepare_non_packed_dataloader", "_prepare_packed_dataloader"),
}
"""Class -> methods of TRL before 1.0 that neither TRL nor burnish calls any more; scripts still override them."""


def warn_about_unused_overrides(kind: type) -> None:
    """Warn once about overridden methods of a script's subclass that transformers or TRL calls, or called in earlier
    versions, but burnish does not."""
    at = next(index for index, base in enumerate(kind.__mro__) if base.__module__.startswith("burnish."))
    overridden = {name for base in kind.__mro__[:at] for name in vars(base)}
    subclasses = kind.__mro__[at:]
    called_by_peer = chain.from_iterable(
        (*_peer_methods().get(base.__name__, ()), *_EARLIER_METHODS.get(base.__name__, ())) for base in subclasses
    )
    uncalled = {name for base in subclasses for name in vars(base).get("_uncalled", ())}
    unused = sorted(
        name for name in overridden.intersection(called_by_peer) if name in uncalled or not hasattr(subclasses[0], name)
    )
    if unused:
        notes.warn(
            f"{kind.__name__} overrides {', '.join(unused)}, which burnish does not call. Override one of the methods "
            "that the docstring of burnish.Trainer lists, or use a callback.",
            UserWarning,
        )


def missing_attribute_message(classes: tuple[type, ...], name: str) -> str:
    """The message of an AttributeError, with a remedy if ``name`` is a method of transformers' or TRL's class."""
    what = f"{classes[0].__name__!r} object has no attribute {name!r}"
    replaced = next((base.__name__ for base in classes if name in _peer_methods().get(base.__name__, ())), None)
    if replaced is None:
        return what
    return (
        f"{what}. The {replaced} of transformers or TRL has this method, but burnish's {replaced} does not. In an "
        "override that was copied from the original method, call super() instead."
    )


@cache
def _peer_methods() -> dict[str, list[str]]:
    return cast(dict[str, list[str]], json.loads(PEER_METHODS.read_text(encoding="utf-8")))


def check_accelerator(accelerator: object) -> None:
    """Raise UserError if an override of ``create_accelerator_and_postprocess`` created another accelerator."""
    if not isinstance(accelerator, ParallelAccelerator):
        what = "create_accelerator_and_postprocess must set trainer.accelerator to burnish's accelerator. Received: "
        remedy = "Call super().create_accelerator_and_postprocess() and change its result."
        raise UserError(f"{what}{type(accelerator).__name__}.", remedy=remedy)


def as_training_arguments(args: object, kind: type[TrainingArguments] = TrainingArguments) -> TrainingArguments:
    """burnish's arguments: as given, converted to ``kind`` by their names, or the defaults."""
    if args is None:
        logger.info(f"No {kind.__name__} passed; using output_dir=tmp_trainer.")
        return kind(output_dir="tmp_trainer")
    if isinstance(args, kind):
        return args
    values = fields_of(args, kind)
    if not isinstance(args, TrainingArguments):  # the earlier name, a copy, is the only one before transformers 5.23
        for name in ("checkpointing", "checkpointing_kwargs"):
            values.setdefault(f"activation_{name}", values.pop(f"gradient_{name}", None))
    return with_own_values(kind(**values), args)


def with_own_values(args: Config, given: object) -> Config:
    """``args``, with the attributes of ``given`` that only its class, or the script, has."""
    for name, value in vars(given).items():
        if not name.startswith("_") and not hasattr(args, name):
            setattr(args, name, value)
    return args


def fields_of(args: object, kind: type[TrainingArguments]) -> dict[str, Any]:
    """The values of those fields of ``kind`` that an object has, such as transformers' or TRL's own arguments.

    Raises:
        TypeError: if it is something else.
    """
    if not hasattr(args, "output_dir") or isinstance(args, type):
        raise TypeError(f"`args` must be an instance of {kind.__name__}. Received: {value_and_type(args)}.")
    known = kind.__dataclass_fields__
    return {name: value for name, value in vars(args).items() if name in known and known[name].init}


def value_and_type(value: object) -> str:
    """``4, of type int``; for a long value, only the type."""
    text = repr(value)
    return f"{text}, of type {type(value).__name__}" if len(text) <= 40 else f"an object of type {type(value).__name__}"


def apply_accelerator_accumulation(args: TrainingArguments) -> None:
    """Take ``num_steps`` of ``accelerator_config``, which is another name of ``gradient_accumulation_steps``."""
    settings = cast(AcceleratorConfig, args.accelerator_config)
    num_steps = (settings.gradient_accumulation_kwargs or {}).get("num_steps")
    if num_steps is None or num_steps == args.gradient_accumulation_steps:
        return
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            "`num_steps` of `accelerator_config` and `gradient_accumulation_steps` are names of the same option; set "
            f"only one of them. Received: {num_steps} and {args.gradient_accumulation_steps}."
        )
    args.gradient_accumulation_steps = num_steps


def resolve_processing_class(tokenizer: Any, processing_class: Any) -> Any:
    """``processing_class``, or ``tokenizer``, its earlier name."""
    if tokenizer is not None:
        notes.warn("`tokenizer` is deprecated. Use `processing_class` instead.", FutureWarning)
    return tokenizer if processing_class is None else processing_class


def collator_for(data_collator: Any, processing_class: Any) -> Callable[[list[Any]], Any]:
    """The collator (rows -> batch): as given, or depending on the processing class."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor)
    collator = data_collator or (DataCollatorWithPadding(processing_class) if pads else default_data_collator)
    if not callable(collator):
        raise TypeError("`data_collator` must be a function, or an object with `__call__`.")
    return collator


def check_model_argument(model: Any, model_init: Any) -> None:
    if model is None and model_init is None:
        raise RuntimeError("`Trainer` requires either `model` or `model_init`.")
    if model is not None and model_init is not None:
        raise ValueError("`Trainer` requires either `model` or `model_init`, but not both.")
    if model is not None and not isinstance(model, nn.Module):
        remedy = " Load it first, with AutoModelForCausalLM.from_pretrained." if isinstance(model, str) else ""
        raise TypeError(f"`model` must be a torch.nn.Module. Received: {value_and_type(model)}.{remedy}")
    if (size := getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError(
            f"Tensor parallelism is not supported. The model was loaded with tp_plan or tp_size over {size} processes. "
            "Load it without these arguments, and use `fsdp` or `deepspeed` to shard its weights."
        )


def optimizer_pair(optimizers: Any) -> tuple[Any, Any]:
    """``optimizers``, which must be a pair (optimizer or None, learning rate scheduler or None)."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise TypeError(
            f"`optimizers` must be a tuple (optimizer, lr_scheduler). Received: {value_and_type(optimizers)}."
        )
    return optimizers[0], optimizers[1]


def callback_list(callbacks: Any) -> list[Any]:
    """Return ``callbacks``, a list of callbacks or of their classes. None: an empty list."""
    if callbacks is None:
        return []
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"`callbacks` must be a list of callbacks. Received: {value_and_type(callbacks)}.")
    if any(callback is None for callback in callbacks):  # the optimizers, in the order of earlier versions
        remedy = "Pass the arguments of the trainer by name: their order differs between versions of transformers."
        raise TypeError(f"`callbacks` must be a list of callbacks. Received: {value_and_type(callbacks)}. {remedy}")
    return list(callbacks)


def check_optimizers(optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, model_init: Any) -> None:
    pair = optimizer_cls_and_kwargs
    if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], dict)):
        what = "`optimizer_cls_and_kwargs` must be a tuple (optimizer class, its arguments as a dict). Received: "
        raise TypeError(f"{what}{value_and_type(pair)}.")
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise RuntimeError("`optimizers` and `optimizer_cls_and_kwargs` cannot be combined.")
    if model_init is not None and optimizers != (None, None):
        raise RuntimeError(
            "`model_init` and `optimizers` cannot be combined. Subclass `Trainer` and override "
            "`create_optimizer_and_scheduler` instead."
        )


def check_sets(args: TrainingArguments, train_dataset: Any, eval_dataset: Any, compute_metrics: Any) -> None:
    """Raise for combinations of arguments, datasets and functions that do not work."""
    if isinstance(train_dataset, dict) and train_dataset and all(isinstance(name, str) for name in train_dataset):
        names = ", ".join(train_dataset)
        what = f"train_dataset must be one dataset. Received: {type(train_dataset).__name__} with the splits {names}."
        raise UserError(what, remedy=f'Pass one split: dataset["{next(iter(train_dataset))}"].')
    if compute_metrics is not None and not callable(compute_metrics):
        raise TypeError(f"`compute_metrics` must be a function. Received: {value_and_type(compute_metrics)}.")
    by_batch = compute_metrics if args.batch_eval_metrics else None
    if by_batch is not None and "compute_result" not in inspect.signature(by_batch).parameters:
        raise ValueError(
            "With `batch_eval_metrics`, `compute_metrics` must accept a boolean argument `compute_result`. It is True "
            "for the last batch of the evaluation set, when the function must return the metrics."
        )
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ValueError(
            f"`eval_strategy` is {plain(args.eval_strategy)}, but `eval_dataset` is missing. Pass an `eval_dataset`, "
            "or set `eval_strategy` to `no`."
        )
    if (args.save_strategy == "best" or args.load_best_model_at_end) and args.metric_for_best_model is None:
        raise ValueError(
            "`metric_for_best_model` is required if `save_strategy` is `best` or `load_best_model_at_end` is True."
        )
    if train_dataset is not None and not has_length(train_dataset) and args.max_steps <= 0:
        raise ValueError(
            "`train_dataset` does not implement __len__, so the number of training steps cannot be inferred; set "
            "`max_steps`. The total number of steps must be known in advance to bound the "
            "training loop and to configure the learning rate scheduler."
        )
