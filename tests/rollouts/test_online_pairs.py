"""Runs of stage dpo with ``online: true`` over a tiny model."""

import shutil

import pytest
from test_rollout_runs import train
from test_rollout_runs import user as group_user

from burnish.config.errors import UserError
from run_outputs import history, same_weights

FOREIGN = ("num_generations", "steps_per_generation", "num_iterations")


def user(folder, **options):
    made = {name: value for name, value in group_user(folder).items() if name not in FOREIGN}
    return {
        **made,
        "stage": "dpo",
        "online": True,
        "num_generations": 3,
        "learning_rate": 1e-3,
        "max_steps": 4,
        **options,
    }


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    return folder, train(user(folder))


def test_run_learns_from_best_and_worst_completion_of_a_prompt(finished_run):
    folder, run = finished_run
    assert user(folder)["online"]
    log = [entry for entry in history(run) if "loss" in entry]
    assert len(log) == 4
    assert {"reward", "reward_std", "rewards/short/mean", "rewards/margins", "frac_reward_zero_std"} <= log[0].keys()
    assert log[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy still equals the reference
    assert log[3]["loss"] != log[0]["loss"]


def test_resumed_run_gives_the_same_weights(finished_run, tmp_path):
    folder, run = finished_run
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(run / "checkpoint-2", out / "checkpoint-2")
    resumed = train(user(folder, output_dir=str(out)))
    assert same_weights(run / "checkpoint-4", resumed / "checkpoint-4")


@pytest.mark.slow
def test_evaluation_changes_nothing(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"val_size": 4, "eval_strategy": "steps", "num_generations_eval": 2, "save_steps": 4}
    a, b = (train(user(folder, **options, eval_steps=steps, output_dir=str(tmp_path / str(steps)))) for steps in (1, 4))
    assert same_weights(a, b)
    assert all("eval_reward" in entry for entry in history(a) if "eval_runtime" in entry)


def test_prompts_with_equal_rewards_give_no_pair(finished_run, tmp_path, capsys):
    folder, _ = finished_run
    (folder / "equal.py").write_text("def same(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    run = train(user(folder, reward_funcs=[f"{folder}/equal.py:same"], output_dir=str(tmp_path / "out")))
    log = [entry for entry in history(run) if "loss" in entry]
    assert all(entry["frac_reward_zero_std"] == 1 and entry["loss"] == 0 for entry in log)
    output = capsys.readouterr().out
    assert "completion: " in output
    assert "advantage" not in output  # pairs have no such metric, and their loss is not near 0


def test_completion_without_a_score_is_in_no_pair(finished_run, tmp_path):
    folder, _ = finished_run
    run = train(user(folder, reward_funcs=[f"{folder}/my_rewards.py:often_bad"], output_dir=str(tmp_path / "out")))
    log = [entry for entry in history(run) if "loss" in entry]
    assert any(entry["rewards/often_bad/none"] for entry in log)
    assert all(entry["reward"] == -1 and entry["frac_reward_zero_std"] == 1 for entry in log)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"num_generations_eval": 1}, '"num_generations_eval" must be at least 2'),
        ({"reward_funcs": None}, "needs a reward"),
    ],
)
def test_unsupported_options_are_rejected(finished_run, tmp_path, options, message):
    folder, _ = finished_run
    with pytest.raises(UserError, match=message):
        train(user(folder, **options, output_dir=str(tmp_path / "out")))
