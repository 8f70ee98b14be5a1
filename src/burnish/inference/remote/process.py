"""Start vLLM or SGLang as a child process that listens on the loopback interface, with a free port and its own key.

Its output goes to a log file. At exit, the process that started it terminates it and removes the log file, but not if
that process is killed by a signal. The flags follow the manuals of the two programs. They have been tested with a stub
only.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from burnish.config.errors import UserError
from burnish.parallel.process_counts import free_port
from burnish.utils.files import folder_until_exit

if TYPE_CHECKING:
    from burnish.inference.options import AnsweringOptions

WAIT_S = 900.0
"""Maximum start-up time in seconds, which includes loading the weights of a large model."""
_MANAGED = "the API key, port and address"


@dataclass
class Child:
    """A started server. ``close`` terminates it."""

    process: subprocess.Popen[bytes]
    url: str
    key: str
    log: Path

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_server(options: AnsweringOptions, folder: str, adapters: dict[str, str], wait_s: float = WAIT_S) -> Child:
    """Start the server selected by ``infer_backend`` and wait until it responds.

    Raises:
        UserError: if its program cannot be found.
        RuntimeError: if it exits or does not respond in time; with the last lines of its log.
    """
    backend = options.infer_backend
    program = shutil.which(options.infer_executable or ("vllm" if backend == "vllm" else "python3"))
    if program is None:
        named = options.infer_executable or backend
        what = f'the executable "{named}" of infer_backend: {backend} was not found.'
        raise UserError(
            what,
            remedy="Set its path, for example infer_executable: /path/to/environment/bin/vllm",
            option="infer_backend",
        )
    key, port = secrets.token_urlsafe(24), free_port()
    command = [program, *arguments(options, folder, adapters, port)]
    log = folder_until_exit(f"burnish-{backend}-") / "server.log"
    environment = {**os.environ, "VLLM_API_KEY": key, "SGLANG_API_KEY": key}
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 (an argument list, no shell)
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    child = Child(process, f"http://127.0.0.1:{port}", key, log)
    atexit.register(child.close)
    _wait(child, time.monotonic() + wait_s)
    return child


def arguments(options: AnsweringOptions, folder: str, adapters: dict[str, str], port: int) -> list[str]:
    """Return the command-line arguments of the server. The key is passed in the environment."""
    if options.infer_backend == "vllm":
        argv = [
            "serve", folder, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(options.vllm_maxlen),
            "--gpu-memory-utilization", str(options.vllm_gpu_util),
        ]  # fmt: skip
        argv += ["--enforce-eager"] if options.vllm_enforce_eager else []
        if adapters:
            argv += ["--enable-lora", "--max-lora-rank", str(options.vllm_max_lora_rank), "--lora-modules"]
            argv += [f"{name}={path}" for name, path in adapters.items()]
        return [*argv, *_flags(options.vllm_config, "vllm_config")]
    argv = [
        "-m", "sglang.launch_server", "--model-path", folder, "--host", "127.0.0.1", "--port", str(port),
        "--context-length", str(options.sglang_maxlen), "--mem-fraction-static", str(options.sglang_mem_fraction),
    ]  # fmt: skip
    argv += ["--tp-size", str(options.sglang_tp_size)] if options.sglang_tp_size > 0 else []
    if adapters:
        argv += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    return [*argv, *_flags(options.sglang_config, "sglang_config")]


def _flags(config: dict[str, Any] | str | None, name: str) -> Sequence[str]:
    """Return further flags of a server: ``{"max_num_seqs": 8}`` becomes ``--max-num-seqs 8``."""
    if config is None:
        return []
    try:
        values = json.loads(config) if isinstance(config, str) else config
    except ValueError as error:
        raise UserError(f'"{name}" is not valid JSON: {error}.', option=name) from error
    if not isinstance(values, dict):
        raise UserError(f'"{name}" must be a JSON object. Received: {config}.', option=name)
    if taken := sorted({"host", "port", "api_key", "uds"} & {str(key).replace("-", "_") for key in values}):
        raise UserError(f'"{name}" must not set {", ".join(taken)}: burnish sets {_MANAGED} itself.')
    argv: list[str] = []
    for key, value in values.items():
        flag = f"--{str(key).replace('_', '-')}"
        argv += [flag] if value is True else [] if value in (False, None) else [flag, _word(value)]
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _wait(child: Child, until: float) -> None:
    while time.monotonic() < until:
        if child.process.poll() is not None:
            raise RuntimeError(f"The engine exited with status {child.process.returncode}. {_last_lines(child.log)}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{child.url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    child.close()
    raise RuntimeError(f"The engine did not start in time. {_last_lines(child.log)}")


def _last_lines(log: Path, number: int = 5) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-number:]
    return f"Last lines of {log}:\n  " + "\n  ".join(lines)
