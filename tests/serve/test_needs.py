"""Says aloud that servers were not tested, where they could not be."""

import pytest


def test_the_extra_serve_is_installed() -> None:
    pytest.importorskip("starlette", reason='servers are not tested: pip install "burnish[serve]"')
    pytest.importorskip("uvicorn", reason='servers are not tested: pip install "burnish[serve]"')
