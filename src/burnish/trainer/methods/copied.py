"""Attributes and methods for overrides that contain copies of transformers' code.

A script that changes one line of ``compute_loss``, ``training_step`` or ``evaluation_loop`` often contains a copy of
the whole method. The copy uses names of features that burnish does not have, such as tensor parallelism. They are
defined here as without the feature. Other methods of transformers' ``Trainer`` raise an AttributeError with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from burnish.trainer import constructor


class CopiedMethods:
    """Attributes and methods of transformers' ``Trainer`` that burnish's own methods do not use."""

    model: Any
    model_wrapped: Any
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_model_parallel = is_distributed_loading_by_transformers = False

    _uncalled = frozenset(
        {"get_tp_size", "get_cp_size", "get_sp_size", "_prepare_context_parallel_inputs", "_wrap_model"}
    )
    """Methods whose overrides are not called."""

    def get_tp_size(self) -> int:
        """Number of processes that share a layer: 1."""
        return 1

    def get_cp_size(self) -> int:
        """Number of processes that share a sequence in context parallelism: 1."""
        return 1

    def get_sp_size(self) -> int:
        """Number of processes that share a sequence in sequence parallelism: 1."""
        return 1

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[None]], Any]:
        """A function that creates a context without effect, and the unchanged inputs."""
        return nullcontext, inputs

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as the backend has wrapped it; another model is returned unchanged."""
        return self.model_wrapped if model is self.model else model

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            if any(name in vars(base) for base in type(self).__mro__):
                return object.__getattribute__(self, name)  # raises the AttributeError inside a property again
            following = getattr(super(), "__getattr__", None)
            if following is not None:  # of a class that a script inherits from as well
                return following(name)
            raise AttributeError(constructor.missing_attribute_message(type(self).__mro__, name))
