"""The parts of a run that a checkpoint holds.

A part has a file name, says whether every rank writes its own file, and checks a state before loading it.
``checkpoint/checkpoint.py`` iterates over the parts and knows no part by name. Parts are written and read in the order
of ``parts_of``. The random generators come last, so that loading another part does not draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from burnish.checkpoint.shards import Shards
from burnish.checkpoint.snapshot import rng_state, set_rng_state
from burnish.config.errors import Problem


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint can hold. Its state dict may be nested, with tensors, numbers, strings, lists and
    None.
    """

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> Any: ...


class ModelPart(Stateful, Protocol):
    """The weights, as the part "model" of a checkpoint."""

    file_stem: str  # "model" or "adapter_model"


def _missing_part(folder: Path, name: str, stem: str) -> Problem:
    what = f'this checkpoint has no "{name}" ({stem}), so training cannot be resumed from it.'
    return Problem(what, remedy="Resume from a different checkpoint, or start a new run in a different output_dir.")


@dataclass(frozen=True)
class Part:
    """One part of a run.

    Args:
        held: the object with the state.
        stem: file name without ``.safetensors`` and ``.json``.
        on_each_rank: every rank has its own state and writes it as ``<stem>_<rank>``. Otherwise only rank 0 writes.
        reads_all_ranks: whether ``held.load_states`` is called with the states of all saved ranks instead of
            ``load_state_dict`` with its own, so that another number of ranks can divide them again.
        is_saved: false if this run's checkpoints omit the part. It is loaded if present.
        is_of_model: whether the part is trained with the model and belongs to it, like the head of a reward model. It
            is saved with ``save_only_model`` too, and loaded with the best weights.
        is_collective: all ranks have to call ``state_dict`` together, although only rank 0 writes the file.
        refuses: (own state, state to load) -> a problem if the second belongs to another object, or None. Default: any
            state is loaded.
        missing: (folder, name, stem) -> the problem if a checkpoint has no such file.
    """

    held: Stateful
    stem: str
    on_each_rank: bool = False
    reads_all_ranks: bool = False
    is_collective: bool = False
    shards: Shards | None = None
    is_saved: bool = True
    is_of_model: bool = False
    refuses: Callable[[Mapping[str, Any], Mapping[str, Any]], Problem | None] | None = None
    missing: Callable[[Path, str, str], Problem] = _missing_part

    def stem_of(self, rank: int) -> str:
        return f"{self.stem}_{rank}" if self.on_each_rank else self.stem

    @property
    def is_sharded(self) -> bool:
        """Whether each rank writes its own shard."""
        return self.shards is not None and not self.is_collective

    def state_dict(self) -> Mapping[str, Any]:
        return self.held.state_dict() if self.shards is None else self.shards.state_dict(self.held)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.shards is None:
            self.held.load_state_dict(state)
        else:
            self.shards.load_state_dict(self.held, state)


class RngState:
    """The global random generators as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_rng_state(state)


_STEMS = {"state": "trainer_state"}
"""Part -> its file name, if it differs from the part's name."""


def parts_of(
    weights: ModelPart, optimizer: Stateful, scheduler: Stateful, others: Mapping[str, Stateful | Part], *,
    save_only_model: bool = False,
) -> dict[str, Part]:  # fmt: skip
    """Every part of a run, by name.

    Args:
        weights: the weights of the model.
        scheduler: the learning rate schedule.
        others: further parts. Each is saved under its name, except "state", which is saved as ``trainer_state``.
        save_only_model: save the model and the state only. Such a checkpoint cannot be resumed.
    """
    parts = {
        "model": Part(weights, weights.file_stem, is_of_model=True, missing=_mismatched_weights),
        "optimizer": Part(optimizer, "optimizer", refuses=_mismatched_optimizer),
        "scheduler": Part(scheduler, "scheduler"),
        **{
            name: held if isinstance(held, Part) else Part(held, _STEMS.get(name, name))
            for name, held in others.items()
        },
        "rng": Part(RngState(), "rng_state", on_each_rank=True),
    }
    return {
        name: replace(part, is_saved=not save_only_model or part.is_of_model or name == "state")
        for name, part in parts.items()
    }


def _mismatched_weights(folder: Path, name: str, stem: str) -> Problem:
    is_adapter = (folder / "adapter_model.safetensors").is_file()
    return Problem(
        f"this checkpoint contains {'an adapter' if is_adapter else 'a full model'}, but this run trains "
        f"{'a full model' if is_adapter else 'an adapter'}.",
        remedy="Set finetuning_type to the value used for the checkpoint, or set a different output_dir.",
    )


def _mismatched_optimizer(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> Problem | None:
    """Return a problem if ``loaded`` is the state of another optimizer.

    That is the case if it lacks entries of ``own``, or if both have settings that the other lacks. If only one has
    additional settings, it comes from another version of torch.
    """
    groups, others = own.get("param_groups", []), loaded.get("param_groups", [])
    apart = ((set(mine) - set(theirs), set(theirs) - set(mine)) for mine, theirs in zip(groups, others, strict=False))
    if own.keys() <= loaded.keys() and len(groups) == len(others) and not any(map(all, apart)):
        return None
    return Problem(
        "this checkpoint contains the state of a different optimizer.",
        remedy="Set optim and its options as in the checkpoint, or start a new run in a different output_dir.",
    )
