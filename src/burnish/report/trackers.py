"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Comet, SwanLab, Trackio and others.

Their callbacks are those of transformers (``transformers.integrations``) and work unchanged: events, state and control
have transformers' names, and the options have ``to_dict``. transformers is imported when a tracker is used. Unknown
names and missing libraries are reported before a model is loaded.

A tracker is a class or function without arguments that returns a ``TrainerCallback``. Every event passes the options of
the run, which say where to log.

    @TRACKERS.register("csv", options=CsvOptions)
    class CsvTracker(TrainerCallback): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from burnish.config.errors import Problem, did_you_mean
from burnish.config.options import raise_if
from burnish.config.registry import Registry

TRACKERS: Registry[Callable[[], Any]] = Registry("tracker")
"""Traits of a tracker: ``needs``, a ``Requirements``, if it has requirements."""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a tracker.

    Args:
        modules: modules that must be importable; "a|b" means one of the two.
        package: name of the package to install with pip.
        variable: environment variable that the tracker's platform sets.
    """

    modules: tuple[str, ...] = ()
    package: str = ""
    variable: str = ""


_TRANSFORMERS_TRACKERS: dict[str, Requirements] = {
    "azure_ml": Requirements(("azureml.core.run",), "azureml-sdk"),
    "clearml": Requirements(("clearml",), "clearml"),
    "codecarbon": Requirements(("codecarbon",), "codecarbon"),
    "comet_ml": Requirements(("comet_ml",), "comet-ml"),
    "dagshub": Requirements(("dagshub", "mlflow"), "dagshub mlflow"),
    "dvclive": Requirements(("dvclive",), "dvclive"),
    "flyte": Requirements(("flytekit",), "flytekit"),
    "kubeflow": Requirements((), variable="KUBEFLOW_TRAINER_SERVER_URL"),
    "mlflow": Requirements(("mlflow",), "mlflow"),
    "neptune": Requirements(("neptune",), "neptune"),
    "swanlab": Requirements(("swanlab",), "swanlab"),
    "tensorboard": Requirements(("tensorboard|tensorboardX",), "tensorboard"),
    "trackio": Requirements(("trackio",), "trackio"),
    "wandb": Requirements(("wandb",), "wandb"),
}


def _callback_of_transformers(name: str) -> Any:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return INTEGRATION_TO_CALLBACK[name]()


for _name, _needs in _TRANSFORMERS_TRACKERS.items():
    TRACKERS.register(_name, needs=_needs)(partial(_callback_of_transformers, _name))


def tracker_callbacks(report_to: str | Iterable[str] | None, logging_dir: str | None = None) -> list[Any]:
    """Return a callback for each tracker.

    Args:
        report_to: names of trackers.
        logging_dir: folder for TensorBoard's files. Default: ``output_dir/runs``.
    Raises:
        UserError: with the problems of ``tracker_problems``.
    """
    raise_if(tracker_problems(report_to))
    names = wanted_trackers(report_to)
    callbacks = [TRACKERS[name]() for name in names]
    for name, callback in zip(names, callbacks, strict=True):
        if name == "tensorboard" and logging_dir is not None:
            callback.logging_dir = logging_dir
    return callbacks


def tracker_problems(report_to: str | Iterable[str] | None) -> list[Problem]:
    """Return all problems of ``report_to``. Imports no tracker library."""
    return [found for name in wanted_trackers(report_to) for found in _problems_of(name)]


def wanted_trackers(report_to: str | Iterable[str] | None) -> list[str]:
    """Return tracker names without duplicates: "none" or None selects no tracker, "all" every installed one."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if "all" in names:
        installed = [name for name in TRACKERS.names() if not _missing(_needs_of(name))]
        return [*installed, *(name for name in names if name not in ("all", "none", *TRACKERS.names()))]
    return list(dict.fromkeys(name for name in names if name != "none"))


def _problems_of(name: str) -> Iterator[Problem]:
    if name not in TRACKERS:
        guess = did_you_mean(name, TRACKERS.names())
        known = ", ".join(TRACKERS.names())
        yield Problem(
            f'"report_to": unknown tracker "{name}".{guess}',
            remedy=f"Available: {known}, all, none.",
            option="report_to",
        )
        return
    needs = _needs_of(name)
    missing = _missing(needs)
    if not missing:
        return
    remedy = f"Install it with pip install {needs.package}" if needs.package else f"Set {needs.variable}"
    yield Problem(
        f'"report_to": {name} requires {missing}, which is not {"installed" if needs.package else "set"}.',
        remedy=f"{remedy}, or remove {name} from report_to.",
        option="report_to",
    )


def _needs_of(name: str) -> Requirements:
    needs: Requirements = TRACKERS.get(name).metadata.get("needs", Requirements())
    return needs


def _missing(needs: Requirements) -> str:
    """Return the first missing requirement, or ""."""
    if needs.variable and not os.environ.get(needs.variable):
        return f"the environment variable {needs.variable}"
    for alternatives in needs.modules:
        if not any(_is_installed(module) for module in alternatives.split("|")):
            return f"the library {alternatives.split('|')[0]}"
    return ""


def _is_installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False
    # A folder of that name in the working directory, such as "wandb" with the runs of wandb, is found as a namespace
    # package. An installed library has a file.
    return spec is not None and spec.origin is not None
