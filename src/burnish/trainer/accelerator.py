"""``trainer.accelerator``: the part of accelerate's ``Accelerator`` that overrides and scripts call, based on the
backend.

It moves tensors, runs the backward pass, clips and gathers. With several processes, accelerate itself may be used
inside the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import save_torch_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from burnish.checkpoint.parts import Stateful
from burnish.config.errors import UserError
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.base import WrappedModel
from burnish.parallel.accelerate import blank_tracker
from burnish.parallel.selection import local_rank
from burnish.trainer.data.in_step import map_tensors
from burnish.trainer.data.loaders import loader_of_rank
from burnish.trainer.processes import ProcessMethods, ProcessState


class ParallelAccelerator(ProcessMethods):
    """An accelerator with the names and semantics of accelerate's."""

    def __init__(
        self, parallel: Parallel, mixed_precision: str, config: Any, trainer_log: Callable[[dict[str, Any]], None],
        trainer_save: Callable[[], str], trainer_load: Callable[[Any], None],
    ) -> None:  # fmt: skip
        self.parallel = parallel
        self._trainer_log, self._trainer_save, self._trainer_load = trainer_log, trainer_save, trainer_load
        self.registered = RegisteredObjects()
        self.mixed_precision = mixed_precision
        # A state dict type set by a script has no effect: save_model writes a full model, checkpoints are sharded.
        plugin = SimpleNamespace(set_state_dict_type=lambda *args: None) if parallel.is_sharded else None
        self.state = ProcessState(parallel.world_size, parallel.rank, local_rank(), parallel.device, None)
        self.state.fsdp_plugin, self.state.mixed_precision = plugin, mixed_precision
        self.parallelism_config = None
        self.project_dir: str | None = None
        self.trackers: list[Any] = []  # trackers of report_to are callbacks
        self._models: list[nn.Module] = []  # read by copies of transformers' evaluation_loop
        self.step_scheduler_with_optimizer = True
        self.non_blocking, self.use_stateful_dataloader = False, False
        self._is_triggered = False
        self.sync_gradients = True  # false in the micro-batches of a step before the last one
        # For scripts that read these attributes. burnish itself divides rows between processes and accumulates
        # gradients. As in transformers, a step of accelerate is a micro-batch.
        self.split_batches, self.dispatch_batches = config.split_batches, config.dispatch_batches
        self.even_batches, self.use_seedable_sampler = config.even_batches, config.use_seedable_sampler
        accumulation = {**(config.gradient_accumulation_kwargs or {}), "num_steps": 1}
        self.gradient_state = SimpleNamespace(
            end_of_dataloader=False, remainder=-1, sync_gradients=True, plugin_kwargs=accumulation
        )

    def begin_micro_batch(self, is_last: bool) -> None:
        """Set ``sync_gradients`` for the next micro-batch. Args: is_last: whether it is the last one of its step."""
        self.sync_gradients = self.gradient_state.sync_gradients = is_last

    device = property(lambda self: self.parallel.device)
    num_processes = property(lambda self: self.parallel.world_size)
    process_index = property(lambda self: self.parallel.rank)
    local_process_index = property(lambda self: local_rank())
    multi_device = property(lambda self: self.parallel.world_size > 1)
    gradient_accumulation_steps = property(lambda self: self.gradient_state.plugin_kwargs["num_steps"])
    is_fsdp2 = property(lambda self: self.parallel.shards_weights)
    distributed_type = property(lambda self: self.state.distributed_type)
    optimizer_step_was_skipped = property(lambda self: False)  # the loop reports skipped steps itself
    deepspeed_plugin = property(lambda self: self.state.deepspeed_plugin)
    logging_dir = property(lambda self: self.project_dir)
    data_parallel_rank = property(lambda self: self.parallel.rank)
    data_parallel_shard_rank = property(lambda self: self.parallel.rank if self.parallel.is_sharded else 0)
    tensor_parallel_rank = pipeline_parallel_rank = context_parallel_rank = 0
    is_composable_parallelism_enabled = False
    should_save_model = True
    torch_device_mesh = fp8_backend = None
    save_iteration = 0
    scaler = property(lambda self: getattr(self.parallel, "scaler", None))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.parallel.backward(loss)

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: int = 2) -> Tensor:
        return self.parallel.clip(list(parameters), max_norm)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    def accumulate(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Do nothing: the loop counts micro-batches and syncs gradients on the last one of a step, and all processes
        of a run have the same number of batches."""
        return nullcontext()

    no_sync = trigger_sync_in_backward = join_uneven_inputs = accumulate

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that omits the first ``num_batches`` batches in each iteration."""
        return SkippedLoader(dataloader, num_batches)

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Do nothing: the trackers of ``report_to`` start with training."""

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log to the trackers of ``report_to`` and to ``state.log_history``, at the current step."""
        self._trainer_log(dict(values))

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str:
        """Save a checkpoint in ``output_dir``. Returns its folder.

        Raises:
            ValueError: for another folder, because runs resume from ``output_dir``.
        """
        if output_dir is not None:
            raise ValueError(
                f"accelerator.save_state does not accept a folder. Received: {output_dir!r}. Checkpoints are saved to "
                "TrainingArguments.output_dir. Use trainer.save_model(folder) to save the model elsewhere."
            )
        return self._trainer_save()

    def load_state(self, input_dir: Any = None, **kwargs: Any) -> None:
        """Load weights, optimizer, schedule, random generators and registered objects from a checkpoint during
        training, as accelerate does. The step and the position in the data stay as they are.

        Args:
            input_dir: folder of the checkpoint; None: the newest one in ``output_dir``.

        Raises:
            ValueError: outside of training.
            UserError: if there is no such checkpoint of burnish, or it is damaged.
        """
        self._trainer_load(input_dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save the state of these objects in each checkpoint, and restore it if training resumes from one. Their order
        must be the same in each run.

        Raises:
            ValueError: for an object without ``state_dict`` and ``load_state_dict``.
        """
        self.registered.add(objects)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _UNSUPPORTED_METHODS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise ValueError(f"accelerator.{name} is not supported. {_UNSUPPORTED_METHODS[name]}")

        return refuse

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Save the weights of a model as safetensors on the main process. ``trainer.save_model`` also writes
        configuration and tokenizer, and gathers sharded weights.
        """
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_torch_model(self.unwrap_model(model), save_directory, max_shard_size=max_shard_size)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is distributed over several devices."""
        return any(len(getattr(module, "hf_device_map", None) or {}) > 1 for module in model.modules())

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save ``obj`` to the file ``f`` on the main process, with ``torch.save`` or as safetensors."""
        if not self.is_main_process:
            return
        if safe_serialization:
            save_file(obj, str(f), metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker that does nothing, as accelerate does if it has none. The trackers of ``report_to`` are
        callbacks in ``trainer.callback_handler.callbacks``."""
        return blank_tracker()

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return the optimizer, which the backend has already prepared."""
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler, which the loop advances."""
        return scheduler

    def set_trigger(self) -> None:
        """Set a flag that ``check_trigger`` reports on all processes."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since the last call."""
        is_set = self.parallel.any(self._is_triggered)
        self._is_triggered = False if is_set else self._is_triggered
        return is_set

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the backend unscales gradients before it clips them."""

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model without the wrappers of the backend, of an objective or of a script's own ``DataParallel``."""
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        inner = self.parallel.unwrap(model.module if isinstance(model, wrappers) else model)
        return inner.model if isinstance(inner, WrappedModel) else inner

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return self.unwrap_model(model).state_dict()

    def prepare(self, *parts: Any) -> Any:
        """Return objects, which are prepared already. A script's own loaders are divided between processes."""
        prepared = tuple(self.prepare_data_loader(part) if isinstance(part, DataLoader) else part for part in parts)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_data_loader(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """A loader with this process's batches, so that each row goes to one process. Divided loaders are returned
        unchanged."""
        return loader_of_rank(loader, self.parallel, self._order_seed)

    @cached_property
    def _order_seed(self) -> int:
        """A seed shared by all processes, drawn in the same way as by torch's ``RandomSampler``."""
        seeds = self.parallel.gather_objects(int(torch.empty((), dtype=torch.int64).random_().item()))
        return int(seeds[0] % 2**32)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model

    def gather(self, values: Any) -> Any:
        """Concatenate the tensors of all processes, including those in tuples, lists and dicts. As in accelerate, a
        scalar becomes a vector if there are several processes."""
        if not self.use_distributed:
            return values
        return map_tensors(values, lambda tensor: self.parallel.gather(tensor[None] if tensor.dim() == 0 else tensor))

    gather_for_metrics = gather

    def pad_across_processes(self, values: Any, dim: int = 1, pad_index: int = IGNORE_INDEX) -> Any:
        """Return ``values`` unchanged, because the backend's gather pads."""
        return values

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        total = self.parallel.sum(tensor)
        return total / self.parallel.world_size if reduction == "mean" else total

    def autocast(self) -> AbstractContextManager[Any]:
        return self.parallel.precision()

    def wait_for_everyone(self) -> None:
        self.parallel.barrier()

    def free_memory(self, *parts: Any) -> tuple[()]:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return ()

    clear = free_memory

    def end_training(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


_CHECKPOINT_HINT = "The trainer saves and loads checkpoints itself: see TrainerCallback.on_save."
_UNSUPPORTED_METHODS = {
    "register_save_state_pre_hook": _CHECKPOINT_HINT,
    "register_load_state_pre_hook": _CHECKPOINT_HINT,
    "lomo_backward": "burnish does not support LOMO.",
    "profile": "Use torch.profiler.profile, or burnish train with profile: true.",
    "maybe_context_parallel": "burnish does not support context parallelism.",
    "deepspeed_ulysses_dl_adapter": "burnish does not support sequence parallelism.",
}
"""Methods of accelerate's ``Accelerator`` that raise an error -> the remedy."""


class RegisteredObjects:
    """The objects of ``register_for_checkpointing`` as a part of a checkpoint."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._loaded: dict[str, Any] = {}  # states of objects that are not registered yet

    def add(self, objects: Sequence[Any]) -> None:
        invalid = [one for one in objects if not isinstance(one, Stateful)]
        if invalid:
            names = ", ".join(type(one).__name__ for one in invalid)
            raise ValueError(
                "register_for_checkpointing requires objects with the methods state_dict and load_state_dict. "
                f"Received: {names}."
            )
        for one in objects:
            self.objects.append(one)
            if (state := self._loaded.pop(str(len(self.objects) - 1), None)) is not None:
                one.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The state of each object by its number."""
        return {str(number): dict(one.state_dict()) for number, one in enumerate(self.objects)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)
        for number, one in enumerate(self.objects):
            if (own := self._loaded.pop(str(number), None)) is None:
                what = f"This checkpoint has the state of {number} objects registered for checkpointing. Registered: "
                remedy = "Register the same objects as in the run that saved it."
                raise UserError(f"{what}{len(self.objects)}.", remedy=remedy)
            one.load_state_dict(own)


class SkippedLoader:
    """A loader that omits its first batches."""

    def __init__(self, loader: Any, num_passed: int) -> None:
        self.loader, self.num_passed = loader, num_passed

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.num_passed, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.num_passed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
