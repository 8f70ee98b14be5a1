"""Random generators of a data loader.

In:  a data loader. Out: the ``torch.Generator`` objects of it and its samplers; and the states of generators that are
attributes of its collator, its dataset, its samplers and what they wrap: of torch, of NumPy, or ``random.Random``.

A checkpoint stores them for each rank, so that a resumed run draws the same masks and augmentations. Worker processes
have copies of these objects, whose states are not known here. Variables of functions are not found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HOLDERS = ("collate_fn", "dataset", "sampler", "batch_sampler")
_NESTED = ("data_collator", "collate", "collate_fn", "inner", "dataset", "sampler", "transform", "transforms")
"""Attributes with the object that a collator, a dataset or a sampler wraps."""
_DEEPEST = 4


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects of a data loader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def set_generators(loader: Any, states: Sequence[Tensor]) -> None:
    """Restore the generators of a data loader from saved states, unless their number has changed."""
    generators = generators_of(loader)
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def attribute_states(loader: Any) -> dict[str, Any]:
    """Return the states of generators that are attributes, by their path; empty if worker processes collate."""
    return {
        f"{path}.{name}": _state_of(value)
        for path, holder in _holders(loader)
        for name, value in vars(holder).items()
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)
    }


def set_attribute_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Restore generators that are attributes. One that the script creates at its first use is created here."""
    for path, holder in _holders(loader) if states else ():
        for name, state in ((key.removeprefix(f"{path}."), state) for key, state in states.items()):
            if name not in vars(holder):
                continue
            if vars(holder)[name] is None and hasattr(holder, "create_rng"):  # transformers' collator for MLM
                holder.create_rng()
            generator = vars(holder)[name]
            restored = _restored(generator, state)
            if restored is not generator:
                setattr(holder, name, restored)


def _holders(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of the collator, the dataset, the samplers and the objects that they wrap."""
    if getattr(loader, "num_workers", 0):
        return
    waiting = [(name, getattr(loader, name, None), 0) for name in _HOLDERS]
    seen: set[int] = set()
    while waiting:
        path, holder, depth = waiting.pop(0)
        if holder is None or id(holder) in seen or depth > _DEEPEST:
            continue
        seen.add(id(holder))
        waiting += [(f"{path}.{name}", value, depth + 1) for name, value in _wrapped_by(holder)]
        if hasattr(holder, "__dict__"):
            yield path, holder


def _wrapped_by(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of what an object wraps. Properties of scripts' classes are not evaluated."""
    if isinstance(holder, MethodType):
        yield "self", holder.__self__
    elif isinstance(holder, partial):
        yield "func", holder.func
    elif isinstance(holder, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(holder))
    elif hasattr(holder, "__dict__"):
        yield from ((name, vars(holder)[name]) for name in _NESTED if name in vars(holder))


def _state_of(generator: Any) -> Any:
    """The state of a generator as data and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _restored(generator: Any, state: Any) -> Any:
    """Return the generator in a saved state; a new one instead of None, or of a generator of another type."""
    if isinstance(state, Tensor):
        generator = generator if isinstance(generator, torch.Generator) else torch.Generator()
        generator.set_state(state)
    elif isinstance(state, tuple):
        generator = generator if isinstance(generator, random.Random) else random.Random()  # noqa: S311
        generator.setstate(state)
    elif "has_gauss" in state:
        generator = generator if isinstance(generator, np.random.RandomState) else np.random.RandomState()
        generator.set_state(state)
    else:
        kind = getattr(np.random, state["bit_generator"])
        is_same = isinstance(generator, np.random.Generator) and type(generator.bit_generator) is kind
        generator = generator if is_same else np.random.Generator(kind())
        generator.bit_generator.state = state
    return generator


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
