"""Run code on some processes of a run only, or in a given order, with the names of accelerate's ``PartialState``.

``trainer.accelerator`` and ``TrainingArguments.distributed_state`` have these methods. In: the number of this process
and how many there are. Out: decorators, slices and ``with`` blocks for some of the processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class ProcessMethods(ABC):
    """Methods that depend on the number of the process only."""

    @property
    @abstractmethod
    def num_processes(self) -> int: ...

    @property
    @abstractmethod
    def process_index(self) -> int: ...

    @property
    @abstractmethod
    def local_process_index(self) -> int:
        """The number of this process on its node."""

    @abstractmethod
    def wait_for_everyone(self) -> None:
        """Block until all processes have called this."""

    is_main_process = property(lambda self: self.process_index == 0)
    is_local_main_process = property(lambda self: self.local_process_index == 0)
    is_last_process = property(lambda self: self.process_index == self.num_processes - 1)
    use_distributed = property(lambda self: self.num_processes > 1)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that it runs on the main process only."""
        return self._run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that it runs on the main process of each node only."""
        return self._run_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorate a function so that it runs on the last process only."""
        return self._run_if(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that it runs on one process only."""
        return self._run_if(lambda: self.process_index == (process_index or 0), function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function so that it runs on one process of each node only."""
        return self._run_if(lambda: self.local_process_index == (local_process_index or 0), function)

    def _run_if(self, is_wanted: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
        if function is None:
            return lambda inner: self._run_if(is_wanted, inner)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_wanted() else None

        return run

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's slice of a list, tuple, tensor or dict of them. The first processes get the remainder.

        Args:
            inputs: the values to divide.
            apply_padding: whether to repeat the last element, so that all processes get the same number.
        """
        yield _slice_of(inputs, self.process_index, self.num_processes, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the ``with`` block in the main process first."""
        return self._runs_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the ``with`` block in the main process of each node first."""
        return self._runs_first(self.is_local_main_process)

    @contextmanager
    def _runs_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class ProcessState(ProcessMethods):
    """The processes of a run that may not have started training, with the names of accelerate's ``PartialState`` and
    ``AcceleratorState``.

    Args:
        num_processes, process_index, local_process_index: as set by the launcher.
        device: device of this process.
        backend: backend of torch.distributed that the user set, or None.
    """

    num_processes = process_index = local_process_index = 0  # set for each instance
    initialized, fork_launched = True, False
    mixed_precision = "no"
    deepspeed_plugin = parallelism_config = None
    fsdp_plugin: Any = None
    is_fsdp2 = property(lambda self: self.fsdp_plugin is not None)

    def __init__(
        self, num_processes: int, process_index: int, local_process_index: int, device: torch.device,
        backend: str | None,
    ) -> None:  # fmt: skip
        self.num_processes, self.process_index = num_processes, process_index
        self.local_process_index, self.device, self.backend = local_process_index, device, backend

    @property
    def distributed_type(self) -> str:
        return "NO" if self.num_processes == 1 else "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    def get_deepspeed_plugin(self, name: str) -> None:
        """None: burnish starts DeepSpeed itself."""

    @property
    def default_device(self) -> torch.device:
        return self.device

    def set_device(self) -> None:
        """Do nothing: ``device`` is set already."""

    def wait_for_everyone(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()

    def destroy_process_group(self, group: Any = None) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)


def _slice_of(inputs: Any, rank: int, world_size: int, pads: bool) -> Any:
    """The slice of ``inputs`` for one process, divided as in accelerate."""
    if isinstance(inputs, dict):
        return {name: _slice_of(values, rank, world_size, pads) for name, values in inputs.items()}
    share, rest = divmod(len(inputs), world_size)
    begin = rank * share + min(rank, rest)
    part = inputs[begin : begin + share + (rank < rest)]
    missing = share + (rest > 0) - len(part) if pads else 0
    if not missing:
        return part
    last = inputs[-1:]
    return torch.cat([part, *[last] * missing]) if isinstance(inputs, Tensor) else part + last * missing
