"""Read checkpoints of transformers' own Trainer, and write them if requested.

Reads ``optimizer.pt``, ``scheduler.pt``, ``rng_state.pth`` with ``weights_only=True``, so torch refuses files that
contain code. The position in the data is derived from ``global_step``, as in transformers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.trainer_pt_utils import safe_globals

from burnish.adapters.base import load_model_state, model_state
from burnish.config.errors import UserError
from burnish.loop.loop import Loop
from burnish.loop.state import load_state
from burnish.utils.tensor_files import read_header


def is_foreign(folder: Path) -> bool:
    """Whether another program wrote this checkpoint. burnish's have a manifest and a cursor."""
    return not (folder / "manifest.json").is_file() and not (folder / "stream.json").is_file()


def load_foreign(folder: Path, loop: Loop, model: nn.Module, steps_per_epoch: int, accumulation: int) -> list[str]:
    """Load a checkpoint of transformers.

    Returns:
        Sentences about missing parts, which start from the beginning.

    Raises:
        FileNotFoundError: if there is no trainer_state.json.
        UserError: if there are no weights.
    """
    load_foreign_weights(folder, model)
    loop.state.load_state_dict(load_state(folder).state_dict())
    epoch, step = divmod(loop.state.global_step, max(steps_per_epoch, 1))
    loop.loader.load_state_dict({"epoch": epoch, "position": step * accumulation})
    optimizer, scheduler = folder / "optimizer.pt", folder / "scheduler.pt"
    missing = " and ".join(path.name for path in (optimizer, scheduler) if not path.is_file())
    if not missing:
        loop.optimizer.load_state_dict(_tensors(optimizer, loop.parallel.device))
        loop.scheduler.load_state_dict(_tensors(scheduler))
    _load_generators(folder, loop.parallel.rank, loop.parallel.world_size)
    return [f"{folder} has no {missing}: the states of optimizer and scheduler are not restored."] if missing else []


def load_foreign_weights(folder: Path, model: Any) -> None:
    """Load ``model.safetensors``, its shards, or an adapter's file into ``model``."""
    if (folder / "adapter_config.json").is_file() and hasattr(model, "load_adapter"):
        model.load_adapter(str(folder), model.active_adapter, is_trainable=True)
        return
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(
            "expected a checkpoint with model.safetensors.", where=str(folder), remedy="Pass another checkpoint."
        )
    state = {name: tensor for file in files if read_header(file) for name, tensor in load_file(file).items()}
    current = model_state(model)
    # A tied weight may have been saved under its other name.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and name not in current:
            first = next(key for key, value in current.items() if value.data_ptr() == tensor.data_ptr())
            state.setdefault(first, state.pop(name))
    load_model_state(model, state)


def _tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    return torch.load(path, map_location=device, weights_only=True)


def _load_generators(folder: Path, rank: int, world_size: int) -> None:
    path = folder / ("rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth")
    if not path.is_file():
        return
    with safe_globals():  # numpy's array types, which the state of a generator consists of
        state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        cuda = state["cuda"]
        if isinstance(cuda, list):
            torch.cuda.random.set_rng_state_all(cuda)
        else:
            torch.cuda.random.set_rng_state(cuda)


def write_transformers_files(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Write ``optimizer.pt``, ``scheduler.pt`` and ``rng_state.pth`` in transformers' format."""
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    state: dict[str, Any] = {
        "python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()
    }  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    torch.save(state, folder / "rng_state.pth")
