"""The reference that the policy is compared with.

A reference is a context in which a module computes the reference's values. The caller that assembles a run creates one:
the base model without its adapter, the weights at the start of training, or a second frozen model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Stateful
from burnish.config.errors import UserError
from burnish.loop.protocols import Parallel


class Reference(Protocol):
    """The reference model of an objective.

    Attributes:
        parts: what a checkpoint stores of it.
        changes_weights: whether it changes the policy's weights in place while it answers, so that a checkpoint must
            have copied them before.
    """

    parts: Mapping[str, Stateful]
    changes_weights: bool = False

    def setup(self, module: nn.Module) -> None:
        """Called once with the policy as the backend prepared it; see ``Objective.setup``."""
        return

    def answering(self, module: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context that yields a module computing the reference's values. ``module`` is the policy as prepared by the
        backend."""
        ...


def refuse_sharded_weights(parallel: Parallel) -> None:
    """Raise UserError for a moving reference if each rank holds only a shard of the weights."""
    if parallel.shards_weights:
        what = '"sync_ref_model" updates full weights, but each process holds only a shard of them (FSDP, ZeRO-3).'
        raise UserError(what, remedy="Remove it, or use DDP, ZeRO-1 or ZeRO-2.", option="sync_ref_model")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class DisabledAdapter(Reference):
    """The model with its adapter disabled, for a new adapter.

    Args:
        adapter: its ``reference`` disables it (``ModelAdapter.reference``).
        model: the model with the adapter attached.
    """

    parts: Mapping[str, Stateful] = {}

    def __init__(self, adapter: Any, model: nn.Module) -> None:
        self.adapter, self.model = adapter, model

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[nn.Module]:
        with self.adapter.reference(self.model):
            yield module


class UnchangedModel(Reference):
    """The policy itself, for values that are computed before its first step."""

    parts: Mapping[str, Stateful] = {}

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module


class InitialWeights(Reference):
    """The weights at the start of training, which temporarily replace the trained weights.

    For full training this is a copy of the model; for a continued adapter only a copy of the adapter. The weights
    follow from what the run loads at its start, so a resumed run has the same reference.

    Args:
        model: the model before training, in its training dtype.
    """

    parts: Mapping[str, Stateful] = {}

    def __init__(self, model: nn.Module) -> None:
        self.held = {name: (p, p.detach().clone()) for name, p in trainable_parameters(model).items()}
        self._model: nn.Module | None = None

    def as_model(self, model: nn.Module) -> nn.Module:
        """A separate model that uses the stored weights without a copy. ``model`` is the policy at the start of the
        run."""
        if self._model is None:
            own: dict[int, Any] = {id(p): p for p in model.parameters()}
            reference = {id(p): nn.Parameter(value, requires_grad=False) for p, value in self.held.values()}
            self._model = deepcopy(model, own | reference).eval()
        return self._model

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[nn.Module]:
        trained = {name: parameter.data for name, (parameter, _) in self.held.items()}
        try:
            for parameter, value in self.held.values():
                parameter.data = value
            yield module
        finally:
            for name, (parameter, _) in self.held.items():
                parameter.data = trained[name]

    def values(self) -> Mapping[str, tuple[nn.Parameter, Tensor]]:
        """Name -> (the policy's parameter, the reference's value)."""
        return self.held


class ShardedInitialWeights(Reference):
    """``InitialWeights`` for sharded weights (FSDP, ZeRO-3): keeps a copy of this rank's shards, and swaps both during
    the reference's forward passes.

    ``setup`` is called after the backend has sharded the model, and before a checkpoint is loaded.
    """

    parts: Mapping[str, Stateful] = {}
    changes_weights = True

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.held: list[tuple[Tensor, Tensor]] = []

    def setup(self, module: nn.Module) -> None:
        """Copy the current weights at the first call. ``module`` is the policy as prepared by the backend."""
        if self.held:
            return
        self.parallel.reshard(module)
        self.held = [(piece, piece.clone()) for piece in self.parallel.local_shards(module)]

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[nn.Module]:
        self._exchange(module)
        try:
            yield module
        finally:
            self._exchange(module)

    def _exchange(self, module: nn.Module) -> None:
        self.parallel.reshard(module)
        with torch.no_grad():
            for piece, other in self.held:
                previous = piece.clone()
                piece.copy_(other)
                other.copy_(previous)


class SeparateModel(Reference):
    """A separate, frozen model.

    Args:
        module: has the same inputs and outputs as the policy; ``module.model`` is a model of transformers.
    """

    parts: Mapping[str, Stateful] = {}

    def __init__(self, module: nn.Module) -> None:
        self.module = module.requires_grad_(False).eval()
        self.held: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def beside(self, policy: nn.Module) -> SeparateModel:
        """Return the same reference, with ``values`` for a ``MovingReference``.

        Raises:
            UserError: if the trained weights are not among its weights.
        """
        model: Any = self.module.model
        own, trained = dict(model.named_parameters()), trainable_parameters(policy)
        if any(name not in own or own[name].shape != parameter.shape for name, parameter in trained.items()):
            what = (
                '"sync_ref_model" updates the reference model towards the policy, but "ref_model" does not '
                "contain the trained weights."
            )
            remedy = "Remove one of them, or set ref_model to a model with the same architecture and train all weights."
            raise UserError(what, remedy=remedy, option=("sync_ref_model", "ref_model"))
        self.held = {name: (parameter, own[name].data) for name, parameter in trained.items()}
        return self

    def values(self) -> Mapping[str, tuple[nn.Parameter, Tensor]]:
        """Name -> (the policy's parameter, the reference's value)."""
        return self.held

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[nn.Module]:
        yield self.module


class MovingReference(Reference):
    """A reference that moves towards the policy at an interval of steps: ρ <- α π + (1 - α) ρ.  TR-DPO, Gorbatovski et
    al. 2024, eq. 5, https://arxiv.org/abs/2404.09656

    It changes during training, so it is part of the checkpoint.
    """

    def __init__(self, start: InitialWeights | SeparateModel, every: int, share: float) -> None:
        self.start, self.every, self.share = start, every, share
        self.steps = 0
        self.parts: Mapping[str, Stateful] = {"reference": self}

    def answering(self, module: nn.Module) -> AbstractContextManager[nn.Module]:
        return self.start.answering(module)

    def end_step(self) -> None:
        """Called after each training step. Every ``every`` steps the reference moves."""
        self.steps += 1
        if self.steps % self.every == 0:
            with torch.no_grad():
                for parameter, value in self.start.values().values():
                    value.lerp_(parameter.to(value), self.share)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "weights": {name: value for name, (_, value) in self.start.values().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        for name, (_, value) in self.start.values().items():
            value.copy_(state["weights"][name])
