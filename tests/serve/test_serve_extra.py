"""Report that servers were not tested if their extra is missing."""

import subprocess
import sys

import pytest

from burnish.config.errors import MissingExtraError
from burnish.serve.chat.command import chat


def test_serve_extra_is_installed() -> None:
    pytest.importorskip("starlette", reason='servers are not tested: pip install "burnish[serve]"')
    pytest.importorskip("uvicorn", reason='servers are not tested: pip install "burnish[serve]"')


@pytest.mark.slow
@pytest.mark.run
def test_terminal_chat_requires_no_server() -> None:
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "import burnish.serve.chat.command, burnish.serve.chat.session, burnish.serve.api.prompts\n"
        "import burnish.serve.api.messages, burnish.serve.http.bodies, burnish.serve.http.errors\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_terminal_chat_names_its_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.serve.chat.command.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "burnish\[serve\]"'):
        chat(["model"])
