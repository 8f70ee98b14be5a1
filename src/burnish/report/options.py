"""Options of ``report/``: output to the terminal, pictures and files, trackers.

``ReportOptions`` also carries the three methods by which a tracker asks for the options of a run (``to_dict``,
``to_json_string``, ``to_sanitized_dict``, transformers' names), so that transformers' callbacks run unchanged on the
flat options object, which inherits from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.config.secrets import has_secret_name

_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")


@dataclass
class ReportOptions:
    """Output and trackers."""

    report_to: list[str] | None = option(
        None,
        "Trackers that receive every log: tensorboard, wandb, mlflow, ...; all takes those that are installed.",
        risky="it sends figures to other machines",
        harmless=("none",),
    )
    run_name: str | None = option(None, "The name of the run in a tracker.")
    project: str = option("huggingface", "The project of the run in Trackio.")
    logging_dir: str | None = option(
        None, "The folder of TensorBoard's files; output_dir/runs if not given.", names_place=True
    )
    trackio_space_id: str | None = option(
        None, "The Hugging Face Space that shows a Trackio project.", risky="it sends figures to other machines"
    )
    trackio_bucket_id: str | None = option(
        None, "The Hugging Face bucket that keeps a Trackio project.", risky="it sends figures to other machines"
    )
    trackio_static_space_id: str | bool | None = option(
        None,
        "The static Space that keeps a Trackio project after the run; false for none.",
        risky="it sends figures to other machines",
    )
    hub_private_repo: bool | None = option(None, "Whether what a tracker makes on the Hugging Face hub is private.")
    disable_tqdm: bool | None = option(None, "Print every log as a plain line instead of the live line.")
    log_level: str = option("passive", "What libraries may say on the main process.", choices=_LEVELS)
    log_level_replica: str = option("warning", "What libraries may say on the other processes.", choices=_LEVELS)
    log_on_each_node: bool = option(True, "The first process of each node counts as a main process for log_level.")
    plot_loss: bool = option(True, "Draw the loss into output_dir/training_loss.png.")
    include_num_input_tokens_seen: bool | str = option(
        False, "Write the tokens seen so far into every log.", choices=(True, False, "all", "non_padding", "no")
    )

    def to_dict(self) -> dict[str, Any]:
        """Every option; the value of a token or key is left out."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: f"<{name.upper()}>" if has_secret_name(name) else value for name, value in values.items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Every option as a number or a text, because some trackers store nothing else."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}


def counts_tokens(options: ReportOptions) -> bool:
    """Return whether logs carry ``num_input_tokens_seen``. No padding is counted: "all" and "non_padding" agree."""
    return options.include_num_input_tokens_seen not in (False, "no")


@check
def check_trackers(options: ReportOptions) -> list[Problem]:
    """Find, before a model is loaded, unknown trackers, trackers whose library is missing, and what one cannot do
    here."""
    from burnish.report.trackers import tracker_problems, wanted_trackers

    problems, keeps_model = tracker_problems(options.report_to), os.environ.get("WANDB_LOG_MODEL", "false").lower()
    if keeps_model in ("end", "checkpoint") and "wandb" in wanted_trackers(options.report_to):
        # To save, the callback makes a transformers Trainer, and takes the options for that Trainer's arguments.
        problems.append(
            Problem(
                f'"report_to": WANDB_LOG_MODEL is {keeps_model}, and this run does not send its model to wandb.',
                remedy="Unset WANDB_LOG_MODEL; the model is in output_dir.",
                option="report_to",
            )
        )
    return problems


_FOR_TRACKERS = (
    "run_name", "project", "logging_dir", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "hub_private_repo",
)  # fmt: skip


@notes
def tracker_notes(options: ReportOptions) -> list[str]:
    """Notes on options for trackers that have no effect because there is no tracker."""
    from burnish.report.trackers import wanted_trackers

    if wanted_trackers(options.report_to):
        return []
    given = [f.name for f in dataclasses.fields(ReportOptions) if f.name in _FOR_TRACKERS]
    defaults = ReportOptions()
    unused = [name for name in given if getattr(options, name) != getattr(defaults, name)]
    return [f'"{name}" has no effect: report_to names no tracker.' for name in unused]
