"""The unit tests of the web UI's JavaScript, if node is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import burnish
from burnish.serve.http.static import MemoryFiles

STATIC = Path(burnish.__file__).parent / "serve" / "page" / "static"
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.run
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_modules_pass_their_tests() -> None:
    argv = ["node", "--no-warnings", "--test", *map(str, sorted(SCRIPTS.glob("*.test.mjs")))]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_served_scripts_have_no_comments_and_their_line_numbers() -> None:
    served = MemoryFiles([STATIC], {}).files
    for path in STATIC.glob("*.js"):
        text, source = served[path.name][0].decode(), path.read_text(encoding="utf-8")
        assert text.count("\n") == source.count("\n"), path.name
        assert not re.search(r"^\s*//|/\*\*", text, re.MULTILINE), path.name
    assert rb"https?:\/\/" in served["md.js"][0]
