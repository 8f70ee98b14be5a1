"""``burnish demo grpo``: held-out accuracy improves, and the result is reproducible."""

import pytest

from burnish.demo.command import demo, demo_plan, reward_lines
from burnish.run.build import train_run
from run_outputs import history, same_weights


def test_grpo_demo_states_its_rewards():
    options = demo_plan(["max_steps=3"], "demo_grpo.yaml").options
    assert (options.stage, options.reward_funcs, options.max_steps) == ("grpo", ["exact_match_reward"], 3)
    assert options.num_generations * 32 == options.per_device_train_batch_size * options.gradient_accumulation_steps


@pytest.mark.slow
def test_grpo_demo_improves_on_held_out_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo(["grpo"]) == 0
    rewards = [entry["eval_reward"] for entry in history(tmp_path / "demo-grpo-run") if "eval_reward" in entry]
    assert rewards[-1] >= rewards[0] + 0.1
    assert "held-out questions" in capsys.readouterr().out
    start = tmp_path / "demo-grpo-run-sft"
    few = ["max_steps=3", "warmup_steps=0", "logging_steps=1", "eval_strategy=no", "eval_on_start=false"]
    folders = [train_run(demo_plan([*few, f"output_dir=again-{n}"], "demo_grpo.yaml", start)).folder for n in (1, 2)]
    assert same_weights(*folders)
    assert reward_lines(folders[0]).startswith("reward during training")
