"""Upload models to the Hugging Face Hub, during training and after it.

In: the folder of a model or a checkpoint, and the options with the names of transformers. Out: commits in a repository.
``Trainer`` calls ``Hub`` itself. ``burnish train`` creates the repository before weights are loaded, so that a missing
token is known at once, and uploads in callbacks and at its end; an upload that fails there does not stop the training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

from burnish.checkpoint.checkpoint import CHECKPOINT_PREFIX, TEMPORARY, Checkpoints, output_folder
from burnish.config.errors import NotSavedError, Problem, UserError, first_line
from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.models.export import hub_errors
from burnish.report.console import RUN_LOG, note, warn
from burnish.report.metadata import METADATA_NAMES
from burnish.report.options import repository_name
from burnish.run.plan.options import RunOptions
from burnish.utils.files import remove

_RESUME_FILES = (
    "optimizer", "scheduler", "rng_state", "loader_rng", "stream", "meter", "scaler", "spikes", "reference",
    "bco_baseline", "rollout", "controllers", "kl_coefficient", "scores", "manifest",
)  # fmt: skip
"""Beginnings of the files of a checkpoint that are only needed to resume."""
_COPY = f"{TEMPORARY}upload-"
"""Beginning of the names of folders in ``output_dir`` with the files of a checkpoint that is being uploaded."""
LOCAL_FILES = [".*", f"{CHECKPOINT_PREFIX}-*"]
"""Patterns of files in ``output_dir`` that are not uploaded."""


class HubChoices(Protocol):
    """Options that ``Hub`` reads."""

    output_dir: Any
    hub_model_id: str | None
    hub_strategy: Any
    hub_token: str | None
    hub_private_repo: bool | None
    hub_always_push: bool
    hub_revision: str | None


class Hub:
    """A repository on the hub, accessed with huggingface_hub, and background uploads to it."""

    def __init__(self) -> None:
        self.repository: str | None = None
        self.uploads: list[Any] = []
        self._copies: set[Path] = set()  # folders of checkpoints that are being uploaded

    @cached_property
    def _api(self) -> Any:
        """One client for all uploads, so that background uploads run one after another."""
        from huggingface_hub import HfApi

        return HfApi()

    def make_repository(self, options: HubChoices, token: str | None, private: bool | None) -> None:
        """Create the repository ``hub_model_id``, or use the existing one."""
        from huggingface_hub import create_repo

        created = create_repo(
            repository_name(options.hub_model_id, Path(options.output_dir or "")),
            token=token or options.hub_token, exist_ok=True,
            private=options.hub_private_repo if private is None else private,
        )  # fmt: skip
        self.repository = created.repo_id

    def upload(
        self, folder: str | Path, message: str, options: HubChoices, *, blocking: bool, token: str | None = None,
        revision: str | None = None, ignore: Sequence[str] | None = None, into: str | None = None,
    ) -> Any:  # fmt: skip
        return self._api.upload_folder(
            repo_id=self.repository, folder_path=folder, path_in_repo=into, commit_message=message,
            token=token or options.hub_token, run_as_future=not blocking, ignore_patterns=ignore,
            revision=revision or options.hub_revision,
        )  # fmt: skip

    def is_due(self, options: HubChoices) -> bool:
        """Whether a checkpoint should be pushed now. By default not while another push is running."""
        is_free = options.hub_always_push or all(upload.done() for upload in self.uploads)
        return options.hub_strategy != "end" and is_free

    def push_checkpoint(self, folder: str | Path, message: str, options: HubChoices, token: str | None = None) -> None:
        """Push a checkpoint in the background, according to ``hub_strategy``.

        The model is uploaded to the root of the repository. A checkpoint is uploaded to a separate folder, with
        everything needed to resume from it. The upload reads a copy (hard links, where the file system supports them),
        because ``save_total_limit`` may remove the checkpoint before the upload ends.

        Raises:
            OSError: if the files cannot be copied.
        """
        self._remove_copies_of_killed_run(Path(folder).parent)
        copy = _linked_copy(Path(folder))
        self._copies.add(copy)
        without = [f"{part}*" for part in _RESUME_FILES]
        uploads = [self.upload(copy, message, options, blocking=False, token=token, ignore=without)]
        into = {"checkpoint": "last-checkpoint", "all_checkpoints": Path(folder).name}.get(options.hub_strategy)
        if into is not None:
            uploads.append(self.upload(copy, message, options, blocking=False, token=token, into=into))
        self.uploads += [*uploads, self._api.run_as_future(self._remove_copy, copy)]

    def _remove_copy(self, copy: Path) -> None:
        """Remove the copy of an uploaded checkpoint. If this fails, the next upload tries again."""
        self._copies.discard(copy)
        with suppress(OSError):
            remove(copy)

    def _remove_copies_of_killed_run(self, folder: Path) -> None:
        for path in folder.glob(f"{_COPY}*"):
            if path not in self._copies:
                with suppress(OSError):
                    remove(path)

    def wait(self) -> None:
        """Wait for the uploads, and raise the exception of a failed one."""
        while self.uploads:
            self.uploads.pop(0).result()


def _linked_copy(checkpoint: Path) -> Path:
    """Copy a checkpoint to a temporary folder beside it, with hard links if the file system supports them."""
    folder = Path(mkdtemp(prefix=_COPY, dir=checkpoint.parent))
    try:
        shutil.copytree(checkpoint, folder, copy_function=_link, dirs_exist_ok=True)
    except OSError:
        remove(folder)
        raise
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# --- burnish train ----------------------------------------------------------------------------------------------------


class RunUploads(TrainerCallback):
    """The uploads of one run of ``burnish train``, on its first process.

    Args:
        options: options of the run.
    Attributes:
        checkpoints: checkpoints of the run, once it has begun.
    Raises:
        UserError: if the repository cannot be created.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options, self.hub = options, Hub()
        self.folder, self.token = output_folder(options), options.hub_token or options.hf_hub_token
        self.checkpoints: Checkpoints | None = None
        try:
            self.hub.make_repository(options, self.token, None)
        except hub_errors() as error:
            name = repository_name(options.hub_model_id, self.folder)
            what = f"The repository {name} cannot be created on the Hub: {first_line(error)}"
            remedy = "Set hub_token to a token with write access or run hf auth login, or remove push_to_hub."
            raise UserError(what, remedy=remedy) from error

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.checkpoints is None or not self.hub.is_due(self.options):
            return
        self.checkpoints.wait()  # it may be written in the background
        folder = self.checkpoints.path(state.global_step)
        if folder.is_dir():  # a failed save has been reported
            self._warn_of_failures([upload for upload in self.hub.uploads if upload.done()])
            message = f"Training in progress, step {state.global_step}"
            try:
                self.hub.push_checkpoint(folder, message, self.options, self.token)
            except OSError as error:  # its files cannot be copied
                self._warn_of_failure(error)

    def _warn_of_failures(self, uploads: Sequence[Any]) -> None:
        """Wait for uploads of checkpoints, and report those that failed."""
        for upload in uploads:
            self.hub.uploads.remove(upload)
            if (error := upload.exception()) is not None:
                self._warn_of_failure(error)

    def _warn_of_failure(self, error: BaseException) -> None:
        warn(f"A checkpoint could not be uploaded to {self.hub.repository}: {first_line(error)}")

    def finish(self, is_interrupted: bool) -> None:
        """Wait for the uploads of checkpoints, and upload the model of a run that was not interrupted."""
        self._warn_of_failures(list(self.hub.uploads))
        if not is_interrupted:
            self.push_model()

    def push_model(self) -> None:
        """Upload the finished model with its reports.

        Raises:
            NotSavedError: if the upload fails. The model remains in ``output_dir``.
        """
        local = [*LOCAL_FILES, *METADATA_NAMES, RUN_LOG]
        try:
            self.hub.upload(self.folder, "End of training", self.options, blocking=True, token=self.token, ignore=local)
        except hub_errors() as error:
            name = self.hub.repository
            what = f"{self.folder} was written but could not be uploaded to {name}: {first_line(error).rstrip('.')}."
            remedy = "After fixing that, run the same command again; it only uploads the model."
            raise NotSavedError(Problem(what, remedy=remedy)) from error
        note(f"Uploaded to {self.hub.repository}.")
