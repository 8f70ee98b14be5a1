"""``burnish webchat PATH`` opens the web UI at a conversation with the named model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.serve.api.options import with_adapters
from burnish.serve.page.command import _link, read_named, read_options


def test_page_options_are_separated_from_model_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    argv = ["model", "--template", "qwen", "web_port=0", "--stop", "a", "b", "infer_seats=2"]
    options, named = read_named(argv)
    assert (options.web_port, named.name, named.folder) == (0, "model", tmp_path)
    assert named.argv == (str(tmp_path / "model"), "--template", "qwen", "--stop", "a", "b", "--infer_seats", "2")
    assert read_named(["org/name"])[1].argv == ("org/name",)
    assert read_named(["--model_name_or_path", "m"])[1].argv == ("--model_name_or_path", "m")
    adapters = ["--adapter", "sql=saves/sql", "--adapter", "poet=saves/poet"]
    assert read_named(["org/name", *adapters])[1].argv == tuple(with_adapters(["org/name", *adapters]))


def test_missing_model_is_an_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webchat", "web_port=0"]) == 2
    assert "burnish webchat requires a model.\n  Usage: burnish webchat PATH" in capsys.readouterr().err
    with pytest.raises(UserError, match='"web_key" on the command line'):
        read_named(["model", "web_key=short"])


def test_link_contains_any_key_unchanged() -> None:
    key = 'a+b%20&c="d" #é'
    link = _link("http://127.0.0.1:7860", "chat", key)
    assert parse_qs(urlsplit(link).fragment, encoding="utf-8")["key"] == [key]
    assert link.isascii()
    assert '"' not in link  # it is written to a private HTML file
    assert _link("http://127.0.0.1:7860", "runs", None) == "http://127.0.0.1:7860/runs"


@pytest.mark.run
def test_page_offers_the_named_model_and_starts_it_with_its_arguments(page) -> None:
    from burnish.serve.page.options import NamedModel

    requests: list[tuple[list[str], Path]] = []
    site = page.site
    site.named = NamedModel("model", ("model", "--template", "qwen"), Path("/somewhere"))
    site.starter.start_command = lambda argv, log, folder, reads_all: (
        requests.append((argv, folder)) or subprocess.Popen([sys.executable, "-c", ""])
    )
    assert '"named":"model"' in page.send("GET", "/api/models")[2].replace(": ", ":")
    status, _, text = page.send("POST", "/api/engines", {"named": True})
    assert (status, '"name"' in text) == (202, True)
    ((argv, folder),) = requests
    assert (argv[:4], folder) == (["api", "model", "--template", "qwen"], Path("/somewhere"))
    site.named = None
    assert page.send("POST", "/api/engines", {"named": True})[0] == 422


@pytest.mark.run
def test_link_opens_the_conversation_after_sign_in(tmp_path: Path) -> None:
    assert read_options(["--page", "chat"])[1] == "chat"
    child = subprocess.Popen(
        [sys.executable, "-m", "burnish", "webui", "--page", "chat", "web_port=0", f"web_home={tmp_path / 'home'}"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    line = child.stdout.readline()
    child.terminate()
    child.wait(20)
    assert re.search(r"http://127\.0\.0\.1:\d+/sign-in\?to=chat#key=\S+", line)
