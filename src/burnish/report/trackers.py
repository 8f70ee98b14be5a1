"""Trackers: TensorBoard, Weights & Biases, MLflow, Comet, SwanLab, Trackio and the others that transformers knows.

Their callbacks are transformers' own (``transformers.integrations``), and run here unchanged: events, state and control
have transformers' names, and the options answer ``to_dict``. transformers is loaded when a tracker is asked for.

In: ``report_to``. Out: callbacks. Refuses names that nobody knows and libraries that are missing, before a model loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from burnish.core.errors import Problem, did_you_mean
from burnish.core.options import raise_if


@dataclass(frozen=True)
class Tracker:
    """What a tracker needs.

    Args:
        modules: all of these must be importable; "a|b" is either of two.
        package: what pip installs.
        variable: an environment variable that must be set, where a platform sets it.
    """

    modules: tuple[str, ...]
    package: str = ""
    variable: str = ""


TRACKERS: dict[str, Tracker] = {
    "azure_ml": Tracker(("azureml.core.run",), "azureml-sdk"),
    "clearml": Tracker(("clearml",), "clearml"),
    "codecarbon": Tracker(("codecarbon",), "codecarbon"),
    "comet_ml": Tracker(("comet_ml",), "comet-ml"),
    "dagshub": Tracker(("dagshub", "mlflow"), "dagshub mlflow"),
    "dvclive": Tracker(("dvclive",), "dvclive"),
    "flyte": Tracker(("flytekit",), "flytekit"),
    "kubeflow": Tracker((), variable="KUBEFLOW_TRAINER_SERVER_URL"),
    "mlflow": Tracker(("mlflow",), "mlflow"),
    "neptune": Tracker(("neptune",), "neptune"),
    "swanlab": Tracker(("swanlab",), "swanlab"),
    "tensorboard": Tracker(("tensorboard|tensorboardX",), "tensorboard"),
    "trackio": Tracker(("trackio",), "trackio"),
    "wandb": Tracker(("wandb",), "wandb"),
}


def tracker_callbacks(report_to: str | Iterable[str] | None, logging_dir: str | None = None) -> list[Any]:
    """A callback for each tracker.

    Args:
        logging_dir: where TensorBoard's files go; ``output_dir/runs`` if None.
    Raises:
        UserError: as ``tracker_problems`` finds.
    """
    raise_if(tracker_problems(report_to))
    names = wanted_trackers(report_to)
    if not names:
        return []
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    callbacks = [INTEGRATION_TO_CALLBACK[name]() for name in names]
    for name, callback in zip(names, callbacks, strict=True):
        if name == "tensorboard" and logging_dir is not None:
            callback.logging_dir = logging_dir
    return callbacks


def tracker_problems(report_to: str | Iterable[str] | None) -> list[Problem]:
    """What is wrong with ``report_to``, all of it at once. Loads nothing."""
    return [found for name in wanted_trackers(report_to) for found in _problems_of(name)]


def wanted_trackers(report_to: str | Iterable[str] | None) -> list[str]:
    """Names, each once: "none" and nothing are no tracker, "all" is every one that is installed."""
    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if "all" in given:
        return [name for name in TRACKERS if not _missing(TRACKERS[name])]
    return list(dict.fromkeys(name for name in given if name != "none"))


def _problems_of(name: str) -> list[Problem]:
    if name not in TRACKERS:
        guess = did_you_mean(name, TRACKERS)
        known = ", ".join(TRACKERS)
        return [Problem(f'"report_to": there is no tracker "{name}".{guess}', remedy=f"Known: {known}, all, none.")]
    missing = _missing(TRACKERS[name])
    if not missing:
        return []
    tracker = TRACKERS[name]
    remedy = f"Install it with: pip install {tracker.package}" if tracker.package else f"Set {tracker.variable}."
    return [
        Problem(
            f'"report_to": {name} needs {missing}, which is not {"installed" if tracker.package else "set"}.',
            remedy=f"{remedy} Or leave {name} out of report_to.",
        )
    ]


def _missing(tracker: Tracker) -> str:
    """The first thing that is not there, or the empty string."""
    if tracker.variable and not os.environ.get(tracker.variable):
        return f"the environment variable {tracker.variable}"
    for alternatives in tracker.modules:
        if not any(_is_installed(module) for module in alternatives.split("|")):
            return f"the library {alternatives.split('|')[0]}"
    return ""


def _is_installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
    # A folder of that name in the working directory, such as the "wandb" that wandb writes its runs to, is found as a
    # namespace package; an installed library has a file.
    return spec is not None and spec.origin is not None
