"""Tokens are used where they are needed and never shown: each command runs with a marker in every secret, and no file
and no line contains it.
"""

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

RUN_YAML, OF_THE_SYSTEM = "hf_GIVENxMARKER0123", "hf_SYSTEMxMARKER456"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret is known from an earlier command of this process."""
    monkeypatch.setattr("burnish.config.secrets._known_secrets", set())


SECRETS = [name for name, spec in specs(RunOptions).items() if spec.is_secret]
WORDS = [f"{name}={RUN_YAML}" for name in SECRETS]


def test_token_and_key_options_are_declared_secret() -> None:
    declared = {**specs(RunOptions), **TrainingArguments.declared}
    assert {name for name, spec in declared.items() if spec.is_secret} == {n for n in declared if has_secret_name(n)}
    assert {"hf_hub_token", "ms_hub_token", "hub_token"} <= {n for n, spec in declared.items() if spec.is_secret}
    for name in ("max_new_tokens", "include_num_input_tokens_seen", "add_special_tokens", "eos_token_id"):
        assert not has_secret_name(name)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "burnish", *words], capture_output=True, text=True, env=environment(), check=False
    )


def environment() -> dict[str, str]:
    return {**os.environ, **dict.fromkeys(VARIABLES, OF_THE_SYSTEM), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Server:
    """A server of ours as a process, and a visitor."""

    def __init__(self, *words: str) -> None:
        self.output = open("said.txt", "w+", encoding="utf-8")  # noqa: SIM115  (closed by ``end``)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "burnish", *words], env=environment(), stdout=self.output, stderr=self.output
        )
        until = time.monotonic() + 120
        while not (result := re.search(r"https?://127\.0\.0\.1:(\d+)", self.said)) or self.send("GET", "/healthz") == 0:
            assert self.child.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)
            if result:
                self.port = int(result[1])

    port = 0

    @property
    def said(self) -> str:
        return Path("said.txt").read_text(encoding="utf-8")

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        """The status, 0 where nobody listens; no answer holds a secret, in its headers neither."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            answered = connection.getresponse()
            text = answered.read().decode("utf-8", "replace")
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()
        self.cookie = (answered.getheader("set-cookie") or "").partition(";")[0] or getattr(self, "cookie", "")
        assert not [m for m in (RUN_YAML, OF_THE_SYSTEM) if m in f"{text} {answered.getheaders()}"], path
        return answered.status

    def words_of_processes(self) -> str:
        """The command lines of the server and of what it started."""
        result = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                if self.child.pid in (int(place.name), parent):
                    result.append((place / "cmdline").read_bytes().decode())
        assert result
        return "\n".join(result)

    def end(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(60) in (0, 143), self.said
        self.output.close()


@pytest.mark.slow
def test_api_shows_no_secret(user_folder: Path) -> None:
    Path("api.yaml").write_text(
        f"model_name_or_path: model\ntemplate: chatml\nhf_hub_token: {RUN_YAML}\n"
        "api_port: 0\napi_model_name: model\napi_log: content\n"
    )
    server = Server("api", "api.yaml")
    options = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    own, wrong = f"Bearer {OF_THE_SYSTEM}", f"Bearer {RUN_YAML}"
    until = time.monotonic() + 60
    while server.send("POST", "/v1/chat/completions", options, Authorization=own) == 503:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert server.send("POST", "/v1/chat/completions", options, Authorization=own) == 200
    assert server.send("POST", "/v1/chat/completions", options, Authorization=wrong) == 401
    for path in ("/v1/models", "/metrics", f"/v1/models?api_key={OF_THE_SYSTEM}", f"/{RUN_YAML}", "/readyz"):
        assert server.send("GET", path, Authorization=own) in (200, 404, 503)
        assert server.send("GET", path, Authorization=wrong) in (200, 401, 404)
    assert server.send("POST", "/v1/chat/completions", {"n": RUN_YAML}, Authorization=own + "\t") in (400, 401, 422)
    words = server.words_of_processes()
    server.end()
    Path("api.yaml").unlink()
    assert_nowhere(server.said + words, user_folder)


@pytest.mark.slow
def test_page_shows_no_secret(user_folder: Path) -> None:
    server = Server("webui", "web_port=0", "web_home=home")
    here = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.send("POST", "/sign-in", {"key": RUN_YAML}, **here) == 403
    assert server.send("POST", "/sign-in", {"key": OF_THE_SYSTEM}, **here) < 400
    visitor = {"Cookie": server.cookie, **here}
    run = {"model_name_or_path": "model", "dataset": "rows", "dataset_dir": "data", "output_dir": "out",
           "finetuning_type": "full", "use_cpu": True, "max_steps": 1, "template": "chatml"}  # fmt: skip
    assert server.send("POST", "/api/runs", {"values": {**run, "hf_hub_token": "x"}}, **visitor) == 422
    assert server.send("POST", "/api/runs", {"values": run}, **visitor) < 300
    assert "/sign-in" in server.said
    words, until = "", time.monotonic() + 120
    while not Path("out/outcome.json").is_file():
        words += server.words_of_processes()
        assert time.monotonic() < until, server.said
        time.sleep(0.2)
    for path in ("/", "/runs", "/new", "/settings", "/api/runs", f"/nowhere?key={OF_THE_SYSTEM}"):
        assert server.send("GET", path, **visitor) < 500
    server.end()
    assert json.loads(Path("out/outcome.json").read_text())["state"] == "done"
    assert_nowhere(server.said + words, user_folder)


def write_failing_optimizer() -> None:
    """A failure that holds the token in its text."""
    Path("sitecustomize.py").write_text(
        "from burnish.loop.loop import Loop\n"
        f"def fails(*a, **k): raise RuntimeError('the hub refused {RUN_YAML} and {OF_THE_SYSTEM}')\n"
        "Loop.step = fails\n",
        encoding="utf-8",
    )


AWAY = f"http://someone:{RUN_YAML}@127.0.0.1:9/v1?api_key={RUN_YAML}"
COMMANDS: dict[str, tuple[list[str], int]] = {
    "train": (["train", "run.yaml"], 0),
    "evaluate and predict": (["train", "run.yaml", "do_predict=true", "val_size=4", "output_dir=other"], 0),
    "explain": (["explain", "run.yaml", "output_dir=other"], 0),
    "export": (["export", "model_name_or_path=model", "export_dir=whole", "template=chatml"], 0),
    "env": (["env"], 0),
    "version": (["version"], 0),
    "runs": (["runs", "."], 0),
    "chat": (["chat", "model", "template=chatml", "max_new_tokens=3", "--once", "Hello"], 0),
    "chat with a server that is away": (["chat", "--url", AWAY, "--once", "Hello"], 2),
    "answers of a server that is away": (
        ["chat", "model", f"infer_url={AWAY}", "infer_backend=vllm", "template=chatml", "--once", "Hello"],
        2,
    ),
    "eval": (["eval", "model", "eval_dataset=rows", "dataset_dir=data", "template=chatml", "save_dir=measured"], 0),
    "predict": (
        ["predict", "model", "eval_dataset=rows", "dataset_dir=data", "template=chatml", "save_dir=predicted"],
        0,
    ),
    "demo": (["demo", "max_steps=1", "warmup_steps=0"], 0),
    "api with a wrong option": (["api", "model", "api_port=none"], 2),
    "webui with a wrong option": (["webui", "web_port=none"], 2),
    "webchat with a wrong option": (["webchat", "model", "web_port=none", f"hf_hub_token={RUN_YAML}"], 2),
    "an api with its key among the words": (["api", "model", f"api_key={RUN_YAML}"], 2),
    "a page with its key among the words": (["webui", f"web_key={RUN_YAML}"], 2),
    "GGUF": (["export", "model_name_or_path=model", "export_dir=single", "export_format=gguf"], 0),
    "a wrong option": (["train", "run.yaml", f"hub_tokn={RUN_YAML}", "output_dir=other"], 2),
    "an option that is not here": (["train", "run.yaml", f"om_hub_token={RUN_YAML}", "output_dir=other"], 2),
    "a wrong value": (["train", "run.yaml", f'hf_hub_token=["{RUN_YAML}"', "lora_rank=x", "output_dir=other"], 2),
    "a model that is nowhere": (["train", "run.yaml", "model_name_or_path=no/model", "output_dir=other"], 2),
}


WITHOUT_OPTIONS_OF_A_RUN = {"env", "version", "runs", "webui"}
"""Commands that take none of a run's secrets."""
SLOW = {"demo", "GGUF", "answers of a server that is away", "predict"}


def test_every_command_is_covered_by_the_secrets_test() -> None:
    assert {words[0] for words, _ in COMMANDS.values()} == set(cli.COMMANDS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in COMMANDS])
def test_no_command_prints_or_writes_a_secret(
    name: str, user_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, OF_THE_SYSTEM)
    words, status = COMMANDS[name]
    takes_none = words[0] in WITHOUT_OPTIONS_OF_A_RUN or "--url" in words
    assert cli.main([*words, *([] if takes_none else WORDS)]) == status
    out, err = capfd.readouterr()
    assert_nowhere(out + err, user_folder)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [[], pytest.param(["--debug"], marks=pytest.mark.slow)], ids=["file", "debug"])
def test_traceback_contains_no_secret(debug: list[str], user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_failing_optimizer()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(user_folder), os.environ.get("PYTHONPATH", "")]))
    done = run("train", "run.yaml", *WORDS, *debug)
    assert done.returncode == 1
    assert f"the hub refused {MASK} and {MASK}" in done.stderr
    Path("sitecustomize.py").unlink()
    shutil.rmtree("__pycache__", ignore_errors=True)  # it was compiled
    assert_nowhere(done.stdout + done.stderr, user_folder)


def assert_nowhere(message: str, folder: Path) -> None:
    caches = [Path(os.environ["BURNISH_CACHE"])]
    for marker in (RUN_YAML, OF_THE_SYSTEM):
        assert marker not in message
        for path in (path for place in (folder, *caches) for path in place.rglob("*") if path.is_file()):
            assert marker.encode() not in path.read_bytes(), path
    write("data/rows.json", ROWS)


SCORE = "def score(completions, api_key, url, **kwargs):\n    return [float(len(each) % 3) for each in completions]\n"


def test_no_file_contains_a_secret_argument_of_a_reward_function(user_folder: Path, capfd: Any) -> None:
    Path("mine.py").write_text(SCORE, encoding="utf-8")
    options = ["stage=grpo", "num_generations=2", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
               "max_completion_length=4", "save_strategy=steps", "save_steps=1", "template=chatml"]  # fmt: skip
    word = "correct-horse-battery"

    def argv(address: str, max_steps: int) -> list[str]:
        functions = [{"mine.py:score": {"api_key": word, "url": f"https://me:{RUN_YAML}@{address}/"}}]
        return ["train", "run.yaml", *options, f"reward_funcs={json.dumps(functions)}", f"max_steps={max_steps}"]

    assert cli.main(argv("host", 1)) == 0
    text = "".join(capfd.readouterr())
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert {"README.md", ".finished.json", "run.yaml"} <= {path.name for path in files}
    for secret in (word, RUN_YAML):
        assert secret not in text
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    word = "another-horse-battery"
    assert cli.main(argv("host", 2)) == 0, "a new key is no other run"
    capfd.readouterr()
    assert cli.main(argv("elsewhere", 3)) == 2
    assert "reward" in capfd.readouterr().err


def test_script_arguments_do_not_show_their_token(tmp_path: Path) -> None:
    made = TrainingArguments(output_dir=str(tmp_path), hub_token=RUN_YAML, report_to="none", use_cpu=True)
    shown = f"{made!r} {made} {made.to_dict()} {made.to_json_string()} {made.to_sanitized_dict()}"
    assert RUN_YAML not in shown
    assert made.hub_token == RUN_YAML


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
    assert f"#key={key}" in capsys.readouterr().out  # made here: it is shown, or nobody could sign in
    assert opened[0].startswith("file://")
    assert key not in opened[0]
    page = Path(opened[0].removeprefix("file://"))
    assert f"#key={key}" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0


def test_ordinary_text_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_TOKEN", "a")
    assert without_secrets("a cat sat") == "a cat sat"
