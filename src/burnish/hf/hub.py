"""The Trainer and the hub: a repository is made when training is set up, and filled when the model is saved."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.hf.face import Face

_ONLY_TO_CONTINUE = ("optimizer", "scheduler", "rng_state", "stream", "meter", "manifest")
"""Files of a checkpoint that only the run itself needs."""


class HubMethods(Face):
    """The hub, through huggingface_hub."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository ``hub_model_id``, or find it."""
        if self.args.process_index != 0:
            return
        from huggingface_hub import create_repo

        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        made = create_repo(
            name, token=token or self.args.hub_token, exist_ok=True,
            private=self.args.hub_private_repo if private is None else private,
        )  # fmt: skip
        self.hub_model_id = made.repo_id

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, private: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Save the model, write its card, upload ``output_dir``.

        Args:
            private: of a repository that is made now; ``hub_private_repo`` if not given.
            kwargs: the card's.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)  # type: ignore[attr-defined]
        if self.args.process_index != 0:
            return None
        kwargs.setdefault("model_name", Path(self.args.output_dir).name)
        self.create_model_card(**kwargs)  # type: ignore[attr-defined]
        self.callback_handler.call_event("on_push_begin", self.args, self.state, self.control)
        self._finish_current_push()
        return self._upload(self.args.output_dir, commit_message, blocking, token, revision, [".*", "checkpoint-*"])

    def _upload(
        self, folder: str, message: str, blocking: bool, token: str | None = None, revision: str | None = None,
        ignore: list[str] | None = None, into: str | None = None,
    ) -> Any:  # fmt: skip
        return self._hub.upload_folder(
            repo_id=self.hub_model_id, folder_path=folder, path_in_repo=into, commit_message=message,
            token=token or self.args.hub_token, run_as_future=not blocking, ignore_patterns=ignore,
            revision=revision or self.args.hub_revision,
        )  # fmt: skip

    @cached_property
    def _hub(self) -> Any:
        """One for all uploads: those that nobody waits for are made one after another."""
        from huggingface_hub import HfApi

        return HfApi()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As ``hub_strategy`` says, without waiting; a push that goes on is not joined by another.

        The model goes to the top of the repository. A checkpoint goes into a folder of its own, with all that a run
        needs to go on from it.
        """
        strategy = self.args.hub_strategy.value
        if strategy == "end" or not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        if not self.args.hub_always_push and not all(push.done() for push in self._pushes):
            return
        message = f"Training in progress, step {self.state.global_step}"
        self.callback_handler.call_event("on_push_begin", self.args, self.state, self.control)
        without = [f"{part}*" for part in _ONLY_TO_CONTINUE]
        self._pushes.append(self._upload(checkpoint_folder, message, blocking=False, ignore=without))
        into = {"checkpoint": "last-checkpoint", "all_checkpoints": Path(checkpoint_folder).name}.get(strategy)
        if into is not None:
            self._pushes.append(self._upload(checkpoint_folder, message, blocking=False, into=into))

    def _finish_current_push(self) -> None:
        """Wait for the uploads, and raise what went wrong with one."""
        while self._pushes:
            self._pushes.pop(0).result()
