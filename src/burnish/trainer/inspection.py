"""Properties of a model that the Trainer reads from its class and its config before training.

Nothing here calls the model. Properties that require a forward pass are in ``models/patches/capabilities.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from burnish.adapters.peft import is_peft_model
from burnish.models.load import context_length
from burnish.trainer import notes
from burnish.trainer.arguments.training import TrainingArguments


def base_model(model: Any) -> Any:
    """The model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def is_causal_lm(model: Any) -> bool:
    return type(base_model(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def takes_loss_arguments(model: Any) -> bool:
    """Whether ``forward`` accepts ``num_items_in_batch``: as declared by the model, or if it accepts any keyword."""
    base = base_model(model)
    parameters = inspect.signature(base.forward).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return bool(getattr(base, "accepts_loss_kwargs", takes_any))


def model_columns(model: Any, label_names: list[str]) -> list[str]:
    """The dataset columns that ``forward`` accepts. Labels may be called label or label_ids, because the default
    collator renames them.
    """
    parameters = inspect.signature(base_model(model).forward).parameters
    return [*parameters, *dict.fromkeys(["label", "label_ids", *label_names])]


def loss_shifts_labels(model: Any) -> bool:
    """Whether position t of the logits predicts label t + 1, so that the first label has no loss."""
    base = base_model(model)
    is_shifted = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return is_shifted and not is_encoder_decoder and not computes_its_own_loss(base)


def computes_its_own_loss(model: Any) -> bool:
    """Whether this class of transformers does not call ``loss_function``, which its name selects. The decoders of
    BART, Whisper, XLNet and others compare the logits at each position with the label at the same position.
    """
    forward = inspect.unwrap(type(model).forward)
    is_of_transformers = getattr(forward, "__module__", "").startswith("transformers.models.")
    return is_of_transformers and "loss_function" not in forward.__code__.co_names


def averages_rows(model: Any) -> bool:
    """Whether the loss is a mean over rows although the labels of a row are a sequence: CTC and transducers align the
    whole sequence, so a long one has no more weight than a short one."""
    names = [each.__name__ for each in type(base_model(model)).__mro__]
    return any(name.endswith(("ForCTC", "ForRNNT", "ForTDT")) for name in names)


def defers_device_placement(model: Any, args: TrainingArguments) -> bool:
    """Return whether the Trainer leaves the model on its current device when it is created: the model is split over
    several devices, or evaluation converts it to another dtype first."""
    is_split = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    return bool(is_split or args.fp16_full_eval or args.bf16_full_eval)


def smoother_of(model: Any, factor: float) -> Any:
    """transformers' label smoother; None if the factor is 0, or for multi-label classification."""
    if not factor:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        notes.warn(
            "Label smoothing is not compatible with multi-label classification. Disabling label smoothing for this "
            "training run.",
            UserWarning,
        )
        return None
    return LabelSmoother(epsilon=factor)


def has_virtual_tokens(model: Any) -> bool:
    """Whether virtual tokens precede the ids (prompt tuning, p-tuning). A prefix is stored in the cache instead."""
    config = getattr(model, "active_peft_config", None) if is_peft_model(model) else None
    return bool(config is not None and config.is_prompt_learning and config.peft_type != "PREFIX_TUNING")


def num_positions(model: nn.Module) -> int | None:
    """Number of positions for which the model has learned embeddings (GPT-2, OPT, BERT, ...); None if it has none.

    The embedding is recognized by its size: the context length, with up to two further rows for padding.
    """
    inside = base_model(model)
    config: Any = getattr(inside, "config", None)
    context = context_length(config) if hasattr(config, "get_text_config") else None
    if context is None:
        return None
    ids = inside.get_input_embeddings() if hasattr(inside, "get_input_embeddings") else None
    tables = (one for one in inside.modules() if isinstance(one, nn.Embedding) and one is not ids)
    return context if any(0 <= table.num_embeddings - context <= _POSITION_OFFSET for table in tables) else None


_POSITION_OFFSET = 2
"""Rows of OPT's embedding of positions that no position uses."""
