"""Options of ``report``: terminal output, plots, files and trackers.

``ReportOptions`` also has the three methods with which trackers read the options of a run (``to_dict``,
``to_json_string``, ``to_sanitized_dict``, as in transformers). The flat options object inherits from it, so that
transformers' callbacks work unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.checkpoint.checkpoint import CheckpointOptions, output_folder
from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import ineffective_option_notes, option, shared_options
from burnish.config.secrets import has_secret_name, mask_json

_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@shared_options
@dataclass
class HubFields:
    """Options of uploads to the Hugging Face Hub, also of ``TrainingArguments``."""

    push_to_hub: bool = option(
        False, "Upload the model to the Hugging Face Hub after training, and checkpoints as set by hub_strategy.",
        risky="it uploads to the Hub with the credentials of the user who started the web UI",
    )  # fmt: skip
    hub_model_id: str | None = option(
        None, "Repository on the Hub. Default: the name of output_dir.", aliases=("push_to_hub_model_id",)
    )
    hub_token: str | None = option(
        None,
        "Access token for uploads. Default: hf_hub_token, or that of hf auth login.",
        is_secret=True,
        aliases=("push_to_hub_token",),
    )
    hub_private_repo: bool | None = option(
        None, "Whether repositories that are created on the Hub are private. Default: as set for the account."
    )
    hub_always_push: bool = option(False, "Upload a checkpoint even if the previous upload is still running.")
    hub_revision: str | None = option(None, "Branch to upload to. Default: main.")


@dataclass
class HubOptions(HubFields):
    """Upload."""

    hub_strategy: str = option(
        "every_save",
        "What to upload during training: nothing (end), the model of each checkpoint (every_save), also the latest "
        "checkpoint with its optimizer (checkpoint), or every checkpoint (all_checkpoints).",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
    )


def repository_name(model_id: str | None, folder: Path) -> str:
    """The repository in ``hub_model_id``, by default called like the output folder."""
    return model_id or folder.absolute().name


class UploadChoices(HubOptions, CheckpointOptions):
    """Options of uploads, and where the model is."""


@check
def check_hub(options: UploadChoices) -> Iterator[Problem]:
    """Yield problems of the repository's name, and of a hub that is switched off."""
    if not options.push_to_hub:
        return
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # (its list of names leaves it out)

    name = repository_name(options.hub_model_id, output_folder(options))
    try:
        validate_repo_id(name)
    except HFValidationError:
        what = f'"hub_model_id" must be the name of a repository on the Hub, such as user/model. Received: "{name}".'
        yield Problem(what, option="hub_model_id")
    if constants.HF_HUB_OFFLINE:
        what = '"push_to_hub" is true, but HF_HUB_OFFLINE disables access to the Hub.'
        yield Problem(what, remedy="Unset HF_HUB_OFFLINE, or remove push_to_hub.", option="push_to_hub")


@shared_options
@dataclass
class ReportFields:
    """Options of logs and trackers, also of ``TrainingArguments``."""

    run_name: str | None = option(None, "Name of the run in trackers.")
    project: str = option("huggingface", "Trackio project of the run.")
    trackio_space_id: str | None = option(
        None, "Hugging Face Space that displays the Trackio project.", risky="it sends metrics to other machines"
    )
    trackio_bucket_id: str | None = option(
        None, "Hugging Face bucket that stores the Trackio project.", risky="it sends metrics to other machines"
    )
    log_level: str = option("passive", "Log level of libraries on the main process.", choices=_LEVELS)
    log_level_replica: str = option("warning", "Log level of libraries on the other processes.", choices=_LEVELS)
    log_on_each_node: bool = option(
        True, "Use log_level on the first process of each node, not only on the main process."
    )


@dataclass
class ReportOptions(ReportFields):
    """Logging and trackers."""

    report_to: list[str] | None = option(
        None,
        "Experiment trackers: tensorboard, wandb, mlflow, ...; all: every installed one.",
        risky="it sends metrics to other machines",
        harmless=("none",),
    )
    logging_dir: str | None = option(None, "Folder for TensorBoard logs. Default: output_dir/runs.", names_place=True)
    trackio_static_space_id: str | bool | None = option(
        None,
        "Static Space that keeps the Trackio project after the run. false: none.",
        risky="it sends metrics to other machines",
    )
    disable_tqdm: bool | None = option(None, "Print each log as a plain line instead of a progress bar.")
    plot_loss: bool = option(True, "Save plots of the loss (training_loss.png) and of other metrics to output_dir.")
    include_num_input_tokens_seen: bool | str = option(
        False, "Log the number of tokens seen so far.", choices=(True, False, "all", "non_padding", "no")
    )

    def to_dict(self) -> dict[str, Any]:
        """Return every option; tokens, keys and passwords are masked, also inside of values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {n: f"<{n.upper()}>" if has_secret_name(n) else mask_json(value) for n, value in values.items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return every option as a number or string, because some trackers store nothing else."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}


def counts_tokens(options: ReportOptions) -> bool:
    """Return whether ``num_input_tokens_seen`` is logged. Padding is never counted: "all" equals "non_padding"."""
    return options.include_num_input_tokens_seen not in (False, "no")


_MODEL_UPLOADS = {
    "wandb": ("WANDB_LOG_MODEL", ("end", "checkpoint")),
    "dvclive": ("HF_DVCLIVE_LOG_MODEL", ("true", "1", "yes", "on")),
}
"""Tracker -> variable, and its values with which the callback creates a transformers Trainer with the options as its
arguments, to save the model."""


@check
def check_trackers(options: ReportOptions) -> Iterator[Problem]:
    """Yield problems found before a model is loaded: unknown trackers, missing libraries, unsupported settings."""
    from burnish.report.trackers import tracker_problems, wanted_trackers

    yield from tracker_problems(options.report_to)
    for tracker in wanted_trackers(options.report_to):
        variable, values = _MODEL_UPLOADS.get(tracker, ("", ()))
        if (value := os.environ.get(variable, "").lower()) in values:
            what = f'"report_to": {variable} is {value}, but burnish does not upload models to {tracker}.'
            remedy = f"Unset {variable}; the model is saved in output_dir."
            yield Problem(what, remedy=remedy, option="report_to")


class HubAndTrackers(HubOptions, ReportOptions):
    """Options that name repositories on the Hub."""


@notes
def hub_notes(options: HubAndTrackers) -> list[str]:
    """Return notes on options of uploads that have no effect, because nothing is uploaded."""
    from burnish.report.trackers import wanted_trackers

    names = ["hub_model_id", "hub_token", "hub_strategy", "hub_always_push", "hub_revision"]
    if "trackio" not in wanted_trackers(options.report_to):  # which creates Spaces and buckets
        names.append("hub_private_repo")
    return ineffective_option_notes(options, dict.fromkeys(names, "push_to_hub"))


_TRACKER_OPTIONS = (
    "run_name", "project", "logging_dir", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
)  # fmt: skip


@notes
def tracker_notes(options: ReportOptions) -> list[str]:
    """Return notes on tracker options that have no effect because no tracker is enabled."""
    from burnish.report.trackers import wanted_trackers

    if wanted_trackers(options.report_to):
        return []
    changed = [f.name for f in dataclasses.fields(ReportOptions) if f.name in _TRACKER_OPTIONS]
    defaults = ReportOptions()
    unused = [name for name in changed if getattr(options, name) != getattr(defaults, name)]
    return [f'"{name}" has no effect: report_to lists no tracker.' for name in unused]
