"""One library, imported once, and a child process of it for every measurement.

    python bench/host.py LIBRARY SOCKET        what ``Host`` starts, in the environment of the library

In: per connection one line of JSON, the words of a script under bench/ and what its environment adds. Out: whatever
the child writes, until it ends; its process id comes first. Imports take 5 to 9 seconds of processor time, more than
most measurements. A child begins with what was imported and nothing else, no model and no tensor; it has clocks of its
own, and its peak of memory begins at what is resident when it forks. That is the same for every library.

Refused: to fork beside another thread, which might hold a lock that no one in the child would ever give back. The one
exception is that of jemalloc, which comes with pyarrow and holds its own locks still while a process forks
(pthread_atfork in its background_thread.c).
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

# What a training by each library imports, whatever the model. train_peer.py imports within its functions.
IMPORTS = {
    "trl": ("train_peer", "trl.trainer.sft_trainer", "transformers.models.qwen2.modeling_qwen2"),
    "transformers": ("train_peer", "datasets", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2"),
    "llamafactory": ("train_llamafactory", "transformers.models.qwen2.modeling_qwen2"),
    "burnish": ("train_burnish", "transformers.models.qwen2.modeling_qwen2"),
}
FORK_SAFE = "jemalloc_bg_thd"


class Host:
    """The asking side: a process that has imported ``library`` and waits."""

    def __init__(self, library: str, python: str, environment: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self.folder.name) / "socket")
        self.server = subprocess.Popen(
            [python, __file__, library, self.path],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.server.stdout is not None
        said = []
        for line in self.server.stdout:
            if line == "ready\n":
                return
            said.append(line)
        raise RuntimeError("".join(said)[-2000:])

    def run(self, words: list[str], environment: dict[str, str], timeout_s: float) -> str:
        """Output of a child that runs the script ``words[0]`` with the other words."""
        said, pid = b"", 0
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.path)
            line.settimeout(timeout_s)  # between two words of it
            line.sendall(json.dumps([words, environment]).encode() + b"\n")
            try:
                while found := line.recv(1 << 16):
                    said += found
                    pid = pid or int(said.split(b"\n")[0] or 0)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                return f"nothing was said for {timeout_s:.0f} s"
        return said.partition(b"\n")[2].decode(errors="replace")

    def close(self) -> None:
        """A host ends when what it reads from ends."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.folder.cleanup()


def serve(library: str, path: str) -> None:
    for name in IMPORTS[library]:
        import_module(name)
    gc.collect()
    gc.freeze()
    others = [name for name in threads() if name != FORK_SAFE][1:]  # but this one
    if others:
        raise RuntimeError(f"{library} has threads before any work was asked for, and cannot fork: {others}.")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child but who reads its words
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while True:
            asking, _, _ = select.select([door, sys.stdin], [], [])
            if sys.stdin in asking:
                return
            caller, _ = door.accept()
            with caller, caller.makefile() as reader:
                words, environment = json.loads(reader.readline())
                if os.fork() == 0:
                    measure(caller, words, environment)


def threads() -> list[str]:
    """Names of this process's threads, as the system knows them."""
    return [
        Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in sorted(os.listdir("/proc/self/task"))
    ]


def measure(caller: socket.socket, words: list[str], environment: dict[str, str]) -> Any:
    """The child: runs the script and ends."""
    gc.enable()  # as a process of its own begins
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(caller.fileno(), stream)
    os.write(1, f"{os.getpid()}\n".encode())
    try:
        import_module(words[0].removesuffix(".py")).main(words[1:])
    except BaseException:
        traceback.print_exc()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
