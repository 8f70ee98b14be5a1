"""Count the source files that a reader has to open to follow one record from a command to the weights.

A run of two steps is traced at seven stations: the file of records is opened, the tokenizer encodes, the tensors of a
batch are created, weights are read, the model computes, the backward pass runs, the optimizer updates. Each station is
a call into a library or into Python itself; for the model, only passes with gradients count. The files of
``src/burnish`` on the call stack at a station are those that lead to it from the command. The result is the number of
different files on all of these stacks. Files that are only imported, and files whose functions returned before a
station (options, checks, reports), are not counted.

The second number is that of files in which any function is called during the second step, from the end of the first
update to the end of the second: loader, loop, objective, kernels, callbacks. The third number is that of the entire
run.

``--door`` selects ``train`` (``burnish train``) or ``sft`` (``SFTTrainer``); default: both.

    python scripts/count_files.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import burnish

SOURCE = Path(burnish.__file__).parent
ROOT = SOURCE.parents[1]
STATIONS = ("records", "tokens", "batches", "weights are read", "forward", "backward", "update")
STEPS = 2


class Walk:
    """The files of burnish on the call stack at each station, and all files that were executed."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)
        self.executed: set[str] = set()
        self.this_step: set[str] = set()  # executed since the last update
        self.in_step: set[str] = set()  # executed between the last two updates

    def at(self, station: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` so that it records the call stack when it is called."""

        def called(*arguments: Any, **named: Any) -> Any:
            self.files[station] |= set(files_on_stack(sys._getframe(1)))
            return function(*arguments, **named)

        return called

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Profile function for ``sys.setprofile``, which also receives calls of C functions."""
        if event == "call":
            if (name := name_of(frame)) and frame.f_code.co_name != "<module>":
                self.executed.add(name)
                self.this_step.add(name)
        elif event == "c_call" and (station := station_of(argument)):
            self.files[station] |= set(files_on_stack(frame))


def station_of(function: Any) -> str | None:
    """Return the station of a call of a C function: the tokenizer or the backward pass."""
    name = getattr(function, "__name__", "")
    if name == "run_backward":
        return "backward"
    owner = type(getattr(function, "__self__", None)).__name__
    return "tokens" if owner == "Tokenizer" and name.startswith("encode") else None


def name_of(frame: FrameType) -> str | None:
    """Return the file of a frame relative to ``src/burnish``, or None for other files."""
    path = frame.f_code.co_filename
    return path[len(str(SOURCE)) + 1 :] if path.startswith(f"{SOURCE}{os.sep}") else None


def files_on_stack(frame: FrameType | None) -> Iterator[str]:
    """Yield the files of burnish on the call stack."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and name_of(frame):
            return  # an import
        if name := name_of(frame):
            yield name
        frame = frame.f_back


def watch(walk: Walk, data: str) -> None:
    """Record the call stack at calls of Python functions that are stations. Args: data: name of the file of records."""
    import builtins

    import torch
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaModel

    original_open = builtins.open

    def open_and_record(file: Any, *arguments: Any, **named: Any) -> Any:
        if str(file).endswith(data):
            walk.files["records"] |= set(files_on_stack(sys._getframe(1)))
        return original_open(file, *arguments, **named)

    made_by: dict[int, set[str]] = {}  # address of an integer tensor -> files on the stack when it was created

    def record_creation(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if result.dtype == torch.int64:
                made_by[result.data_ptr()] = set(files_on_stack(sys._getframe(1)))
            return result

        return wrapper

    def forward(model: Any, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            walk.files["forward"] |= set(files_on_stack(sys._getframe(1)))
            for given in (*arguments, *named.values()):
                if isinstance(given, torch.Tensor):
                    walk.files["batches"] |= made_by.get(given.data_ptr(), set())
        return plain_forward(model, *arguments, **named)

    def update(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        walk.files["update"] |= set(files_on_stack(sys._getframe(1)))
        result = plain_update(optimizer, *arguments, **named)
        walk.in_step, walk.this_step = walk.this_step, set()
        return result

    builtins.open = io.open = open_and_record
    for name in ("tensor", "as_tensor", "cat", "stack", "from_numpy", "frombuffer"):
        setattr(torch, name, record_creation(getattr(torch, name)))
    read = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(walk.at("weights are read", read))  # type: ignore[assignment]
    plain_forward, LlamaModel.forward = LlamaModel.forward, forward
    plain_update, torch.optim.AdamW.step = torch.optim.AdamW.step, update  # type: ignore[method-assign]


def run_train(folder: Path) -> None:
    """Run ``burnish train``."""
    from burnish.cli import main

    arguments = ["train", "model_name_or_path=model", "dataset=data.json", "output_dir=out", f"max_steps={STEPS}"]
    arguments += ["per_device_train_batch_size=2", "plot_loss=false", "use_cpu=true", "overwrite_cache=true"]
    assert main(arguments) == 0


def run_sft(folder: Path) -> None:
    """Train with ``SFTTrainer``."""
    from datasets import load_dataset

    from burnish import SFTConfig, SFTTrainer

    rows = load_dataset("json", data_files=str(folder / "chats.json"), split="train")
    args = SFTConfig(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    SFTTrainer(model=str(folder / "model"), args=args, train_dataset=rows).train()


DOORS = {"train": run_train, "sft": run_sft}


def count(door: str) -> Walk:
    """Run one entry point in a temporary folder and return its walk."""
    import json

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from small_run import make_model, records

    folder, walk, before = Path(tempfile.mkdtemp()), Walk(), Path.cwd()
    os.environ["BURNISH_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    make_model(folder / "model")
    (folder / "data.json").write_text(json.dumps(records(8)), encoding="utf-8")
    roles = (("user", "instruction"), ("assistant", "output"))
    chats = [{"messages": [{"role": role, "content": row[key]} for role, key in roles]} for row in records(8)]
    (folder / "chats.json").write_text(json.dumps(chats), encoding="utf-8")
    watch(walk, "data.json" if door == "train" else "chats.json")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(walk.profile)
        try:
            DOORS[door](folder)
        finally:
            sys.setprofile(None)
            os.chdir(before)
    return walk


def report(door: str) -> None:
    """Print the files by station and the three numbers."""
    walk, seen = count(door), set[str]()
    for station in STATIONS:
        new = sorted(walk.files[station] - seen)
        seen |= walk.files[station]
        print(f"  {station:18}{len(walk.files[station]):3} files, new: {', '.join(new) or '-'}")
    in_step, executed = len(walk.in_step), len(walk.executed)
    print(f"{door}: {len(seen)} files from the command to the weights; {in_step} executed in a step, {executed} in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--door", choices=tuple(DOORS))
    door = parser.parse_args().door
    if door:
        report(door)
        return
    for name in DOORS:  # separate processes, so that imports and caches of one do not affect the other
        subprocess.run([sys.executable, __file__, "--door", name], check=True)


if __name__ == "__main__":
    main()
