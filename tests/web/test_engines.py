"""Engines of the chat page: their states while others begin or end, and their sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.serve.page.home import Home
from burnish.serve.page.jobs.engines import Engines


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """Engines whose processes run until they get a signal, and do nothing."""
    child = SimpleNamespace(poll=lambda: None, send_signal=lambda number: None)
    starter = SimpleNamespace(places=SimpleNamespace(first=tmp_path), start_command=lambda *arguments: child)
    return Engines(Home(str(tmp_path / "home")), starter)


def test_states_are_listed_while_an_engine_ends(engines: Engines, tmp_path: Path, monkeypatch) -> None:
    first, second = (engines.begin(tmp_path / name, name) for name in ("first", "second"))

    async def ready_after_another_request(*_: object) -> tuple[int, bytes]:
        engines.end(second.id)
        return 200, b"{}"

    monkeypatch.setattr("burnish.serve.page.jobs.engines.request_json", ready_after_another_request)
    assert [one["id"] for one in asyncio.run(engines.states())] == [first.id]


def test_model_that_is_loaded_again_has_another_socket_than_its_ending_process(
    engines: Engines, tmp_path: Path
) -> None:
    before = engines.begin(tmp_path, "model")
    engines.end(before.id)
    after = engines.begin(tmp_path, "model")
    assert (after.id, after.socket.parent) == (before.id, before.socket.parent)
    assert after.socket != before.socket
