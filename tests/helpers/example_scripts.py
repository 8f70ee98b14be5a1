"""Run the scripts of ``examples/`` as a user would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_script(script: Path | str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in ``folder``, without a network or a GPU. It must succeed.

    Args:
        script: a path, or the name of an example.
    """
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    completed = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)], cwd=folder, env=environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed
