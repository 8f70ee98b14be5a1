"""Result files of a run, and the metrics in them.

The files are ``train_results.json``, ``eval_results.json``, ``all_results.json`` and ``trainer_state.json``. Names of
files and keys are those of transformers (``Trainer.save_metrics``, ``speed_metrics``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.loop.state import STATE_NAME
from burnish.report.pace import clock_time
from burnish.utils.files import temporary_path
from burnish.utils.json_files import read_object

if TYPE_CHECKING:
    from burnish.loop.state import TrainerState

ALL_RESULTS = "all_results.json"


def save_metrics(split: str, metrics: Mapping[str, Any], folder: str | Path, combined: bool = True) -> Path:
    """Write ``<split>_results.json`` and, if ``combined``, merge the metrics into ``all_results.json``.

    Args:
        split: "train", "eval", "test" or "predict".
        metrics: metrics to write.
        folder: output folder.
        combined: also update ``all_results.json``.
    Returns:
        The file of the split.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}_results.json"
    _write_json(path, metrics)
    if combined:
        together = folder / ALL_RESULTS
        _write_json(together, {**_earlier_metrics(together), **metrics})
    return path


def _earlier_metrics(path: Path) -> dict[str, Any]:
    """Return the metrics of earlier parts of the run. A damaged file counts as empty, to keep the new metrics."""
    try:
        return read_object(path) if path.is_file() else {}
    except UserError:
        return {}


def save_state(state: TrainerState, folder: str | Path) -> Path:
    """Write ``trainer_state.json``: the state of the run and its log history."""
    path = Path(folder) / STATE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    state.save_to_json(str(path))
    return path


def speed_metrics(
    split: str, start_time: float, num_samples: float | None = None, num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the runtime since ``start_time`` (of ``time.time()``) in seconds, and rates per second."""
    runtime_s = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime_s, 4)}
    done = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    if runtime_s > 0:
        metrics |= {f"{split}_{k}_per_second": round(n / runtime_s, 3) for k, n in done.items() if n is not None}
    return metrics


def format_metrics(split: str, metrics: Mapping[str, Any]) -> str:
    """Format metrics as aligned lines below a heading, sorted by name."""
    formatted = {name: _format_value(name, value) for name, value in sorted(metrics.items())}
    names, values = max(map(len, formatted), default=0), max(map(len, formatted.values()), default=0)
    lines = [f"  {name:<{names}} = {word:>{values}}" for name, word in formatted.items()]
    return "\n".join([f"***** {split} metrics *****", *lines])


def _format_value(name: str, value: Any) -> str:
    if name.endswith("_runtime"):
        return clock_time(value)
    if name == "total_flos":
        return f"{value / 1e9:,.0f} GF"
    return f"{round(value, 4) if isinstance(value, float) else value}"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text_atomically(path, json.dumps(data, indent=4, sort_keys=True) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file atomically: it contains the old text or the new one, even if the disk fills up."""
    temporary = temporary_path(path)
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The system names the temporary file, or no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
