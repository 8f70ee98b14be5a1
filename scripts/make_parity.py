"""Regenerate the comparisons with transformers, TRL and LLaMA-Factory: lists of methods and tables of numbers.

    python scripts/make_parity.py                    # everything; an hour on two cores
    python scripts/make_parity.py peer_methods       # some of the scripts in this folder

The environments of the other libraries are created by ``bench/environments.py`` if they are missing. Written are the
tables in docs/parity*.md and ``src/burnish/trainer/peer_methods.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ("peer_methods", "parity", "parity_sft", "parity_preferences")
OWN_ENVIRONMENTS = ("parity_preferences",)
"""Scripts that start processes in the environments themselves."""


def main(arguments: list[str]) -> str | None:
    """Run the scripts. Returns an error message or None."""
    if unknown := [name for name in arguments if name not in SCRIPTS]:
        return f"Unknown script: {', '.join(unknown)}. Expected: {', '.join(SCRIPTS)}."
    sys.path.insert(0, str(ROOT / "bench"))
    python = import_module("environments").interpreters(["trl"])["trl"]
    if isinstance(python, str):
        return python
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    for name in arguments or SCRIPTS:
        interpreter = sys.executable if name in OWN_ENVIRONMENTS else python
        subprocess.run([interpreter, ROOT / "scripts" / f"{name}.py", "--write"], env=environment, check=True)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
