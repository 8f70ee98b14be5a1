"""TRL's GRPO and RLOO scripts run with only imports and paths changed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from example_scripts import run_script
from small_run import make_model

pytestmark = [
    pytest.mark.run,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]
REWARDS = "def short(completions, **kwargs):\n    return [-len(c[0]['content']) / 100 for c in completions]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a folder with a model, prompts with solutions, and a reward function."""
    folder = tmp_path_factory.mktemp("examples")
    make_model(folder / "model")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "data").mkdir()
    pairs = [(a, b) for a in range(4) for b in range(4)]
    rows = [{"prompt": [{"role": "user", "content": f"{a} + {b}?"}], "solution": f"${a + b}$"} for a, b in pairs]
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(
            "\n".join(map(json.dumps, rows[: 16 if split == "train" else 4]))
        )
    return folder


def with_burnish(script, name):
    """Return the script with the trainer, its config and the rewards imported from burnish."""
    for imported, others in ((f"{name}Trainer", "trainer"), (f"{name}Config", "config")):
        line = re.search(rf"^( *)from trl import (.*\b{imported}\b.*)$", script, re.MULTILINE)
        assert line, others
        rest = ", ".join(word for word in line[2].split(", ") if word != imported)
        script = script.replace(line[0], f"{line[1]}from burnish import {imported}\n{line[1]}from trl import {rest}")
    return script.replace("from trl.rewards import", "from burnish.rewards import")


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_script_of_trl_trains_evaluates_and_saves(folder, name):
    import trl

    script = (Path(trl.__file__).parent / "scripts" / f"{name.lower()}.py").read_text()
    own, output = folder / f"{name}.py", folder / name
    own.write_text(with_burnish(script, name))
    options = {
        "model_name_or_path": "model", "dataset_name": "data", "output_dir": name, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 3,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "bf16": False,
        "use_cpu": True, "learning_rate": 1e-3,
    }  # fmt: skip
    arguments = [word for option, value in options.items() for word in (f"--{option}", value)]
    rewards = ["--reward_funcs", "think_format_reward", "my_rewards.short"]
    done = run_script(own, *rewards, *arguments, folder=folder)
    assert "Training completed" in done.stdout
    state = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())
    logged = {key for entry in state["log_history"] for key in entry}
    assert {"reward", "rewards/short/mean", "rewards/think_format_reward/mean", "eval_reward", "entropy"} <= logged
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "model", output))
    assert any((a != b).any() for a, b in zip(start.parameters(), trained.parameters(), strict=True))
