"""Gradient checkpointing: keep a layer's input only, and recompute the rest of the layer in the backward pass.

In: ``gradient_checkpointing`` and its arguments, which are those of torch, of transformers' models, and TRL's
``selective``. Refuses, before a model is loaded, unknown arguments and models that do not support it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from burnish.config.errors import Problem, did_you_mean
from burnish.parallel.options import ParallelChoices
from burnish.utils.patching import Reason, record

CHECKPOINTED = Reason("layer under gradient checkpointing", "gradient_checkpointing is set")
_TORCH_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_BURNISH_ARGUMENTS = {"every_n_layers": 1, "offload": False}
"""Further arguments of transformers 5.23's models, and their neutral values."""


def checkpointing_problems(options: ParallelChoices) -> Iterator[Problem]:
    """Problems of ``gradient_checkpointing_kwargs``."""
    kwargs, known = options.gradient_checkpointing_kwargs or {}, [*_TORCH_ARGUMENTS, *_BURNISH_ARGUMENTS, "selective"]
    for name in [name for name in kwargs if name not in known]:
        yield Problem(
            f'"gradient_checkpointing_kwargs": unknown key "{name}".{did_you_mean(name, known)}',
            remedy=f"Available: {', '.join(known)}.",
            option="gradient_checkpointing_kwargs",
        )
    layers = kwargs.get("every_n_layers", 1)
    if type(layers) is not int or layers < 1:
        yield Problem(
            f'"gradient_checkpointing_kwargs": "every_n_layers" must be a positive integer. Received: {layers!r}.',
            option="gradient_checkpointing_kwargs",
        )
    if kwargs.get("selective") and not options.gradient_checkpointing:
        yield Problem(
            "`gradient_checkpointing_kwargs={'selective': True}` requires `gradient_checkpointing=True`.",
            option=("gradient_checkpointing_kwargs", "gradient_checkpointing"),
        )
    if kwargs.get("selective") and kwargs.get("use_reentrant"):
        yield Problem(
            "`gradient_checkpointing_kwargs={'selective': True}` requires non-reentrant gradient checkpointing.",
            remedy="Set `use_reentrant` to `False`, or leave it unset.",
            option="gradient_checkpointing_kwargs",
        )


def checkpoint_activations(model: nn.Module, kwargs: dict[str, Any] | None) -> None:
    """Enable checkpointing in the layers of ``model``.

    Args:
        model: a model of transformers, with or without adapter.
        kwargs: ``gradient_checkpointing_kwargs``.

    Raises:
        ValueError: if the model or the installed transformers does not support it.
    """
    able: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing_enable")]
    if not able:
        raise ValueError(
            f"gradient_checkpointing is set, but {type(model).__name__} has no method gradient_checkpointing_enable(). "
            "Remove gradient_checkpointing, or use a transformers model."
        )
    # Non-reentrant: it recomputes with the same autocast and random numbers, and does not need an input with a
    # gradient, which frozen embeddings do not provide.
    arguments = {"use_reentrant": False, **(kwargs or {})}
    if arguments.pop("selective", False):
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _save_costly_operations)
    model_arguments = {name: arguments.pop(name, usual) for name, usual in _BURNISH_ARGUMENTS.items()}
    if next(model.parameters()).device.type == "cpu":  # activations are in main memory already
        model_arguments["offload"] = False
    record(model, partial(_enable, able[0], arguments, model_arguments), CHECKPOINTED)


def _enable(model: Any, arguments: dict[str, Any], model_arguments: dict[str, Any]) -> None:
    if arguments["use_reentrant"]:
        model.enable_input_require_grads()  # reentrant checkpointing requires an input with a gradient
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(arguments, **model_arguments)
    elif model_arguments == _BURNISH_ARGUMENTS:
        model.gradient_checkpointing_enable(arguments)
    else:
        raise ValueError(
            '"gradient_checkpointing_kwargs": every_n_layers and offload require a newer version '
            'of transformers: pip install "transformers>=5.23".'
        )


_MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm"}
"""Without baddbmm and products into an existing tensor (``aten::addmm.out``), because their results are overwritten."""


def _save_costly_operations(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of ``selective``: keep the results of matrix products and attention, and recompute the rest."""
    name: str = operation.name()  # attention of torch, flash-attn, or the model
    is_costly = name in _MATRIX_PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE
