"""Runs of stage ppo over a tiny model: training, logs, and exact resume within a rollout."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_rollout_runs import train
from test_rollout_runs import user as group_user

from burnish.config.errors import UserError
from burnish.inference.loading import writes_answers
from burnish.models.reward_files import CRITIC, load_reward_model
from burnish.serve.command_line import serving_of
from representative import representative_slow
from run_outputs import history, same_weights

FOREIGN = ("num_generations", "steps_per_generation", "num_iterations")


def user(folder, **options):
    """Return the options of a run with two rollouts: 16 completions of 16 prompts, trained on twice in 2 steps."""
    made = {name: value for name, value in group_user(folder).items() if name not in FOREIGN}
    return {**made, "stage": "ppo", "ppo_buffer_size": 2, "ppo_epochs": 2, "learning_rate": 1e-3,
            "max_steps": 2, **options}  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    return folder, train(user(folder))


def test_run_trains_policy_and_value_head_and_adapts_coefficient(finished_run):
    _, run = finished_run
    log = [entry for entry in history(run) if "loss" in entry]
    options = user(finished_run[0])
    steps = options["ppo_buffer_size"] * options["ppo_epochs"]  # steps of a rollout
    assert [("reward" in entry) for entry in log] == [step % steps == 0 for step in range(8)]
    assert {"ppo/policy_loss", "ppo/value_loss", "ppo/clipfrac", "ppo/entropy", "ppo/skipped"} <= log[1].keys()
    assert log[0]["objective/kl"] == pytest.approx(0, abs=1e-5)  # the policy still equals the reference
    assert log[0]["kl_coef"] == pytest.approx(0.2)
    assert log[4]["objective/kl"] != 0
    assert log[4]["kl_coef"] == pytest.approx(0.2 * (1 - 0.2 * 16 / 10000))
    heads = [load_file(run / f"checkpoint-{step}" / "value_head.safetensors") for step in (1, 8)]
    assert all(not torch.equal(heads[0][name], heads[1][name]) for name in heads[0].keys() - {CRITIC})


def test_value_head_is_saved_next_to_the_model_and_reloaded(finished_run, tmp_path, capsys):
    folder, run = finished_run
    saved, last = (load_file(each / "value_head.safetensors") for each in (run, run / "checkpoint-8"))
    assert saved.keys() == {"v_head.summary.weight", "v_head.summary.bias", CRITIC}
    assert all(torch.equal(saved[name], last[name]) for name in saved)
    more = {"model_name_or_path": str(run), "max_steps": 1, "learning_rate": 1e-30, "weight_decay": 0}
    again = train(user(folder, **more, output_dir=str(tmp_path / "again")))
    assert "The value head was loaded from" in capsys.readouterr().out
    assert torch.allclose(
        load_file(again / "value_head.safetensors")["v_head.summary.weight"], saved["v_head.summary.weight"]
    )


@pytest.mark.parametrize("name", ["", "checkpoint-8"])
def test_policy_with_a_value_head_generates_text(finished_run, name):
    _, run = finished_run
    assert writes_answers(serving_of([str(run / name)]).options)


def test_policy_is_rejected_as_a_reward_model(finished_run):
    _, run = finished_run
    with pytest.raises(UserError, match="it is not a reward model"):
        load_reward_model(str(run))


def test_steps_count_rollouts_with_one_learning_rate_each(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"lr_scheduler_type": "linear", "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    log = [entry for entry in history(train(user(folder, **options))) if "loss" in entry]
    assert [entry["learning_rate"] for entry in log] == pytest.approx([1e-3] * 4 + [5e-4] * 4)


@pytest.mark.parametrize("stopped", representative_slow([3, 1, 4], 1))
def test_run_resumed_inside_a_rollout_gives_the_same_weights(finished_run, tmp_path, stopped):
    folder, run = finished_run
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(run / f"checkpoint-{stopped}", out / f"checkpoint-{stopped}")
    resumed = train(user(folder, output_dir=str(out)))
    assert same_weights(run / "checkpoint-8", resumed / "checkpoint-8")
    heads = [load_file(each / "checkpoint-8" / "value_head.safetensors") for each in (run, resumed)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.slow
def test_evaluation_changes_nothing(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"val_size": 4, "eval_strategy": "steps", "ppo_score_norm": True, "save_steps": 8}
    a, b = (train(user(folder, **options, eval_steps=steps, output_dir=str(tmp_path / str(steps)))) for steps in (1, 8))
    assert same_weights(a, b)
    assert all("eval_reward" in entry for entry in history(a) if "eval_runtime" in entry)


@pytest.mark.slow
def test_update_does_not_depend_on_micro_batching(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"max_steps": 1, "save_steps": 1, "ppo_epochs": 1, "infer_exact": True}
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    a, b = (
        train(user(folder, **options, **more, output_dir=str(tmp_path / str(at)))) for at, more in enumerate(({}, cut))
    )
    norms = [next(e["grad_norm"] for e in history(each) if "grad_norm" in e) for each in (a, b)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_step_beyond_ratio_threshold_has_no_loss(finished_run, tmp_path):
    folder, _ = finished_run
    run = train(user(folder, ppo_ratio_threshold=1.0000001, learning_rate=0.1, output_dir=str(tmp_path / "far")))
    log = [entry for entry in history(run) if "loss" in entry]
    assert log[-1]["ppo/skipped"] > 0
    assert any(entry["loss"] == 0 for entry in log)


def test_completion_without_a_score_is_not_trained_on(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"max_steps": 1, "ppo_score_norm": True, "reward_funcs": [f"{folder}/my_rewards.py:often_bad"]}
    run = train(user(folder, **options, output_dir=str(tmp_path / "out")))
    first = history(run)[0]
    assert first["rewards/often_bad/none"] > 0
    assert first["reward"] == -1
    rollout = load_file(run / "checkpoint-1" / "rollout_0.safetensors")
    assert any((values == 0).any() for name, values in rollout.items() if name.endswith("mask"))


@pytest.mark.slow
def test_unfinished_completion_is_penalized(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"max_steps": 1, "save_steps": 1}
    a, b = (train(user(folder, **options, missing_eos_penalty=penalty, output_dir=str(tmp_path / str(penalty))))
            for penalty in (None, 5.0))  # fmt: skip
    returns = [load_file(each / "checkpoint-1" / "rollout_0.safetensors") for each in (a, b)]
    lower = [name for name in returns[0] if not torch.equal(returns[0][name], returns[1][name])]
    assert any("returns" in name for name in lower)


def test_options_of_other_losses_without_effect_are_reported(finished_run, tmp_path, capsys):
    folder, _ = finished_run
    options = {"num_iterations": 2, "scale_rewards": "batch", "num_generations_eval": 2, "max_steps": 1}
    train(user(folder, **options, output_dir=str(tmp_path / "out")))
    output = capsys.readouterr()
    assert "num_generations_eval" not in output.out + output.err  # evaluations use it
    for name in ("num_iterations", "scale_rewards"):
        assert f'"{name}" has no effect: stage is ppo.' in output.out + output.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 4}, "num_generations"),
        ({"reward_funcs": None}, "stage: ppo needs a reward"),
        ({"train_on_prompt": True}, "train_on_prompt"),
    ],
)
def test_options_unsupported_by_ppo_are_rejected(finished_run, tmp_path, options, message):
    folder, _ = finished_run
    with pytest.raises(UserError, match=message):
        train(user(folder, **options, output_dir=str(tmp_path / "out")))
