"""The cost of a server of answers: one server, started, asked and ended.

    python bench/ask_server.py FOLDER SMALL WORDS ...       WORDS start the server, on folder MODEL and port PORT

In: folders with the model of ``answer_material.py`` and with a small one of the same vocabulary. Out: a line of JSON.
Only the standard library: what is measured is the other process. One thread each, greedy, answers streamed.
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

from answer_material import EVEN, SEATS, STOP, text_of, work

LONG, REQUESTS, READY_S = 4000, 1000, 120


class Server:
    """A server that is asked."""

    def __init__(self, words: list[str], folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        words = [word.replace("MODEL", folder).replace("PORT", str(self.port)) for word in words]
        told = {**os.environ, "API_PORT": str(self.port), "API_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            words, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.model = folder

    def until_open(self) -> float:
        return self._until(lambda: socket.create_connection(("127.0.0.1", self.port), 1).close())

    def until_ready(self) -> float:
        """Until a first answer comes."""

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            names = [one["id"] for one in json.loads(response.read())["data"]] if response.status == 200 else []
            self.model = (names or [self.model])[0]  # without a hub's cache, transformers serve answers with 500
            if not self.answer([5, 6, 7], 1):
                raise OSError("no answer yet")

        return self._until(ask)

    def _until(self, does: object) -> float:
        while time.monotonic() - self.begun < READY_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            with suppress(OSError, KeyError, ValueError, http.client.HTTPException):
                does()  # type: ignore[operator]
                return time.monotonic() - self.begun
            time.sleep(0.02)
        raise RuntimeError(f"not ready after {READY_S} s")

    def answer(self, ids: list[int], length: int) -> list[float]:
        """The seconds since the request at which each piece of text came; none where there is no stream."""
        body = {"model": self.model, "stream": True, "max_tokens": length, "temperature": 0,
                "messages": [{"role": "user", "content": text_of(ids)}]}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
        begin, found = time.monotonic(), []
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return found
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("delta", {}).get("content"):
                    found.append(time.monotonic() - begin)
        connection.close()
        return found

    def at_once(self, length: int) -> tuple[float, float]:
        """Seconds that a step of eight streams takes: by the clock, and of the server's processors."""
        found: list[list[float]] = []
        before = self.processor_s()
        prompts = work()["even"].prompts
        threads = [threading.Thread(target=lambda ids=ids: found.append(self.answer(ids, length))) for ids in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(times[-1] for times in found) / length, (self.processor_s() - before) / length

    def processor_s(self) -> float:
        """Seconds of processors that it and the processes that it started have used."""
        return sum(int(words[11]) + int(words[12]) for _, words in self._session()) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        """Bytes of it and of the processes that it started."""
        total = 0
        for entry, _ in self._session():
            with suppress(OSError):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += next(int(x.split()[1]) for x in lines if x.startswith("Pss:")) * 1024
        return total

    def _session(self) -> Iterator[tuple[Path, list[str]]]:
        """Each process of it, and the words of its ``stat`` after the name."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(words[3]) == self.process.pid:
                    yield entry, words


@contextmanager
def started(words: list[str], folder: str) -> Iterator[Server]:
    server = Server(words, folder)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def main(folder: str, small: str, words: list[str]) -> None:
    found: dict[str, float] = {}
    with started(words, folder) as server:
        found["open_s"], found["ready_s"] = server.until_open(), server.until_ready()
        found["loaded_bytes"] = server.resident()
        server.at_once(EVEN)
        taken = [server.at_once(EVEN) for _ in range(4)]
        found["tokens_per_s"] = SEATS / min(clock for clock, _ in taken)
        found["tokens_per_cpu_s"] = SEATS / min(processor for _, processor in taken)
        long = [3 + at * 7 % (STOP - 3) for at in range(LONG)]
        alone = server.answer(long, 1)[0]
        busy = threading.Thread(target=server.answer, args=([5 + at * 11 % (STOP - 5) for at in range(LONG)], 1))
        busy.start()
        time.sleep(0.3)
        first = server.answer([9, 8, 7, 6, 5], 2)[0]
        busy.join()
        found |= {"long_s": alone, "first_s": first, "pieces": first / (alone * 512 / LONG)}
    with started(words, small) as server:
        server.until_ready()
        server.at_once(EVEN)
        taken = [server.at_once(4 * EVEN) for _ in range(6)]
        found["small_token_s"] = min(clock for clock, _ in taken)
        found["small_token_cpu_s"] = min(processor for _, processor in taken)
        for at in range(REQUESTS // 5):
            server.answer([3 + at, 4, 5], 2)
        before = server.resident()
        for at in range(REQUESTS):
            server.answer([3 + at, 4, 5], 2)
        found["grown_bytes"] = server.resident() - before
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
