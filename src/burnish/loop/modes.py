"""Switch a module to evaluation mode temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the ``with`` block with ``module`` in evaluation mode and without gradients, then restore its mode."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
