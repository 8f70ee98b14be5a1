"""Files that the web UI cannot write: its state folder or the folder of a run is full or read-only."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.serve.page.home import Home
from web.conftest import KEY
from web.page_thread import start_page


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def denied(*_: Any, **__: Any) -> None:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def full_home(page: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the page, to which nothing more can be written."""
    monkeypatch.setattr("burnish.serve.page.home.os.fsync", full)
    return Path(page.site.home.folder)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/runs/{first}/label", {"name": "x"}),
        ("PUT", "/api/chats/a", {"turns": []}),
        ("PUT", "/api/presets/x", {"text": "lora_rank: 8\n"}),
    ],
)
def test_state_that_cannot_be_written_is_an_error_with_the_reason(page, full_home, method, path, body) -> None:
    before = sorted(full_home.rglob("*"))
    status, _, text = page.send(method, path.format(first=page.id_of("first")), body)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (507, "not_written")
    assert "No space left on device" in error["message"]
    assert sorted(full_home.rglob("*")) == before  # no part of a file is left


def test_presets_are_listed_while_text_cannot_be_written(page, monkeypatch) -> None:
    page.send("PUT", "/api/presets/mine", {"text": "lora_rank: 8\n"})
    monkeypatch.setattr("burnish.serve.page.form.tempfile.TemporaryDirectory", full)
    assert page.send("POST", "/api/yaml", {"text": "lora_rank: 8\n"})[0] == 507
    assert page.get("/api/form")["own_presets"] == {"mine": {"lora_rank": "8"}}


@pytest.mark.parametrize("route", ["continue", "new"])
def test_run_that_cannot_be_started_in_its_folder_is_an_error(page, root, monkeypatch, route) -> None:
    monkeypatch.setattr("burnish.serve.page.jobs.starting.start_burnish", denied)
    outcome = (root / "saves/first/outcome.json").read_bytes()
    path, body = f"/api/runs/{page.id_of('first')}/continue", {}
    if route == "new":
        path, body = "/api/runs", {"values": {"model_name_or_path": "m", "dataset": "d", "output_dir": "saves/next"}}
    status, _, text = page.send("POST", path, body)
    assert (status, json.loads(text)["error"]["option"]) == (422, "output_dir")
    assert "Permission denied" in text
    assert (root / "saves/first/outcome.json").read_bytes() == outcome


def test_run_whose_first_folder_is_gone_is_not_resumed(page, root) -> None:
    launch = json.loads((root / "saves/first/launch.json").read_text())
    (root / "saves/first/launch.json").write_text(json.dumps({**launch, "folder": str(root / "moved")}))
    outcome = (root / "saves/first/outcome.json").read_bytes()
    status, _, text = page.send("POST", f"/api/runs/{page.id_of('first')}/continue", {})
    assert status == 409
    assert '"moved", in which the run was started, does not exist' in json.loads(text)["error"]["message"]
    assert (root / "saves/first/outcome.json").read_bytes() == outcome


def test_options_are_described_without_space_to_keep_them(root, tmp_path, monkeypatch) -> None:
    with start_page(root, tmp_path / "home", KEY) as page:
        (page.site.home.folder / "form.json").unlink()
        monkeypatch.setattr(page.site.planner, "whole", lambda _: _described())
        monkeypatch.setattr("burnish.serve.page.home.os.fsync", full)
        assert page.get("/api/form")["fields"] == []


async def _described() -> dict[str, Any]:
    return {"groups": [], "fields": []}


def test_key_file_that_is_not_text_is_an_error(tmp_path) -> None:
    home = Home(str(tmp_path))
    (home.folder / "key").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="not UTF-8"):
        home.key()


def test_file_that_cannot_be_read_is_an_error_of_the_download(page, root, monkeypatch) -> None:
    monkeypatch.setattr("burnish.serve.page.api._download", denied)
    status, _, text = page.send("GET", f"/api/runs/{page.id_of('first')}/download/run.yaml")
    assert status == 404
    assert "Permission denied" in text
