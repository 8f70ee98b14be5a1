"""The same start twice: of the second, what the first one has left in the cache of encoded rows is read.

    python bench/start_again.py MATERIAL OUTPUT [name=value ...]

In: what ``train_burnish.py`` takes. Out: the line of ``gauge.py``, with what it says of the first start and, under
``again_``, of the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gauge import ENDS_AT_FIRST_STEP, MARK, say


def start(words: list[str]) -> dict[str, Any]:
    """A process from its very start to its first step."""
    told = {**os.environ, ENDS_AT_FIRST_STEP: "1", "BENCH_STARTED_S": str(time.time())}
    command = [sys.executable, Path(__file__).with_name("train_burnish.py"), *words, "overwrite_cache=false"]
    done = subprocess.run(command, env=told, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return {name: value for name, value in found.items() if name.startswith("ready_")}


if __name__ == "__main__":
    first, again = start(sys.argv[1:]), start(sys.argv[1:])
    say(**first, **{f"again_{name}": value for name, value in again.items()})
