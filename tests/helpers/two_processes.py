"""Run a test function in two processes with a gloo process group, as a launcher would start them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.cli import main
from small_run import as_arguments

_LAUNCHER = """
import importlib, json, os, sys
sys.path[:0] = {paths!r}
import torch, accelerate
module, name, given = json.loads(sys.argv[1])
function = getattr(importlib.import_module(module), name)
torch.set_num_threads(1)

def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="{count}")
    function(*given)

# Forked, so that the libraries are imported once.
torch.multiprocessing.start_processes(run, nprocs={count}, start_method="fork")
"""


def in_two_processes(function: Callable[..., None], *args: Any, environment: dict[str, str] | None = None) -> None:
    """Call ``function`` in each of two processes, which read their rank from the environment."""
    in_processes(2, function, *args, environment=environment)


def in_processes(
    count: int, function: Callable[..., None], *args: Any, environment: dict[str, str] | None = None
) -> None:
    """Call ``function`` in each of ``count`` processes.

    Args:
        args: the arguments of the function, which must be JSON values.
        environment: additional environment variables of the processes.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    helpers = Path(__file__).parent
    test_folder = Path(function.__code__.co_filename).parent
    script = _LAUNCHER.format(
        count=count, paths=[str(test_folder), str(helpers), str(helpers.parent), str(helpers.parents[1] / "src")]
    )
    variables = {**os.environ, **(environment or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    call = json.dumps([function.__module__, function.__name__, args])
    subprocess.run([sys.executable, "-c", script, call], env=variables, check=True, timeout=300)


def train_with_one_and_two(folder: Path, options: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> None:
    """Train each kind of run in one process and in two, into ``folder/one/KIND`` and ``folder/two/KIND``.

    Args:
        options: options of all runs, with two rows per micro-batch. With two processes, each gets one row.
        kinds: name -> further options.
    """

    def commands(count: str, **more: Any) -> list[list[str]]:
        outputs = {kind: {"output_dir": str(folder / count / kind)} for kind in kinds}
        return [["train", *as_arguments({**options, **more, **kinds[kind], **outputs[kind]})] for kind in kinds]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(folder / "cache of one"))
        run_commands(commands("one"))
    cache = {"BURNISH_CACHE": str(folder / "cache of two")}  # a new cache, so that two processes also tokenize
    two = commands("two", per_device_train_batch_size=1, ddp_backend="gloo")
    in_two_processes(run_commands, two, environment=cache)


def run_commands(commands: list[list[str]]) -> None:
    for argv in commands:
        assert main(argv) == 0
