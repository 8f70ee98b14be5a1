"""Read and write reward models: with a value head (LLaMA-Factory), or as transformers' sequence classifier.

In: folders. Out: the weights of the head, under LLaMA-Factory's names, from either format. Writes both formats. Both
contain one linear layer over the last hidden states; a classifier's has no bias.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem, UserError
from burnish.config.options import raise_if
from burnish.models.load import weight_problems
from burnish.models.options import REWARD_MODEL, ModelOptions
from burnish.models.quiet import explain_conversion_errors, suppress_loading_messages
from burnish.models.save import SHARD_SIZE
from burnish.models.source import ADAPTER_PATTERNS, files_of_tensors, local_folder
from burnish.utils.json_files import read_object, write_json
from burnish.utils.tensor_files import read_header

VALUE_HEAD, OLD_VALUE_HEAD = "value_head.safetensors", "value_head.bin"
WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
CRITIC = "v_head.is_critic"
"""Tensor that marks the value head of PPO, whose model generates text and is no reward model."""
_SCORE, _KIND = "score.weight", "reward_head"
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", OLD_VALUE_HEAD)
_CLASSIFIER_FILES = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
FindsFolder = Callable[[str, ModelOptions, str, Sequence[str]], Path | None]
"""Returns the folder of a model, by its name, the options of the hub, the name of the option, and file patterns."""


def head_folders(options: ModelOptions, adapters: Sequence[Path]) -> list[Path]:
    """The folders that may hold the head of a reward model: that of the model, then ``adapters``, in order.

    The value head of a model on the Hub is downloaded, and so are the weights of a sequence classifier.

    Raises:
        UserError: if there is no such model.
    """
    name, option = options.model_name_or_path or "", "model_name_or_path"
    folder = local_folder(name, options, option, ("config.json", VALUE_HEAD, OLD_VALUE_HEAD))
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "ForSequenceClassification" in str(config.get("architectures")):
        folder = local_folder(name, options, option, _CLASSIFIER_FILES)
    return [folder, *adapters]


def read_head(folders: Sequence[Path], accepts_critic: bool = False) -> tuple[dict[str, Tensor], Path] | None:
    """The head in the last of ``folders`` that has one, and its file; None if none has one.

    Args:
        folders: folders of the model and its adapters.
        accepts_critic: also accept the value head of PPO.
    """
    for folder in reversed(folders):
        for read in (_value_head, _old_value_head, _score):
            found = read(folder)
            if found is not None and (accepts_critic or CRITIC not in found[0]):
                weights, file = found
                return {name: value for name, value in weights.items() if name != CRITIC}, file
    return None


def _value_head(folder: Path) -> tuple[dict[str, Tensor], Path] | None:
    from safetensors.torch import load_file

    file = folder / VALUE_HEAD
    if not file.is_file() or not read_header(file):
        return None
    found = load_file(file)
    return (found if kind_of_head(file) else _check_head(found, file)), file


def kind_of_head(file: Path) -> tuple[str, int] | None:
    """The registered name and width of the reward head in a file; None for the linear layer."""
    from safetensors import safe_open

    if file.name != VALUE_HEAD:
        return None
    with safe_open(file, "pt") as tensors:
        metadata = tensors.metadata() or {}
    if _KIND not in metadata:
        return None
    if not metadata.get("width", "").isdecimal():
        raise UserError(f'its metadata has no "width" of the {metadata[_KIND]} head.', where=str(file))
    return metadata[_KIND], int(metadata["width"])


def _old_value_head(folder: Path) -> tuple[dict[str, Tensor], Path] | None:
    file = folder / OLD_VALUE_HEAD
    if not file.is_file():
        return None
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        what = f"it cannot be read as weights: {str(error).splitlines()[0] if str(error) else 'it is empty'}"
        raise UserError(f"{what.rstrip('.')}.", where=str(file), remedy="Download or copy it again.") from error
    return _check_head(found, file), file


def _check_head(found: Any, file: Path) -> dict[str, Tensor]:
    tensors = (
        {name: value for name, value in found.items() if isinstance(value, Tensor)} if isinstance(found, dict) else {}
    )
    if WEIGHT not in tensors:
        raise UserError(f"it has no {WEIGHT}. Found: {', '.join(map(str, tensors)) or 'nothing'}.", where=str(file))
    return _check_labels(tensors, file)


def _check_labels(weights: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    labels = weights[WEIGHT].numel() // max(1, weights[WEIGHT].shape[-1]) if weights[WEIGHT].dim() else 0
    if labels != 1:
        what = f"a reward model has a head with one label. This one has {labels}."
        raise UserError(what, str(file), remedy="Use a sequence classifier with num_labels: 1.")
    return weights


def check_head_width(width: int, hidden_size: int, where: str) -> None:
    """Raise UserError if a head does not fit the hidden states of its model.

    Args:
        width: size of the hidden states that the head takes.
        hidden_size: size of those of the model.
        where: file of the head.
    """
    if width != hidden_size:
        what = f"the reward head takes hidden states of size {width:,}, but the model's have size {hidden_size:,}."
        raise UserError(what, where, remedy="Use the base model with which it was trained.")


def _score(folder: Path) -> tuple[dict[str, Tensor], Path] | None:
    """The score head of a sequence classifier: in a single file, a shard, or an adapter's weights."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = files_of_tensors(index) if index.is_file() else {}
    for file in (folder / name for name in ([names[_SCORE]] if _SCORE in names else _WEIGHTS)):
        key = next((name for name in read_header(file) if name.endswith(_SCORE)), None) if file.is_file() else None
        if key is not None:
            with safe_open(file, "pt") as tensors:
                return _check_labels({WEIGHT: tensors.get_tensor(key).float()}, file), file
    return None


def write_value_head(
    folder: Path, weights: Mapping[str, Tensor], kind: tuple[str, int] | None = None, is_critic: bool = False
) -> None:
    """Write ``value_head.safetensors``.

    Args:
        folder: the destination.
        weights: by LLaMA-Factory's names; saved in float32.
        kind: registered name and width of a head other than the linear layer.
        is_critic: whether it is the value head of PPO.
    """
    from safetensors.torch import save_file

    whole = dict(weights) if kind else {WEIGHT: weights[WEIGHT], BIAS: weights.get(BIAS, torch.zeros(1))}
    if is_critic:
        whole[CRITIC] = torch.ones(1)
    metadata = {"format": "pt"} | ({_KIND: kind[0], "width": str(kind[1])} if kind else {})
    save_file({name: value.float().contiguous() for name, value in whole.items()}, folder / VALUE_HEAD, metadata)


def save_classifier(
    model: nn.Module, tokenizer: Any, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None = None,
    max_shard_size: str | int = SHARD_SIZE,
) -> None:  # fmt: skip
    """Write a language model and a score head as one sequence classifier, replacing the language model in ``folder``.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        weights: weights of the head.
        folder: the folder of the language model.
        dtype: dtype of the saved weights. Default: the one in which the model was loaded.
        max_shard_size: maximum size of a file.

    Raises:
        UserError: if transformers would compute the score at another position: it uses the last token other than
            padding.
    """
    from transformers import AutoModelForSequenceClassification

    inner: Any = model
    config = copy.deepcopy(inner.config)
    config.num_labels, config.dtype = 1, dtype or inner.config.dtype
    config.pad_token_id = pad_of_classifier(tokenizer)
    with torch.device("meta"), suppress_loading_messages():
        classifier = AutoModelForSequenceClassification.from_config(config)
    backbone = inner.base_model.state_dict()
    prefix = classifier.base_model_prefix
    state = {f"{prefix}.{name}": value.detach().to(config.dtype) for name, value in backbone.items()}
    state["score.weight"] = weights[WEIGHT].to(config.dtype)
    classifier.load_state_dict(state, assign=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    with suppress_loading_messages():
        classifier.save_pretrained(folder, max_shard_size=max_shard_size)


def save_reward_head(
    weights: Mapping[str, Tensor], model: nn.Module, tokenizer: Any, folder: Path, kind: tuple[str, int] | None = None,
    **saving: Any,
) -> None:  # fmt: skip
    """Write the head of the full model in ``folder`` in its original format. A value head has a bias, a classifier
    has none. ``kind``: registered name and width of a head other than the linear layer. ``saving``: ``dtype`` and
    ``max_shard_size`` of a classifier."""
    if kind:
        write_value_head(folder, weights, kind)
    elif BIAS in weights:
        write_value_head(folder, weights)
    else:
        save_classifier(model, tokenizer, weights, folder, **saving)


_OTHER_PADDING = "Set a separate pad_token in the tokenizer, or save a value head (reward_head: value_head)."


def pad_of_classifier(tokenizer: Any, remedy: str = _OTHER_PADDING) -> int:
    """A padding token that does not end responses: the tokenizer's own, or another special token.

    Args:
        remedy: what to do if there is none.
    Raises:
        UserError: if there is none.
    """
    eos = tokenizer.eos_token_id
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    special = sorted(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    others = [*named, *tokenizer.all_special_ids, *special]
    found = next((token for token in others if token is not None and token != eos), None)
    if found is None:
        raise UserError(
            "a sequence classifier reads its score at the last non-padding token, but the tokenizer pads with "
            "its EOS token, so the score would be read one token early.",
            remedy=remedy,
        )
    return int(found)


def add_score_to_adapter(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Convert the adapter in ``folder`` to one of a sequence classifier, with the score as a fully trained module."""
    from safetensors.torch import load_file, save_file

    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    tensors["base_model.model.score.weight"] = weights[WEIGHT].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    raw = read_object(config)
    raw |= {"task_type": "SEQ_CLS", "modules_to_save": [*(raw.get("modules_to_save") or []), "score"]}
    write_json(config, raw)


def parts_of_reward_model(folder: Path, adapters: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The base model and the adapters of a reward model, which may be the folder of an adapter.

    Raises:
        UserError: if an adapter does not name its base model.
    """
    config = folder / "adapter_config.json"
    if not config.is_file() or (folder / "config.json").is_file():
        return str(folder), [*adapters]
    base = read_object(config).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        remedy = "Set reward_model to the base model, and reward_model_adapters to the adapter."
        raise UserError("the adapter does not name its base model.", str(config), remedy=remedy, option="reward_model")
    return base, [str(folder), *adapters]


def reward_model_folders(
    name: str, adapters: Sequence[str], options: ModelOptions, finds: FindsFolder = local_folder
) -> list[Path | None]:
    """The folders of a reward model: its base model, then its adapters in order.

    Args:
        name: a folder or Hub ID of a model or an adapter.
        adapters: folders or Hub IDs of its adapters.
        options: options of the hub.
        finds: returns the folder of a name, or None if it is not known yet. Default: downloads it if necessary.

    Raises:
        UserError: for a name that cannot be found.
    """
    folder = finds(name, options, "reward_model", _FILES)
    if folder is None:
        return [None]
    base, more = parts_of_reward_model(folder, adapters)
    found = [folder if base == str(folder) else finds(base, options, "reward_model", _FILES)]
    return [*found, *(finds(each, options, "reward_model_adapters", ADAPTER_PATTERNS) for each in more)]


def head_of_reward_model(name: str, folders: Sequence[Path]) -> dict[str, Tensor] | None:
    """The weights of the value head in the last of ``folders`` that has a head; None if it is that of a sequence
    classifier.

    Args:
        name: name of the reward model, for error messages.

    Raises:
        UserError: if there is no head: a new one would give random scores.
    """
    found = read_head(folders)
    if found is None:
        raise UserError(not_a_reward_model(name, "Train one with stage: rm, or set a reward function.", "reward_model"))
    weights, file = found
    if kind_of_head(file):
        raise UserError(
            f"{file} is not a linear layer; reward heads of other types are not supported.", option="reward_model"
        )
    return weights if file.name in (VALUE_HEAD, OLD_VALUE_HEAD) else None


def not_a_reward_model(name: str, remedy: str, option: str | tuple[str, ...] = ()) -> Problem:
    """The problem that a model has no reward head."""
    what = f'{name} has no {VALUE_HEAD} and no "score" weights: it is not a reward model.'
    return Problem(what, remedy=remedy, option=option)


def load_reward_model(
    name: str, adapters: Sequence[str] = (), quantization_bit: int | None = None, options: ModelOptions | None = None
) -> tuple[Any, Any, dict[str, Tensor] | None]:
    """A reward model for scoring: the model, its tokenizer, and the weights of a value head, or None if the model is a
    sequence classifier, which includes its score head.

    Args:
        name: a folder or Hub ID of a model or an adapter.
        adapters: folders or Hub IDs of its adapters, in order.
        quantization_bit: 4 or 8 to quantize while loading.
        options: options of the hub.

    Raises:
        UserError: if it cannot be found, no folder has a head, or weights are missing or do not fit.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

    options = options or ModelOptions()
    folders = [path for path in reward_model_folders(name, adapters, options) if path is not None]
    base, *merged = folders
    bits = {4: {"load_in_4bit": True}, 8: {"load_in_8bit": True}}.get(quantization_bit or 0)
    more: dict[str, Any] = {"dtype": torch.float32} if bits is None else {}
    if bits is not None:
        more["quantization_config"] = BitsAndBytesConfig(**bits)
    weights = head_of_reward_model(name, folders)
    if weights is None:
        more["num_labels"] = 1
    auto_class: Any = AutoModelForSequenceClassification if weights is None else AutoModelForCausalLM
    with suppress_loading_messages(), explain_conversion_errors(str(base)):
        model, found = auto_class.from_pretrained(
            base, use_safetensors=True, trust_remote_code=options.trust_remote_code, output_loading_info=True,
            ignore_mismatched_sizes=True, **more,  # reported below in one message
        )  # fmt: skip
        # The last adapter may have the score head, which was found in one of the folders.
        found["missing_keys"] = [key for key in found["missing_keys"] if not key.endswith(_SCORE)]
        raise_if(weight_problems(str(base), model, found, needs_head=False, names=REWARD_MODEL))
        for adapter in merged:
            model.load_adapter(str(adapter))
    return model, load_reward_tokenizer(folders, len(adapters)), weights


def load_reward_tokenizer(folders: Sequence[Path], num_adapters: int) -> Any:
    """Load the tokenizer of a reward model: its own, or that of its base model.

    Args:
        folders: folders of its base model and its adapters.
        num_adapters: number of adapters that are given besides the model; they come last.
    """
    from transformers import AutoTokenizer

    own = folders[len(folders) - 1 - num_adapters]
    with suppress_loading_messages():
        return AutoTokenizer.from_pretrained(own if any(own.glob("tokenizer*")) else folders[0])
