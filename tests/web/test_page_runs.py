"""A run started from the web UI equals a run of the command line, whatever happens to the server."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import burnish
from browser.conftest import Server, _end_runs, wait_for
from burnish.serve.page.runs.runs import read_run

pytestmark = [pytest.mark.run, pytest.mark.slow]
VALUES = {
    "model_name_or_path": "model", "dataset": "demo_train", "finetuning_type": "lora", "cutoff_len": "64",
    "per_device_train_batch_size": "4", "max_steps": "60", "logging_steps": "1", "save_steps": "30",
    "max_samples": "400", "lora_dropout": "0.1", "use_cpu": "true", "output_dir": "saves/page",
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    root, demo = tmp_path / "root", Path(burnish.__file__).parent / "demo"
    root.mkdir()
    for name in ("model", "data"):
        shutil.copytree(demo / name, root / name)
    result = Server(root, tmp_path / "home").start()
    yield result
    result.end()
    _end_runs(root)


def ask(server: Server, method: str, path: str, body: Any = None) -> Any:
    """Send a request, signed in with the key of the link."""
    host = server.address.removeprefix("http://")
    head = {"Origin": server.address, "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", "/sign-in", json.dumps({"key": server.link.partition("key=")[2]}), head)
    cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(method, path, None if body is None else json.dumps(body), {**head, "Cookie": cookie})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status < 300, text
    return json.loads(text)


def result_of(folder: Path) -> tuple[str, list[tuple[int, float]]]:
    """Return a hash of the weights, and the loss of every step."""
    weights = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    rows = map(json.loads, (folder / "trainer_log.jsonl").read_text().splitlines())
    return weights, [(row["current_steps"], row["loss"]) for row in rows if "loss" in row]


@pytest.mark.parametrize("seed", [3, 17])
def test_killing_the_page_at_random_times_does_not_affect_the_run(server, seed) -> None:
    draw, folder = random.Random(seed), server.root / "saves" / "page"
    identity = ask(server, "POST", "/api/runs", {"values": VALUES})["id"]
    kills = 0
    while (result := read_run(folder)) is not None and result.is_alive:
        time.sleep(draw.uniform(0.0, 1.5))
        port = int(server.address.rpartition(":")[2])
        server.kill()
        kills += 1
        server.start(port)
        assert ask(server, "GET", f"/api/runs/{identity}")["name"] == "page"
    wait_for(lambda: ask(server, "GET", f"/api/runs/{identity}")["state"] == "done", 10)
    assert kills >= 2
    series = ask(server, "GET", f"/api/runs/{identity}/series")["columns"]
    text = (folder / "run.yaml").read_text().replace("saves/page", "saves/line")
    (server.root / "line.yaml").write_text(text)
    environment = {
        **os.environ, "PYTHONPATH": str(Path(burnish.__file__).parents[1]), "OMP_NUM_THREADS": "1",
        "BURNISH_CACHE": str(server.home / "cache"),
    }  # fmt: skip
    argv = [sys.executable, "-m", "burnish", "train", "line.yaml"]
    subprocess.run(argv, cwd=server.root, env=environment, check=True, capture_output=True, timeout=300)
    weights, losses = result_of(folder)
    assert (weights, losses) == result_of(server.root / "saves" / "line")
    assert list(zip(series["step"], series["loss"], strict=True)) == losses
    assert len(losses) == 60
