"""The Trainer's optimizer and schedule.

Both are burnish's (``optim/``, ``core/schedule.py``), by transformers' names and to its values. Where a subclass
overrides a part of transformers' way to an optimizer, it is made that way.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from burnish.hf.argument_values import plain_options
from burnish.hf.face import Face
from burnish.optim.builtin import create_optimizer as create_own_optimizer
from burnish.optim.builtin import create_scheduler as create_own_scheduler
from burnish.optim.builtin import parameter_groups


class OptimizerMethods(Face):
    """Optimizer and schedule."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Both. Override it, or either of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer, unless there is one."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        if self.optimizer_cls_and_kwargs is None and not self._chooses_itself():
            self.optimizer = create_own_optimizer(model.named_parameters(), model, plain_options(self.args))
            return self.optimizer
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            made = kind()  # a factory that makes the optimizer from the whole model, or a class that looks like one
            self.optimizer = made(model, **arguments) if callable(made) else made
            return self.optimizer
        arguments = dict(arguments)
        groups: Any = self._parameter_groups(model)
        for instead in ("params", "model", "optimizer_dict"):  # GaLore, LOMO and layer-wise ones bring their own
            groups = arguments.pop(instead, groups)
        self.optimizer = kind(groups, **arguments)
        return self.optimizer

    def _chooses_itself(self) -> bool:
        """Whether a subclass says which optimizer there is, or what decays."""
        mine = OptimizerMethods
        return (
            type(self).get_optimizer_cls_and_kwargs is not mine.get_optimizer_cls_and_kwargs
            or type(self).get_decay_parameter_names is not mine.get_decay_parameter_names
        )

    def _parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        decaying = set(self.get_decay_parameter_names(model))
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for name, p in trainable if name in decaying], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in trainable if name not in decaying], "weight_decay": 0.0},
        ]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to: no biases, no norms."""
        names = {id(p): name for name, p in model.named_parameters()}
        return [names[id(p)] for p in parameter_groups(model.named_parameters(), model, 1.0)[0]["params"]]

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """The class behind ``args.optim`` and its arguments, from transformers' table."""
        from transformers import Trainer

        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, arguments

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule, unless there is one."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            peak = optimizer.defaults.get("lr", self.args.learning_rate)
            self.lr_scheduler = create_own_scheduler(optimizer, plain_options(self.args), num_training_steps, peak)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def get_num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        if self.optimizer is None:
            raise ValueError("Trainer optimizer is None, please make sure you have setup the optimizer before.")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group that holds ``param``, or the parameters of all groups."""
        if self.optimizer is None:
            raise ValueError("Trainer optimizer is None, please make sure you have setup the optimizer before.")
        if param is not None:
            for group in self.optimizer.param_groups:
                if any(param is other for other in group["params"]):
                    return group
        return [group["params"] for group in self.optimizer.param_groups]
