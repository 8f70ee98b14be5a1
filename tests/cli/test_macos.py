"""Commands as on macOS, without files and functions that only Linux has (``helpers/macos``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import burnish
from burnish.kernels.cpu.packed_linear import has_kernels
from burnish.parallel import checks, precision, selection
from burnish.parallel.options import ParallelOptions
from helpers.small_run import as_arguments, make_workspace
from serve.client import send
from serve.test_api_command import MODEL, Process

_PATH = os.pathsep.join([str(Path(__file__).parents[1] / "helpers" / "macos"), str(Path(burnish.__file__).parents[1])])


def _python(*words: str) -> str:
    """Return the output of a Python process that runs as on macOS."""
    completed = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": _PATH}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


_LINUX_ONLY = {
    "os": "sched_getaffinity pidfd_open posix_fadvise posix_fallocate memfd_create eventfd splice copy_file_range",
    "signal": "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR",
    "resource": "prlimit RUSAGE_THREAD",
    "select": "epoll",
    "mmap": "MADV_HUGEPAGE MAP_POPULATE",
    "socket": "SO_BINDTODEVICE TCP_USER_TIMEOUT",
    "time": "CLOCK_BOOTTIME",
}


@pytest.mark.parametrize("module", _LINUX_ONLY)
def test_function_that_only_linux_has_is_used_if_it_exists(module: str) -> None:
    for path in Path(burnish.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for name in _LINUX_ONLY[module].split():
            if f"{module}.{name}" in text:
                assert f'hasattr({module}, "{name}")' in text, f"{path}: {module}.{name}"


@pytest.mark.slow
@pytest.mark.run
def test_run_with_worker_processes_trains_and_is_listed(tmp_path: Path) -> None:
    options = make_workspace(
        tmp_path, max_steps=2, dataloader_num_workers=2, preprocessing_num_workers=2, num_processes=2
    )
    _python("-m", "burnish", "train", *as_arguments({**options, "model_name_or_path": MODEL}))
    listed = json.loads(_python("-m", "burnish", "runs", str(tmp_path), "--json"))
    assert (listed["state"], listed["step"]) == ("done", 2)


@pytest.mark.slow
@pytest.mark.run
def test_server_answers_and_stops() -> None:
    process = Process(MODEL, "api_port=0", PYTHONPATH=_PATH).until_ready()
    body = {"model": "model", "messages": [{"role": "user", "content": "opposite: hot"}], "max_tokens": 2}
    assert send(process, "POST", "/v1/chat/completions", body)[0] == 200
    assert process.ended() == 128 + 15


@pytest.mark.run
def test_process_of_a_run_is_identified_and_stopped() -> None:
    printed = _python(
        "-c",
        "import signal, subprocess, sys\n"
        "from burnish.report.metadata import launch_record\n"
        "from burnish.serve.http.child import send_signal\n"
        "from burnish.serve.page.runs.runs import is_alive\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "launch = launch_record([], child.pid)\n"
        "another = {**launch, 'start_ticks': launch['start_ticks'] - 1}\n"
        "print(is_alive(launch), send_signal(another, signal.SIGTERM, is_alive), child.poll())\n"
        "print(send_signal(launch, signal.SIGTERM, is_alive), child.wait(), is_alive(launch))\n",
    )
    assert printed.splitlines() == ["True False None", "True -15 False"]


def test_torch_without_onednn_needs_none_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoOperators:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    monkeypatch.setattr(precision.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", NoOperators(), raising=False)
    assert precision.cpu_instructions() == torch.backends.cpu.get_cpu_capability()
    has_kernels.cache_clear()
    assert not has_kernels(torch.float32)
    has_kernels.cache_clear()


def test_untested_accelerator_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    options = ParallelOptions()
    assert selection.device_of(options) == torch.device("cpu")
    assert checks.parallel_notes(options)[0] == (
        'The "mps" device of this machine is not used: burnish has not been tested on it.'
    )
    assert selection.untested_accelerator(ParallelOptions(use_cpu=True)) == ""
