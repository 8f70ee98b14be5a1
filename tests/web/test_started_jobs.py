"""Exports, predictions and evaluations are listed by a later server with the same state folder."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from burnish.serve.http.errors import APIError
from burnish.serve.page.home import Home
from burnish.serve.page.jobs.commands import Commands

WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def site(tmp_path):
    def start_command(argv, log):
        return subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE)

    places = SimpleNamespace(first=tmp_path, display_path=str)
    return SimpleNamespace(
        home=Home(str(tmp_path / "home")), places=places, starter=SimpleNamespace(start_command=start_command)
    )


def begin(site, folder):
    commands = Commands(site)
    (folder.parent / "model").mkdir()
    id = commands.export(folder.parent / "model", "first", folder, "safetensors", {})
    return commands, id


@pytest.mark.run
@pytest.mark.parametrize(("has_result", "state"), [(True, "done"), (False, "failed")])
def test_job_of_an_earlier_server_is_listed_until_and_after_its_end(site, tmp_path, has_result, state):
    folder = tmp_path / "exported"
    first, id = begin(site, folder)
    later = Commands(site)
    assert [(job["id"], job["name"], job["state"]) for job in later.all()] == [(id, "first", "running")]
    if has_result:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    first._children[id].communicate()  # closes the input, which ends the process
    assert later.state(id)["state"] == state
    assert first.state(id)["state"] == "done"  # the server that started it knows the exit status
    seconds = later.state(id)["seconds"]
    time.sleep(0.01)
    assert Commands(site).all()[0]["seconds"] == pytest.approx(seconds, abs=5)


@pytest.mark.run
def test_exit_status_is_recorded_by_the_server_that_started_the_job(site, tmp_path):
    first, id = begin(site, tmp_path / "exported")
    first._children[id].kill()
    first._children[id].communicate()
    assert first.all()[0]["state"] == "failed"
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"weights")
    assert Commands(site).all()[0]["state"] == "failed"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[1, null, {}]", '[{"id": 3}]', '{"id": "x"}', json.dumps([dict.fromkeys(
        ("id", "kind", "name", "folder", "expected", "began", "ended", "status", "launch"), 1)])],
)  # fmt: skip
def test_unreadable_records_of_jobs_are_ignored(site, text):
    (site.home.folder / "jobs.json").write_text(text)
    assert Commands(site).all() == []


@pytest.mark.run
def test_two_jobs_do_not_write_to_one_folder(site, tmp_path):
    """An export creates its folder only when the weights are complete."""
    folder = tmp_path / "exports"
    commands, id = begin(site, folder)
    with pytest.raises(APIError) as refused:
        commands.evaluate(tmp_path / "model", "first", folder, "predict", {"dataset": "d"})
    assert refused.value.code == "folder_in_use"
    child = commands._children[id]
    child.communicate()
    assert commands.evaluate(tmp_path / "model", "first", folder, "predict", {"dataset": "d"})
    for child in commands._children.values():
        child.communicate()
