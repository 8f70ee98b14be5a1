"""The mark of a finished run, by which the same command recognises it, and notices files that have gone since.

In ``output_dir``: ``.finished.json`` with the steps, what the run depended on, and the files of the model with their
sizes. A finished run whose model has gone is not finished: it goes on from its last checkpoint, and writes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.app.checks import FINISHED_NAME
from burnish.core.errors import UserError
from burnish.core.json_files import read_object
from burnish.core.state import STATE_NAME, TrainerState

_MODEL = ("*.safetensors", "model.safetensors.index.json", "config.json", "adapter_config.json", "tokenizer.json")
_REMEDY = "Set overwrite_output_dir: true to train anew, or name another output_dir."


def write_finished(folder: Path, state: TrainerState, fingerprints: Mapping[str, Any]) -> None:
    """Write that the run in ``folder`` is done, with its fingerprints, for runs without checkpoints."""
    done = {
        "global_step": state.global_step, "max_steps": state.max_steps, "files": _sizes(folder),
        "fingerprints": dict(fingerprints),
    }  # fmt: skip
    (folder / FINISHED_NAME).write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    found = (path for pattern in _MODEL for path in sorted(folder.glob(pattern)) if path.is_file())
    return {path.name: path.stat().st_size for path in found}


def read_finished(folder: Path) -> dict[str, Any]:
    """Raises UserError where the file is damaged."""
    needed = [("global_step", int), ("max_steps", int), ("fingerprints", dict)]
    return read_object(folder / FINISHED_NAME, _REMEDY, needed)


def lost_files(folder: Path, done: Mapping[str, Any]) -> list[str]:
    """The files of the model that are gone or no longer whole, as half sentences."""
    found = _sizes(folder)
    lost = []
    for name, size in dict(done.get("files") or {}).items():
        if name not in found:
            lost.append(f"its {name} is gone")
        elif found[name] != size and name.endswith(".safetensors"):  # of the others a person may change a word
            lost.append(f"its {name} has {found[name]:,} bytes instead of {size:,}")
    return lost


def finished_state(folder: Path) -> TrainerState | None:
    """The state of the run in ``folder`` at its end; None where it has not finished, or its model is not whole."""
    if not ((folder / "train_results.json").is_file() and (folder / STATE_NAME).is_file()):
        return None
    try:
        if (folder / FINISHED_NAME).is_file() and lost_files(folder, read_finished(folder)):
            return None
        return TrainerState.load_from_json(str(folder / STATE_NAME))
    except UserError:  # damaged: what it said is said again once its checkpoint has been gone on from
        return None


def finished_sentence(folder: Path, step: int) -> str:
    return (
        f"{folder} holds this run, finished at step {step}: there is nothing to do.\n"
        "  A larger num_train_epochs or max_steps trains it further. For a run with other settings name another "
        "output_dir, or set overwrite_output_dir: true."
    )
