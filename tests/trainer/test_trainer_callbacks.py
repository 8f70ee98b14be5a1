"""Callbacks: the events, order and arguments of transformers."""

import warnings

import pytest
import torch
import transformers
from transformers import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback

import burnish
from burnish import Trainer, TrainerControl
from burnish.loop.events import EVENTS
from trainer_run import Regression, arguments, make_trainer, points, transformers_arguments, weights

pytestmark = pytest.mark.run


def recorder(base):
    """Return a callback class of either library that records events, their arguments, and the control flags."""

    def write(name):
        def event(self, args, state, control, **kwargs):
            flags = tuple(name for name, is_up in vars(control).items() if is_up and name.startswith("should"))
            options = {key for key, value in kwargs.items() if value is not None}
            self.seen.append((name, state.global_step, flags, tuple(sorted(options))))

        return event

    recorder_class = type("Recorder", (base,), {name: write(name) for name in EVENTS})
    recorder_class.seen = []
    return recorder_class


CASES = {
    "the usual": {"max_steps": 4},
    "accumulation, everything due": {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4, "eval_on_start": True,
    },
    "by epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
    "the best": {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "loss",
                 "max_steps": 4},
    "late evaluations": {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3, "max_steps": 4,
                         "logging_first_step": True, "logging_steps": 3},
    "shares": {"logging_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5, "max_steps": 8},
}  # fmt: skip


@pytest.mark.sample(1)
# eval_loss, the metric of "the best", is not a metric of two sets.
@pytest.mark.parametrize(
    ("case", "sets"),
    [
        pytest.param(
            case, sets, marks=() if sets == "one set" and case in ("the usual", "the best") else pytest.mark.slow
        )
        for case in CASES
        for sets in ("one set", "two sets")
        if (case, sets) != ("the best", "two sets")
    ],
)
def test_events_and_their_arguments_match_transformers(tmp_path, case, sets):
    recorded = []
    for trainer_class, make_arguments, base in (
        (Trainer, arguments, burnish.TrainerCallback),
        (transformers.Trainer, transformers_arguments, transformers.TrainerCallback),
    ):
        callback = recorder(base)
        options = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no",
                   "learning_rate": 0.1, **CASES[case]}  # fmt: skip
        eval_set = points(5) if sets == "one set" else {"a": points(3), "b": points(4)}
        trainer = trainer_class(
            Regression(), make_arguments(tmp_path / trainer_class.__module__, **options), train_dataset=points(),
            eval_dataset=eval_set, callbacks=[callback],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.predict(points(3))
        recorded.append(callback.seen)
    ours, theirs = recorded
    assert [event[:2] for event in ours] == [event[:2] for event in theirs]
    assert [event[3] for event in ours] == [event[3] for event in theirs]
    assert [event[2] for event in ours] == [event[2] for event in theirs]


def test_burnish_callbacks_run_in_transformers_trainer(tmp_path):
    class Stop(burnish.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer = transformers.Trainer(
        Regression(), transformers_arguments(tmp_path), train_dataset=points(), callbacks=[Stop()]
    )
    assert trainer.train().global_step == 2


def test_early_stopping_callback_of_transformers_stops_training(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=20, learning_rate=1e-12, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss",
        trainer={"eval_dataset": points(4), "callbacks": [EarlyStoppingCallback(2, early_stopping_threshold=0.01)]},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert trainer.state.global_step == 6


def test_progress_display_matches_transformers(tmp_path, capsys):
    lines = Trainer(Regression(), arguments(tmp_path, max_steps=2), train_dataset=points())
    lines.train()
    assert "'learning_rate'" in capsys.readouterr().out
    bar = Trainer(Regression(), arguments(tmp_path, max_steps=2, disable_tqdm=False), train_dataset=points())
    bar.train()
    assert "2/2" in capsys.readouterr().err
    assert [type(callback).__name__ for callback in bar.callback_handler.callbacks] == [
        "DefaultFlowCallback", "ProgressCallback"
    ]  # fmt: skip


def test_callbacks_are_added_and_removed_by_class_or_instance(tmp_path):
    class CustomCallback(burnish.TrainerCallback):
        pass

    trainer = make_trainer(tmp_path)
    instance = CustomCallback()
    trainer.add_callback(instance)
    assert instance in trainer.callback_handler.callbacks
    assert trainer.pop_callback(CustomCallback) is instance
    assert trainer.pop_callback(CustomCallback) is None
    trainer.add_callback(CustomCallback)
    trainer.remove_callback(CustomCallback)
    assert not any(isinstance(callback, CustomCallback) for callback in trainer.callback_handler.callbacks)
    for flow in (DefaultFlowCallback, burnish.loop.events.DefaultFlowCallback):
        trainer = make_trainer(tmp_path)
        trainer.remove_callback(flow)
        assert trainer.callback_handler.callbacks == []


def test_second_callback_of_same_class_gives_a_warning(tmp_path, monkeypatch):
    message = []
    monkeypatch.setattr(transformers.trainer_callback.logger, "warning", message.append)
    make_trainer(tmp_path, trainer={"callbacks": [ProgressCallback, ProgressCallback()]})
    assert "ProgressCallback" in message[0]


def test_control_returned_by_callback_replaces_the_current_one(tmp_path):
    class ReplaceControl(burnish.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_training_stop=state.global_step == 3)

    trainer = make_trainer(tmp_path, trainer={"callbacks": [ReplaceControl()]})
    assert trainer.train().global_step == 3
    assert trainer.control is trainer.callback_handler.control


def test_run_whose_epochs_are_ended_early_ends_after_its_epochs(tmp_path):
    class EndEpochs:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    results = []
    for library, options in ((burnish, arguments), (transformers, transformers_arguments)):
        callback = type("Mine", (EndEpochs, library.TrainerCallback), {})()
        args = options(tmp_path, num_train_epochs=2, per_device_train_batch_size=2)
        trainer = library.Trainer(Regression(), args, train_dataset=points(16), callbacks=[callback])
        results.append((trainer.train().global_step, round(trainer.state.epoch, 4)))
    assert results[0] == results[1]
    assert results[0][0] == 4


def test_run_stopped_at_the_beginning_of_an_epoch_makes_no_further_step(tmp_path):
    class Stop(burnish.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            control.should_training_stop = state.epoch >= 1

    trainer = make_trainer(tmp_path, trainer={"callbacks": [Stop()]}, num_train_epochs=2)
    assert trainer.train().global_step == trainer.state.max_steps // 2


def test_event_can_be_fired_by_a_script(tmp_path):
    recorded = []

    class Listener(burnish.TrainerCallback):
        def on_push_begin(self, args, state, control, **kwargs):
            recorded.append("push")

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            recorded.append(metrics)

    trainer = make_trainer(tmp_path, trainer={"callbacks": [Listener()]})
    handler = trainer.callback_handler
    handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"a": 1})
    assert recorded == ["push", {"a": 1}]


def test_callback_receives_the_parts_of_the_run(tmp_path):
    parts = {}

    class ReadArguments(burnish.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            parts.update(kwargs)

    trainer = make_trainer(tmp_path, max_steps=1, trainer={"callbacks": [ReadArguments()]})
    trainer.train()
    assert parts["model"] is trainer.model
    assert parts["optimizer"] is trainer.optimizer
    assert parts["lr_scheduler"] is trainer.lr_scheduler
    assert trainer.callback_handler.train_dataloader is parts["train_dataloader"]


def test_callback_can_change_model_between_steps(tmp_path):
    class ResetWeights(burnish.TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.a.fill_(7.0)

    trainer = make_trainer(tmp_path, trainer={"callbacks": [ResetWeights()]})
    trainer.train()
    assert weights(trainer)["a"] == 7


def test_tensorboard_receives_logs(tmp_path):
    pytest.importorskip("tensorboardX")
    with pytest.warns(FutureWarning, match="TENSORBOARD_LOGGING_DIR"):
        trainer = make_trainer(tmp_path, max_steps=2, report_to="tensorboard", logging_dir=str(tmp_path / "logs"))
    trainer.train()
    assert list((tmp_path / "logs").rglob("events*"))


def test_missing_tracker_library_is_rejected_by_name(tmp_path):
    with pytest.raises(burnish.UserError, match="azureml"):
        make_trainer(tmp_path, report_to="azure_ml")


def test_arguments_in_the_order_of_earlier_versions_are_refused_with_advice(tmp_path):
    """Before transformers 4.47 there was no ``compute_loss_func``, so the optimizers came one position earlier."""
    args = arguments(tmp_path)
    with pytest.raises(TypeError, match=r"`callbacks` must be a list of callbacks.*Pass the arguments .* by name"):
        Trainer(Regression(), args, None, points(4), None, None, None, None, None, (None, None))
