"""A working directory with a configuration file for tests that only explain it."""

from collections.abc import Iterator

import pytest

from bad_inputs import make_folder
from small_run import make_model


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One working directory for all tests of a module, because ``explain`` writes no files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(tmp_path_factory.mktemp("user"))
        make_folder(make_model(tmp_path_factory.mktemp("model")))
        yield
