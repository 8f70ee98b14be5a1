"""Whether a run that goes on is the run that was begun.

In: the fingerprints in a checkpoint's manifest, and those of now. Out: sentences on what has changed and is applied.
Refuses what makes it another run, with both values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.core.errors import Problem, UserError
from burnish.core.manifest import read_manifest

_HASH = re.compile(r"^[0-9a-f]{32,}$")
MAY_CHANGE = frozenset(
    {"learning_rate", "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "world_size",
     "versions", "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir"}
)  # fmt: skip
"""Fingerprints that a continued run may change: they are applied and said. The batch sizes are among them because
``rows_per_step``, their product, is not."""


def compare_fingerprints(folder: Path, now: Mapping[str, Any], despite: bool = False) -> list[str]:
    """Sentences on what has changed since the checkpoint and is applied.

    Raises:
        UserError: if something changed that makes it another run, unless ``despite``.
    """
    return compare(read_manifest(folder)["fingerprints"], now, folder, despite)


def compare(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path, despite: bool = False) -> list[str]:
    """``compare_fingerprints`` with those that a checkpoint or a finished run in ``folder`` was made with."""
    changed = {name: _apart(before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    fatal = {name: pair for name, pair in changed.items() if name not in MAY_CHANGE}
    if fatal and not despite:
        raise UserError(
            Problem(
                "this is another run than the one here: "
                + "; ".join(_difference(name, old, new) for name, (old, new) in fatal.items())
                + ".",
                where=str(folder),
                why="Continuing would mix two runs.",
                remedy="Restore the old value, use another output_dir, or set resume_despite_changes: true.",
            )
        )
    return [
        f"{name} has changed since {folder.name}."
        if _is_hash(old)
        else f"{name} was {_short(old)} in {folder.name} and is {_short(new)} now."
        for name, (old, new) in changed.items()
    ]


def _apart(old: Any, new: Any) -> tuple[Any, Any]:
    """Of two mappings the entries that differ; of anything else both values."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return old, new
    same = {name for name in old if name in new and old[name] == new[name]}
    before, now = ({name: value for name, value in side.items() if name not in same} for side in (old, new))
    return before, now


def _difference(name: str, old: Any, new: Any) -> str:
    """``seed was 42, is 7``; of a hash no more can be said than that it has changed."""
    return f"{name} has changed" if _is_hash(old) else f"{name} was {_short(old)}, is {_short(new)}"


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.match(value) is not None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
