"""Messages about values that differ from those in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.checkpoint.comparison import compare_fingerprints
from burnish.config.errors import UserError


def test_long_values_are_shown_from_where_they_differ():
    targets = ",".join(f"layers.{layer}.q_proj" for layer in range(8))
    with pytest.raises(UserError) as raised:
        compare_fingerprints({"lora_target": f"{targets},a"}, {"lora_target": f"{targets},b"}, Path("checkpoint-2"))
    assert 'lora_target changed from ...roj,layers.7.q_proj,a" to ...roj,layers.7.q_proj,b".' in str(raised.value)


def test_long_values_that_differ_early_are_shown_from_their_beginning():
    with pytest.raises(UserError, match=r'lora_target changed from "x{56}\.\.\. to "y{56}\.\.\.\.'):
        compare_fingerprints({"lora_target": "x" * 90}, {"lora_target": "y" * 90}, Path("checkpoint-2"))


def test_removed_value_is_called_not_set():
    (note,) = compare_fingerprints({"eval_steps": 500}, {"eval_steps": None}, Path("checkpoint-2"))
    assert note == "eval_steps was 500 in checkpoint-2 and is not set now."
