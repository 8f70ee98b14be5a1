"""Settings of FSDP: ``fsdp``, ``fsdp_config``, and the environment variables of ``accelerate launch``.

In: the settings of transformers and accelerate, including those of FSDP1. Out: settings; notes on renamed settings and
those without effect; problems: a missing file, an unknown word, an unsupported kind of state dict.

Keys: https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments.fsdp_config,
https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import Problem, did_you_mean
from burnish.parallel.accelerate_launch import is_true
from burnish.parallel.options import ParallelOptions
from burnish.utils.json_files import json_beside, quote_value, read_settings

_OFF: tuple[Any, ...] = (None, False, "", [], {})
_FSDP_WORDS = {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap"}
_STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
_OLD_RESHARD = {
    "FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False, "NO_SHARD": False,
}  # fmt: skip
"""FSDP1's strategies, which accelerate passes as ``reshard_after_forward``."""


def _is_flag(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on", "false", "0", "no", "off")


def _is_count(value: Any, least: int) -> bool:
    text = str(value).strip()
    return text.isascii() and text.isdigit() and int(text) >= least


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


_FLAG = ("true or false", _is_flag)
_NAMES = ("a class name or a list of class names", _are_names)
_SUPPORTED_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "sharding_strategy": (
        f"one of {', '.join(_STRATEGIES.values())}", lambda value: _strategy_name(value) in _STRATEGIES.values(),
    ),
    "reshard_after_forward": ("true or false", lambda value: _is_flag(value) or str(value).upper() in _OLD_RESHARD),
    "offload_params": _FLAG, "cpu_offload": _FLAG, "activation_checkpointing": _FLAG,
    "transformer_layer_cls_to_wrap": _NAMES, "transformer_cls_to_wrap": _NAMES,
    "min_num_params": ("an integer of at least 0", lambda value: _is_count(value, 0)),
    "dp_replicate_size": ("an integer of at least 1", lambda value: _is_count(value, 1)),
}  # fmt: skip
"""Key -> what its value must be, in words and as a test."""
_WITHOUT_EFFECT = {
    "version": "only FSDP2 is supported.",
    "fsdp": "set the option fsdp instead.",
    "auto_wrap_policy": "layers are detected automatically, or set by transformer_layer_cls_to_wrap or min_num_params.",
    "backward_prefetch": "FSDP2 prefetches the next layer.",
    "backward_prefetch_policy": "FSDP2 prefetches the next layer.",
    "forward_prefetch": "FSDP2 prefetches the next layer.",
    "limit_all_gathers": "FSDP2 frees gathered weights without waiting.",
    "use_orig_params": "FSDP2 shards each parameter separately.",
    "sync_module_states": "every process reads the same files.",
    "cpu_ram_efficient_loading": "each process reads its shard from the files.",
    "state_dict_type": "checkpoints are sharded safetensors; the final model is one folder with the full weights.",
    "mixed_precision_policy": "set bf16 or fp16 instead.",
    "xla": "burnish does not support XLA.", "xla_fsdp_v2": "burnish does not support XLA.",
    "xla_fsdp_grad_ckpt": "burnish does not support XLA.", "xla_fsdp_settings": "burnish does not support XLA.",
}  # fmt: skip


@dataclass(frozen=True)
class FsdpSettings:
    """How weights are sharded.

    Args:
        reshards: whether a layer's weights are released after its forward pass and gathered again for its backward
            pass.
        offloads: whether shards and their optimizer states are kept in main memory.
        layer_classes: class names of layers that are gathered one at a time; empty: determined from the model.
        min_num_params: gather modules with at least this number of parameters instead; 0: disabled.
        checkpoints: whether layers are recomputed in the backward pass.
        copies: number of replicas of the model, each sharded over its share of the processes. 0: one per machine; None:
            a single one.
    """

    reshards: bool = True
    offloads: bool = False
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    checkpoints: bool = False
    copies: int | None = None


def uses_fsdp(options: ParallelOptions) -> bool:
    is_on = options.fsdp not in _OFF and "no_shard" not in _fsdp_words(options)
    return is_on or is_true(os.environ.get("ACCELERATE_USE_FSDP"))


def fsdp_settings(options: ParallelOptions) -> FsdpSettings:
    """Parse the settings of options that were checked before."""
    flags, values = _fsdp_words(options), _values(options)
    strategy = _strategy(flags, values)
    layers = values.get("transformer_layer_cls_to_wrap", values.get("transformer_cls_to_wrap")) or ()
    layers = [name.strip() for name in layers.split(",")] if isinstance(layers, str) else layers
    reshards = values.get("reshard_after_forward", _OLD_RESHARD.get(strategy.upper(), True))
    copies, old = values.get("dp_replicate_size"), _OLD_RESHARD.get(str(reshards).upper())
    return FsdpSettings(
        reshards=is_true(reshards) if old is None else old,
        offloads="offload" in flags or is_true(values.get("offload_params", values.get("cpu_offload"))),
        layer_classes=tuple(layers),
        min_num_params=int(values.get("min_num_params") or 0) if not layers else 0,
        checkpoints=is_true(values.get("activation_checkpointing")),
        copies=int(copies) if copies not in (None, 1, "1") else 0 if strategy.startswith("hybrid") else None,
    )


def fsdp_problems(options: ParallelOptions) -> Iterator[Problem]:
    value = options.fsdp_config
    if isinstance(value, str) and not Path(value).exists():
        what = f'"fsdp_config": the file {Path(value).absolute()} does not exist.'
        yield Problem(what, remedy=json_beside(Path(value)), option="fsdp_config")
        return
    if value and not uses_fsdp(options):
        yield Problem(
            '"fsdp_config" has no effect without "fsdp".',
            remedy="Set fsdp: full_shard, or remove it.",
            option=("fsdp_config", "fsdp"),
        )
    for word in sorted(_fsdp_words(options) - _FSDP_WORDS):
        yield Problem(f'"fsdp": unknown value "{word}".{did_you_mean(word, _FSDP_WORDS)}', option="fsdp")
    for key, setting in _log_request().items():
        if key not in _SUPPORTED_KEYS and key not in _WITHOUT_EFFECT and setting.lower() not in ("", "false", "none"):
            what = f'the environment variable FSDP_{key.upper()} is "{setting}", which burnish does not support.'
            yield Problem(what, remedy="Remove the setting from accelerate's config file, or unset the variable.")
    try:
        known = [*_SUPPORTED_KEYS, *_WITHOUT_EFFECT]
        for key, value in _values(options).items():
            if key not in known:
                yield Problem(f'"fsdp_config": unknown key "{key}".{did_you_mean(key, known)}', option="fsdp_config")
            elif key in _SUPPORTED_KEYS and not _SUPPORTED_KEYS[key][1](value):
                what = f'"fsdp_config": "{key}" must be {_SUPPORTED_KEYS[key][0]}. Received: {quote_value(value)}.'
                yield Problem(what, option="fsdp_config")
    except ValueError as error:
        yield Problem(f'"fsdp_config": the file {error}.', where=str(value), option="fsdp_config")


def fsdp_notes(options: ParallelOptions) -> Iterator[str]:
    """Notes on settings of other versions and their meaning here."""
    if not uses_fsdp(options):
        return
    values = _config_values(options)
    for key in values:
        if key in _WITHOUT_EFFECT and key not in ("version", "fsdp"):
            yield f'"fsdp_config": "{key}" has no effect: {_WITHOUT_EFFECT[key]}'
    if "sharding_strategy" in values:
        resharding = str(fsdp_settings(options).reshards).lower()
        yield (
            '"fsdp_config": "sharding_strategy" is an FSDP1 setting; it is read as reshard_after_forward: '
            f"{resharding}."
        )


def _strategy(flags: set[str], values: Mapping[str, Any]) -> str:
    if "sharding_strategy" in values:
        return _strategy_name(values["sharding_strategy"])
    return next((word for word in sorted(flags) if "shard" in word), "full_shard")


def _strategy_name(value: Any) -> str:
    """The name of one of FSDP1's strategies, which may be given by its number."""
    name = str(value).lower()
    return _STRATEGIES.get(name, name)


def _fsdp_words(options: ParallelOptions) -> set[str]:
    """The words of ``"full_shard auto_wrap"``, ``["full_shard", "auto_wrap"]``, or true."""
    if options.fsdp in _OFF or isinstance(options.fsdp, bool):
        return set()
    text = options.fsdp if isinstance(options.fsdp, str) else " ".join(options.fsdp or [])
    return {word for word in text.replace(",", " ").split() if word.lower() != "true"}


def _values(options: ParallelOptions) -> dict[str, Any]:
    return {
        **{name: value for name, value in _log_request().items() if name in _SUPPORTED_KEYS and value not in _UNSET},
        **_config_values(options),
    }


_UNSET = ("", "none", "None")
"""Values of environment variables that accelerate sets without a value."""


def _config_values(options: ParallelOptions) -> dict[str, Any]:
    """``fsdp_config``, without the prefix ``fsdp_`` that keys may have, and without empty values.

    Raises:
        ValueError: a clause, if the file is not JSON.
    """
    config: Any = options.fsdp_config or {}
    if isinstance(config, str):
        config = read_settings(Path(config))
        if not isinstance(config, dict):
            raise ValueError("does not contain a JSON object")
    given = {str(key): value for key, value in config.items() if value not in (None, "", [])}
    return {(key if key == "fsdp" else key.removeprefix("fsdp_")): value for key, value in given.items()}


def _log_request() -> dict[str, str]:
    """The environment variables that ``accelerate launch --config_file fsdp.yaml`` sets."""
    if not is_true(os.environ.get("ACCELERATE_USE_FSDP")):
        return {}
    renamed = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "dp_replicate_size"}
    return {
        renamed.get(name, name.removeprefix("FSDP_").lower()): value
        for name, value in os.environ.items()
        if name.startswith("FSDP_") or name in renamed
    }
