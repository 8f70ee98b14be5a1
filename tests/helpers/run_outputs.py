"""Readers of the output files of a run, and a script that kills its run in the middle of an epoch."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

KILLS_ITSELF_AFTER_STEP_FIVE = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from burnish.loop.loop import Loop
from burnish.cli import main
step = Loop.step
def step_or_kill(run, step_batch):
    if run.state.global_step == 5:
        run.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    step(run, step_batch)
Loop.step = step_or_kill
main(["train", *sys.argv[1:]])
"""


def weights_in(folder):
    name = next(n for n in ("model.safetensors", "adapter_model.safetensors") if (Path(folder) / n).is_file())
    return load_file(Path(folder) / name)


def same_weights(a, b):
    a, b = weights_in(a), weights_in(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def history(folder):
    log = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in log]
