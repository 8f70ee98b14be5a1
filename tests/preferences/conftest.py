"""Keep the user's cache unchanged."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
