"""The ``set_*`` methods of ``TrainingArguments``, which set groups of related arguments.

Each returns the arguments, so that calls can be chained: ``args.set_training(1e-4).set_logging(steps=10)``.
"""

from __future__ import annotations

from typing import Any, cast

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from burnish.trainer.arguments.checks import check_numbers
from burnish.trainer.arguments.fields import Fields


class Setters:
    """Setters with the names, defaults and effects of those in transformers."""

    def _set(self, **values: Any) -> Any:
        for name, value in values.items():
            setattr(self, name, value)
        check_numbers(cast(Fields, self))
        return self

    def set_training(
        self, learning_rate: float = 5e-5, batch_size: int = 8, weight_decay: float = 0, num_epochs: float = 3,
        max_steps: int = -1, gradient_accumulation_steps: int = 1, seed: int = 42,
        activation_checkpointing: bool = False, gradient_checkpointing: bool | None = None,
    ) -> Any:  # fmt: skip
        checkpointing = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True, learning_rate=learning_rate, per_device_train_batch_size=batch_size,
            weight_decay=weight_decay, num_train_epochs=num_epochs, max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps, seed=seed,
            activation_checkpointing=checkpointing, gradient_checkpointing=checkpointing,
        )  # fmt: skip

    def set_evaluate(
        self, strategy: str | IntervalStrategy = "no", steps: int = 500, batch_size: int = 8,
        accumulation_steps: int | None = None, delay: float | None = None, loss_only: bool = False,
    ) -> Any:  # fmt: skip
        strategy = IntervalStrategy(strategy)
        _check_steps(strategy, steps)
        return self._set(
            eval_strategy=strategy, do_eval=strategy != IntervalStrategy.NO, eval_steps=steps,
            per_device_eval_batch_size=batch_size, eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0, prediction_loss_only=loss_only,
        )  # fmt: skip

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Any:
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self, strategy: str | IntervalStrategy = "steps", steps: int = 500, total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Any:  # fmt: skip
        strategy = SaveStrategy(strategy)
        _check_steps(strategy, steps)
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self, strategy: str | IntervalStrategy = "steps", steps: int = 500, report_to: str | list[str] = "none",
        level: str = "passive", first_step: bool = False, nan_inf_filter: bool = False, on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Any:  # fmt: skip
        strategy = IntervalStrategy(strategy)
        _check_steps(strategy, steps)
        return self._set(
            logging_strategy=strategy, logging_steps=steps, report_to=report_to, log_level=level,
            logging_first_step=first_step, logging_nan_inf_filter=nan_inf_filter, log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )  # fmt: skip

    def set_push_to_hub(
        self, model_id: str, strategy: str | HubStrategy = "every_save", token: str | None = None,
        private_repo: bool | None = None, always_push: bool = False, revision: str | None = None,
    ) -> Any:  # fmt: skip
        return self._set(
            push_to_hub=True, hub_model_id=model_id, hub_strategy=HubStrategy(strategy), hub_token=token,
            hub_private_repo=private_repo, hub_always_push=always_push, hub_revision=revision,
        )  # fmt: skip

    def set_optimizer(
        self, name: str | OptimizerNames = "adamw_torch", learning_rate: float = 5e-5, weight_decay: float = 0,
        beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, args: str | None = None,
    ) -> Any:  # fmt: skip
        return self._set(
            optim=OptimizerNames(name), learning_rate=learning_rate, weight_decay=weight_decay, adam_beta1=beta1,
            adam_beta2=beta2, adam_epsilon=epsilon, optim_args=args,
        )  # fmt: skip

    def set_lr_scheduler(
        self, name: str | SchedulerType = "linear", num_epochs: float = 3.0, max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Any:  # fmt: skip
        return self._set(
            lr_scheduler_type=SchedulerType(name), num_train_epochs=num_epochs, max_steps=max_steps,
            warmup_steps=warmup_steps,
        )  # fmt: skip

    def set_dataloader(
        self, train_batch_size: int = 8, eval_batch_size: int = 8, drop_last: bool = False, num_workers: int = 0,
        pin_memory: bool = True, persistent_workers: bool = False, prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None, in_order: bool = True, auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False, sampler_seed: int | None = None,
    ) -> Any:  # fmt: skip
        return self._set(
            per_device_train_batch_size=train_batch_size, per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last, dataloader_num_workers=num_workers, dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers, dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context, dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size, ignore_data_skip=ignore_data_skip, data_seed=sampler_seed,
        )  # fmt: skip


def _check_steps(strategy: str, steps: int) -> None:
    if strategy == "steps" and steps == 0:
        raise ValueError("Setting `strategy` as 'steps' requires a positive value for `steps`.")
