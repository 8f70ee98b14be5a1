"""The methods of a ``Trainer`` for optimizer and schedule.

It is burnish's (``optim/``), with transformers' names and values. If a script selects its class, or a subclass
overrides a part of transformers' procedure, that procedure is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from burnish.adapters.base import trainable_summary
from burnish.optim.builtin import create_optimizer, create_scheduler, parameter_groups
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.methods.base import TrainerBase
from burnish.trainer.methods.loss import call_accepting


class OptimizerMethods(TrainerBase):
    """Optimizer and schedule."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create optimizer and scheduler. Override it, or one of the two methods that it calls."""
        self.create_optimizer()
        call_accepting(
            "optimizer", self.create_scheduler, num_training_steps=num_training_steps, optimizer=self.optimizer
        )

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer, unless it exists."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        selects = map(self._overrides, ("get_optimizer_cls_and_kwargs", "get_decay_parameter_names"))
        if self.optimizer_cls_and_kwargs is None and not any(selects):
            self.optimizer = create_optimizer(model.named_parameters(), model, plain_options(self.args))
            return self.optimizer
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        groups = two_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
        self.optimizer = optimizer_of(kind, arguments, model, groups)
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all except biases and norms."""
        names = {id(p): name for name, p in model.named_parameters()}
        return [names[id(p)] for p in parameter_groups(model.named_parameters(), model, 1.0)[0]["params"]]

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The class selected by ``args.optim`` and its arguments, from transformers' table."""
        from transformers import Trainer as Theirs

        kind, arguments = Theirs.get_optimizer_cls_and_kwargs(cast(Any, args), cast(Any, model))
        return kind, arguments

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler, unless it exists."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            peak = optimizer.defaults.get("lr", self.args.learning_rate)
            self.lr_scheduler = create_scheduler(optimizer, plain_options(self.args), num_training_steps, peak)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        """The learning rate of the next step, for the log."""
        return float(self.optimizer.param_groups[0]["lr"])

    def get_num_trainable_parameters(self) -> int:
        return trainable_summary(self.model)[0]

    def get_learning_rates(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ValueError("The Trainer has no optimizer yet. Call create_optimizer() first.")
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group that contains ``param``; by default the parameters of all groups."""
        groups = self._groups()
        holding = (group for group in groups if any(param is other for other in group["params"]))
        return next(holding, [group["params"] for group in groups])


def optimizer_of(kind: Any, arguments: dict[str, Any], model: nn.Module, groups: Any) -> Any:
    """Create an optimizer from a class, or from a factory that takes the whole model.

    Args:
        kind: the class or factory.
        arguments: its arguments. GaLore, LOMO and layer-wise optimizers include their parameters here.
        model: the model, for factories.
        groups: the parameter groups, unless they are in ``arguments``.
    """
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        created = kind()  # a factory
        return created(model, **arguments) if callable(created) else created
    arguments = dict(arguments)
    for instead in ("params", "model", "optimizer_dict"):
        groups = arguments.pop(instead, groups)
    return kind(groups, **arguments)


def two_groups(model: nn.Module, decaying: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters with weight decay, and those without."""
    names = set(decaying)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in names], "weight_decay": 0.0},
    ]
