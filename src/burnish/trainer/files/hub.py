"""Upload the Trainer's models to the hub. The repository is created when training is set up."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.trainer.arguments.training import TrainingArguments

_ONLY_TO_CONTINUE = ("optimizer", "scheduler", "rng_state", "stream", "meter", "manifest")
"""Files of a checkpoint that are only needed to resume."""


class Hub:
    """A repository on the hub, accessed with huggingface_hub, and background uploads to it."""

    def __init__(self) -> None:
        self.repository: str | None = None
        self.uploads: list[Any] = []

    @cached_property
    def _api(self) -> Any:
        """One client for all uploads, so that background uploads run one after another."""
        from huggingface_hub import HfApi

        return HfApi()

    def make_repository(self, args: TrainingArguments, token: str | None, private: bool | None) -> None:
        """Create the repository ``hub_model_id``, or use the existing one."""
        if args.process_index != 0:
            return
        from huggingface_hub import create_repo

        name = args.hub_model_id or Path(args.output_dir or "").absolute().name
        created = create_repo(
            name, token=token or args.hub_token, exist_ok=True,
            private=args.hub_private_repo if private is None else private,
        )  # fmt: skip
        self.repository = created.repo_id

    def upload(
        self, folder: str, message: str, args: TrainingArguments, *, blocking: bool, token: str | None = None,
        revision: str | None = None, ignore: list[str] | None = None, into: str | None = None,
    ) -> Any:  # fmt: skip
        return self._api.upload_folder(
            repo_id=self.repository, folder_path=folder, path_in_repo=into, commit_message=message,
            token=token or args.hub_token, run_as_future=not blocking, ignore_patterns=ignore,
            revision=revision or args.hub_revision,
        )  # fmt: skip

    def is_due(self, args: TrainingArguments) -> bool:
        """Whether a checkpoint should be pushed now. By default not while another push is running."""
        is_enabled = args.hub_strategy != "end" and args.process_index == 0
        return is_enabled and (args.hub_always_push or all(upload.done() for upload in self.uploads))

    def push_checkpoint(self, folder: str, message: str, args: TrainingArguments) -> None:
        """Push a checkpoint in the background, according to ``hub_strategy``.

        The model is uploaded to the root of the repository. A checkpoint is uploaded to a separate folder, with
        everything needed to resume from it.
        """
        without = [f"{part}*" for part in _ONLY_TO_CONTINUE]
        self.uploads.append(self.upload(folder, message, args, blocking=False, ignore=without))
        into = {"checkpoint": "last-checkpoint", "all_checkpoints": Path(folder).name}.get(args.hub_strategy)
        if into is not None:
            self.uploads.append(self.upload(folder, message, args, blocking=False, into=into))

    def wait(self) -> None:
        """Wait for the uploads, and raise the exception of a failed one."""
        while self.uploads:
            self.uploads.pop(0).result()
