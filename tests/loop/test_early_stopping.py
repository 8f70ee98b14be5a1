"""Early stopping compared with transformers' callback, and its required options."""

import random
from types import SimpleNamespace

import pytest

from burnish.config.errors import UserError
from burnish.loop.best import best_model_metric_name, is_higher_better
from burnish.loop.early_stopping import EarlyStoppingCallback, EarlyStoppingOptions, check_early_stopping
from burnish.loop.events import CallbackHandler
from burnish.loop.state import TrainerControl, TrainerState


def arguments(**changes):
    known = {
        "early_stopping_steps": 2, "early_stopping_threshold": 0.0, "eval_strategy": "steps", "save_strategy": "steps",
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": None,
    }  # fmt: skip
    return SimpleNamespace(**{**known, **changes})


def evaluations_until_stop(callback, values, args, name="eval_loss"):
    """Return the number of evaluations until the stop. Each callback runs before the best metric is updated."""
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    for number, value in enumerate(values, 1):
        callback.on_evaluate(args, state, control, metrics={name: value})
        better = state.best_metric is None or (value - state.best_metric) * (1 if args.greater_is_better else -1) > 0
        state.best_metric = value if better else state.best_metric
        if control.should_training_stop:
            return number
    return None


@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (3, 0.0), (2, 0.05)])
def test_early_stopping_stops_at_the_same_step_as_transformers(patience, threshold, higher):
    from transformers import EarlyStoppingCallback as TransformersCallback

    args = arguments(greater_is_better=higher)
    for seed in range(30):
        draw = random.Random(seed)
        values = [draw.uniform(0, 1) / (1 if higher else number) for number in range(1, 15)]
        ours = evaluations_until_stop(EarlyStoppingCallback(patience, threshold), values, args)
        assert ours == evaluations_until_stop(TransformersCallback(patience, threshold), values, args)


def test_early_stopping_uses_the_given_patience():
    assert evaluations_until_stop(EarlyStoppingCallback(2), [3.0, 2.0, 2.5, 2.4, 1.0], arguments()) == 4
    assert evaluations_until_stop(EarlyStoppingCallback(2), [3.0, 2.0, 1.0, 0.5, 0.4], arguments()) is None


def test_equal_loss_is_not_an_improvement():
    assert evaluations_until_stop(EarlyStoppingCallback(2), [1.0, 1.0, 1.0], arguments()) == 3


def test_nan_loss_is_not_an_improvement():
    assert evaluations_until_stop(EarlyStoppingCallback(2), [3.0, float("nan"), float("nan")], arguments()) == 3


def test_patience_counter_survives_a_checkpoint():
    first = EarlyStoppingCallback(3)
    evaluations_until_stop(first, [1.0, 2.0, 2.0], arguments())
    assert first.early_stopping_patience_counter == 2
    saved = CallbackHandler([first], None, TrainerState(), TrainerControl()).state_dict()
    second = EarlyStoppingCallback(3)
    CallbackHandler([second], None, TrainerState(), TrainerControl()).load_state_dict(saved)
    assert second.early_stopping_patience_counter == 2


def test_unknown_metric_is_reported_with_available_ones():
    callback = EarlyStoppingCallback(1)
    args = arguments(metric_for_best_model="acuracy")
    with pytest.raises(UserError, match="eval_acuracy") as caught:
        callback.on_evaluate(args, TrainerState(), TrainerControl(), metrics={"eval_loss": 1, "eval_accuracy": 1})
    assert 'Did you mean "eval_accuracy"?' in str(caught.value)


def test_missing_requirements_of_early_stopping_are_reported_before_the_run():
    assert list(check_early_stopping(arguments())) == []
    assert list(check_early_stopping(arguments(early_stopping_steps=None, eval_strategy="no"))) == []
    wrong = arguments(eval_strategy="no", metric_for_best_model=None, load_best_model_at_end=False)
    assert len(list(check_early_stopping(wrong))) == 2
    with pytest.raises(UserError):
        EarlyStoppingCallback().on_train_begin(wrong, TrainerState(), TrainerControl())
    assert EarlyStoppingOptions().early_stopping_steps is None


def test_metric_names_match_evaluation_and_lower_loss_is_better():
    assert best_model_metric_name(arguments(metric_for_best_model=None)) == "eval_loss"
    assert best_model_metric_name(arguments(metric_for_best_model="eval_accuracy")) == "eval_accuracy"
    assert not is_higher_better(arguments())
    assert is_higher_better(arguments(metric_for_best_model="accuracy"))
