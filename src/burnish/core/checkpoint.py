"""Checkpoints: everything a run needs to go on as if it had never stopped.

The parts of a run that change (weights, optimizer, schedule, stream, state, callbacks, generators) are ``Stateful``
and live in one dict; to save is one loop over it, to load is another. A checkpoint is written into a temporary folder
beside its place, flushed, given a manifest last, and renamed: a folder called ``checkpoint-12`` is whole or it is not
there. Nothing is pickled and nothing is unpickled: tensors are safetensors, the rest is JSON.

In:  parts by name, a step number, the fingerprints of what the run depends on.
Out: ``output_dir/checkpoint-<step>/`` with ``model.safetensors`` (or ``adapter_model.safetensors``),
     ``trainer_state.json``, ``<part>.safetensors`` and ``<part>.json``, ``manifest.json``.
Refuses: a damaged checkpoint, a second writer in the same folder; one of another run (``comparison.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.core.errors import Problem, UserError
from burnish.core.manifest import faults, flush_folders, write_manifest
from burnish.core.options import option
from burnish.core.snapshot import copy_large, join, rng_state, set_rng_state, split
from burnish.core.state import TrainerState
from burnish.core.types import Stateful

CHECKPOINT_PREFIX = "checkpoint"
_NAME = re.compile(rf"^{CHECKPOINT_PREFIX}-(\d+)$")
_TEMPORARY = ".incomplete-"
_LOCK = ".lock"
FILE_STEMS = {"state": "trainer_state"}
"""Parts whose file has a name that others know; the model says its own (``file_stem``)."""


@dataclass
class CheckpointOptions:
    """Where a run is kept, and how it is taken up again."""

    output_dir: str | None = option(None, "The folder that receives everything the run writes.")
    overwrite_output_dir: bool = option(False, "Start anew in a folder that holds an earlier run.")
    resume: str = option(
        "auto", "What to do where output_dir holds a checkpoint: continue it, never, or insist on one.",
        choices=("auto", "never", "must"),
    )  # fmt: skip
    resume_from_checkpoint: str | bool | None = option(
        None, "A checkpoint folder to continue from; true for the newest in output_dir, false for none."
    )
    resume_despite_changes: bool = option(
        False, "Continue although data, model, seed or batch differ from the checkpoint's."
    )
    save_total_limit: int | None = option(None, "Checkpoints kept; the oldest go, never the best one.", ge=1)
    save_only_model: bool = option(False, "Checkpoints without optimizer and generators; they cannot be continued.")
    save_in_background: bool = option(True, "Train on while a checkpoint is written; costs a copy of it in memory.")
    load_best_model_at_end: bool = option(False, "Finish with the weights of the best evaluation.")
    metric_for_best_model: str | None = option(None, "The metric that decides which is best; eval_loss if not given.")
    greater_is_better: bool | None = option(None, "Whether a higher metric is better; not for a loss, if not given.")


class RngState:
    """The global generators as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_rng_state(state)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``output_dir``.
        fingerprints: what the run depends on, by name; JSON data. Stored in each manifest.
        write_extras: called with the folder to add what makes it loadable elsewhere (config, tokenizer).
        limit: how many to keep; None keeps all.
        in_background: copy, then write in a thread while training goes on.
        rank, barrier: this process, and what makes all processes wait for each other.
    """

    def __init__(
        self, folder: str | Path, *, fingerprints: Mapping[str, Any] | None = None,
        write_extras: Callable[[Path], None] | None = None, limit: int | None = None, in_background: bool = True,
        rank: int = 0, barrier: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        self.fingerprints = dict(fingerprints or {})
        self.write_extras = write_extras
        self.limit = limit
        self.in_background = in_background
        self.rank = rank
        self.barrier = barrier
        self.last_step: int | None = None  # of the last save in this process
        self._writer: threading.Thread | None = None
        self._has_copies = threading.Event()  # of everything that the next update changes
        self._has_copies.set()
        self._failure: BaseException | None = None

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, parts: Mapping[str, Stateful], *, best: str | None = None, copies_later: bool = False
    ) -> Path:
        """Write ``checkpoint-<step>``, then let old ones go.

        Args:
            parts: every part; the one called "rng" is written by every rank, the others by rank 0.
            best: a checkpoint folder that rotation must keep.
            copies_later: leave the copying of large tensors to the writing thread as well. Whoever asks for it calls
                ``settle`` before a weight or a state of the optimizer changes: the next forward and backward passes
                only read them, so most of a step may pass meanwhile.
        Raises:
            OSError: of this or of the previous save, if the disk is full, say. What was there before is untouched.
        """
        self.wait()
        self.last_step = step
        target = self.path(step)
        temporary = self._begin(target, parts)
        if self.rank != 0:
            return target
        copies_later = copies_later and self.in_background
        taken = {
            _stem(name, part): split(part.state_dict(), copy=self.in_background, leave_large=copies_later)
            for name, part in parts.items()
            if name != "rng"
        }
        if copies_later:
            self._has_copies.clear()
        else:
            self._add_extras(temporary)

        def write() -> None:
            if copies_later:
                self._copy(tensors for tensors, _ in taken.values())
                self._add_extras(temporary)
            for stem, (tensors, data) in taken.items():
                _write_part(temporary, stem, tensors, data)
            write_manifest(temporary, step, self.fingerprints)
            self._put_in_place(temporary, target)
            self._rotate(keep={target.name, Path(best).name if best else ""})

        if self.in_background:
            self._writer = threading.Thread(target=self._guarded, args=(write,), name="burnish-checkpoint")
            self._writer.start()
        else:
            write()
        return target

    def _begin(self, target: Path, parts: Mapping[str, Stateful]) -> Path:
        """The temporary folder, with the generators of every rank in it."""
        temporary = self.folder / f"{_TEMPORARY}{target.name}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.barrier()
        if "rng" in parts:
            _write_part(temporary, f"rng_state_{self.rank}", *split(parts["rng"].state_dict()))
        self.barrier()
        return temporary

    def _add_extras(self, temporary: Path) -> None:
        if self.write_extras is not None:
            self.write_extras(temporary)

    def _copy(self, taken: Iterable[dict[str, Any]]) -> None:
        """The large tensors that were left where they lie; whoever waits in ``settle`` goes on, failure or not."""
        try:
            for tensors in taken:
                copy_large(tensors)
        finally:
            self._has_copies.set()

    def settle(self) -> None:
        """Until the checkpoint under way holds copies of its own, so that what it saves may change."""
        self._has_copies.wait()

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        replaced = self.folder / f"{_TEMPORARY}replaced-{target.name}"
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        flush_folders([self.folder])
        shutil.rmtree(replaced, ignore_errors=True)

    def wait(self) -> None:
        """Until the checkpoint under way is on the disk. Raises what went wrong while it was written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # carried to the thread that trains, which raises it in wait()
            self._failure = error

    def _rotate(self, keep: set[str]) -> None:
        if self.limit is None:
            return
        kept_anyway = [path for path in self.all() if path.name in keep]
        others = [path for path in self.all() if path.name not in keep]
        for path in others[: max(0, len(others) + len(kept_anyway) - max(self.limit, len(kept_anyway)))]:
            shutil.rmtree(path)

    # --- reading ------------------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """The checkpoint folders, oldest step first, whole or not."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.match(path.name))]
        return [path for _, path in sorted(found)]

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence for each newer one that was passed over."""
        skipped: list[str] = []
        for path in reversed(self.all()):
            wrong = faults(path)
            if not wrong:
                return path, skipped
            skipped.append(f"{path} was passed over: {'; '.join(wrong[:3])}.")
        return None, skipped

    def path(self, step: int) -> Path:
        return self.folder / f"{CHECKPOINT_PREFIX}-{step}"

    def sweep(self) -> None:
        """Remove what a killed save left behind. Only the owner of the folder's lock may call this."""
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)


def load(folder: Path, parts: Mapping[str, Stateful], rank: int = 0) -> None:
    """Give every part its state back. The generators come last, so that nothing draws from them in between.

    Raises:
        UserError: where the folder is damaged, or lacks a part of this run, or holds another optimizer's state.
    """
    wrong = faults(folder)
    if wrong:
        raise UserError(Problem(f"{'; '.join(wrong)}.", where=str(folder), remedy=others_beside(folder)))
    for name, part in parts.items():
        if name == "rng":
            continue
        stem = _stem(name, part)
        if not _has_part(folder, stem):
            raise UserError(_missing(folder, name, stem))
        state = _read_part(folder, stem)
        if name == "optimizer" and _is_of_another_optimizer(part.state_dict(), state):
            raise UserError(_other_optimizer(folder))
        part.load_state_dict(state)
    if "rng" in parts and _has_part(folder, f"rng_state_{rank}"):
        parts["rng"].load_state_dict(_read_part(folder, f"rng_state_{rank}"))


def load_part(folder: Path, name: str, part: Stateful) -> None:
    """Give one part its state back, such as the model of the best checkpoint."""
    part.load_state_dict(_read_part(folder, _stem(name, part)))


def load_state(folder: Path) -> TrainerState:
    """Where the run stood when ``folder`` was written."""
    return TrainerState.load_from_json(str(folder / "trainer_state.json"))


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process. One that was made for a run which is then refused goes again.

    Raises:
        UserError: where another run holds it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.fstat(lock.fileno()).st_nlink > 0  # 0: the run that held it took it away just now
        except BlockingIOError:
            is_held = False
        if not is_held:
            raise UserError(
                Problem(
                    "another run is writing into this folder.",
                    where=str(folder),
                    remedy="Wait for it to end, or give this run an output_dir of its own.",
                )
            )
        try:
            yield
        except UserError:
            if is_new and os.listdir(folder) == [_LOCK]:
                (folder / _LOCK).unlink()
                folder.rmdir()
            raise
        finally:
            (folder / _LOCK).unlink(missing_ok=True)  # while it is held: who opened it before finds it gone


def _stem(name: str, part: Any) -> str:
    return getattr(part, "file_stem", None) or FILE_STEMS.get(name, name)


def _write_part(folder: Path, stem: str, tensors: Mapping[str, Any], data: Any) -> None:
    if tensors:
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / f"{stem}.safetensors", metadata={"format": "pt"})
    if not tensors or set(data) != set(tensors):  # a flat dict of tensors needs no JSON beside it
        text = json.dumps(data, indent=2, sort_keys=stem == "trainer_state")
        (folder / f"{stem}.json").write_text(text + "\n", encoding="utf-8")


def _has_part(folder: Path, stem: str) -> bool:
    return (folder / f"{stem}.json").is_file() or (folder / f"{stem}.safetensors").is_file()


def _read_part(folder: Path, stem: str) -> Any:
    tensors: dict[str, Any] = {}
    if (folder / f"{stem}.safetensors").is_file():
        from safetensors.torch import load_file

        tensors = load_file(folder / f"{stem}.safetensors")
    if not (folder / f"{stem}.json").is_file():
        return tensors
    return join(tensors, json.loads((folder / f"{stem}.json").read_text(encoding="utf-8")))


def _missing(folder: Path, name: str, stem: str) -> Problem:
    if name == "model":
        is_adapter = (folder / "adapter_model.safetensors").is_file()
        return Problem(
            f"this checkpoint holds {'an adapter' if is_adapter else 'a whole model'}, and this run trains "
            f"{'a whole model' if is_adapter else 'an adapter'}.",
            where=str(folder),
            remedy="Set finetuning_type as it was, or use another output_dir.",
        )
    return Problem(
        f'this checkpoint has no "{name}" ({stem}), so the run cannot be continued from it.',
        where=str(folder),
        remedy=others_beside(folder),
    )


def _is_of_another_optimizer(own: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether ``given`` lacks what ``own`` has, or has settings of another kind: each of the two some that the other
    has not. Settings that one of them alone has beyond the other are those of a newer torch."""
    groups, others = own.get("param_groups", []), given.get("param_groups", [])
    apart = ((set(mine) - set(theirs), set(theirs) - set(mine)) for mine, theirs in zip(groups, others, strict=False))
    return not own.keys() <= given.keys() or len(groups) != len(others) or any(map(all, apart))


def _other_optimizer(folder: Path) -> Problem:
    return Problem(
        "this checkpoint holds the state of another optimizer than this run's.",
        where=str(folder),
        remedy="Set optim and what belongs to it as they were, or begin a new run in another output_dir.",
    )


def others_beside(folder: Path) -> str:
    """Where else the run could go on, as a remedy."""
    there = [path.name for path in Checkpoints(folder.parent).all() if path != folder and not faults(path)]
    return (
        f"Whole checkpoints beside it: {', '.join(there)}." if there else "Start anew with overwrite_output_dir: true."
    )
