"""Plots of rewards and margins, and the warning about falling rewards of chosen responses."""

import json

import pytest

from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.plots import plot_history, plot_margins
from burnish.run.callbacks import FALLING_CHOSEN, ChosenFallsCallback
from pair_runs import make_pair_workspace, train_on_pairs


def count_notes(capsys, chosen, margins):
    callback = ChosenFallsCallback()
    for one, other in zip(chosen, margins, strict=True):
        logs = {"rewards/chosen": one, "rewards/margins": other}
        callback.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    return " ".join(capsys.readouterr().out.split()).count(FALLING_CHOSEN)


@pytest.mark.parametrize(
    ("chosen", "margins", "times"),
    [
        ([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], 0),
        ([-0.1, -0.2, -0.3, -0.4], [0.4, 0.3, 0.2, 0.1], 0),
        ([-0.1, -0.2, 0.0, -0.1, -0.2], [0.1, 0.2, 0.3, 0.4, 0.5], 0),
    ],
)
def test_falling_rewards_of_chosen_responses_are_explained_once(capsys, chosen, margins, times):
    assert count_notes(capsys, chosen, margins) == times


def test_rewards_are_plotted(tmp_path):
    history = [
        {"step": step, "loss": 0.7, **{f"rewards/{name}": step / 10 for name in ("chosen", "rejected", "margins")},
         "rewards/accuracies": 0.5}
        for step in range(1, 4)
    ]  # fmt: skip
    names = [path.name for path in plot_history(history, tmp_path)]
    assert names == ["training_loss.png", "training_rewards.png", "training_rewards_accuracies.png"]


@pytest.mark.parametrize("margins", [
    {"evaluation": [1.5, -0.5, 0.25, float("nan")]}, {"one": [0.0], "other": [-2.0, -1.0]}, {"far": [1e6, 1e6 + 1]},
])  # fmt: skip
def test_margin_distribution_is_plotted(tmp_path, margins):
    from matplotlib.image import imread

    (path,) = plot_margins(margins, tmp_path, "saves/rm")
    assert imread(path)[..., :3].std() > 0.02
    assert plot_margins({"none": [], "broken": [float("nan")]}, tmp_path) == []


@pytest.mark.slow
@pytest.mark.run
def test_reward_model_plots_the_margins_of_the_last_evaluated_dataset(tmp_path, monkeypatch):
    from burnish.run import finish

    drawn, workspace = [], make_pair_workspace(tmp_path)
    plot = finish.plot_margins
    monkeypatch.setattr(finish, "plot_margins", lambda *args: drawn.append(args[0]) or plot(*args))
    train_on_pairs(workspace, monkeypatch, stage="rm", plot_loss=True)
    train_on_pairs(workspace, monkeypatch, stage="rm", val_size=4, eval_strategy="steps", eval_steps=1, do_predict=True,
           do_train=True, plot_loss=True)  # fmt: skip
    assert [{name: len(margins) for name, margins in one.items()} for one in drawn] == [
        {"training": 12}, {"evaluation": 4}
    ]  # fmt: skip
    scored = [json.loads(line) for line in (workspace / "out" / "generated_predictions.jsonl").read_text().splitlines()]
    assert sorted(drawn[1]["evaluation"]) == pytest.approx(sorted(one["chosen"] - one["rejected"] for one in scored))
    card = (workspace / "out" / "README.md").read_text()
    assert "![Reward margins of pairs](training_margins.png)" in card
    assert "burnish api out" in card
    assert not any(word in card for word in ("burnish chat", "vllm", "generate", "pipeline_tag"))
    assert (workspace / "out" / "training_rewards.png").is_file()
