"""Activation offloading: what the forward pass keeps for the backward pass lies in the machine's memory, not the GPU's.

In: a model on its device. Out: a context for its forward passes. The numbers do not change. With checkpointing, only
the inputs of layers are kept at all, and so only they are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 2**20
"""Bytes below which a tensor stays: to move it would take longer than it is worth."""


class Offloading:
    """Moves what autograd keeps to the machine's memory while the forward pass goes on, and back when it is needed.

    The copies run beside the computation, on a stream of their own. Weights stay where they are, and so do the copies
    in half precision that autocast makes of them; both are known by their shapes.

    Args:
        device: where the model is. On a CPU nothing would be gained; it is the place to test what is moved.
    """

    def __init__(self, model: nn.Module, device: torch.device, smallest: int = _SMALL) -> None:
        self.smallest = smallest
        shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self._weights = shapes | {shape[::-1] for shape in shapes}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._away, self._back):
            yield

    def _away(self, tensor: Tensor) -> tuple[Tensor, torch.device | None, Any]:
        """(what is kept, where it came from or None where it stayed, when its copy is done)."""
        if tensor.nbytes < self.smallest or tuple(tensor.shape) in self._weights:
            return tensor, None, None
        if self._stream is None:
            return tensor.clone(), tensor.device, None
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
            done = self._stream.record_event()
        tensor.record_stream(self._stream)  # its memory is free for others only once it has been read
        return kept, tensor.device, done

    def _back(self, packed: tuple[Tensor, torch.device | None, Any]) -> Tensor:
        kept, device, done = packed
        if device is None:
            return kept
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)
        return kept.to(device, non_blocking=True)
