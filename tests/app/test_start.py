"""The start of a command: what it loads and leaves out before it does what it was asked for."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.utils.collection import collect_from_here, without_collection
from small_run import make_user

pytestmark = pytest.mark.run

SOURCE = Path(__file__).parents[2] / "src"
NEVER_NEEDED = {
    "datasets", "pyarrow", "pandas", "peft", "trl", "bitsandbytes", "scipy", "sklearn", "torchvision", "matplotlib",
    "wandb", "tensorboard", "gradio", "fastapi", "transformers.trainer", "transformers.training_args",
}  # fmt: skip
"""A full training of local JSON reaches its end without these. What transformers imports for any model is not ours."""

# The command line in a process of its own; what it has loaded, and how the search for garbage stood in the training.
AS_COMMAND = """
import gc, json, sys
from burnish.cli import command
found = {}
if sys.argv[2] == "watched":
    from burnish.run.recovery import spikes
    train = spikes.train
    def watched(*given):
        found.update(enabled=gc.isenabled(), frozen=gc.get_freeze_count())
        return train(*given)
    spikes.train = watched
found.update(status=command(["train", sys.argv[1]]), loaded=sorted(sys.modules))
print("FOUND", json.dumps(found))
"""


def loaded_by(folder: Path, options: dict[str, Any], watched: bool = False) -> dict[str, Any]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(options))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", AS_COMMAND, str(file), "watched" if watched else ""],
        capture_output=True, text=True, cwd=folder, env=environment, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.split("FOUND ")[1])
    return found


def test_a_full_training_loads_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    found = loaded_by(tmp_path, make_user(tmp_path, max_steps=1, report_to="none"), watched=True)
    assert found["status"] == 0
    assert "transformers.models.llama.modeling_llama" in found["loaded"]
    assert not NEVER_NEEDED & set(found["loaded"])
    assert found["enabled"], "a training makes garbage, which is searched for"
    assert found["frozen"] > 100_000, "but not among what was imported"


def test_a_misspelled_option_does_not_wait_for_transformers(tmp_path: Path) -> None:
    found = loaded_by(tmp_path, {**make_user(tmp_path), "learning_rat": 1})
    assert found["status"] == 2
    assert not {"transformers", "datasets"} & set(found["loaded"])


@pytest.fixture
def searching() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


def test_a_program_that_calls_burnish_keeps_its_search_for_garbage(searching: None) -> None:
    frozen = gc.get_freeze_count()
    collect_from_here()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_what_stands_when_the_search_begins_is_not_searched(searching: None) -> None:
    with without_collection():
        assert not gc.isenabled()
        collect_from_here()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
