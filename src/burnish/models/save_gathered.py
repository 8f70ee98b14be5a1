"""Save a model with sharded weights, one file at a time.

In: the model, on every rank; a collective function that gathers a weight. Out: on rank 0, the folder that
``models/save.py`` writes. A rank holds at most the weights of one file besides its shards. Exception: models whose
files contain other tensors than the model in memory (experts that are stacked while loading), which transformers
converts all at once on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.checkpoint.snapshot import named_tensors_without_duplicates
from burnish.models.quiet import suppress_loading_messages
from burnish.utils.json_files import write_json


def save_gathered(
    model: nn.Module, folder: Path, dtype: torch.dtype | None, max_shard_size: str | int,
    whole: Callable[[Tensor], Tensor], writes: bool,
) -> None:  # fmt: skip
    """Write the weights of ``model``. The config and tokenizer are written by the caller.

    Args:
        model: a model of transformers.
        folder: the destination.
        dtype: dtype of floating-point weights in the files; None: unchanged.
        max_shard_size: maximum size of a file.
        whole: gathers a sharded weight; a collective operation.
        writes: whether this rank writes. The others only take part in gathering.
    """
    state = named_tensors_without_duplicates(model, getattr(model, "_keys_to_ignore_on_save", None) or ())

    def fetched(name: str) -> Tensor | None:
        tensor = whole(state[name]).detach()
        if not writes:
            return None
        return tensor.to("cpu", _format(tensor, dtype))

    if _is_converted(model):
        tensors = {name: fetched(name) for name in state}
        if writes:
            with suppress_loading_messages():
                model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)  # type: ignore[operator]
        return
    from safetensors.torch import save_file

    files = _files(state, dtype, max_shard_size)
    for name, keys in files.items():
        shard = {key: fetched(key) for key in keys}
        if writes:
            tensors = {key: tensor.contiguous() for key, tensor in shard.items() if tensor is not None}
            save_file(tensors, folder / name, metadata={"format": "pt"})
    if writes and len(files) > 1:
        _write_index(folder, files, state, dtype)


@contextmanager
def trained_weights_whole(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which trained parameters are gathered on every rank. Those of an adapter are small."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                replaced.append((module, name, parameter))
    try:
        for module, name, parameter in replaced:
            module._parameters[name] = nn.Parameter(whole(parameter).detach())
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def _is_converted(model: Any) -> bool:
    """Whether the tensors of the files differ from those of the model, by transformers' table of conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def _format(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _files(state: dict[str, Tensor], dtype: torch.dtype | None, max_shard_size: str | int) -> dict[str, list[str]]:
    """File -> the weights in it, as transformers assigns them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    shapes: dict[str, Any] = {
        name: torch.empty(t.shape, dtype=_format(t, dtype), device="meta") for name, t in state.items()
    }
    return dict(split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size).filename_to_tensors)


def _write_index(
    folder: Path, files: dict[str, list[str]], state: dict[str, Tensor], dtype: torch.dtype | None
) -> None:
    # DeepSpeed replaces a weight with an empty tensor that has the shape as an attribute.
    shapes = (getattr(tensor, "ds_shape", tensor.shape) for tensor in state.values())
    index = {
        "metadata": {
            "total_parameters": sum(map(prod, shapes)),
            "total_size": sum(tensor.numel() * _format(tensor, dtype).itemsize for tensor in state.values()),
        },
        "weight_map": {key: name for name, keys in files.items() for key in sorted(keys)},
    }
    write_json(folder / "model.safetensors.index.json", index, sort_keys=True)
