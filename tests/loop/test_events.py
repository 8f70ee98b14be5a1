"""Callbacks: burnish's own, and transformers' unchanged."""

import math

import pytest

from burnish.config.registry import Registry
from burnish.loop.events import CallbackHandler, IntervalOptions, TrainerCallback, check_intervals
from burnish.loop.schedule import steps_of
from burnish.loop.state import TrainerControl, TrainerState


def handler(*callbacks):
    return CallbackHandler(callbacks, IntervalOptions(), TrainerState(), TrainerControl(), model="the model")


def test_event_passes_parts_of_the_run_by_keyword():
    recorded = {}

    class LogRecorder(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            recorded.update(kwargs, logs=logs)

    handler(LogRecorder()).fire("on_log", logs={"loss": 1})
    assert recorded == {"model": "the model", "logs": {"loss": 1}}


def test_returned_control_replaces_current_one():
    class Replace(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_save=True)

    h = handler(Replace())
    assert h.fire("on_step_end") is h.control
    assert h.control.should_save


def test_control_flags_are_reset_before_their_event():
    h = handler()
    h.control.should_save = h.control.should_log = True
    h.fire("on_save")
    assert (h.control.should_save, h.control.should_log) == (False, True)
    h.fire("on_step_begin")
    assert not h.control.should_log


def test_transformers_callbacks_run_unchanged():
    from transformers import EarlyStoppingCallback
    from transformers import TrainerCallback as TheirCallback

    events = []

    class EpochRecorder(TheirCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            events.append(state.global_step)

    h = handler(EpochRecorder(), EarlyStoppingCallback(2))
    h.fire("on_epoch_begin")
    assert events == [0]


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_interval_of_evaluations_in_the_state_is_that_of_transformers(strategy, tmp_path):
    import transformers

    theirs = transformers.TrainerState()
    options = {"logging_steps": 7, "save_steps": 0.3, "eval_strategy": strategy}
    theirs.compute_steps(transformers.TrainingArguments(str(tmp_path), use_cpu=True, **options), 50)
    ours = TrainerState()
    ours.compute_steps(IntervalOptions(**options), 50)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_callback_state_round_trips_through_checkpoint():
    class Counting(TrainerCallback):
        count = 0

        def state(self):
            return {"args": {}, "attributes": {"count": self.count}}

    first, second = Counting(), Counting()
    first.count, second.count = 3, 5
    saved = handler(first, second).state_dict()
    one, two = Counting(), Counting()
    handler(one, two).load_state_dict(saved)
    assert (one.count, two.count) == (3, 5)


def test_listeners_are_callbacks_that_override_the_event():
    class Quiet(TrainerCallback):
        pass

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs): ...

    h = handler(Quiet(), Logger())
    assert h.listeners("on_log") == ["Logger"]
    assert h.listeners("on_save") == []


def test_interval_below_one_is_a_fraction_of_all_steps():
    assert [steps_of(v, 171, 500) for v in (0.1, 5, None, 0.5)] == [18, 5, 500, 86]
    assert len(check_intervals(IntervalOptions(logging_steps=2.5))) == 1
    assert len(check_intervals(IntervalOptions(save_steps=math.inf, eval_steps=math.inf))) == 2


def test_trainer_state_file_is_compatible_with_transformers(tmp_path):
    from transformers import TrainerState as TheirState

    ours = TrainerState(global_step=7, epoch=0.5, log_history=[{"loss": 1.0, "step": 7}])
    ours.save_to_json(str(tmp_path / "a.json"))
    theirs = TheirState.load_from_json(str(tmp_path / "a.json"))
    assert (theirs.global_step, theirs.log_history) == (7, ours.log_history)
    theirs.save_to_json(str(tmp_path / "b.json"))
    assert TrainerState.load_from_json(str(tmp_path / "b.json")) == ours


def test_registry_suggests_nearest_member():
    import pytest

    from burnish.config.errors import UserError

    family = Registry("flavour")

    @family.register("vanilla", "plain")
    def vanilla():
        """Tastes of little."""

    assert family["plain"] is vanilla
    assert family.get("vanilla").summary == "Tastes of little."
    with pytest.raises(UserError, match='Unknown flavour "vanila"') as raised:
        family.get("vanila")
    assert 'Did you mean "vanilla"?' in str(raised.value)
    with pytest.raises(ValueError, match="already registered"):
        family.register("plain")(print)
