"""Import a library once and fork a child process for each measurement.

    python bench/host.py LIBRARY SOCKET        started by ``Host`` in the environment of the library

Each connection to the socket sends one line of JSON with the arguments of a script under bench/ and environment
variables. The reply is the process id of the child, then its output until it ends. Imports take 5 to 9 seconds of
processor time, more than most measurements. A child starts with the imported modules only, without model or tensors. It
has its own clocks, and its peak memory starts at the resident memory at the fork. This is the same for every library.

A process with other threads is not forked, because they might hold a lock that is never released in the child. The
exception is jemalloc's thread (part of pyarrow), which handles forks itself (pthread_atfork in its
background_thread.c).
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# What a training with each library imports for any model. train_peer.py imports inside its functions.
IMPORTS = {
    "trl": ("train_peer", "trl.trainer.sft_trainer", "transformers.models.qwen2.modeling_qwen2"),
    "transformers": ("train_peer", "datasets", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2"),
    "llamafactory": ("train_llamafactory", "transformers.models.qwen2.modeling_qwen2"),
    "burnish": ("train_burnish", "transformers.models.qwen2.modeling_qwen2"),
}
FORK_SAFE = "jemalloc_bg_thd"


class Host:
    """Client of a process that has imported ``library`` and waits for requests."""

    def __init__(self, library: str, python: str, environment: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self.folder.name) / "socket")
        self.server = subprocess.Popen(
            [python, __file__, library, self.path],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.server.stdout is not None
        output = []
        for text in self.server.stdout:
            if text == "ready\n":
                return
            output.append(text)
        raise RuntimeError("".join(output)[-2000:])

    def run(self, arguments: list[str], environment: dict[str, str], timeout_s: float) -> str:
        """Return the output of a child that runs the script ``arguments[0]`` with the other arguments."""
        output, pid = b"", 0
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.path)
            connection.settimeout(timeout_s)  # between two parts of the output
            connection.sendall(json.dumps([arguments, environment]).encode() + b"\n")
            try:
                while received := connection.recv(1 << 16):
                    output += received
                    pid = pid or int(output.split(b"\n")[0] or 0)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                return f"no output for {timeout_s:.0f} s"
        return output.partition(b"\n")[2].decode(errors="replace")

    def close(self) -> None:
        """End the host by closing its standard input."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.folder.cleanup()


def serve(library: str, path: str) -> None:
    """Import the library and fork a child for each connection."""
    for name in IMPORTS[library]:
        import_module(name)
    gc.collect()
    gc.freeze()
    others = [name for name in threads() if name != FORK_SAFE][1:]  # except this one
    if others:
        raise RuntimeError(f"{library} starts threads when it is imported and cannot be forked: {others}.")
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # nothing waits for children: the client reads until their output ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            with connection, connection.makefile() as reader:
                arguments, environment = json.loads(reader.readline())
                if os.fork() == 0:
                    measure(connection, arguments, environment)


def threads() -> list[str]:
    """Return the names of the threads of this process."""
    return [
        Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in sorted(os.listdir("/proc/self/task"))
    ]


def measure(connection: socket.socket, arguments: list[str], environment: dict[str, str]) -> Any:
    """Run the script in the child, then exit."""
    gc.enable()  # as in a new process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(connection.fileno(), stream)
    os.write(1, f"{os.getpid()}\n".encode())
    try:
        import_module(arguments[0].removesuffix(".py")).main(arguments[1:])
    except BaseException:
        traceback.print_exc()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
