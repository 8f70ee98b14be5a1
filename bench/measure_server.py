"""Start an API server, measure its cost, and stop it.

    python bench/measure_server.py FOLDER SMALL COMMAND ...       COMMAND starts the server; MODEL and PORT are replaced

FOLDER has the model of ``generation_material.py``, SMALL a very small model with the same vocabulary. Prints a line of
JSON. It uses the standard library only, because the other process is measured. One thread each, greedy, streamed
responses.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from generation_material import END_TOKEN, EVEN, SLOTS, to_text, workloads

LONG, REQUESTS, READY_S = 4000, 1000, 120


class Server:
    """A running server and its client."""

    def __init__(self, command: list[str], folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [item.replace("MODEL", folder).replace("PORT", str(self.port)) for item in command]
        variables = {**os.environ, "API_PORT": str(self.port), "API_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.model = folder

    def until_open(self) -> float:
        """Wait until the port is open and return the seconds since the start."""
        return self._until(lambda: socket.create_connection(("127.0.0.1", self.port), 1).close())

    def until_ready(self) -> float:
        """Wait for a first response and return the seconds since the start."""

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            names = [one["id"] for one in json.loads(response.read())["data"]] if response.status == 200 else []
            self.model = (names or [self.model])[0]  # without a hub cache, transformers serve returns 500
            if not self.respond([5, 6, 7], 1):
                raise OSError("no response yet")

        return self._until(ask)

    def _until(self, action: object) -> float:
        while time.monotonic() - self.started_at < READY_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with status {self.process.returncode}")
            with suppress(OSError, KeyError, ValueError, http.client.HTTPException):
                action()  # type: ignore[operator]
                return time.monotonic() - self.started_at
            time.sleep(0.02)
        raise RuntimeError(f"not ready after {READY_S} s")

    def respond(self, ids: list[int], length: int) -> list[float]:
        """Return the seconds from the request to each chunk of the response; empty without a stream."""
        body = {"model": self.model, "stream": True, "max_tokens": length, "temperature": 0,
                "messages": [{"role": "user", "content": to_text(ids)}]}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
        begin = time.monotonic()
        times: list[float] = []
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return times
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("delta", {}).get("content"):
                    times.append(time.monotonic() - begin)
        connection.close()
        return times

    def step_seconds(self, length: int) -> tuple[float, float]:
        """Return the duration of a step of eight streams: wall seconds, and processor seconds of the server."""
        streams: list[list[float]] = []
        before = self.processor_s()
        prompts = workloads()["even"].prompts
        threads = [
            threading.Thread(target=lambda ids=ids: streams.append(self.respond(ids, length))) for ids in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(times[-1] for times in streams) / length, (self.processor_s() - before) / length

    def processor_s(self) -> float:
        """Return the processor seconds of the server and its child processes."""
        return sum(int(fields[11]) + int(fields[12]) for _, fields in self._processes()) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the memory of the server and its child processes in bytes."""
        total = 0
        for entry, _ in self._processes():
            with suppress(OSError):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += next(int(x.split()[1]) for x in lines if x.startswith("Pss:")) * 1024
        return total

    def _processes(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield each process of the server and the fields of its ``stat`` after the name."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self.process.pid:
                    yield entry, fields


@contextmanager
def started(command: list[str], folder: str) -> Iterator[Server]:
    """Start a server and stop it at the end."""
    server = Server(command, folder)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def main(folder: str, small: str, command: list[str]) -> None:
    results: dict[str, float] = {}
    with started(command, folder) as server:
        results["open_s"], results["ready_s"] = server.until_open(), server.until_ready()
        results["loaded_bytes"] = server.memory_bytes()
        server.step_seconds(EVEN)
        measured = [server.step_seconds(EVEN) for _ in range(4)]
        results["tokens_per_s"] = SLOTS / min(wall_s for wall_s, _ in measured)
        results["tokens_per_cpu_s"] = SLOTS / min(cpu_s for _, cpu_s in measured)
        long = [3 + index * 7 % (END_TOKEN - 3) for index in range(LONG)]
        alone = server.respond(long, 1)[0]
        busy = threading.Thread(
            target=server.respond, args=([5 + index * 11 % (END_TOKEN - 5) for index in range(LONG)], 1)
        )
        busy.start()
        time.sleep(0.3)
        first = server.respond([9, 8, 7, 6, 5], 2)[0]
        busy.join()
        results |= {"long_s": alone, "first_s": first, "chunks": first / (alone * 512 / LONG)}
    with started(command, small) as server:
        server.until_ready()
        server.step_seconds(EVEN)
        measured = [server.step_seconds(4 * EVEN) for _ in range(6)]
        results["small_token_s"] = min(wall_s for wall_s, _ in measured)
        results["small_token_cpu_s"] = min(cpu_s for _, cpu_s in measured)
        for index in range(REQUESTS // 5):
            server.respond([3 + index, 4, 5], 2)
        before = server.memory_bytes()
        for index in range(REQUESTS):
            server.respond([3 + index, 4, 5], 2)
        results["grown_bytes"] = server.memory_bytes() - before
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
