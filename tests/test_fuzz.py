"""A thousand of the random inputs of ``make fuzz``."""

import os
from pathlib import Path

import pytest

fuzzing = pytest.importorskip("fuzz", reason="hypothesis is not installed")

pytestmark = pytest.mark.run


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", fuzzing.READERS)
def test_every_input_ends_in_success_or_an_error_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fuzzing.fuzz(name, 1000 // len(fuzzing.READERS) + 1, int(os.environ.get("BURNISH_SEED", "0")))
