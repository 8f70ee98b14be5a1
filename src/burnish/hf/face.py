"""What the chapters of the ``Trainer`` share: its attributes, by name and meaning.

The class is written in chapters, one file each: ``loaders`` (data), ``optimizing``, ``losses``, ``evaluating``,
``saving``, ``reporting``, ``hub``, ``search``, ``training`` (the run), and ``trainer`` puts them together. Each is a
class whose methods a subclass of ``Trainer`` may override; this one declares what they find on ``self``.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

from burnish.core.state import TrainerControl, TrainerState
from burnish.core.types import Engine, Run
from burnish.hf.accelerator import EngineAccelerator
from burnish.hf.callbacks import FaceHandler


class Face:
    """Names are transformers', except those that begin with an underscore."""

    args: Any
    model: nn.Module  # as it was given
    model_wrapped: nn.Module  # as the engine prepared it
    processing_class: Any
    data_collator: Callable[[list[Any]], Any]
    train_dataset: Any
    eval_dataset: Any
    model_init: Callable[..., nn.Module] | None
    compute_loss_func: Callable[..., Tensor] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    lr_scheduler: Any
    accelerator: EngineAccelerator
    callback_handler: FaceHandler
    state: TrainerState
    control: TrainerControl
    is_in_train: bool
    label_names: list[str]
    can_return_loss: bool
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    place_model_on_device: bool
    neftune_noise_alpha: float | None
    current_gradient_accumulation_steps: int
    loss_is_scaled_for_ga: bool | None
    hp_search_backend: Any
    hp_name: Callable[..., str] | None
    hub_model_id: str | None

    _engine: Engine
    _run: Run | None  # while train() goes on, and of the last call after it
    _checkpoints: Any
    # What each model was asked once; a model of another trial may come to lie where one was that is gone.
    _allows_needed: MutableMapping[nn.Module, bool]
    _heads: MutableMapping[nn.Module, Any]
    _train_batch_size: int  # rows of a micro-batch, which auto_find_batch_size may halve
    _accumulation: int  # micro-batches of a step
    _signature_columns: list[str] | None
    _loss_shifts_labels: bool
    _step_weight: Tensor | None  # () items of the step under way, over all its micro-batches; None outside of one
    _sums: dict[str, Tensor]  # metrics of the micro-batch under way, sums over its items; compute_loss may add to it
    _memory_tracker: Any
    _created_lr_scheduler: bool
    _trial: Any
    _ignore_keys_for_eval: list[str] | None
    _pushes: list[Any]  # uploads that nobody waits for
