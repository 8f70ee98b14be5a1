"""Load a language model, with its vision tower if it has one: config, weights, precision, attention.

In:  ``ModelOptions``, and from the backend a dtype and a device. Out: transformers' own model, ready for an adapter.
``meta_model`` creates it without weights, for counting and checking.
Refuses: weights that are missing, of another shape, or pickled. Errors that the files alone show are found earlier
(check.py).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from burnish.config.errors import UNUSABLE, Problem, UserError, few, shape_in_words
from burnish.config.options import raise_if
from burnish.models.attention_choice import requested_attention
from burnish.models.generation_settings import generation_file_problems, setting_problems
from burnish.models.images.torchvision import raise_if_torchvision_is_broken
from burnish.models.options import TRAINED_MODEL, ModelNames, ModelOptions
from burnish.models.quantization.quantize import (
    keep_as_loaded,
    quantization_arguments,
    quantization_method_of,
    use_kernels_that_train,
)
from burnish.models.quiet import explain_conversion_errors, suppress_loading_messages
from burnish.models.source import PROCESSOR_FILES, find_source, hub_arguments, local_folder
from burnish.utils.activity import Activity, annotate_errors
from burnish.utils.json_files import quote_value
from burnish.utils.patching import Reason, patch
from burnish.utils.work import progress

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
"""transformers attaches the adapter that this file in a model's folder describes."""


def load_config(
    options: ModelOptions, max_length: int | None = None, notes: list[str] | None = None,
    names: ModelNames = TRAINED_MODEL,
) -> PreTrainedConfig:  # fmt: skip
    """Load the model's config.

    Args:
        options: the options of the model.
        max_length: maximum sequence length of the run, to which ``rope_scaling`` extends the context.
        notes: receives sentences for the user.
        names: the options that the model is given by.

    Raises:
        UserError: if it is missing or inconsistent.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    source = find_source(options.model_name_or_path, options, names.model)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.name, **hub_arguments(options))
    except (*UNUSABLE, StrictDataclassError) as error:
        raise UserError(f"its config cannot be used: {message_of(error)}", where=source.name) from error
    _check_kernels(config, options, source.name)
    if source.folder is not None:
        _check_other_weights(config, source.folder, names)
    notes = [] if notes is None else notes
    if getattr(config, "auto_map", None) and not options.trust_remote_code:
        notes.append(
            f"{source.name} contains custom model code; transformers' own class for {config.model_type} is used, "
            "unless trust_remote_code is set."
        )
    if options.rope_scaling and max_length:
        notes.append(scale_rope(config, options.rope_scaling, max_length))
    return config


def _check_kernels(config: PreTrainedConfig, options: ModelOptions, where: str) -> None:
    """Raise UserError if the config, not the user, selects an attention kernel of the hub, which is code to run."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    named = [str(getattr(part, "_attn_implementation", "")) for part in parts]
    kernel = next((name for name in named if "/" in name), None)
    if kernel is not None and requested_attention(options) is None:
        what = f'its config selects the attention kernel "{kernel}", which would be downloaded from the Hub and run.'
        remedy = f"Set attn_implementation: {kernel} if you trust it, or a different one, such as sdpa."
        raise UserError(what, where=where, remedy=remedy, option="attn_implementation")


def _check_other_weights(config: PreTrainedConfig, folder: Path, names: ModelNames) -> None:
    """Raise UserError for a folder from which transformers would load other weights than the ones that are checked."""
    if named := getattr(config, "transformers_weights", None):
        what = f'"transformers_weights" selects the weights in {quote_value(named)}.'
        why = "burnish reads only model.safetensors, or the shards that its index lists."
        remedy = "Rename that file to model.safetensors, and remove transformers_weights."
        raise UserError(what, where=str(folder / "config.json"), why=why, remedy=remedy)
    if (folder / ADAPTER_CONFIG).is_file() and (folder / "config.json").is_file():
        raise UserError(_adapter_in_model(str(folder), names))


def _adapter_in_model(where: str, names: ModelNames) -> Problem:
    return Problem(
        f"this folder contains both a model and an adapter ({ADAPTER_CONFIG}).",
        where=where,
        why="transformers would load the model with the adapter.",
        remedy=f"Move {ADAPTER_CONFIG} and adapter_model.safetensors to a separate folder. To load the adapter, set "
        f"{names.adapters} to that folder.",
    )


def load_model(
    options: ModelOptions, *, dtype: torch.dtype | str = "auto", attn_implementation: str | None = None,
    device: torch.device | str | None = None, config: PreTrainedConfig | None = None, notes: list[str] | None = None,
    needs_head: bool = True, names: ModelNames = TRAINED_MODEL,
) -> PreTrainedModel:  # fmt: skip
    """Load the model with its weights, in evaluation mode. All parameters require gradients.

    Args:
        options: the options of the model.
        dtype: dtype of all parameters; "auto" for the saved one.
        attn_implementation: overrides the options.
        device: device to load to. Default: CPU.
        config: result of ``load_config``; loaded again by default.
        notes: receives sentences for the user, such as on unused weights in the files.
        needs_head: whether the language model head is required.
        names: the options that the model is given by.

    Raises:
        UserError: if weights are missing or do not fit.
    """
    notes = [] if notes is None else notes
    config = load_config(options, names=names) if config is None else config
    attention = attn_implementation or requested_attention(options)
    arguments: dict[str, Any] = {"dtype": dtype} | ({"attn_implementation": attention} if attention else {})
    arguments |= quantization_arguments(options, dtype, config, names)
    notes += filter(None, [use_kernels_that_train(config, device)])
    with progress("Loading the model"), annotate_errors(Activity.LOAD_MODEL):
        if options.train_from_scratch:
            model = _random_model(options, config, arguments, device)
        else:
            model = _pretrained_model(options, config, arguments, device, notes, needs_head, names)
    model.config.use_cache = options.use_cache
    if getattr(config, "vision_config", None) is not None:  # copied next to the trained model
        name = options.model_name_or_path or ""
        cast(Any, model).processor_folder = local_folder(name, options, names.model, PROCESSOR_FILES)
    keep_as_loaded(model)
    if options.upcast_layernorm:
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and re.search(r"norm|ln_", name):
                parameter.data = parameter.data.float()
    if samples_without_sampling(model):
        patch(model, "generation_config.do_sample", True, SAMPLING)
    return model


# Parameters of sampling, and their neutral values.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}
SAMPLING = Reason(
    "generation config with sampling parameters", "it sets a temperature or top_p without do_sample, and transformers "
    "4.39 to 5.23 cannot save such a config after a change (https://github.com/huggingface/transformers/issues/29988)",
)  # fmt: skip


def samples_without_sampling(model: nn.Module) -> bool:
    """Whether the model's generation config has sampling parameters but does not enable sampling."""
    generation = getattr(model, "generation_config", None)
    if generation is None or generation.do_sample:
        return False
    return any(getattr(generation, name, None) not in {None, neutral} for name, neutral in _SAMPLING.items())


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the config: with a vision tower if the config has one, else a causal language model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = getattr(config, "vision_config", None) is not None
    is_seeing = has_tower and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_seeing else AutoModelForCausalLM


def meta_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Create the model without weights, on the meta device.

    Raises:
        UserError: if the config is invalid.
    """
    from transformers import GenerationConfig

    try:
        with torch.device("meta"), suppress_loading_messages():
            model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (*UNUSABLE, ImportError) as error:
        raise_if_torchvision_is_broken(error)
        raise UserError(
            f"no model can be created from its config: {message_of(error)}", config.name_or_path or ""
        ) from error
    model.tie_weights()  # transformers 5.0 does not do this on the meta device
    path = Path(config.name_or_path or "") / "generation_config.json"
    if config.name_or_path and path.is_file():
        raise_if(generation_file_problems(path.parent))
        try:
            model.generation_config = GenerationConfig.from_pretrained(config.name_or_path)
        except UNUSABLE as error:
            raise UserError(f"it cannot be used: {message_of(error)}", where=str(path)) from error
    return model


def find_non_finite(model: nn.Module) -> list[str]:
    """Names of the weights with NaN or infinity. Reads every weight once."""
    weights = ((name, p) for name, p in model.named_parameters() if p.is_floating_point() and not p.is_meta)
    return [name for name, weight in weights if not _is_finite(weight)]


def raise_if_empty(model: nn.Module, name: str, notes: list[str]) -> None:
    """Raise UserError if all matrices or the whole embedding are zero.

    Adds a note if only some matrices are zero, as in a model with new layers that are initialized to zero.
    """
    matrices = {n: p for n, p in model.named_parameters() if p.ndim > 1 and p.is_floating_point() and not p.is_meta}
    wide = {n: p.detach() for n, p in matrices.items() if p.dtype.itemsize > 1}
    empty = [n for n, p in wide.items() if not p[0].any() and not p.any()]  # the first row decides almost always
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = getattr(find(), "weight", None) if find is not None else None
    is_lost = len(empty) == len(matrices) or any(matrices[n] is embedding for n in empty)
    if empty and is_lost:
        raise UserError(
            f"{len(empty)} of the model's {len(matrices)} matrices contain only zeros: {few(empty)}.",
            where=name,
            why="Training cannot start from weights that are all zero.",
            remedy="Download the model again, or set train_from_scratch: true to start from random weights.",
        )
    if empty:
        notes.append(f"{len(empty)} of {len(matrices)} matrices contain only zeros: {few(empty)}.")


def _is_finite(weight: nn.Parameter) -> bool:
    """Whether all elements of a weight are finite.

    NaN and infinity propagate to the sum, which takes a twentieth of the time of testing each element. If a sum of
    finite numbers overflows, each element is tested. 8-bit dtypes have no sum and are converted to bfloat16, which
    represents all their values.
    """
    numbers = weight.detach()
    if numbers.dtype.itemsize == 1:
        numbers = numbers.bfloat16()
    return bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all())


def raise_if_not_finite(model: nn.Module, name: str) -> None:
    """Raise UserError if a weight is NaN or infinite, because every loss would be, too."""
    remedy = "Download the model again, or load it in a dtype with a wider range (bfloat16 for float16)."
    raise_if(_not_finite("model", find_non_finite(model), name, remedy))


def raise_if_adapter_not_finite(model: nn.Module, folders: Sequence[Path]) -> None:
    """Raise UserError if a weight of the adapters is NaN or infinite. The base model's weights were checked before."""
    found = [name for name, p in model.named_parameters() if p.requires_grad and not _is_finite(p)]
    remedy = "The file is corrupted, or training diverged; use an earlier checkpoint."
    raise_if(_not_finite("adapter", found, ", ".join(map(str, folders)), remedy))


def _not_finite(whose: str, found: list[str], where: str, remedy: str) -> list[Problem]:
    what = f"{len(found)} of the {whose}'s weights contain NaN or infinity: {few(found)}."
    return [Problem(what, where, why="Every loss would be NaN.", remedy=remedy)] if found else []


def largest_over_layers(config: Any, name: str) -> int | None:
    """Return a number of a transformers config, or None if it has none. If its layers differ, as the heads of Gemma 4,
    the largest one: the config itself raises an error then (``per_layer_config``)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        numbers = [getattr(layer, name, None) for layer in config.per_layer_config]
        return max((number for number in numbers if isinstance(number, int)), default=None)
    return value if isinstance(value, int) else None


def context_length(config: PreTrainedConfig) -> int | None:
    """Context length of the model; None if the config has none or sets no limit."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            rope = getattr(text, "rope_parameters", None)
            is_dynamic = isinstance(rope, dict) and rope.get("rope_type") == "dynamic"
            return int(length * (rope or {})["factor"]) if is_dynamic else length
    return None


def check_context(config: PreTrainedConfig, longest: int) -> Iterator[Problem]:
    """Check that an example of ``longest`` tokens fits the model's context."""
    length = context_length(config)
    if length is None or longest <= length:
        return
    has_rope = isinstance(getattr(config.get_text_config(), "rope_parameters", None), dict)
    extends = ", or extend the context with rope_scaling" if has_rope else ""
    yield Problem(
        f"the longest example has {longest:,} tokens, but the model's context length is {length:,}.",
        why="The model was not trained on positions beyond it.",
        remedy=f"Set cutoff_len to {length} or less{extends}.",
    )


def scale_rope(config: PreTrainedConfig, kind: str, length_needed: int) -> str:
    """Scale rotary positions by the smallest integer factor with which ``length_needed`` tokens fit. Returns a note.

    Sources: linear, Chen et al. 2023, https://arxiv.org/abs/2306.15595; yarn, Peng et al. 2023,
    https://arxiv.org/abs/2309.00071; dynamic and llama3 as in transformers' ``modeling_rope_utils``.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    length = context_length(config)
    if not isinstance(rope, dict) or length is None or "rope_theta" not in rope:
        raise UserError(
            f'rope_scaling "{kind}" cannot be used: models of type "{config.model_type}" have several rotary '
            "embeddings.",
            remedy="Remove rope_scaling, and keep cutoff_len within the model's context.",
            option="rope_scaling",
        )
    original = rope.get("original_max_position_embeddings") or length
    if length_needed <= length:
        return f"rope_scaling has no effect: {length_needed} tokens fit into the model's context of {length}."
    factor = float(math.ceil(length_needed / original))
    changed = {**rope, "rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "llama3":
        changed |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    text.rope_parameters = changed
    sentence = f"The context is extended from {length} to {int(original * factor)} tokens ({kind}, factor {factor:g})."
    if kind == "dynamic":  # transformers scales rows that are longer than max_position_embeddings, so keep it
        return (
            f"{sentence} The factor depends on the longest example of a micro-batch, so results depend on how a "
            "step is split into micro-batches."
        )
    text.max_position_embeddings = int(original * factor)
    return sentence


def _random_model(
    options: ModelOptions, config: PreTrainedConfig, arguments: dict[str, Any], device: torch.device | str | None
) -> PreTrainedModel:
    """Create a model with random weights, drawn on the CPU in float32, so that a seed gives the same weights
    everywhere."""
    dtype = arguments.pop("dtype")
    wanted = (config.dtype or torch.float32) if dtype == "auto" else dtype
    code = options.trust_remote_code
    model: PreTrainedModel = auto_class(config).from_config(
        config, trust_remote_code=code, dtype=torch.float32, **arguments
    )
    model.config.dtype = wanted
    placed: PreTrainedModel = cast(Any, model).to(device=device or "cpu", dtype=wanted)
    placed.eval()
    return placed


def _pretrained_model(
    options: ModelOptions, config: PreTrainedConfig, arguments: dict[str, Any], device: torch.device | str | None,
    notes: list[str], needs_head: bool, names: ModelNames,
) -> PreTrainedModel:  # fmt: skip
    source = find_source(options.model_name_or_path, options, names.model, with_weights=True)
    if source.folder is not None:
        raise_if(generation_file_problems(source.folder))
    talks = redirect_stdout(sys.stderr) if quantization_method_of(config) else nullcontext()  # gptqmodel prints a lot
    try:
        with suppress_loading_messages(), talks, explain_conversion_errors(source.name):
            loaded: Any = auto_class(config).from_pretrained(
                source.name,
                config=config,
                use_safetensors=True,
                device_map=None if device is None else {"": device},
                ignore_mismatched_sizes=True,  # reported below in one message
                output_loading_info=True,
                **hub_arguments(options),
                **arguments,
            )
    except UserError:
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the model cannot be loaded: {message_of(error)}", where=source.name) from error
    model: PreTrainedModel = loaded[0]
    if hasattr(model, "peft_config"):
        raise UserError(_adapter_in_model(source.name, names))
    if (generation := getattr(model, "generation_config", None)) is not None:  # it may be from config.json
        raise_if(setting_problems(vars(generation), f"{source.name}: its generation settings"))
    found: dict[str, Any] = loaded[1]
    raise_if(weight_problems(source.name, model, found, needs_head, names))
    # The score head of a reward model is loaded by ``models.reward_files``.
    unused = sorted(name for name in found["unexpected_keys"] if needs_head or not name.endswith("score.weight"))
    if unused:
        count = "1 tensor in the files is" if len(unused) == 1 else f"{len(unused)} tensors in the files are"
        notes.append(f"{count} not part of {type(model).__name__}: {few(unused)}.")
    return model


_HEAD_NAME = re.compile(r"(lm_head|embed_out|output)\.")


def weight_problems(
    where: str, model: nn.Module, found: Mapping[str, Any], needs_head: bool, names: ModelNames
) -> Iterator[Problem]:
    """Problems of a model's weights, from transformers' ``loading_info``."""
    class_name = type(model).__name__
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if beyond := sorted(_layers_in(found["unexpected_keys"]) - _layers_in(dict(model.named_parameters()))):
        which = f"layer {beyond[0]}" if len(beyond) == 1 else f"{len(beyond)} layers ({beyond[0]} to {beyond[-1]})"
        yield Problem(
            f"the weights have {which} beyond the number of layers in config.json.",
            where=where,
            why=f"{class_name} would be trained without its last layers.",
            remedy="Correct the number of layers in config.json (num_hidden_layers), or remove those tensors.",
        )
    if not needs_head:
        missing = [name for name in missing if not _HEAD_NAME.search(name)]
    if missing:
        is_headless = all(_HEAD_NAME.search(name) for name in missing)
        again = "Download the model again, check its config.json, or set train_from_scratch: true."
        if not names.is_trained:
            again = "Download the model again, or check its config.json."
        yield Problem(
            f"the weights have no {few(missing)}, which {class_name} needs."
            + (" This is a model without an LM head." if is_headless else ""),
            where=where,
            why="They would be initialized randomly.",
            remedy=again
            if not is_headless
            else "Use the variant of the model with an LM head (its class name ends in ForCausalLM).",
        )
    if mismatched:
        name, held, needed = mismatched[0]
        more = f", and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        what = f"{name} is {shape_in_words(held)} in the weights but {shape_in_words(needed)} in the config{more}."
        yield Problem(
            what, where=where, remedy="config.json and the weights belong to different models; download both again."
        )


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|decoder_layers)\.(\d+)\.")


def _layers_in(names: Iterable[str]) -> set[int]:
    """Indices of the layers that the weights with these names belong to."""
    return {int(match[1]) for name in names if (match := _LAYER.search(name))}


def message_of(error: BaseException) -> str:
    """A library's error message as one sentence. Includes more lines if the first one ends with a colon, and the type
    of the error if the message is only a word.
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    first = next(iter(lines), "")
    if first.endswith(":"):
        first = " ".join(lines[:3])
    if not first or isinstance(error, KeyError):
        first = f"{type(error).__name__} {first}".strip()
    return f"{first[:300].rstrip('.:')}."
