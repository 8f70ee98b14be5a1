"""The unit tests of the web UI's JavaScript, if node is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.run
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_modules_pass_their_tests() -> None:
    argv = ["node", "--no-warnings", "--test", *map(str, sorted(SCRIPTS.glob("*.test.mjs")))]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
