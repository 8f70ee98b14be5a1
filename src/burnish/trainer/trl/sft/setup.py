"""Prepare the constructor arguments of TRL's trainers: config, model, tokenizer, adapter.

Out: the config, a model, a tokenizer with the same EOS and padding tokens as the model, and the adapter attached to the
model. Raises TRL's errors for inconsistent arguments.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.processing_utils import ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from burnish.adapters.peft import PeftAdapter, PeftOptions, is_peft_model
from burnish.models.options import ModelOptions
from burnish.models.source import check_model_path, refuse_unavailable
from burnish.parallel.precision import supported_dtype
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.constructor import fields_of, value_and_type, with_own_values
from burnish.trainer.notes import logger
from burnish.utils.json_files import read_object

Config = TypeVar("Config", bound=TrlArguments)


def resolve_config(
    kind: type[Config], args: Any, model: Any, values: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """burnish's config of this kind: as given, or converted from other arguments by their names.

    Args:
        values: further values of fields, which replace those of ``args``.

    Raises:
        TypeError: if ``args`` are no arguments, or ``model`` is neither a model of transformers nor a name.
    """
    check_model(model)
    if isinstance(args, kind) and not values:
        return args
    if args is None:
        name = model if isinstance(model, str) else model_id(model)
        return kind(output_dir=f"{name.split('/')[-1]}-{kind.__name__.removesuffix('Config')}", **values)
    with warnings.catch_warnings():
        if isinstance(args, TrainingArguments):  # has given its warnings
            warnings.simplefilter("ignore")
        return with_own_values(kind(**{**fields_of(args, kind), **values}), args)


def check_model(model: Any, argument: str = "model") -> None:
    """Raise TypeError unless ``model`` is a name, a folder, or a model with a config."""
    if not isinstance(model, str) and not hasattr(model, "config"):
        what = f"`{argument}` must be a transformers model, or the name or folder of one. Received: "
        raise TypeError(f"{what}{value_and_type(model)}.")


def model_id(model: Any) -> str:
    return str(getattr(model.config, "_name_or_path", None) or type(model).__name__)


def resolve_model(
    model: Any, args: TrlArguments, processing_class: Any, quantization_config: Any, scores: bool = False
) -> tuple[Any, Any, list[int]]:
    """The model and its processing class, loaded if necessary, with the requested EOS token and chat template.

    Args:
        model: a model, or its name or folder.
        processing_class: tokenizer or processor; None: the model's.
        quantization_config: for a model given by name.
        scores: whether the model is a sequence classifier with one label rather than a language model.

    Returns:
        Model, tokenizer or processor, and the ids of tokens that were added by a chat template.
    """
    if isinstance(model, str):
        model = load_named_model(model, args, quantization_config, scores)
    else:
        settings = {"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config}
        for name in [name for name, value in settings.items() if value is not None]:
            logger.warning(f"`{name}` is ignored, because the model is already instantiated.")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"Expected a causal language model. Received: {type(model).__name__}, an encoder-decoder model. "
            "Use burnish.Seq2SeqTrainer."
        )
    if processing_class is None:
        processing_class = load_processing_class(model, args)
    inner_tokenizer(processing_class)  # raises for other types
    if args.eos_token is not None:
        set_eos(model, processing_class, args.eos_token)
    path = args.chat_template_path
    added = [] if path is None else load_chat_template(model, processing_class, path)
    share_chat_template(processing_class)
    return model, processing_class, added


def load_named_model(
    name: str, args: TrlArguments, quantization_config: Any, scores: bool = False, argument: str = "model"
) -> Any:
    """The model of that name or folder, in the class that its config specifies, in float32 by default."""
    kwargs = _loading_arguments(name, args, argument)
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "`quantization_config` is set both as a trainer argument and in `args.model_init_kwargs`. Remove one "
                "of them."
            )
        kwargs["quantization_config"] = quantization_config
    kwargs["dtype"] = _dtype(kwargs.pop("torch_dtype", None) if "dtype" not in kwargs else kwargs["dtype"])
    if scores:
        _check_classifier(_config_of(name, kwargs), name)
        return AutoModelForSequenceClassification.from_pretrained(name, **{"num_labels": 1, **kwargs})
    architecture = (_config_of(name, kwargs).architectures or [""])[0]
    kind: Any = getattr(transformers, architecture, AutoModelForCausalLM)
    return kind.from_pretrained(name, **kwargs)


def _check_classifier(config: Any, name: str) -> None:
    """Raise ValueError if transformers has no sequence classifier for models of this type."""
    mapping: Any = AutoModelForSequenceClassification._model_mapping
    own = getattr(config, "auto_map", None) or {}
    if type(config) not in mapping and "AutoModelForSequenceClassification" not in own:
        raise ValueError(
            f"{name} cannot be a reward model: transformers has no sequence classifier for models of type "
            f"{config.model_type}. Use a text model."
        )


def vocabulary_size(model: Any, args: TrlArguments, argument: str = "model") -> int:
    """The vocabulary size in the config of a model, which may be a name or folder."""
    config = _config_of(model, _loading_arguments(model, args, argument)) if isinstance(model, str) else model.config
    return int(config.get_text_config().vocab_size)


def _config_of(name: str, kwargs: Mapping[str, Any]) -> Any:
    where = {key: kwargs[key] for key in ("revision", "trust_remote_code", "subfolder", "token") if key in kwargs}
    return AutoConfig.from_pretrained(name, **where)


def _loading_arguments(name: str, args: TrlArguments, argument: str) -> dict[str, Any]:
    """The arguments for loading a model by its name.

    Raises:
        UserError: if it cannot be found.
        ValueError: for the folder of an adapter.
    """
    kwargs: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if "subfolder" in kwargs:
        check_model_path(name, argument)
    else:
        refuse_unavailable(name, _hub_options(name, kwargs), argument)
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file() and not any(Path(name).glob("model*.safetensors*")):
        base = read_object(adapter).get("base_model_name_or_path")
        raise ValueError(
            f"`{name}` is an adapter, not a model. Load its base model ({base}), and load the adapter with "
            "`PeftModel.from_pretrained(model, folder, is_trainable=True)` or `resume_from_checkpoint`."
        )
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    return kwargs


def _hub_options(name: str, kwargs: Mapping[str, Any]) -> ModelOptions:
    """The options for finding a model that is loaded with ``kwargs``."""
    token, revision, cache_dir = (kwargs.get(key) for key in ("token", "revision", "cache_dir"))
    return ModelOptions(
        model_name_or_path=name, model_revision=revision or "main", cache_dir=str(cache_dir) if cache_dir else None,
        hf_hub_token=token if isinstance(token, str) else None,
    )  # fmt: skip


def _dtype(dtype: Any) -> Any:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype in ("bfloat16", "float16", "float32"):
        return getattr(torch, dtype)
    raise ValueError(f"`dtype` in `model_init_kwargs` must be auto, bfloat16, float16 or float32. Received: {dtype}.")


def load_processing_class(model: Any, args: TrlArguments) -> Any:
    """The tokenizer or processor of the model's folder."""
    kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    more = {"revision": kwargs.get("revision"), "trust_remote_code": args.trust_remote_code}
    if getattr(model.config, "vision_config", None) is None:
        return AutoProcessor.from_pretrained(model_id(model), **more)
    # The combined processor of most vision models requires torchvision; burnish uses its image processor only.
    return AutoTokenizer.from_pretrained(model_id(model), **more)


def inner_tokenizer(processing_class: Any) -> Any:
    """The tokenizer, or the one inside a processor."""
    if isinstance(processing_class, ProcessorMixin):
        return processing_class.tokenizer
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    raise TypeError("The `processing_class` must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`")


def share_chat_template(processing_class: Any) -> None:
    """Give the tokenizer of a processor the processor's chat template, which a script may set on the processor only."""
    template = getattr(processing_class, "chat_template", None)
    if isinstance(processing_class, ProcessorMixin) and template is not None:
        processing_class.tokenizer.chat_template = template


def set_eos(model: Any, processing_class: Any, eos_token: str) -> None:
    """Set ``eos_token`` as the EOS token of the tokenizer, the model and its generation config."""
    tokenizer = inner_tokenizer(processing_class)
    _check_in_vocabulary("eos_token", eos_token, processing_class, tokenizer, "an EOS token")
    tokenizer.eos_token = eos_token
    eos = tokenizer.eos_token_id
    model.config.get_text_config().eos_token_id = eos
    stops = end_tokens(model)
    if eos not in stops:
        model.generation_config.eos_token_id = [eos, *stops]


def end_tokens(model: Any) -> list[int]:
    """The ids that end a response, as the generation config of a model has them."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def set_pad(model: Any, processing_class: Any, pad_token: str | None) -> int:
    """Set the same padding token in tokenizer and model: the requested one, the tokenizer's own, or EOS. Labels are
    masked by position, so a text that ends with EOS is still trained on it.
    """
    tokenizer = inner_tokenizer(processing_class)
    pad_token = pad_token or tokenizer.pad_token or tokenizer.eos_token
    _check_in_vocabulary("pad_token", pad_token, processing_class, tokenizer, "a padding token")
    tokenizer.pad_token = pad_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return int(tokenizer.pad_token_id)


def _check_in_vocabulary(option: str, token: str | None, processing_class: Any, tokenizer: Any, what: str) -> None:
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"The specified `{option}` ('{token}') is not found in the vocabulary of the given `processing_class` "
            f"({type(processing_class).__name__}). Ensure that the `{option}` exists in the vocabulary before using it "
            f"as {what}."
        )


def is_template_file(path: str) -> bool:
    """Whether ``chat_template_path`` is a Jinja file, rather than a folder or name with a tokenizer."""
    return path.endswith((".jinja", ".j2"))


def load_chat_template(model: Any, processing_class: Any, path: str) -> list[int]:
    """Load the chat template of a Jinja file, or of another tokenizer with its tokens.

    Returns:
        The ids of tokens that were added to the vocabulary. The embeddings are resized accordingly.
    """
    if is_template_file(path):
        if not Path(path).is_file():
            raise ValueError(f"`chat_template_path`: the file {Path(path).absolute()} does not exist.")
        processing_class.chat_template = Path(path).read_text(encoding="utf-8")
        return []
    tokenizer, source = inner_tokenizer(processing_class), AutoTokenizer.from_pretrained(path)
    before = len(tokenizer)
    processing_class.chat_template = source.get_chat_template()
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in source.added_tokens_decoder.values() if token.content not in vocabulary])
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    # Each row of the embedding gets a token, as in TRL, so that tokenizer and model have the same size.
    free = count()
    while len(tokenizer) < model.get_input_embeddings().weight.shape[0]:
        tokenizer.add_tokens(f"<extra_id_{next(free)}>")
    return list(range(before, len(tokenizer)))


def attach_peft(model: Any, peft_config: Any, added_tokens: list[int]) -> Any:
    """Attach the adapter that ``peft_config`` describes."""
    peft = sys.modules.get("peft")  # already imported by the code that created a peft config
    if peft is None or not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(
            "`peft_config` must be a `peft.PeftConfig` instance, such as a `peft.LoraConfig`. "
            f"Received: {type(peft_config).__name__}."
        )
    if is_peft_model(model):
        raise ValueError(
            "A `PeftModel` and `peft_config` cannot be combined. First merge and unload the existing adapter, and pass "
            "the resulting model with `peft_config`."
        )
    if (alpha := getattr(peft_config, "lora_alpha", 1)) <= 0:
        effect = "the adapter has no effect" if alpha == 0 else "the adapter is subtracted"
        logger.warning(f"`lora_alpha` is {alpha}: {effect}.")
    if added_tokens:
        _train_added_tokens(peft_config, added_tokens)
    return PeftAdapter(PeftOptions(peft_config)).attach(model)


def _train_added_tokens(peft_config: Any, added_tokens: list[int]) -> None:
    """Train the added rows of the vocabulary, in the embedding and in the head."""
    by_layer = dict(peft_config.trainable_token_indices or {})
    peft_config.trainable_token_indices = {
        **by_layer, "embed_tokens": [*by_layer.get("embed_tokens", []), *added_tokens]
    }  # fmt: skip
    saved = list(peft_config.modules_to_save or [])
    if "lm_head" not in saved:
        logger.warning(
            "The chat template added new tokens. 'lm_head' was added to PEFT's `modules_to_save`, so that the model "
            "learns to generate them."
        )
        peft_config.modules_to_save = [*saved, "lm_head"]


def finish_peft(model: Any, args: TrlArguments) -> None:
    """Prepare a model with an adapter: gradients through checkpointed layers, and the dtype of the adapter."""
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        # As in the QLoRA paper (section 3, https://arxiv.org/abs/2305.14314). DoRA's magnitudes change by less than
        # bfloat16 can represent, so they are not converted.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(supported_dtype(torch.bfloat16, parameter.device))
