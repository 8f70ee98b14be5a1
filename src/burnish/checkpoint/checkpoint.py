"""Save and load checkpoints, from which a run resumes exactly.

The parts of a run that change (weights, optimizer, schedule, loader, state, callbacks, generators) are ``Stateful``
objects in one dict. Saving and loading iterate over it. A checkpoint is written to a temporary folder in
``output_dir``, flushed, completed by a manifest and renamed, so a folder named ``checkpoint-12`` is always complete.
Nothing is pickled: tensors are stored as safetensors, everything else as JSON.

In:  parts by name, a step number, the fingerprints of what the run depends on.
Out: ``output_dir/checkpoint-<step>/`` with ``model.safetensors`` (or ``adapter_model.safetensors``),
     ``trainer_state.json``, ``<part>.safetensors`` and ``<part>.json``, ``manifest.json``.
     Sharded parts are written by all ranks (``checkpoint/shards.py``).
Refuses: damaged checkpoints, and checkpoints of another run (``comparison.py``). ``exclusive_writer_lock`` in
``utils/files.py`` prevents two runs from writing to the same folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from burnish.checkpoint.manifest import flush_folders, integrity_errors, write_manifest
from burnish.checkpoint.parts import Part
from burnish.checkpoint.shards import (
    ShardedTensor,
    gather_reports,
    index_name,
    read_sharded,
    report_files,
    shard_name,
    write_index,
    write_shard,
)
from burnish.checkpoint.snapshot import copy_large, join, split
from burnish.config.errors import Problem, UserError, few
from burnish.config.options import option
from burnish.utils.files import remove
from burnish.utils.json_files import write_json

CHECKPOINT_PREFIX = "checkpoint"
_NAME = re.compile(rf"^{CHECKPOINT_PREFIX}-(\d+)$")
TEMPORARY = ".incomplete-"
"""Beginning of the names of temporary folders in ``output_dir``."""


@dataclass
class CheckpointOptions:
    """Output folder, checkpoints and resume."""

    output_dir: str | None = option(
        None, "Output folder for checkpoints, the final model, logs and plots.", names_place=True
    )
    overwrite_output_dir: bool = option(
        False, "Start over if output_dir contains an earlier run, and replace its files."
    )
    resume: str = option(
        "auto",
        "Whether to resume from the latest checkpoint in output_dir. auto: if one exists; never: do not resume; must: "
        "raise an error if none exists.",
        choices=("auto", "never", "must"),
    )  # fmt: skip
    resume_from_checkpoint: str | bool | None = option(
        None,
        "Checkpoint folder to resume from. true: the latest in output_dir; false: none.",
        names_place=True,
    )
    resume_despite_changes: bool = option(
        False, "Resume even if data, model, seed or batch size have changed since the checkpoint."
    )
    save_total_limit: int | None = option(
        None, "Maximum number of checkpoints to keep. The oldest are deleted; the best is kept.", ge=1
    )
    save_only_model: bool = option(
        False,
        "Save only the model in checkpoints, without optimizer and RNG states. Training cannot be resumed from them.",
    )
    save_in_background: bool = option(
        True, "Write checkpoints in the background. Requires memory for a copy of the training state."
    )
    load_best_model_at_end: bool = option(False, "Load the weights of the best evaluation at the end of training.")
    metric_for_best_model: str | None = option(None, "Metric that selects the best checkpoint. Default: eval_loss.")
    greater_is_better: bool | None = option(
        None, "Whether a higher metric_for_best_model is better. Default: false for losses, true otherwise."
    )


def output_folder(options: CheckpointOptions) -> Path:
    """``output_dir``, which a planned run always has."""
    assert options.output_dir is not None
    return Path(options.output_dir)


@dataclass(frozen=True)
class _PendingSave:
    """A started save: what this rank writes, and where."""

    step: int
    target: Path
    temporary: Path
    taken: Mapping[str, tuple[dict[str, Any], Any]]  # stem -> tensors and data
    sharded: list[str]  # stems of parts of which each rank writes its shard
    copies_later: bool  # the tensors in ``taken`` are not copied yet; the writing thread copies them
    best: str | None


class Listeners(Protocol):
    """The methods of a callback handler that saving depends on."""

    def foreign_callbacks(self, event: str | None) -> list[str]:
        """Names of callbacks from outside burnish that act on ``event`` (any event if None)."""
        ...


class Ranks(Protocol):
    """The processes of a run. A backend implements this."""

    rank: int
    world_size: int

    def barrier(self) -> None: ...


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``output_dir``.
        fingerprints: what the run depends on, by name; JSON data. Stored in each manifest.
        write_extras: called with the folder to add files for other libraries (config, tokenizer).
        limit: number of checkpoints to keep; None keeps all.
        in_background: copy the tensors, then write them in a thread while training continues.
        processes: the processes of the run, if there are several.
        listeners: if a callback from outside burnish acts on ``on_save``, the save is not in the background, because it
            may read or upload the folder. If it acts on any event, tensors are copied before the save returns, because
            it may change the weights.
        copies_later: copy large tensors in the writing thread as well. Requires that only a step of the loop changes
            the weights, and that it calls ``wait_for_copies`` first.
    """

    def __init__(
        self, folder: str | Path, *, fingerprints: Mapping[str, Any] | None = None,
        write_extras: Callable[[Path], None] | None = None, limit: int | None = None, in_background: bool = True,
        processes: Ranks | None = None, listeners: Listeners | None = None, copies_later: bool = False,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        self.fingerprints = dict(fingerprints or {})
        self.write_extras = write_extras
        self.limit = limit if limit and limit > 0 else None
        self.in_background = in_background
        self.processes = processes
        self.rank, self.world_size = (0, 1) if processes is None else (processes.rank, processes.world_size)
        self.last_step: int | None = None  # step of the last save in this process
        self._writer: threading.Thread | None = None
        self._has_copies = threading.Event()  # set once everything that the next update changes is copied
        self._has_copies.set()
        self._failure: BaseException | None = None
        self._listeners = listeners
        self._may_copy_later = in_background and copies_later

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, parts: Mapping[str, Part], *, best: str | None = None) -> Path:
        """Write ``checkpoint-<step>``, then remove old checkpoints beyond ``limit``.

        Args:
            step: number of completed steps.
            parts: every part.
            best: a checkpoint folder that must not be removed.

        Raises:
            OSError: if this save or the previous one failed, for example because the disk is full. Older checkpoints
                are not affected.
        """
        self.wait()
        self.last_step = step
        target = self.path(step)
        parts = {name: part for name, part in parts.items() if part.is_saved}
        temporary = self._begin(target, parts)
        copies_later = self._may_copy_later and not self._has_listener(None)
        sharded = [part.stem for part in parts.values() if part.is_sharded]
        taken = self._snapshot_parts(parts, copies_later)
        if self.rank != 0 and not sharded:
            return target
        if copies_later:
            self._has_copies.clear()
        elif self.rank == 0:
            self._add_extras(temporary)
        pending = _PendingSave(step, target, temporary, taken, sharded, copies_later, best)
        write = partial(self._write_all if self.rank == 0 else self._write_own, pending)
        if self.in_background:
            self._writer = threading.Thread(
                target=self._write_catching_errors, args=(write,), name="burnish-checkpoint"
            )
            self._writer.start()
        else:
            write()
        if self._has_listener("on_save"):
            self.wait()
        return target

    def _write_all(self, pending: _PendingSave) -> None:
        """Write the files of rank 0, wait for those of the other ranks, and rename the folder."""
        self._write_shards(pending)
        if pending.copies_later:
            self._add_extras(pending.temporary)
        for stem, (tensors, data) in pending.taken.items():
            _write_part(pending.temporary, stem, {} if stem in pending.sharded else tensors, data)
        reported = gather_reports(pending.temporary, self.world_size) if pending.sharded else {}
        for stem in pending.sharded:
            write_index(pending.temporary, stem, self.world_size)
        write_manifest(pending.temporary, pending.step, self.fingerprints, reported)
        self._replace_target(pending.temporary, pending.target)
        self._rotate(keep={pending.target.name, Path(pending.best).name if pending.best else ""})

    def _write_own(self, pending: _PendingSave) -> None:
        """Write the shards of a rank other than 0, and report them to rank 0."""
        names = [shard_name(stem, self.rank, self.world_size) for stem in pending.sharded]
        with report_files(pending.temporary, self.rank, names):
            self._write_shards(pending)

    def _write_shards(self, pending: _PendingSave) -> None:
        """Copy the tensors that the next update changes, and write this rank's shards."""
        if pending.copies_later:
            self._copy(tensors for tensors, _ in pending.taken.values())
        for stem in pending.sharded:
            path = pending.temporary / shard_name(stem, self.rank, self.world_size)
            write_shard(path, pending.taken[stem][0], is_first=self.rank == 0)

    def _has_listener(self, event: str | None) -> bool:
        """Whether a callback from outside burnish acts on ``event`` (any event if None)."""
        return self._listeners is not None and bool(self._listeners.foreign_callbacks(event))

    def _snapshot_parts(self, parts: Mapping[str, Part], leave_large: bool) -> dict[str, tuple[dict[str, Any], Any]]:
        """Return the tensors and data that this rank writes, by file stem. All ranks iterate over the parts in the same
        order."""
        taken = {}
        for part in parts.values():
            if part.on_each_rank or not (self.rank == 0 or part.is_sharded or part.is_collective):
                continue
            state = part.state_dict()
            if self.rank == 0 or part.is_sharded:
                taken[part.stem] = split(state, copy=self.in_background, leave_large=leave_large)
        return taken

    def _begin(self, target: Path, parts: Mapping[str, Part]) -> Path:
        """Create the temporary folder and write the parts that each rank saves separately."""
        temporary = self.folder / f"{TEMPORARY}{target.name}"
        if self.rank == 0:
            remove(temporary)
            temporary.mkdir(parents=True)
        self._barrier()
        if not temporary.is_dir():
            what = f"rank {self.rank} cannot see the files that rank 0 writes to output_dir."
            raise UserError(
                what,
                where=str(self.folder),
                remedy="Set output_dir to a folder that all nodes of the run share.",
                option="output_dir",
            )
        for part in parts.values():
            if part.on_each_rank:
                _write_part(temporary, part.stem_of(self.rank), *split(part.state_dict()))
        self._barrier()
        return temporary

    def _barrier(self) -> None:
        if self.processes is not None:
            self.processes.barrier()

    def _add_extras(self, temporary: Path) -> None:
        if self.write_extras is not None:
            self.write_extras(temporary)

    def _copy(self, taken: Iterable[dict[str, Any]]) -> None:
        """Copy the large tensors that were not copied yet, then let the next update continue (also after an error)."""
        try:
            for tensors in taken:
                copy_large(tensors)
        finally:
            self._has_copies.set()

    def wait_for_copies(self) -> None:
        """Wait until the background save has copied the weights."""
        self._has_copies.wait()

    def _replace_target(self, temporary: Path, target: Path) -> None:
        replaced = self.folder / f"{TEMPORARY}replaced-{target.name}"
        if os.path.lexists(target):
            target.rename(replaced)
        temporary.rename(target)
        flush_folders([self.folder])
        remove(replaced)

    def wait(self) -> None:
        """Wait until the background save is written. Raises its exception if it failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write_catching_errors(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # re-raised by wait() in the training thread
            self._failure = error

    def _rotate(self, keep: set[str]) -> None:
        if self.limit is None:
            return
        kept_anyway = [path for path in self.all() if path.name in keep]
        others = [path for path in self.all() if path.name not in keep]
        for path in others[: max(0, len(others) + len(kept_anyway) - max(self.limit, len(kept_anyway)))]:
            remove(path)

    # --- reading ------------------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """All checkpoint folders, oldest step first, including damaged ones."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.match(path.name))]
        return [path for _, path in sorted(found)]

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest valid checkpoint, and a sentence for each newer one that is damaged."""
        skipped: list[str] = []
        for path in reversed(self.all()):
            wrong = integrity_errors(path)
            if not wrong:
                return path, skipped
            skipped.append(f"{path} was skipped: {'; '.join(wrong[:3])}.")
        return None, skipped

    def path(self, step: int) -> Path:
        return self.folder / f"{CHECKPOINT_PREFIX}-{step}"

    def remove_incomplete(self) -> None:
        """Remove temporary files of interrupted saves. Only the process that holds the folder's lock may call this."""
        for pattern in (f"{TEMPORARY}*", ".*.incomplete"):
            for path in self.folder.glob(pattern):
                remove(path)


def load(folder: Path, parts: Mapping[str, Part], rank: int = 0) -> None:
    """Load the state of every part, in order.

    Raises:
        UserError: if the folder is damaged, lacks a part of this run, or contains another optimizer's state.
    """
    wrong = integrity_errors(folder)
    if wrong:
        raise UserError(f"{'; '.join(wrong)}.", where=str(folder), remedy=valid_checkpoints_beside(folder))
    for name, part in parts.items():
        stem = part.stem_of(rank)
        if part.reads_all_ranks:
            value: Any = part.held
            value.load_states(_states_of_ranks(folder, part))
        elif has_part(folder, stem):
            state = _read_part(folder, stem, by_shards=part.shards is not None)
            if part.refuses is not None:
                _raise_if_problem(part.refuses(part.state_dict(), state), folder)
            part.load_state_dict(state)
        elif not part.on_each_rank:  # with more ranks than before, new ranks start without a state
            _raise_if_problem(part.missing(folder, name, stem), folder)


def _states_of_ranks(folder: Path, part: Part) -> list[Any]:
    """The states of a part, rank by rank; empty if the checkpoint has none."""
    states: list[Any] = []
    while has_part(folder, stem := part.stem_of(len(states))):
        states.append(_read_part(folder, stem, by_shards=part.shards is not None))
    return states


def _raise_if_problem(problem: Problem | None, folder: Path) -> None:
    if problem is not None:
        remedy = problem.remedy or valid_checkpoints_beside(folder)
        raise UserError(dataclasses.replace(problem, where=str(folder), remedy=remedy))


def load_part(folder: Path, part: Part) -> None:
    """Load the state of one part, such as the model of the best checkpoint."""
    part.load_state_dict(_read_part(folder, part.stem, by_shards=part.shards is not None))


def _write_part(folder: Path, stem: str, tensors: Mapping[str, Any], data: Any) -> None:
    if tensors:
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / f"{stem}.safetensors", metadata={"format": "pt"})
    if not tensors or set(data) != set(tensors):  # a flat dict of tensors needs no JSON file
        write_json(folder / f"{stem}.json", data, sort_keys=stem == "trainer_state")


def has_part(folder: Path, stem: str) -> bool:
    """Whether a checkpoint contains a part."""
    return any((folder / name).is_file() for name in (f"{stem}.json", f"{stem}.safetensors", index_name(stem)))


def _read_part(folder: Path, stem: str, by_shards: bool = False) -> Any:
    """Read the state of a part. With ``by_shards``, tensors stay ``ShardedTensor``; each rank reads its shard."""
    tensors: dict[str, Any] = {}
    if (folder / index_name(stem)).is_file():
        scattered = read_sharded(folder, stem)
        tensors = scattered if by_shards else {name: tensor.full_tensor() for name, tensor in scattered.items()}
    elif (folder / f"{stem}.safetensors").is_file():
        from safetensors.torch import load_file

        tensors = load_file(folder / f"{stem}.safetensors")
        if by_shards:
            tensors = {name: ShardedTensor.of(tensor) for name, tensor in tensors.items()}
    if not (folder / f"{stem}.json").is_file():
        return tensors
    return join(tensors, json.loads((folder / f"{stem}.json").read_text(encoding="utf-8")))


def later_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints beside ``folder`` with a higher step number, in ascending order."""
    there = Checkpoints(folder.resolve().parent).all()
    names = [path.name for path in there]
    return there[names.index(folder.name) + 1 :] if folder.name in names else []


def later_checkpoints_note(folder: Path) -> str:
    """Return a sentence about the checkpoints of ``later_checkpoints``, "" if there are none."""
    later = [path.name for path in later_checkpoints(folder)]
    if not later:
        return ""
    return (
        f"{folder.parent} also contains later checkpoints ({few(later)}). Until they are replaced, resuming from the "
        f"latest checkpoint continues from {later[-1]}. Remove those of an abandoned attempt."
    )


def valid_checkpoints_beside(folder: Path) -> str:
    """A remedy that lists the valid checkpoints next to ``folder``."""
    there = [path.name for path in Checkpoints(folder.parent).all() if path != folder and not integrity_errors(path)]
    return (
        f"Other complete checkpoints: {', '.join(there)}." if there else "Start over with overwrite_output_dir: true."
    )
