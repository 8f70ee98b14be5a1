"""What a person is told of a run of preferences: pictures of rewards, and why those of chosen answers fall."""

import pytest

from burnish.core.state import TrainerControl, TrainerState
from burnish.report.plots import plot_history
from burnish.report.preferences import SENTENCE, ChosenFallsCallback


def said(capsys, chosen, margins):
    callback = ChosenFallsCallback()
    for one, other in zip(chosen, margins, strict=True):
        logs = {"rewards/chosen": one, "rewards/margins": other}
        callback.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    return " ".join(capsys.readouterr().out.split()).count(SENTENCE)


@pytest.mark.parametrize(
    ("chosen", "margins", "times"),
    [
        ([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], 0),
        ([-0.1, -0.2, -0.3, -0.4], [0.4, 0.3, 0.2, 0.1], 0),
        ([-0.1, -0.2, 0.0, -0.1, -0.2], [0.1, 0.2, 0.3, 0.4, 0.5], 0),
    ],
)
def test_falling_rewards_of_chosen_answers_are_explained_once(capsys, chosen, margins, times):
    assert said(capsys, chosen, margins) == times


def test_rewards_are_drawn(tmp_path):
    history = [
        {"step": step, "loss": 0.7, **{f"rewards/{name}": step / 10 for name in ("chosen", "rejected", "margins")},
         "rewards/accuracies": 0.5}
        for step in range(1, 4)
    ]  # fmt: skip
    names = [path.name for path in plot_history(history, tmp_path)]
    assert names == ["training_loss.png", "training_rewards.png", "training_rewards_accuracies.png"]
