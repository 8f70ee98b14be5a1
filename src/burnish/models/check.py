"""Check a model before its weights are read, from its JSON files and the headers of its safetensors files.

In:  ``ModelOptions``. Out: all problems at once, in a second or two. If there are none, ``load_model`` will succeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.config.errors import UNUSABLE, Problem, UserError, did_you_mean
from burnish.config.options import raise_if
from burnish.models.attention_choice import attention_problems
from burnish.models.generation_settings import generation_file_problems
from burnish.models.load import load_config, message_of, meta_model, weight_problems
from burnish.models.options import TRAINED_MODEL, ModelNames, ModelOptions
from burnish.models.quantization.quantize import check_quantized_files
from burnish.models.quiet import explain_conversion_errors, suppress_loading_messages
from burnish.models.source import files_of_tensors, find_source
from burnish.utils.json_files import DAMAGED_FILE_REMEDY, quote_value, read_object
from burnish.utils.tensor_files import TensorInfo, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_JSON_FILES = ("tokenizer_config.json", "tokenizer.json")


def check_model(
    options: ModelOptions, checks_library: bool = True, needs_head: bool = True, names: ModelNames = TRAINED_MODEL
) -> list[Problem]:
    """Return all problems that would prevent loading the model.

    Args:
        options: the options of the model.
        checks_library: whether to import transformers, which takes seconds. Without it only the files are checked, and
            not whether transformers supports the model.
        needs_head: whether the language model head is required. A reward model does not need it.
        names: the options that the model is given by.
    """
    problems = [*attention_problems(options)]
    try:
        source = find_source(options.model_name_or_path, options, names.model)
        if source.folder is None:  # on the hub, not fetched yet: load_model will check it
            return problems
        raw = _raw_config(source.folder, names)
    except UserError as error:
        return [*problems, *error.problems]
    problems += _check_json(source.folder)
    identity = _check_identity(source.folder, raw, options) if checks_library else []
    problems += identity
    problems += check_quantized_files(options, raw, names)
    if not identity and not options.train_from_scratch and source.has_weights:
        problems += _check_weights(source.folder, raw, options, checks_library, needs_head, names)
    return problems


def _raw_config(folder: Path, names: ModelNames) -> dict[str, Any]:
    """Read ``config.json``. Raises UserError if it is missing or invalid."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(_no_config(folder, names))
    raw = read_object(path)
    if not isinstance(raw.get("model_type"), str):
        what = 'it has no "model_type", so the model type is unknown.'
        raise UserError(what, where=str(path), remedy=DAMAGED_FILE_REMEDY)
    raise_if(Problem(wrong, where=str(path), remedy=DAMAGED_FILE_REMEDY) for wrong in _wrong_numbers(raw))
    return raw


def _wrong_numbers(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each invalid number that transformers would not report."""
    for name, value in raw.items():
        counts = value if isinstance(value, list) and value else [value]  # a list has a size per layer
        is_default = value is None and name == "intermediate_size"
        if name in _COUNTS and not is_default and not all(type(count) is int and count > 0 for count in counts):
            yield f'"{name}" must be a positive integer. Received: {quote_value(value)}.'
        if name.endswith(("dropout", "pdrop")) and isinstance(value, int | float) and not 0 <= value <= 1:
            yield f'"{name}" must be from 0 to 1. Received: {quote_value(value)}.'
    yield from _too_large(raw)


def _too_large(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each number, also in nested configs, with which a model without weights exhausts memory."""
    for name, value in raw.items():
        most = _MAX_LAYERS if name in _LAYERS else _MAX_HEAD if name.endswith(("head_dim", "rotary_dim")) else None
        if most is not None and isinstance(value, int | float) and value > most:
            yield f'"{name}" must be at most {most}. Received: {quote_value(value)}.'
        elif isinstance(value, Mapping):
            yield from _too_large(value)


_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"})
_MAX_LAYERS, _MAX_HEAD = 10_000, 65_536  # rotary frequencies of a head are computed when the model is created
_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer",
    "n_head",
)  # fmt: skip


def _check_json(folder: Path) -> list[Problem]:
    problems = generation_file_problems(folder)
    for name in _JSON_FILES:
        if (folder / name).is_file():
            try:
                read_object(folder / name)
            except UserError as error:
                problems += error.problems
    return problems


def _check_identity(folder: Path, raw: dict[str, Any], options: ModelOptions) -> list[Problem]:
    """Check that transformers supports the model as a causal language model, or that it has custom code."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind, code = raw["model_type"], raw.get("auto_map")
    code = code if isinstance(code, dict) else {}
    is_known = kind in CONFIG_MAPPING
    if code and not is_known:
        return [] if options.trust_remote_code else [_custom_code(folder, code)]
    if not is_known:
        guess = did_you_mean(kind, list(CONFIG_MAPPING.keys()))
        what = f'the installed transformers does not support model_type "{kind}".{guess}'
        return [
            Problem(what, where=str(folder / "config.json"), remedy="A newer version of transformers may support it.")
        ]
    speaks = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not any(CONFIG_MAPPING[kind] in known for known in speaks) and "AutoModelForCausalLM" not in code:
        what = f'a model of type "{kind}" is not a causal language model.'
        return [
            Problem(
                what,
                where=str(folder),
                remedy="burnish trains decoder-only models, such as Llama, Qwen, Gemma and GPT-2.",
            )
        ]
    return []


def _check_weights(
    folder: Path, raw: dict[str, Any], options: ModelOptions, checks_library: bool, needs_head: bool,
    names: ModelNames,
) -> list[Problem]:  # fmt: skip
    try:
        files = weight_files(folder, names)
    except UserError as error:
        return list(error.problems)
    tensors, problems = read_headers(files)
    problems += _wrongly_declared(folder, raw, tensors, names)
    if problems or not checks_library or raw.get("quantization_config") or raw.get("auto_map"):
        return problems  # for these two formats, missing weights are found when loading
    try:
        config = load_config(options, names=names)
    except UserError as error:
        return list(error.problems)
    return list(compare_with_model(folder, config, tensors, needs_head, names))


def _wrongly_declared(
    folder: Path, raw: dict[str, Any], tensors: dict[str, TensorInfo], names: ModelNames
) -> Iterator[Problem]:
    """Report integer weights, which need scales, in a model that is not declared as quantized, and the opposite."""
    # Masks of GPT-NeoX, GPT-Neo and GPT-J have four dimensions, tables of indices are int64.
    matrices = [name for name, info in tensors.items() if len(info.shape) in (2, 3) and info.dtype in _NOT_WEIGHTS]
    declared = raw.get("quantization_config")
    if isinstance(declared, dict) and declared:
        method = declared.get("quant_method", "bitsandbytes")
        if matrices or method not in _INTEGER_METHODS or not tensors:
            return
        first = next(iter(tensors))
        yield Problem(
            f"its config.json declares weights that are quantized with {method}, but the files contain none "
            f"({first}: {tensors[first].dtype}).",
            where=str(folder),
            remedy="Remove quantization_config from config.json. To quantize the weights when they are loaded, set "
            f"{names.quantization}.",
        )
        return
    if not matrices:
        return
    yield Problem(
        f"{len(matrices)} of its weights are integers or 8-bit floats ({matrices[0]}: "
        f"{tensors[matrices[0]].dtype}), but its config.json has no quantization_config.",
        where=str(folder),
        why="quantization_config describes how the weights are scaled; without it they would be loaded unscaled.",
        remedy="Download config.json again, or use the unquantized model.",
    )


_INTEGER_METHODS = ("bitsandbytes", "gptq", "awq")
"""Quantization methods that store weights as integer tensors."""
_NOT_WEIGHTS = ("I8", "U8", "I16", "U16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
"""Dtypes that need scales to be weights."""


def weight_files(folder: Path, names: ModelNames = TRAINED_MODEL) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        UserError: if a shard is missing, or if there are only pickle files or no weights.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted({folder / name for name in files_of_tensors(index).values()})
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            what = f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing[:3])}."
            raise UserError(what, where=str(folder), remedy="Download them too.")
        return shards
    raise UserError(_no_weights(folder, names))


def compare_with_model(
    folder: Path, config: PreTrainedConfig, tensors: dict[str, TensorInfo], needs_head: bool, names: ModelNames
) -> Iterator[Problem]:
    """Yield the differences between the files and a model of that config.

    Uses transformers' loading of tensors on the meta device, which have shapes but no data. It handles older names,
    names without the base model's prefix, tied weights, and experts that are one tensor in memory and several in the
    file.
    """
    try:
        model = meta_model(config)
    except UserError as error:
        yield from error.problems
        return
    state = {name: torch.empty(info.shape, device="meta") for name, info in tensors.items()}
    try:
        with suppress_loading_messages(), explain_conversion_errors(str(folder)):
            loaded: Any = type(model).from_pretrained(
                None,
                config=config,
                state_dict=state,
                device_map="meta",
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except UserError as error:
        yield from error.problems
        return
    except NotImplementedError:  # a conversion that needs data; checked when loading
        return
    except UNUSABLE as error:
        yield Problem(f"the model cannot be loaded: {message_of(error)}", where=str(folder))
        return
    yield from weight_problems(str(folder), model, loaded[1], needs_head, names)


def _no_config(folder: Path, names: ModelNames) -> Problem:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        return Problem(
            "this is an adapter, not a model.",
            where=str(folder),
            remedy=f"Set {names.adapters} to it, and {names.model} to {base or 'its base model'}.",
        )
    inside = sorted(str(path.parent) for path in folder.glob("*/config.json"))[:3]
    remedy = "Set it to the folder that contains config.json and the weights."
    return Problem(
        "this folder has no config.json, so it does not contain a model.",
        where=str(folder),
        remedy=f"There is one in {', '.join(inside)}." if inside else remedy,
    )


def _custom_code(folder: Path, code: dict[str, Any]) -> Problem:
    files = sorted({str(name).split("--")[-1].split(".")[0] + ".py" for name in code.values() if isinstance(name, str)})
    return Problem(
        f"this model requires running its own Python code ({', '.join(files)}).",
        where=str(folder),
        remedy="Review that code; if you trust it, set trust_remote_code: true.",
    )


def _no_weights(folder: Path, names: ModelNames) -> Problem:
    pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(suffix))
    if pickles:
        return Problem(
            f"the weights are pickle files ({', '.join(pickles[:3])}), which can run arbitrary code when they "
            "are loaded.",
            where=str(folder),
            why="burnish reads safetensors only.",
            remedy="Use a copy in safetensors, or, if you trust this one, convert it with transformers' "
            "from_pretrained and save_pretrained.",
        )
    return Problem(
        "there are no weights in this folder (model.safetensors, or its shards with their index).",
        where=str(folder),
        remedy="Download them, or set train_from_scratch: true to start from random weights."
        if names.is_trained
        else f"Download them, or set {names.model} to a model with weights.",
    )
