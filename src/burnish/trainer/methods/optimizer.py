"""The methods of a ``Trainer`` for optimizer and schedule; see ``trainer/optimizer.py``."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from burnish.optim.builtin import create_optimizer, create_scheduler
from burnish.trainer import inspection, optimizer
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.methods.base import TrainerBase


class OptimizerMethods(TrainerBase):
    """Optimizer and schedule."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create optimizer and scheduler. Override it, or one of the two methods that it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer, unless it exists."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        if self.optimizer_cls_and_kwargs is None and not self._chooses_itself():
            self.optimizer = create_optimizer(model.named_parameters(), model, plain_options(self.args))
            return self.optimizer
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        groups = optimizer.two_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
        self.optimizer = optimizer.optimizer_of(kind, arguments, model, groups)
        return self.optimizer

    def _chooses_itself(self) -> bool:
        """Whether a subclass selects the optimizer or the parameters with weight decay."""
        names = ("get_optimizer_cls_and_kwargs", "get_decay_parameter_names")
        return any(getattr(type(self), name) is not getattr(OptimizerMethods, name) for name in names)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all except biases and norms."""
        return optimizer.decaying_names(model)

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
        return inspection.num_trainable(self.model)

    def get_learning_rates(self) -> list[float]:
        return [group["lr"] for group in optimizer.groups_of(self.optimizer)]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group that contains ``param``; by default the parameters of all groups."""
        return optimizer.group_with(self.optimizer, param)
