"""What is wrong with a model before a weight of it is read: from its JSON files and the headers of its safetensors.

In:  ``ModelOptions``. Out: problems, all of them at once, in a second or two; none means that ``load_model`` will load.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.core.errors import Problem, UserError, did_you_mean
from burnish.core.tensor_files import TensorInfo, read_headers, read_json
from burnish.models.attention_choice import attention_problems
from burnish.models.load import load_config, meta_model, weight_problems
from burnish.models.quantize import check_quantised_files
from burnish.models.quiet import quiet, refused_conversions
from burnish.models.source import find_source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_JSON_FILES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")


def check_model(options: Any, asks_library: bool = True) -> list[Problem]:
    """Everything that would keep the model from being loaded.

    Args:
        asks_library: whether transformers may be asked, whose import takes seconds; without it the files are looked at,
            and not whether they are those of a model that transformers knows.
    """
    problems = [*attention_problems(options)]
    try:
        source = find_source(options.model_name_or_path, options)
        if source.folder is None:  # on the hub, not fetched yet: load_model has the last word
            return problems
        raw = _raw_config(source.folder)
    except UserError as error:
        return [*problems, *error.problems]
    problems += _check_json(source.folder)
    identity = _check_identity(source.folder, raw, options) if asks_library else []
    problems += identity
    problems += check_quantised_files(options, raw)
    if not identity and not options.train_from_scratch and source.has_weights:
        problems += _check_weights(source.folder, raw, options, asks_library)
    return problems


def _raw_config(folder: Path) -> dict[str, Any]:
    """``config.json``. Raises UserError where there is none, or something else in its place."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(_no_config(folder))
    raw = read_json(path)
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UserError(Problem('it has no "model_type", so there is no telling what model it is.', where=str(path)))
    return raw


def _check_json(folder: Path) -> list[Problem]:
    problems: list[Problem] = []
    for name in _JSON_FILES:
        if (folder / name).is_file():
            try:
                read_json(folder / name)
            except UserError as error:
                problems += error.problems
    return problems


def _check_identity(folder: Path, raw: dict[str, Any], options: Any) -> list[Problem]:
    """Whether transformers knows such a model as a causal language model, or brings code of its own."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind, code = raw["model_type"], raw.get("auto_map") or {}
    is_known = kind in CONFIG_MAPPING
    if code and not is_known:
        return [] if options.trust_remote_code else [_custom_code(folder, code)]
    if not is_known:
        guess = did_you_mean(kind, list(CONFIG_MAPPING.keys()))
        return [
            Problem(
                f'this transformers knows no model_type "{kind}".{guess}',
                where=str(folder / "config.json"),
                remedy="A newer transformers may know it.",
            )
        ]
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in code:
        return [
            Problem(
                f'a model of type "{kind}" is no causal language model.',
                where=str(folder),
                remedy="burnish trains decoders, such as Llama, Qwen, Gemma, Mistral, GPT-2.",
            )
        ]
    return []


def _check_weights(folder: Path, raw: dict[str, Any], options: Any, asks_library: bool) -> list[Problem]:
    try:
        files = weight_files(folder)
    except UserError as error:
        return list(error.problems)
    tensors, problems = read_headers(files)
    if problems or not asks_library or raw.get("quantization_config") or raw.get("auto_map"):
        return problems  # what the last two need, only loading them can tell
    try:
        config = load_config(options)
    except UserError as error:
        return list(error.problems)
    return compare_with_model(folder, config, tensors)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        UserError: where a shard is missing, where there are only pickles, or nothing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted({folder / name for name in read_json(index)["weight_map"].values()})
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise UserError(
                Problem(
                    f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing[:3])}.",
                    where=str(folder),
                    remedy="Fetch them too.",
                )
            )
        return shards
    raise UserError(_no_weights(folder))


def compare_with_model(folder: Path, config: PreTrainedConfig, tensors: dict[str, TensorInfo]) -> list[Problem]:
    """What a model of that config would miss in the files.

    transformers itself is asked, with tensors that have shapes and no content: it knows older names, names without the
    base model's prefix, tied weights, and experts that are one tensor in memory and many in the file.
    """
    try:
        model_class = type(meta_model(config))
    except UserError as error:
        return list(error.problems)
    state = {name: torch.empty(info.shape, device="meta") for name, info in tensors.items()}
    try:
        with quiet(), refused_conversions(str(folder)):
            _, found = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                device_map="meta",
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except UserError as error:
        return list(error.problems)
    except NotImplementedError:  # a conversion that needs the numbers; loading will tell
        return []
    return weight_problems(str(folder), model_class.__name__, found)


def _no_config(folder: Path) -> Problem:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        return Problem(
            "this is an adapter, not a model.",
            where=str(folder),
            remedy=f"Set adapter_name_or_path to it, and model_name_or_path to {base or 'what it was trained on'}.",
        )
    return Problem(
        "there is no config.json in this folder, so it holds no model.",
        where=str(folder),
        remedy=_models_inside(folder),
    )


def _models_inside(folder: Path) -> str:
    found = sorted(str(path.parent) for path in folder.glob("*/config.json"))[:3]
    return f"There is one in {', '.join(found)}." if found else "Give the folder that has config.json and the weights."


def _custom_code(folder: Path, code: dict[str, Any]) -> Problem:
    files = sorted({str(name).split("--")[-1].split(".")[0] + ".py" for name in code.values() if isinstance(name, str)})
    return Problem(
        f"this model is Python code of its own ({', '.join(files)}), which would have to be run.",
        where=str(folder),
        remedy="Read that code; if you trust it, set trust_remote_code: true.",
    )


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(suffix))
    if pickles:
        return Problem(
            f"the weights are pickles ({', '.join(pickles[:3])}), which can run any code when they are read.",
            where=str(folder),
            why="burnish reads safetensors only.",
            remedy="Take a copy in safetensors, or convert this one where you trust it, with transformers' "
            "from_pretrained and save_pretrained.",
        )
    return Problem(
        "there are no weights in this folder (model.safetensors, or its shards with their index).",
        where=str(folder),
        remedy="Fetch them, or set train_from_scratch: true to begin with random ones.",
    )
