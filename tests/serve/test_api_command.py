"""``burnish api`` as a process: bind address, key, output, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import burnish
from burnish.config.errors import UserError
from burnish.serve.api.command import in_thread, read_options, with_adapters
from burnish.serve.http.sockets import listen_unix
from serve.client import send

pytestmark = pytest.mark.run

MODEL = str(Path(burnish.__file__).parent / "demo" / "model")
SOURCE = str(Path(burnish.__file__).parents[1])


class Process:
    """A server process with its port and output."""

    def __init__(self, *argv: str, **environment: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "burnish", "api", *argv],
            env={**os.environ, "PYTHONPATH": SOURCE, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.child.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def until_ready(self) -> Process:
        until = time.monotonic() + 120
        while not any(line.startswith("try ") for line in self.lines):
            assert self.child.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.05)
        address = next(line for line in self.lines if line.startswith("address"))
        self.port = int(address.split()[1].rstrip(",").rpartition(":")[2])
        return self

    def ended(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        self.child.send_signal(number)
        return self.child.wait(seconds)


def test_server_prints_its_address_responds_and_drains(tmp_path: Path) -> None:
    process = Process(
        MODEL, "api_port=0", "api_drain=5", "max_concurrent_requests=2", API_KEY="canary-0123456789"
    ).until_ready()
    assert any(line.startswith("Loading ") for line in process.lines)
    assert len([line for line in process.lines if line.split()[:1] and not line[:2].isdigit()]) == 5
    assert process.lines[0].startswith("Loading ")
    headers = {"Authorization": "Bearer canary-0123456789"}
    body = {"model": "model", "messages": [{"role": "user", "content": "opposite: hot"}], "max_tokens": 400}
    assert send(process, "GET", "/v1/models")[0] == 401
    answers: list[tuple[int, str]] = []
    options = {**body, "ignore_eos": True, "temperature": 0}

    def ask() -> None:
        status, _, text = send(process, "POST", "/v1/chat/completions", options, headers)
        answers.append((status, text))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    process.child.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    refused = _status_or_none(process, headers, body)
    assert process.child.wait(30) == 128 + signal.SIGTERM
    asking.join(10)
    assert answers
    assert answers[0][0] in {200, 503}  # finished within the drain time, or ended with an error message
    assert refused in {503, None}
    assert "canary" not in process.output
    assert "Traceback" not in process.output
    listed = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=False).stdout
    assert "canary" not in listed


def _status_or_none(process: Process, headers: dict[str, str], body: dict) -> int | None:
    try:
        return send(process, "POST", "/v1/chat/completions", body, headers)[0]
    except OSError:
        return None


@pytest.mark.slow
def test_non_loopback_bind_generates_a_key_and_prints_it_once() -> None:
    process = Process(MODEL, "api_port=0", "api_host=0.0.0.0").until_ready()
    key = process.output.partition("key ")[2].split()[0]
    assert len(key) >= 40
    assert process.output.count(key) == 1
    assert send(process, "GET", "/v1/models")[0] == 401
    assert send(process, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
    assert process.ended(signal.SIGINT) == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(("is_removed", "is_replaced"), [(False, False), (True, False), (True, True)])
def test_unix_socket_replaces_a_port(tmp_path: Path, is_removed: bool, is_replaced: bool) -> None:
    path = tmp_path / "engine.sock"
    process = Process(MODEL, f"api_socket={path}")
    until = time.monotonic() + 120
    while not any(line.startswith("try ") for line in process.lines):
        assert time.monotonic() < until, process.output
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b'"status":"ready"' in raw.makefile("rb").read()
    if is_removed:  # by somebody else, while the server runs
        path.unlink()
    other = listen_unix(str(path)) if is_replaced else None
    assert process.ended() == 128 + signal.SIGTERM
    assert path.exists() is (other is not None)
    if other is not None:
        other.close()


def test_work_that_outlives_the_server_ends_silently(monkeypatch) -> None:
    """An engine may need longer to stop than the server waits for it."""
    faults, is_over = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", faults.append)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(is_over.wait), 0.05)

    asyncio.run(give_up())
    (thread,) = (one for one in threading.enumerate() if one.name == "burnish-loading")
    is_over.set()
    thread.join(10)
    assert not faults


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no/such/model", "api_port=0"], "no/such/model"),
        ([MODEL, "api_port=0", "templte=qwen"], "templte"),
        ([MODEL, "api_port=x"], "api_port"),
        ([MODEL, "port=0"], 'Did you mean "api_port"?'),
        ([MODEL, "api_key=0123456789"], "process list"),
        ([MODEL, "api_host=192.0.2.7", "api_port=0"], "192.0.2.7"),
        ([MODEL, "api_port=0", "--adapter", f"model={MODEL}"], '"model" is a name of the model and of an adapter'),
    ],
)
def test_user_error_gives_one_sentence_and_status_2(argv: list[str], message: str) -> None:
    process = Process(*argv)
    assert process.child.wait(120) == 2
    time.sleep(0.1)
    assert message in process.output
    assert "Traceback" not in process.output


def test_server_options_come_from_file_flags_and_environment(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "api.yaml"
    file.write_text("model_name_or_path: x\napi_port: 9001\napi_key: from-the-file\napi_aliases: [a, b]\n")
    monkeypatch.setenv("API_PORT", "9002")
    monkeypatch.setenv("API_MODEL_NAME", "named")
    options = read_options([str(file), "api_drain=3"])
    assert (options.api_port, options.api_drain, options.api_model_name) == (9001, 3.0, "named")
    assert (options.api_key, options.api_aliases) == ("from-the-file", ["a", "b"])
    with pytest.raises(UserError, match="api_timeout"):
        read_options(["some/folder", "api_timeout=-1"])


def test_adapters_are_named_individually() -> None:
    argv = with_adapters(["m", "--adapter", "sql=a/b", "--adapter", "poet=c=d", "api_port=1"])
    assert argv[:2] == ["m", "api_port=1"]
    assert json.loads(argv[3]) == {"sql": "a/b", "poet": "c=d"}
    with pytest.raises(UserError, match="name=folder"):
        with_adapters(["m", "--adapter", "sql"])
    with pytest.raises(UserError, match=r'"sql" twice: a/b and c/d'):
        with_adapters(["m", "--adapter", "sql=a/b", "--adapter", "sql=c/d"])


LOOPS = (
    "{% for m in messages %}{{ m['role'] + m['content'] }}{% if 'loop' in m['content'] %}"
    + "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4 + "{% endif %}{% endfor %}"
)  # fmt: skip


@pytest.mark.slow
def test_looping_chat_template_is_stopped_and_server_continues(tmp_path: Path) -> None:
    (tmp_path / "loops.jinja").write_text(LOOPS, encoding="utf-8")
    process = Process(
        MODEL, "api_port=0", "max_concurrent_requests=2", f"template={tmp_path / 'loops.jinja'}"
    ).until_ready()
    body = {"model": "model", "messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        status, _, text = send(process, "POST", "/v1/chat/completions", body)
        answers.append((status, text))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    assert send(process, "GET", "/healthz")[0] == 200
    plain = {**body, "messages": [{"role": "user", "content": "hot"}]}
    began = time.monotonic()
    assert (
        send(process, "POST", "/v1/chat/completions", plain)[0] == 200
    )  # waits for the other request and for a worker
    assert time.monotonic() - began < 8
    asking.join(20)
    assert answers[0][0] == 400
    assert "took more than 2 s" in answers[0][1]
    others = [threading.Thread(target=ask, daemon=True) for _ in range(10)]
    for other in others:
        other.start()
    time.sleep(1)
    # Not 429, which a request gets that waits for 10 s: it does not wait for all of them.
    assert send(process, "POST", "/v1/chat/completions", plain)[0] == 200
    began = time.monotonic()
    assert process.ended() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 15  # api_drain is 10
    assert "Traceback" not in process.output


def test_help_is_printed_before_importing_model_libraries() -> None:
    script = "import sys; from burnish.cli import main; main(['api', '--help']); print('LOADED', *sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": SOURCE}
    ).stdout
    assert "api_port" in run
    loaded = run.partition("LOADED")[2].split()
    assert not {"torch", "transformers", "starlette", "uvicorn"} & set(loaded)
