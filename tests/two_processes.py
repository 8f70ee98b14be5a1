"""A function of a test in two processes that share a gloo group, as a launcher would start them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def in_two_processes(function: Callable[..., None], *given: Any, environment: dict[str, str] | None = None) -> None:
    """Call ``function`` in each of two processes, which learn their rank from the environment."""
    in_processes(2, function, *given, environment=environment)


def in_processes(
    count: int, function: Callable[..., None], *given: Any, environment: dict[str, str] | None = None
) -> None:
    """Call ``function`` in each of ``count`` processes.

    Args:
        given: its arguments, as JSON can hold them.
        environment: of both processes, besides this one's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    beside = Path(function.__code__.co_filename).parent
    script = _LAUNCHER.format(count=count, paths=[str(beside), str(here), str(here.parent / "src")])
    place = {**os.environ, **(environment or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    called = json.dumps([function.__module__, function.__name__, given])
    subprocess.run([sys.executable, "-c", script, called], env=place, check=True, timeout=300)
