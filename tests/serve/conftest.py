"""Servers for tests; without the extra ``serve`` the tests of this folder are skipped with a message."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("starlette") and find_spec("uvicorn") else ["test_[!n]*.py"]


@pytest.fixture
def serve() -> Iterator[object]:
    """Return ``server_thread.start``, which starts a server that is stopped after the test."""
    from serve.server_thread import server_starter

    with server_starter() as start:
        yield start
