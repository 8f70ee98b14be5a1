"""A few of the random kills of ``make test-kills``."""

import os
import random
from pathlib import Path

import pytest

from kills import WAYS, campaign
from representative import representative_slow

pytestmark = pytest.mark.run

SEED = int(os.environ.get("BURNISH_SEED", "0"))


@pytest.mark.parametrize(
    "way", representative_slow(["full", "completions, used twice", "lora with dropout", "two processes", "images"], 1)
)
def test_killed_run_gives_bitwise_equal_weights(way: str, small_model: Path, tmp_path: Path) -> None:
    assert way in WAYS
    lines = list(campaign(small_model, way, 2, random.Random(f"{SEED} {way}"), tmp_path))
    assert sum(": killed" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["images", "images of pairs, tower trained"])
def test_run_killed_20_times_while_decoding_images_is_bitwise_equal(way: str, tmp_path: Path) -> None:
    lines = list(campaign(tmp_path, way, 20, random.Random(f"{SEED} {way}"), tmp_path / "runs"))
    assert sum(": killed" in line for line in lines) == 20


@pytest.mark.slow
def test_run_killed_50_times_inside_generations_is_bitwise_equal(small_model: Path, tmp_path: Path) -> None:
    lines = list(campaign(small_model, "completions, used twice", 50, random.Random(SEED), tmp_path))
    assert sum(": killed" in line for line in lines) == 50
