"""Measure the largest tensor that an operation allocates."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns, in elements, and the number of operations."""

    def __init__(self):
        super().__init__()
        self.numel, self.calls = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self.numel = max(self.numel, tensor.numel())
        self.calls += 1
        return result
