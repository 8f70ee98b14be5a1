"""Check from names and shapes whether a LoRA adapter fits a model.

In:  a model (its parameters may be on the meta device) and an adapter's folder, of which only the config and the header
of the weights are read; or two states, of a checkpoint and of this run.
Out: the location of each adapter tensor in the model, and problems for the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from burnish.adapters.base import raise_unless_same_tensors
from burnish.adapters.lora_model import (
    FILE_PREFIX,
    embeddings,
    is_embedding,
    layer_features,
    linear_layers,
    pattern_fault,
)
from burnish.config.errors import Problem, UserError, few, shape_in_words
from burnish.config.options import raise_if
from burnish.utils.json_files import DAMAGED_FILE_REMEDY, quote_value, read_object
from burnish.utils.tensor_files import TensorInfo, read_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_UNSUPPORTED_FIELDS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Fields of peft's config that enable more than low-rank updates and fully trained modules."""

# Suffixes of tensor names in a file, one per kind of tensor.
_LINEAR, _BIAS, _EMBEDDING = ("lora_A.weight", "lora_B.weight"), "lora_B.bias", ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE, _BASE = "lora_magnitude_vector", "base_layer.weight"
_FACTORS = (*_LINEAR, _BIAS, *_EMBEDDING, _MAGNITUDE)


@dataclass(frozen=True)
class Fit:
    """An adapter and the modules of a model that it applies to.

    Args:
        config: peft's ``LoraConfig``.
        targets: paths of the layers with low-rank factors.
        whole: paths of the modules with a fully trained copy.
        base: name in the file -> parameter of the model that it replaces (an embedding saved with the adapter).
    """

    config: Any
    targets: Sequence[str]
    whole: Sequence[str]
    base: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> Fit:
        """Read an adapter. Raises UserError if a file is missing, damaged, or of an unsupported kind."""
        config = read_adapter_config(folder)
        targets: dict[str, None] = {}
        whole: dict[str, None] = {}
        base: dict[str, str] = {}
        for key in read_weights_header(folder):
            path, kind = _split_tensor_name(key)
            holder = path.rpartition(".")[0]
            if kind in _FACTORS:
                targets[path] = None
            elif kind == _BASE:
                base[key] = f"{path}.weight"
            elif module := _trained_module_of(holder, config.modules_to_save or ()):
                whole[module] = None
            else:
                base[key] = path
        return cls(config, list(targets), list(whole), base)

    def rank_at(self, path: str) -> int:
        """The rank in the layer at ``path``."""
        from peft.utils.other import get_pattern_key

        pattern = self.config.rank_pattern
        return int(pattern.get(get_pattern_key(pattern.keys(), path), self.config.r))

    def problems(self, model: nn.Module) -> Iterator[Problem]:
        """Find layers that do not support the settings."""
        sides = {path: min(_layer_shape(model.get_submodule(path))) for path in self.targets}
        small = next((path for path, side in sides.items() if self.config.r > side), None)
        if small is None or not str(self.config.init_lora_weights).startswith("pissa"):
            return
        what = f"pissa_init with lora_rank {self.config.r}: {small} has only {sides[small]} singular values."
        yield Problem(
            what, remedy="Lower lora_rank, or remove that layer from lora_target.", option=("pissa_init", "lora_rank")
        )


SCORE = f"{FILE_PREFIX}score.weight"
"""Score head of a reward model that was saved as a sequence classifier; read by ``models.reward_files``."""


def read_adapter_config(folder: Path) -> Any:
    """The config of the adapter in ``folder``, as peft's ``LoraConfig``.

    Raises:
        UserError: if it is missing or not plain LoRA.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise UserError(_no_adapter(folder))
    raw = read_object(path)
    method = raw.get("peft_type", "LORA")
    if method == "LORA":  # fields of other methods may have other values
        raise_if(Problem(wrong, where=str(path), remedy=DAMAGED_FILE_REMEDY) for wrong in _wrong_values(raw))
    if raw.get("task_type") == "SEQ_CLS":
        whole = [name for name in raw.get("modules_to_save") or () if name != "score"]
        raw = {**raw, "task_type": "CAUSAL_LM", "modules_to_save": whole or None}
    if more := _unsupported_feature(raw):
        what = f"this adapter uses {more}, which finetuning_type lora does not support."
        remedy = "Set finetuning_type: peft to run it through the peft library."
        if method == "OFT":
            remedy = "Set finetuning_type: oft."
        raise UserError(what, where=str(path), remedy=remedy, option="finetuning_type")
    from peft import LoraConfig

    try:
        known = {each.name for each in fields(LoraConfig)} - {"runtime_config"}
        return LoraConfig(**{name: value for name, value in raw.items() if name in known})
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UserError(f"peft rejects this adapter's config: {str(error).rstrip('.')}.", where=str(path)) from error


_TEXT, _NUMBER, _COUNT, _FLAG = "text", "a positive number", "a positive integer", "true or false"
_FIELD_TYPES = {
    "r": _COUNT, "lora_alpha": _NUMBER, "use_rslora": _FLAG, "use_dora": _FLAG, "lora_bias": _FLAG,
    "rank_pattern": _COUNT, "alpha_pattern": _NUMBER, "base_model_name_or_path": _TEXT, "target_modules": _TEXT,
    "modules_to_save": _TEXT,
}  # fmt: skip


def _wrong_values(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of a type that peft does not write."""
    for name, kind in _FIELD_TYPES.items():
        value = raw.get(name)
        is_pattern = name.endswith("_pattern")
        if value is None:
            continue
        if is_pattern and not isinstance(value, Mapping):
            yield f'"{name}" must be a mapping of names to {kind}. Received: {quote_value(value)}.'
            continue
        if is_pattern and (invalid := [key for key in value if pattern_fault(key)]):
            yield f'the keys of "{name}" must be regular expressions. Received: {quote_value(invalid[0])}.'
        items = list(value.values()) if is_pattern else value if isinstance(value, list) else [value]
        if not all(_has_type(kind, item) for item in items):
            yield f'"{name}" must be {kind}. Received: {quote_value(value)}.'
    dropout = raw.get("lora_dropout", 0)
    if not (_is_number(dropout) and 0 <= dropout < 1):
        yield f'"lora_dropout" must be at least 0 and below 1. Received: {quote_value(dropout)}.'


def _has_type(kind: str, value: Any) -> bool:
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _FLAG:
        return isinstance(value, bool)
    return _is_number(value) and value > 0 and (kind == _NUMBER or isinstance(value, int))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unsupported_feature(raw: Mapping[str, Any]) -> str:
    """The feature that LoRA does not have, such as another method; "" if there is none."""
    if raw.get("peft_type") != "LORA":
        return f"the method {raw.get('peft_type')}"
    if raw.get("bias", "none") != "none":
        return f"bias: {raw['bias']}"
    return next((name for name in _UNSUPPORTED_FIELDS if raw.get(name)), "")


def check_fit(model: nn.Module, folder: Path) -> Iterator[Problem]:
    """Yield problems that prevent attaching the adapter in ``folder`` to ``model``."""
    try:
        fit = Fit.of_folder(folder)
        header = read_weights_header(folder)
    except UserError as error:
        yield from error.problems
        return
    places = {**linear_layers(model), **embeddings(model)}
    modules = dict(model.named_modules())
    absent = [path for path in fit.targets if path not in places] + [path for path in fit.whole if path not in modules]
    if absent:
        what = f"the adapter is for a model with {few(absent, 1)}, which {type(model).__name__} does not have."
        yield _mismatch_problem(folder, fit, what)
        return
    if lacking := [name for name in _expected_names(fit, modules) if name not in header]:
        what = f"{WEIGHTS_NAME} lacks {few(lacking, 1)}."
        yield Problem(what, where=str(folder), remedy="Check that the adapter folder was copied completely.")
        return
    other = [text for key, info in header.items() if (text := _shape_difference(model, fit, key, info))]
    if other:
        more = f" ({len(other)} tensors differ)" if len(other) > 1 else ""
        yield _mismatch_problem(folder, fit, f"the adapter does not fit this {type(model).__name__}: {other[0]}{more}.")
        return
    yield from fit.problems(model)


def raise_unless_fitting(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Raise UserError if a checkpoint's adapter does not match the one of this run."""
    own_rank, rank = _rank_of_state(own), _rank_of_state(loaded)
    if own_rank != rank and None not in (own_rank, rank) and own.keys() == loaded.keys():
        what = f"the adapter in the checkpoint has rank {rank}, but this run uses rank {own_rank}."
        raise UserError(what, remedy=f"Set lora_rank: {rank}, or start a new run in a different output_dir.")
    raise_unless_same_tensors(own, loaded, "the adapter's weights")


def read_weights_header(folder: Path) -> dict[str, TensorInfo]:
    """Read name -> shape and dtype of each tensor of the adapter in ``folder``. Raises UserError if there are none."""
    path = folder / WEIGHTS_NAME
    if path.is_file():
        return {name: info for name, info in read_header(path).items() if name != SCORE}
    is_pickle = (folder / "adapter_model.bin").is_file()
    raise UserError(
        f"adapter_model.bin is a pickle file, which can run arbitrary code; burnish reads {WEIGHTS_NAME} only."
        if is_pickle
        else f"the adapter has no {WEIGHTS_NAME}.",
        where=str(folder),
        remedy="Save it again with a recent version of peft, which writes safetensors."
        if is_pickle
        else "Check that the adapter folder was copied completely.",
    )


def _trained_module_of(holder: str, names: Sequence[str]) -> str:
    """The fully trained module that a tensor of the module at ``holder`` belongs to, or "". As in peft, a name matches
    every path that ends with it as a string.
    """
    parts = holder.split(".")
    paths = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return next((path for path in paths if path.endswith(tuple(names))), "")


def _split_tensor_name(key: str) -> tuple[str, str]:
    """Split a name in a file: (path in the model, factor), or ("lm_head.weight", "") for a tensor of a fully trained
    module."""
    name = key.removeprefix(FILE_PREFIX)
    for kind in (*_FACTORS, _BASE):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}"), kind
    return name, ""


def _expected_names(fit: Fit, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the tensors that the file of an adapter contains."""
    bias = (_BIAS,) if fit.config.lora_bias else ()
    magnitude = (_MAGNITUDE,) if fit.config.use_dora else ()
    for path in fit.targets:
        factors = _EMBEDDING if is_embedding(modules[path]) else (*_LINEAR, *bias)
        for kind in (*factors, *magnitude):
            yield f"{FILE_PREFIX}{path}.{kind}"
    for path in fit.whole:
        for name, _ in modules[path].named_parameters(remove_duplicate=False):
            yield f"{FILE_PREFIX}{path}.{name}"


def _layer_shape(module: nn.Module) -> tuple[int, int]:
    """(I, O) of a linear layer; (vocabulary size, width) of an embedding."""
    layer: Any = getattr(module, "base_layer", module)
    if is_embedding(layer):
        return layer.num_embeddings, layer.embedding_dim
    return layer_features(layer)


def _shape_difference(model: nn.Module, fit: Fit, key: str, info: TensorInfo) -> str:
    """The difference in shape between a tensor of the file and the model; "" if it fits."""
    path, kind = _split_tensor_name(key)
    if kind in _FACTORS:
        inputs, outputs = _layer_shape(model.get_submodule(path))
        rank = fit.rank_at(path)
        a, b, vector = (rank, inputs), (outputs, rank), (outputs,)
        expected = dict(zip(_FACTORS, (a, b, vector, a, b, vector), strict=True))[kind]
    else:
        path = fit.base.get(key, path)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if path not in parameters:
            return f"{path} is not in the model"
        expected = tuple(parameters[path].shape)
    if info.shape == expected:
        return ""
    found, expected_shape = shape_in_words(info.shape), shape_in_words(expected)
    return f"{path} {kind} is {found} in the adapter, but {expected_shape} is expected".replace("  ", " ")


def _rank_of_state(state: Mapping[str, Tensor]) -> int | None:
    ranks = {len(tensor) for key, tensor in state.items() if key.endswith(("lora_A.weight", "lora_embedding_A"))}
    return ranks.pop() if len(ranks) == 1 else None


def _mismatch_problem(folder: Path, fit: Fit, what: str) -> Problem:
    base = fit.config.base_model_name_or_path
    remedy = f"It was trained on {base}." if base else "Set model_name_or_path to the model that it was trained on."
    return Problem(what, where=str(folder), remedy=remedy)


def _no_adapter(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem(
            f'adapter_name_or_path "{folder}" is not a folder.',
            remedy="Set it to the folder that contains the adapter.",
            option="adapter_name_or_path",
        )
    what = "a full model" if (folder / "config.json").is_file() else "no adapter"
    return Problem(
        f"the folder has no {CONFIG_NAME}: it contains {what}.",
        where=str(folder),
        remedy="Set model_name_or_path to a model, and adapter_name_or_path to an adapter.",
    )
