"""The wheel contains all files that a new user needs outside of a checkout."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_runs_the_demo_from_an_empty_environment(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # it may contain a checkout

    def run(*command: str | Path) -> str:
        completed = subprocess.run(
            [str(word) for word in command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("burnish-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    run(python, "-m", "pip", "install", "--quiet", pinned)  # first, so that no other build of torch is installed later
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    where = run(python, "-c", "import burnish; print(burnish.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    message = run(tmp_path / "env" / "bin" / "burnish", "demo")
    before, after = map(float, re.findall(r"([\d.]+) before, ([\d.]+) after", message)[0])
    assert after > 0.8 > before
    assert (tmp_path / "demo-run" / "model.safetensors").is_file()
    printed = re.findall(r"^  \S*burnish ((?:explain|train demo).*)$", message, re.MULTILINE)
    assert len(printed) == 2
    for command in printed:
        short_run = ["max_steps=2", "warmup_steps=0"] if command.startswith("train") else []
        run(tmp_path / "env" / "bin" / "burnish", *command.split(), *short_run)
    assert (tmp_path / "lora-run" / "adapter_model.safetensors").is_file()
