"""The data of a run, for a command that was started in another folder than the run.

In: the options of ``run.yaml``, and the folder that ``launch.json`` names. Out: paths that hold from everywhere. A page
asks too, so nothing that is slow to import is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def data_seen_from(place: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that name data by a relative path, with paths that hold from every folder.

    Args:
        place: the folder in which the run was started.
        values: of its options.
    """
    folders = {"dataset_dir": "data", **values}
    found: dict[str, Any] = {}
    for name in ("dataset_dir", "tokenized_path"):
        if isinstance(folders.get(name), str) and (place / folders[name]).is_dir():
            found[name] = str(place / folders[name])
    for name in ("dataset", "eval_dataset"):
        given = values.get(name) or []
        names = [one.strip() for one in given.split(",")] if isinstance(given, str) else list(given)
        if any((place / one).is_file() for one in names):
            found[name] = [str(place / one) if (place / one).is_file() else one for one in names]
    return found
