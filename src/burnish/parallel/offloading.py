"""Activation offloading: keep activations for the backward pass in main memory instead of GPU memory.

In: a model on its device. Out: a context for its forward passes. Results do not change. With checkpointing only the
inputs of layers are kept, so only they are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MIN_OFFLOADED_BYTES = 2**20
"""Tensors below this number of bytes are not moved, because the transfer would cost more than it saves."""


class Offloading:
    """Moves tensors that autograd saves to main memory during the forward pass, and back when they are needed.

    Copies run on a separate stream in parallel to the computation. Weights and autocast's half-precision copies of them
    are not moved; both are recognized by their shapes.

    Args:
        device: the model's device. On a CPU there is no benefit; it is supported for tests only.
        smallest: tensors below this number of bytes are not moved.
    """

    def __init__(self, model: nn.Module, device: torch.device, smallest: int = _MIN_OFFLOADED_BYTES) -> None:
        self.smallest = smallest
        shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self._weights = shapes | {shape[::-1] for shape in shapes}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context for a forward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._to_storage, self._back):
            yield

    def _to_storage(self, tensor: Tensor) -> tuple[Tensor, torch.device | None, Any]:
        """Move a tensor away. Returns (tensor to keep, its device or None if not moved, event of the copy)."""
        if tensor.nbytes < self.smallest or tuple(tensor.shape) in self._weights:
            return tensor, None, None
        if self._stream is None:
            return tensor.clone(), tensor.device, None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
            done = self._stream.record_event()
        tensor.record_stream(self._stream)  # so that its memory is not reused before the copy is done
        return copy, tensor.device, done

    def _back(self, packed: tuple[Tensor, torch.device | None, Any]) -> Tensor:
        copy, device, done = packed
        if device is None:
            return copy
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)
        return copy.to(device, non_blocking=True)
