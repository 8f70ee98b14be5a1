"""Resolve the paths of a run for a command that was started in another folder.

Paths in ``run.yaml`` are relative to the folder in ``launch.json``. The web UI uses this too, so nothing that is slow
to import is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def absolute_data_options(place: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dataset options that have relative paths, with absolute paths.

    Args:
        place: folder in which the run was started.
        values: its options.
    """
    folders = {"dataset_dir": "data", **values}
    found: dict[str, Any] = {}
    for name in ("dataset_dir", "tokenized_path"):
        if isinstance(folders.get(name), str) and (place / folders[name]).is_dir():
            found[name] = str(place / folders[name])
    for name in ("dataset", "eval_dataset"):
        value = values.get(name) or []
        names = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
        if any((place / one).is_file() for one in names):
            found[name] = [str(place / one) if (place / one).is_file() else one for one in names]
    return found


def absolute_model_options(place: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with relative paths of models and adapters, converted to absolute paths.

    Args:
        place: folder in which the run was started.
        values: its options.
    """
    found: dict[str, Any] = {}
    for name in ("model_name_or_path", "ref_model", "reward_model"):
        if isinstance(values.get(name), str) and (place / values[name]).is_dir():
            found[name] = str(place / values[name])
    for name in ("adapter_name_or_path", "ref_model_adapters", "reward_model_adapters"):
        if isinstance(values.get(name), list):
            found[name] = [str(place / one) if (place / str(one)).is_dir() else one for one in values[name]]
    return found
