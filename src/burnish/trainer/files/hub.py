"""The Trainer and the hub: a repository is made when training is set up, and filled when the model is saved."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.trainer.arguments.training import TrainingArguments

_ONLY_TO_CONTINUE = ("optimizer", "scheduler", "rng_state", "stream", "meter", "manifest")
"""Files of a checkpoint that only the run itself needs."""


class Hub:
    """A repository on the hub, through huggingface_hub, and the uploads to it that nobody waits for."""

    def __init__(self) -> None:
        self.repository: str | None = None
        self.uploads: list[Any] = []

    @cached_property
    def _api(self) -> Any:
        """One for all uploads: those that nobody waits for are made one after another."""
        from huggingface_hub import HfApi

        return HfApi()

    def make_repository(self, args: TrainingArguments, token: str | None, private: bool | None) -> None:
        """Make the repository ``hub_model_id``, or find it."""
        if args.process_index != 0:
            return
        from huggingface_hub import create_repo

        name = args.hub_model_id or Path(args.output_dir or "").absolute().name
        made = create_repo(
            name, token=token or args.hub_token, exist_ok=True,
            private=args.hub_private_repo if private is None else private,
        )  # fmt: skip
        self.repository = made.repo_id

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
        """Tell whether a checkpoint is to be pushed now; a push that goes on is not joined by another."""
        asks = args.hub_strategy != "end" and args.process_index == 0
        return asks and (args.hub_always_push or all(upload.done() for upload in self.uploads))

    def push_checkpoint(self, folder: str, message: str, args: TrainingArguments) -> None:
        """As ``hub_strategy`` says, without waiting.

        The model goes to the top of the repository. A checkpoint goes into a folder of its own, with all that a run
        needs to go on from it.
        """
        without = [f"{part}*" for part in _ONLY_TO_CONTINUE]
        self.uploads.append(self.upload(folder, message, args, blocking=False, ignore=without))
        into = {"checkpoint": "last-checkpoint", "all_checkpoints": Path(folder).name}.get(args.hub_strategy)
        if into is not None:
            self.uploads.append(self.upload(folder, message, args, blocking=False, into=into))

    def wait(self) -> None:
        """Wait for the uploads, and raise what went wrong with one."""
        while self.uploads:
            self.uploads.pop(0).result()
