"""Activation offloading: keep activations for the backward pass in the machine's memory instead of the GPU's.

In: a model on its device. Out: a context for its forward passes. The numbers do not change. With checkpointing, only
the inputs of layers are kept, and so only they are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 2**20
"""Bytes below which a tensor is not moved, because moving would take too long for what it saves."""


class Offloading:
    """Moves tensors that autograd keeps to the machine's memory during the forward pass, and back when needed.

    The copies run in parallel to the computation, on a stream of their own. Weights are not moved, nor are autocast's
    copies of them in half precision; both are recognized by their shapes.

    Args:
        device: the model's device. On a CPU nothing is gained; there it serves tests only.
    """

    def __init__(self, model: nn.Module, device: torch.device, smallest: int = _SMALL) -> None:
        self.smallest = smallest
        shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self._weights = shapes | {shape[::-1] for shape in shapes}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._away, self._back):
            yield

    def _away(self, tensor: Tensor) -> tuple[Tensor, torch.device | None, Any]:
        """Move a tensor away. Returns (tensor to keep, its device or None if it was not moved, event of the copy)."""
        if tensor.nbytes < self.smallest or tuple(tensor.shape) in self._weights:
            return tensor, None, None
        if self._stream is None:
            return tensor.clone(), tensor.device, None
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
            done = self._stream.record_event()
        tensor.record_stream(self._stream)  # so that its memory is not used again before it has been copied
        return kept, tensor.device, done

    def _back(self, packed: tuple[Tensor, torch.device | None, Any]) -> Tensor:
        kept, device, done = packed
        if device is None:
            return kept
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)
        return kept.to(device, non_blocking=True)
