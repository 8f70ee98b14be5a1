"""Start the same training twice; the second start reads the rows that the first one cached.

    python bench/restart.py MATERIAL OUTPUT [name=value ...]

Takes the arguments of ``train_burnish.py``. Prints the line of ``gauge.py`` with the measurements of the first start
and, with the prefix ``again_``, of the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gauge import ENDS_AT_FIRST_STEP, MARK, print_measurements


def start(arguments: list[str]) -> dict[str, Any]:
    """Run a new process until its first step and return its measurements."""
    variables = {**os.environ, ENDS_AT_FIRST_STEP: "1", "BENCH_STARTED_S": str(time.time())}
    command = [sys.executable, str(Path(__file__).with_name("train_burnish.py")), *arguments, "overwrite_cache=false"]
    finished = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line for line in finished.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(finished.stderr[-2000:])
    results: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return {name: value for name, value in results.items() if name.startswith("ready_")}


if __name__ == "__main__":
    first, again = start(sys.argv[1:]), start(sys.argv[1:])
    print_measurements(**first, **{f"again_{name}": value for name, value in again.items()})
