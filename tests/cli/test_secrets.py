"""Secrets are used but never shown: each command runs with a marker as the value of each secret, and no file and no
output contains a marker."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import ROWS, write
from burnish import cli
from burnish.config.options import specs
from burnish.config.secrets import MASK, has_secret_name, without_secrets
from burnish.run.plan.plan import RunOptions
from burnish.trainer.arguments.training import TrainingArguments

pytestmark = pytest.mark.run
VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "INFER_KEY", "API_KEY", "BURNISH_KEY")

OPTION_SECRET, VARIABLE_SECRET = "hf_GIVENxMARKER0123", "hf_SYSTEMxMARKER456"


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the secrets of earlier commands of this process."""
    monkeypatch.setattr("burnish.config.secrets._known_secrets", set())


SECRETS = [name for name, spec in specs(RunOptions).items() if spec.is_secret]
SECRET_ARGUMENTS = [f"{name}={OPTION_SECRET}" for name in SECRETS]


def test_token_and_key_options_are_declared_secret() -> None:
    declared = {**specs(RunOptions), **TrainingArguments.declared}
    assert {name for name, spec in declared.items() if spec.is_secret} == {n for n in declared if has_secret_name(n)}
    assert {"hf_hub_token", "ms_hub_token", "hub_token"} <= {n for n, spec in declared.items() if spec.is_secret}
    for name in ("max_new_tokens", "include_num_input_tokens_seen", "add_special_tokens", "eos_token_id"):
        assert not has_secret_name(name)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "burnish", *argv], capture_output=True, text=True, env=environment(), check=False
    )


def environment() -> dict[str, str]:
    return {**os.environ, **dict.fromkeys(VARIABLES, VARIABLE_SECRET), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Server:
    """A server of burnish in another process, and an HTTP client."""

    def __init__(self, *argv: str) -> None:
        self.output = open("said.txt", "w+", encoding="utf-8")  # noqa: SIM115  (closed by ``end``)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "burnish", *argv], env=environment(), stdout=self.output, stderr=self.output
        )
        deadline = time.monotonic() + 120
        while (
            not (result := re.search(r"https?://127\.0\.0\.1:(\d+)", self.output_text))
            or self.send("GET", "/healthz") == 0
        ):
            assert self.child.poll() is None, self.output_text
            assert time.monotonic() < deadline, self.output_text
            time.sleep(0.05)
            if result:
                self.port = int(result[1])

    port = 0

    @property
    def output_text(self) -> str:
        return Path("said.txt").read_text(encoding="utf-8")

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        """Send a request and return the status, or 0 if the connection is refused. No response may contain a secret."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()
        self.cookie = (response.getheader("set-cookie") or "").partition(";")[0] or getattr(self, "cookie", "")
        assert not [m for m in (OPTION_SECRET, VARIABLE_SECRET) if m in f"{text} {response.getheaders()}"], path
        return response.status

    def command_lines(self) -> str:
        """Return the command lines of the server and its child processes."""
        result = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if self.child.pid in (int(path.name), parent):
                    result.append((path / "cmdline").read_bytes().decode())
        assert result
        return "\n".join(result)

    def end(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(60) in (0, 143), self.output_text
        self.output.close()


@pytest.mark.slow
def test_api_shows_no_secret(user_folder: Path) -> None:
    Path("api.yaml").write_text(
        f"model_name_or_path: model\ntemplate: chatml\nhf_hub_token: {OPTION_SECRET}\n"
        "api_port: 0\napi_model_name: model\napi_log: content\n"
    )
    server = Server("api", "api.yaml")
    options = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    valid, invalid = f"Bearer {VARIABLE_SECRET}", f"Bearer {OPTION_SECRET}"
    deadline = time.monotonic() + 60
    while server.send("POST", "/v1/chat/completions", options, Authorization=valid) == 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.send("POST", "/v1/chat/completions", options, Authorization=valid) == 200
    assert server.send("POST", "/v1/chat/completions", options, Authorization=invalid) == 401
    for path in ("/v1/models", "/metrics", f"/v1/models?api_key={VARIABLE_SECRET}", f"/{OPTION_SECRET}", "/readyz"):
        assert server.send("GET", path, Authorization=valid) in (200, 404, 503)
        assert server.send("GET", path, Authorization=invalid) in (200, 401, 404)
    assert server.send("POST", "/v1/chat/completions", {"n": OPTION_SECRET}, Authorization=valid + "\t") in (
        400,
        401,
        422,
    )
    command_lines = server.command_lines()
    server.end()
    Path("api.yaml").unlink()
    assert_no_secret(server.output_text + command_lines, user_folder)


@pytest.mark.slow
def test_page_shows_no_secret(user_folder: Path) -> None:
    server = Server("webui", "web_port=0", "web_home=home")
    origin = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.send("POST", "/sign-in", {"key": OPTION_SECRET}, **origin) == 403
    assert server.send("POST", "/sign-in", {"key": VARIABLE_SECRET}, **origin) < 400
    headers = {"Cookie": server.cookie, **origin}
    run = {"model_name_or_path": "model", "dataset": "rows", "dataset_dir": "data", "output_dir": "out",
           "finetuning_type": "full", "use_cpu": True, "max_steps": 1, "template": "chatml"}  # fmt: skip
    assert server.send("POST", "/api/runs", {"values": {**run, "hf_hub_token": "x"}}, **headers) == 422
    assert server.send("POST", "/api/runs", {"values": run}, **headers) < 300
    assert "/sign-in" in server.output_text
    command_lines, deadline = "", time.monotonic() + 120
    while not Path("out/outcome.json").is_file():
        command_lines += server.command_lines()
        assert time.monotonic() < deadline, server.output_text
        time.sleep(0.2)
    for path in ("/", "/runs", "/new", "/settings", "/api/runs", f"/nowhere?key={VARIABLE_SECRET}"):
        assert server.send("GET", path, **headers) < 500
    server.end()
    assert json.loads(Path("out/outcome.json").read_text())["state"] == "done"
    assert_no_secret(server.output_text + command_lines, user_folder)


def write_failing_step() -> None:
    """Write a module that raises an error with the secrets in its message."""
    Path("sitecustomize.py").write_text(
        "from burnish.loop.loop import Loop\n"
        f"def fails(*a, **k): raise RuntimeError('the hub refused {OPTION_SECRET} and {VARIABLE_SECRET}')\n"
        "Loop.step = fails\n",
        encoding="utf-8",
    )


UNREACHABLE_URL = f"http://someone:{OPTION_SECRET}@127.0.0.1:9/v1?api_key={OPTION_SECRET}"
COMMANDS: dict[str, tuple[list[str], int]] = {
    "train": (["train", "run.yaml"], 0),
    "evaluate and predict": (["train", "run.yaml", "do_predict=true", "val_size=4", "output_dir=other"], 0),
    "explain": (["explain", "run.yaml", "output_dir=other"], 0),
    "export": (["export", "model_name_or_path=model", "export_dir=whole", "template=chatml"], 0),
    "env": (["env"], 0),
    "version": (["version"], 0),
    "runs": (["runs", "."], 0),
    "chat": (["chat", "model", "template=chatml", "max_new_tokens=3", "--once", "Hello"], 0),
    "chat with an unreachable server": (["chat", "--url", UNREACHABLE_URL, "--once", "Hello"], 2),
    "responses of an unreachable server": (
        ["chat", "model", f"infer_url={UNREACHABLE_URL}", "infer_backend=vllm", "template=chatml", "--once", "Hello"],
        2,
    ),
    "eval": (["eval", "model", "eval_dataset=rows", "dataset_dir=data", "template=chatml", "save_dir=measured"], 0),
    "predict": (
        ["predict", "model", "eval_dataset=rows", "dataset_dir=data", "template=chatml", "save_dir=predicted"],
        0,
    ),
    "score": (["score", "model", "dataset=data/rows.json", "save_dir=scored"], 2),  # it is no reward model
    "demo": (["demo", "max_steps=1", "warmup_steps=0"], 0),
    "api with a wrong option": (["api", "model", "api_port=none"], 2),
    "webui with a wrong option": (["webui", "web_port=none"], 2),
    "webchat with a wrong option": (["webchat", "model", "web_port=none", f"hf_hub_token={OPTION_SECRET}"], 2),
    "api with a key argument": (["api", "model", f"api_key={OPTION_SECRET}"], 2),
    "webui with a key argument": (["webui", f"web_key={OPTION_SECRET}"], 2),
    "GGUF": (["export", "model_name_or_path=model", "export_dir=single", "export_format=gguf"], 0),
    "a misspelled option": (["train", "run.yaml", f"hub_tokn={OPTION_SECRET}", "output_dir=other"], 2),
    "an option of another tool": (["train", "run.yaml", f"om_hub_token={OPTION_SECRET}", "output_dir=other"], 2),
    "a wrong value": (["train", "run.yaml", f'hf_hub_token=["{OPTION_SECRET}"', "lora_rank=x", "output_dir=other"], 2),
    "a missing model": (["train", "run.yaml", "model_name_or_path=no/model", "output_dir=other"], 2),
}


WITHOUT_RUN_OPTIONS = {"env", "version", "runs", "webui"}
"""Commands without the secret options of a run."""
SLOW = {"demo", "GGUF", "responses of an unreachable server", "predict"}


def test_every_command_is_covered_by_the_secrets_test() -> None:
    assert {argv[0] for argv, _ in COMMANDS.values()} == set(cli.COMMANDS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in COMMANDS])
def test_no_command_prints_or_writes_a_secret(
    name: str, user_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, VARIABLE_SECRET)
    argv, status = COMMANDS[name]
    takes_no_secrets = argv[0] in WITHOUT_RUN_OPTIONS or "--url" in argv
    assert cli.main([*argv, *([] if takes_no_secrets else SECRET_ARGUMENTS)]) == status
    out, err = capfd.readouterr()
    assert_no_secret(out + err, user_folder)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [[], pytest.param(["--debug"], marks=pytest.mark.slow)], ids=["file", "debug"])
def test_traceback_contains_no_secret(debug: list[str], user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_failing_step()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(user_folder), os.environ.get("PYTHONPATH", "")]))
    completed = run("train", "run.yaml", *SECRET_ARGUMENTS, *debug)
    assert completed.returncode == 1
    assert f"the hub refused {MASK} and {MASK}" in completed.stderr
    Path("sitecustomize.py").unlink()
    shutil.rmtree("__pycache__", ignore_errors=True)  # contains the compiled file
    assert_no_secret(completed.stdout + completed.stderr, user_folder)


def assert_no_secret(message: str, folder: Path) -> None:
    caches = [Path(os.environ["BURNISH_CACHE"])]
    for marker in (OPTION_SECRET, VARIABLE_SECRET):
        assert marker not in message
        for path in (path for root in (folder, *caches) for path in root.rglob("*") if path.is_file()):
            assert marker.encode() not in path.read_bytes(), path
    write("data/rows.json", ROWS)


SCORE = "def score(completions, api_key, url, **kwargs):\n    return [float(len(each) % 3) for each in completions]\n"


def test_no_file_contains_a_secret_argument_of_a_reward_function(user_folder: Path, capfd: Any) -> None:
    Path("mine.py").write_text(SCORE, encoding="utf-8")
    options = ["stage=grpo", "num_generations=2", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
               "max_completion_length=4", "save_strategy=steps", "save_steps=1", "template=chatml"]  # fmt: skip
    key = "correct-horse-battery"

    def argv(address: str, max_steps: int) -> list[str]:
        functions = [{"mine.py:score": {"api_key": key, "url": f"https://me:{OPTION_SECRET}@{address}/"}}]
        return ["train", "run.yaml", *options, f"reward_funcs={json.dumps(functions)}", f"max_steps={max_steps}"]

    assert cli.main(argv("host", 1)) == 0
    text = "".join(capfd.readouterr())
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert {"README.md", ".finished.json", "run.yaml"} <= {path.name for path in files}
    for secret in (key, OPTION_SECRET):
        assert secret not in text
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    key = "another-horse-battery"
    assert cli.main(argv("host", 2)) == 0, "a new key is the same run"
    capfd.readouterr()
    assert cli.main(argv("elsewhere", 3)) == 2
    assert "reward" in capfd.readouterr().err


def test_script_arguments_do_not_show_their_token(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), hub_token=OPTION_SECRET, report_to="none", use_cpu=True)
    shown = (
        f"{arguments!r} {arguments} {arguments.to_dict()} {arguments.to_json_string()} {arguments.to_sanitized_dict()}"
    )
    assert OPTION_SECRET not in shown
    assert arguments.hub_token == OPTION_SECRET


@pytest.mark.parametrize(
    ("text", "shown"),
    [("https://me:hunter22@host/v1 is away", f"https://me:{MASK}@host/v1 is away"),
     ("http://host/v1?api_key=hunter22&n=3", f"http://host/v1?api_key={MASK}&n=3"),
     ("http://host/sign-in#key=hunter22", f"http://host/sign-in#key={MASK}"),
     ("http://localhost:8000/v1?board=a, 1:30 me@here", "http://localhost:8000/v1?board=a, 1:30 me@here")],
)  # fmt: skip
def test_secrets_in_urls_are_replaced(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_browser_command_line_does_not_contain_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from burnish.serve.page import command

    opened: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    monkeypatch.setattr(command.asyncio, "run", lambda served: served.close())
    command.webui(["web_port=0", "web_open=true", f"web_home={tmp_path}"])
    key = (tmp_path / "web" / "key").read_text().strip()
    assert f"#key={key}" in capsys.readouterr().out  # the generated key is printed, as users need it to sign in
    assert opened[0].startswith("file://")
    assert key not in opened[0]
    page = Path(opened[0].removeprefix("file://"))
    assert f"#key={key}" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0


def test_ordinary_text_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_TOKEN", "a")
    assert without_secrets("a cat sat") == "a cat sat"
