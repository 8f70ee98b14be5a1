"""``overwrite_output_dir``: replace the files of an earlier run, which are deleted only when there is a replacement.

    problems_of_sources(options)        refuses a run whose own model, adapter or data would be deleted
    with BackupOnOverwrite(folder) as earlier:   moves the files of an earlier run to ``.earlier-run``
        ...                             deletes them after the first complete checkpoint, or on success
                                        restores them if the block fails before that

Files of a run are recognized by name; no other file is touched. A killed process leaves ``.earlier-run`` behind, which
the next run that overwrites uses. While files are moved there or back, it has another name, so that a killed process
never leaves a part of them in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.adapters.chain import MERGED_NAME
from burnish.checkpoint.checkpoint import Checkpoints, output_folder
from burnish.checkpoint.manifest import MANIFEST_NAME
from burnish.config.errors import Problem
from burnish.data.sets.dataset_info import local_files
from burnish.loop.events import TrainerCallback
from burnish.run.plan.options import RunOptions
from burnish.utils.files import LOCK, expand_user, remove

EARLIER_RUN = ".earlier-run"
_BACKUP_FOLDER = ".earlier-run.incomplete"
_DISCARDED_FOLDER = ".incomplete-earlier-run"
SOURCES = (
    "model_name_or_path", "adapter_name_or_path", "ref_model", "ref_model_adapters", "dataset_dir", "tokenized_path",
    "new_special_tokens_config", "template", "peft_config", "fsdp_config", "deepspeed",
    "reward_model", "reward_model_adapters", "media_dir",
)  # fmt: skip
"""Options that name files or folders which a run reads, besides its datasets."""
RUN_OUTPUT_FILES = (
    ".finished.json", "trainer_log.jsonl", "run.log", "events.jsonl", "outcome.json", "progress.json",
    "trainer_state.json", "traceback.txt", "*_results.json", "README.md",
    "training_loss.png", "training_eval_*.png", "training_rewards*.png", "training_margins.png",
    "generated_predictions*.jsonl", "completions.jsonl", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "adapter_config.json", "adapter_model.safetensors", MERGED_NAME,
    "value_head.safetensors",
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
"""Name patterns of the files that a run writes to ``output_dir``, besides checkpoints."""


def files_of_run(folder: Path) -> list[Path]:
    """Return the files and checkpoints in ``folder`` that a run wrote. Symbolic links are not followed."""
    if not folder.is_dir():
        return []
    files = {
        path for pattern in RUN_OUTPUT_FILES for path in folder.glob(pattern) if path.is_file() or path.is_symlink()
    }
    return [*Checkpoints(folder).all(), *sorted(files)]


def files_of_killed_run(folder: Path, patterns: Sequence[str] = ()) -> set[str]:
    """Names of the files in ``folder`` left by a process that was killed inside ``BackupOnOverwrite(folder, also)``."""
    names = {LOCK}
    backup = folder / _BACKUP_FOLDER
    if backup.is_dir() and not any(backup.iterdir()):  # killed before there was anything to move, or after the last
        names.add(_BACKUP_FOLDER)
    if (folder / EARLIER_RUN).is_dir():
        paths = [*files_of_run(folder), *(path for pattern in patterns for path in folder.glob(pattern))]
        names |= {EARLIER_RUN, *(path.name for path in paths)}
    return names


def problems_of_sources(options: RunOptions) -> list[Problem]:
    """Return a problem for each input of the run that it would delete or overwrite."""
    folder = output_folder(options)
    return [
        Problem(
            f'"{name}" {source} is inside output_dir "{folder}", which the run would overwrite.',
            remedy="Set a different output_dir.",
            option=(name, "output_dir"),
        )
        for name, source in _sources(options)
        if _would_be_removed(expand_user(source), folder)
    ]


def _sources(options: RunOptions) -> Iterator[tuple[str, str]]:
    for name in SOURCES:
        value = getattr(options, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item:
                yield name, item
    for name, path in local_files(options):
        yield name, str(path)


def _would_be_removed(source: Path, folder: Path) -> bool:
    """Return whether ``source`` is among the files that would be removed, or is a model or adapter in ``folder``."""
    if not source.exists():
        return False
    place = source.resolve()
    is_model = place == folder.resolve() and any(source.glob("*.safetensors"))
    removed = [path.resolve() for path in files_of_run(folder) if path.exists()]  # a link to itself does not exist
    return is_model or any(place == path or path in place.parents for path in removed)


class BackupOnOverwrite(TrainerCallback):
    """Moves the files of an earlier run in ``folder`` aside until the new run has its first complete checkpoint.

    As a callback it notices that checkpoint, so that both runs are on disk no longer than necessary.

    Args:
        folder: ``output_dir``.
        also: name patterns of further files to move aside, for example those of an export.
    """

    def __init__(self, folder: Path, also: Sequence[str] = ()) -> None:
        self.folder, self.aside, self.also = folder, folder / EARLIER_RUN, also
        self.backup = folder / _BACKUP_FOLDER

    def __enter__(self) -> BackupOnOverwrite:
        remove(self.folder / _DISCARDED_FOLDER)
        if _has_checkpoint(self.folder):  # a killed run has a checkpoint, so its files stay
            self._discard()
        is_of_a_killed_run = self.aside.is_dir()
        if not is_of_a_killed_run:
            self.backup.mkdir(exist_ok=True)
        patterns = (path for name in self.also for path in self.folder.glob(name))
        for path in [*files_of_run(self.folder), *patterns]:
            target = self.backup / path.name  # it exists if a process was killed while it moved files back
            remove(path) if is_of_a_killed_run or os.path.lexists(target) else path.rename(target)
        if not is_of_a_killed_run:
            self.backup.rename(self.aside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or _has_checkpoint(self.folder):
            self._discard()
        else:
            self.move_back()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        if _has_checkpoint(self.folder):
            self._discard()

    def _discard(self) -> None:
        if self.aside.is_dir():
            self.aside.rename(self.folder / _DISCARDED_FOLDER)
            remove(self.folder / _DISCARDED_FOLDER)

    def move_back(self) -> None:
        """Move everything back and delete files that the failed run wrote under the same names."""
        self.aside.rename(self.backup)
        for path in sorted(self.backup.glob("*")):
            remove(self.folder / path.name)
            path.rename(self.folder / path.name)
        remove(self.backup)


def _has_checkpoint(folder: Path) -> bool:
    return any((path / MANIFEST_NAME).is_file() for path in Checkpoints(folder).all())
