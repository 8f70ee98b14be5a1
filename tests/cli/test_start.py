"""The modules that a command imports before its work."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from small_run import make_workspace

pytestmark = pytest.mark.run

SOURCE = Path(__file__).parents[2] / "src"
UNUSED_LIBRARIES = {
    "datasets", "pandas", "peft", "trl", "bitsandbytes", "sklearn", "torchvision", "matplotlib",
    "wandb", "tensorboard", "gradio", "fastapi", "transformers.trainer", "transformers.training_args",
}  # fmt: skip
"""Libraries that a full training on a local JSON file does not use."""

# Run a command in another process, and print the imported modules and the settings of the garbage collector.
SCRIPT = """
import gc, json, sys
from burnish.cli import command
found = {}
if sys.argv[2] == "watched":
    from burnish.loop.loop import Loop
    train = Loop.train
    def watched(loop):
        found.update(enabled=gc.isenabled(), threshold=gc.get_threshold()[0])
        return train(loop)
    Loop.train = watched
found.update(status=command(["train", sys.argv[1]]), loaded=sorted(sys.modules))
print("FOUND", json.dumps(found))
"""


def run_command(folder: Path, options: dict[str, Any], watched: bool = False) -> dict[str, Any]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(options))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file), "watched" if watched else ""],
        capture_output=True, text=True, cwd=folder, env=environment, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(completed.stdout.split("FOUND ")[1])
    return result


@pytest.mark.slow
def test_full_training_imports_no_unused_library(tmp_path: Path) -> None:
    result = run_command(tmp_path, make_workspace(tmp_path, max_steps=1, report_to="none"), watched=True)
    assert result["status"] == 0
    assert "transformers.models.llama.modeling_llama" in result["loaded"]
    assert not UNUSED_LIBRARIES & set(result["loaded"])
    assert result["enabled"], "garbage collection is enabled during training"
    assert result["threshold"] == 700, "the default threshold is restored when training begins"


def test_invalid_options_are_reported_before_importing_transformers(tmp_path: Path) -> None:
    result = run_command(tmp_path, {**make_workspace(tmp_path), "lr_scheduler_kwargs": {"powr": 1}})
    assert result["status"] == 2
    assert not {"transformers", "datasets", "torch._dynamo"} & set(result["loaded"])
