"""Use a temporary cache."""

import pytest


@pytest.fixture(autouse=True)
def temporary_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
