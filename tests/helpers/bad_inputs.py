"""Helpers of tests with bad inputs: a valid working directory, changes to it, and checks of the output."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from small_run import records

ROWS = records()
OPTIONS: dict[str, Any] = {
    "model_name_or_path": "model", "finetuning_type": "full", "dataset_dir": "data", "dataset": "rows",
    "cutoff_len": 128, "output_dir": "out", "max_steps": 8, "save_steps": 2, "logging_steps": 1,
    "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": "none", "use_cpu": "true",
    "plot_loss": "false",
}  # fmt: skip


def make_folder(model: Path) -> None:
    """Fill the working directory: a model, a data set and ``run.yaml``."""
    shutil.copytree(model, "model")
    write("data/rows.json", ROWS)
    write("data/dataset_info.json", {"rows": {"file_name": "rows.json"}})
    Path("run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in OPTIONS.items()), encoding="utf-8")


def write(name: str, content: Any) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    raw = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
    Path(name).write_bytes(raw)


def change(name: str, **values: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    changed = {**json.loads(Path(name).read_text(encoding="utf-8")), **values}
    write(name, {key: value for key, value in changed.items() if value is not None})


def cut_short(name: str, num_bytes: int = 100) -> None:
    Path(name).write_bytes(Path(name).read_bytes()[:num_bytes])


@dataclass(frozen=True)
class Case:
    """A bad input: its number, a function that prepares it, and the expected messages."""

    number: str
    prepare: Callable[[], None]
    expected: list[str]
    argv: list[str] = field(default_factory=list)  # additional command-line arguments

    def __str__(self) -> str:
        return self.number


def read_output(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return standard output and standard error. They contain no traceback, and at most four lines per problem."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    for problem in captured.err.split("error: ")[1:]:
        assert len(problem.splitlines()) <= 4, problem
    return captured.out, captured.err


SENTENCES = Path(__file__).parents[1] / "golden" / "bad_inputs.json"
WRITES = "BURNISH_WRITE_SENTENCES"
"""If this environment variable is set, ``matches_stored_message`` updates the table; check the diff before the
commit."""


MISSING_LIBRARIES = {"option A21": "wandb", "option A33": "bitsandbytes", "option A34": "deepspeed"}
"""Messages about a missing library, which differ if it is installed."""


PYTHON_313_MESSAGES = {
    "column 35: invalid JSON: Illegal trailing comma before end of object": (
        "column 36: invalid JSON: Expecting property name enclosed in double quotes"
    )
}
"""JSON errors of Python 3.13, and those of earlier versions."""


def matches_stored_message(name: str, err: str, folder: Path) -> bool:
    """Tell whether ``err`` is the stored output for that bad input, with a dot for the working directory."""
    for path, replacement in ((folder.resolve(), "."), (folder, "."), (Path(__file__).parents[2], "burnish")):
        err = err.replace(str(path), replacement)
    for newer, older in PYTHON_313_MESSAGES.items():
        err = err.replace(newer, older)
    if name in MISSING_LIBRARIES and find_spec(MISSING_LIBRARIES[name]):
        return True
    table = json.loads(SENTENCES.read_text(encoding="utf-8")) if SENTENCES.is_file() else {}
    if os.environ.get(WRITES):
        text = json.dumps({**table, name: err}, indent=1, ensure_ascii=False, sort_keys=True)
        SENTENCES.write_text(text + "\n", encoding="utf-8")
        return True
    assert err == table.get(name)
    return True


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
