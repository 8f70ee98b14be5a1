"""``TrainingArguments``: every field of transformers' class, with its name, type and default.

The fields of burnish's components are inherited from their option groups. The others, and those with another default or
type, are declared in ``fields.py``. The instance is the options object of the run for the loop, the stream and the
optimizer. Names of earlier versions are accepted with one warning (``old_names.py``).

Raises exceptions of the same classes as transformers, because scripts and tests expect them (``checks.py``).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, ParallelMode
from transformers.training_args import TrainingArguments as Original
from transformers.utils import logging

import burnish
from burnish.config.errors import did_you_mean, few
from burnish.config.options import raise_if, specs
from burnish.loop.schedule import warmup_steps_of
from burnish.optim.builtin import OPTIMIZERS
from burnish.parallel.accelerate import initialize_single_process
from burnish.parallel.accelerate_launch import mixed_precision
from burnish.parallel.selection import device_of
from burnish.parallel.single import check_parallel
from burnish.trainer import notes
from burnish.trainer.arguments.checks import check_arguments, check_numbers, warn_about_unused_arguments
from burnish.trainer.arguments.fields import Fields
from burnish.trainer.arguments.old_names import FLAGS, current_names, value_by_old_name
from burnish.trainer.arguments.values import (
    accelerator_config_of,
    convert_numbers,
    dictionary_of,
    plain,
    refuse_unknown_choices,
    trackers_of,
)
from burnish.trainer.notes import logger
from burnish.trainer.processes import ProcessState
from burnish.utils.environment import launcher_number


class AcceptsOldNames(type):
    """Replaces earlier names before any ``__init__`` runs, including that of a user's subclass."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        by_position = _by_position(cls.__name__, args)
        if twice := sorted(by_position.keys() & kwargs.keys()):
            raise TypeError(f"{cls.__name__}.__init__() got multiple values for argument {twice[0]!r}.")
        args, kwargs = args[:1], {**by_position, **kwargs}
        renamed, known = current_names(kwargs), inspect.signature(cls).parameters
        unknown = [name for name in renamed if name not in known]
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            what = f"{cls.__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}."
            others = _configs_with(unknown[0])
            hint = f" It is an argument of {few(others, 5)}." if others else did_you_mean(unknown[0], known)
            raise TypeError(f"{what}{hint}")
        return super().__call__(*args, **renamed)

    @property
    def __signature__(cls) -> inspect.Signature:
        parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
        return inspect.Signature(parameters[1:])


def _configs_with(name: str) -> list[str]:
    """Return the names of the configs of burnish that have an argument."""
    configs = [kind for kind in burnish.__all__ if kind.endswith(("Config", "Arguments"))]
    return [kind for kind in configs if name in inspect.signature(getattr(burnish, kind)).parameters]


def _by_position(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments after ``output_dir``, by their names in the order of transformers' class."""
    if len(args) < 2:
        return {}
    names = [field.name for field in dataclasses.fields(Original) if field.init]
    if len(args) > len(names):
        raise TypeError(f"{name}.__init__() takes at most {len(names)} positional arguments. Received: {len(args)}.")
    return dict(zip(names[1:], args[1:], strict=False))


def _setter(name: str) -> Any:
    """transformers' method of that name, which sets related arguments and returns the object. Numbers are checked."""
    original = getattr(Original, name)

    @wraps(original)
    def set_values(self: TrainingArguments, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        self.activation_checkpointing = self.gradient_checkpointing  # older versions only set the latter
        self.eval_delay = self.eval_delay or 0  # None without an argument
        check_numbers(self)
        return self

    return set_values


@dataclass
class TrainingArguments(Fields, metaclass=AcceptsOldNames):
    """The arguments of a ``Trainer``, as in transformers 5, and burnish's own.

    In addition to transformers: ``on_non_finite`` (what to do after a step with a non-finite loss or gradient),
    ``on_spike`` and ``spike_ratio`` (roll back and exclude the rows of the step), ``needed_tokens_only``,
    ``save_in_background``, ``save_hf_format``, ``resume``, ``resume_despite_changes``.
    """

    def __post_init__(self) -> None:
        self.output_dir = _folder_of(self.output_dir)
        self._read_json_texts()
        convert_numbers(self)
        refuse_unknown_choices(self)
        self._mirror_activation_checkpointing()
        if self.disable_tqdm is None:
            self.disable_tqdm = logger.getEffectiveLevel() > logging.WARNING
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        self._convert_to_enums()
        self._derive()
        check_arguments(self)
        self.mixed_precision = mixed_precision(self)
        if self.torch_compile_mode is not None or self.torch_compile_backend is not None:
            self.torch_compile = True
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"
        if not isinstance(self.accelerator_config, AcceleratorConfig):
            self.accelerator_config = cast(Any, accelerator_config_of(self.accelerator_config))
        if self.use_cpu:
            self.dataloader_pin_memory = False
        self.fsdp = self.fsdp or None
        raise_if(check_parallel(cast(Any, self)))  # some of its types are wider than those of the backend
        if self.world_size == 1:
            initialize_single_process(self.use_cpu)
        warn_about_unused_arguments(self)

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Values under names of earlier versions. Python only calls this for missing attributes."""
            return value_by_old_name(self, name)

    def _read_json_texts(self) -> None:
        for name in _MAY_BE_JSON:
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, dictionary_of(name, value))

    def _mirror_activation_checkpointing(self) -> None:
        """Keep the two names of an argument equal, so that both can be read."""
        pairs = [("gradient_checkpointing", "activation_checkpointing"),
                 ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")]  # fmt: skip
        for old, new in pairs:
            if getattr(self, new) is None and getattr(self, old) is not None:
                notes.warn(f"`{old}` is deprecated. Use `{new}` instead.", FutureWarning)
                setattr(self, new, getattr(self, old))
            setattr(self, old, getattr(self, new))
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing = False

    def _convert_to_enums(self) -> None:
        """Convert strings to transformers' enumerations, which are strings as well."""
        self.eval_strategy = IntervalStrategy(self.eval_strategy)
        self.logging_strategy = IntervalStrategy(self.logging_strategy)
        self.save_strategy = SaveStrategy(self.save_strategy)
        self.hub_strategy = HubStrategy(self.hub_strategy)
        self.lr_scheduler_type = SchedulerType(self.lr_scheduler_type)
        if not isinstance(self.optim, OptimizerNames):
            OPTIMIZERS.get(self.optim)  # raises for an unknown name
            if self.optim in [name.value for name in OptimizerNames]:  # others are burnish's own
                self.optim = OptimizerNames(self.optim)
        if not isinstance(self.debug, list):
            self.debug = [DebugOption(name) for name in (self.debug or "").split()]

    def _derive(self) -> None:
        """Set arguments that depend on others."""
        if self.eval_strategy != IntervalStrategy.NO:
            self.do_eval = True
        if self.eval_strategy == IntervalStrategy.STEPS and not self.eval_steps and self.logging_steps > 0:
            self.eval_steps = self.logging_steps
        follows_metric = self.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
        if (self.load_best_model_at_end or follows_metric) and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        self.report_to = trackers_of(self.report_to)

    set_training, set_evaluate, set_testing = map(_setter, ("set_training", "set_evaluate", "set_testing"))
    set_save, set_logging, set_push_to_hub = map(_setter, ("set_save", "set_logging", "set_push_to_hub"))
    set_optimizer, set_lr_scheduler, set_dataloader = map(
        _setter, ("set_optimizer", "set_lr_scheduler", "set_dataloader")
    )

    # --- derived values -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"{name}={value},\n" for name, value in sorted(self.to_dict().items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    @property
    def train_batch_size(self) -> int:
        """Number of rows of a micro-batch in this process. A process has one device."""
        return int(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        return int(self.per_device_eval_batch_size)

    @property
    def device(self) -> torch.device:
        return device_of(self)

    @property
    def n_gpu(self) -> int:
        """1 on an accelerator, 0 on a CPU. With several GPUs each has its own process."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=self.ddp_timeout)

    @property
    def world_size(self) -> int:
        return launcher_number("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        return launcher_number("RANK", 0)

    @property
    def local_process_index(self) -> int:
        return launcher_number("LOCAL_RANK", 0)

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def distributed_state(self) -> ProcessState:
        """The processes of the run, with the attributes and methods of accelerate's ``PartialState``."""
        return ProcessState(
            self.world_size, self.process_index, self.local_process_index, self.device, self.ddp_backend
        )

    @property
    def should_log(self) -> bool:
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    # Further attributes that transformers' own Trainer reads. The callbacks of W&B and DVCLive create such a Trainer
    # with these arguments to save the model (WANDB_LOG_MODEL).
    deepspeed_plugin = None
    fsdp_plugin_args = None

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    @property
    def place_model_on_device(self) -> bool | None:
        """None leaves the choice to the Trainer; a subclass may return true or false."""
        return None

    def get_process_log_level(self) -> int:
        """The log level of this process: ``log_level`` or ``log_level_replica``; "passive" keeps the current level."""
        level = logging.get_log_levels_dict() | {"passive": logging.get_verbosity()}
        return int(level[self.log_level if self.should_log else self.log_level_replica])

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return warmup_steps_of(self, num_training_steps)

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Run the ``with`` block in the main process first, so that the others find its results in a cache."""
        state = self.distributed_state
        return state.local_main_process_first() if local else state.main_process_first()

    # --- as data ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every argument as plain data. Values of tokens are omitted."""
        return {
            field.name: f"<{field.name.upper()}>" if field.name.endswith("_token") else plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.init
        }

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Every argument as a number or a string, because some trackers store nothing else."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {k: v if type(v) in (bool, int, float, str, torch.Tensor) else str(v) for k, v in values.items()}


def _folder_of(output_dir: object) -> str:
    if output_dir is None:
        logger.info("No output_dir passed; using trainer_output.")
        return "trainer_output"
    if not isinstance(output_dir, str | os.PathLike):
        kind = type(output_dir).__name__
        raise TypeError(f"`output_dir` must be a str or a path. Received: {output_dir!r}, of type {kind}.")
    return os.fspath(os.path.expanduser(output_dir))


_MAY_BE_JSON = (
    "accelerator_config", "fsdp_config", "deepspeed", "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs", "lr_scheduler_kwargs",
)  # fmt: skip


_FLAGS_WITHOUT_VALUE = ("activation_checkpointing", "gradient_checkpointing", "fsdp")
"""Flags that mean true without a value, although their fields are not plain booleans."""


def for_argument_parser(cls: Any) -> None:
    """Reduce each field's metadata to the keys that transformers' ``HfArgumentParser`` passes to argparse. The full
    declarations are kept in ``cls.declared``.
    """
    declared = dict(getattr(cls, "declared", {}))
    for name, field in list(cls.__dataclass_fields__.items()):
        spec = specs(cls).get(name)  # none for class variables
        if not spec or not spec.help or (field.metadata and "unit" not in field.metadata):
            continue
        declared[name] = spec
        own, choices = copy.copy(field), spec.raw_choices
        rest: dict[str, Any] = {"choices": list(choices)} if choices and not callable(choices) else {}
        if name in _FLAGS_WITHOUT_VALUE and field.type != "bool":
            rest |= {"nargs": "?", "const": True}
        if name in FLAGS:
            rest["aliases"] = FLAGS[name]
        own.metadata = MappingProxyType({"help": spec.help.replace("%", "%%"), **rest})
        cls.__dataclass_fields__[name] = own
    cls.declared = declared


for_argument_parser(TrainingArguments)
