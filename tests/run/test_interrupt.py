"""Ctrl-C and SIGTERM: a checkpoint, a clean exit, and an exact resume."""

import os
import signal
import threading

import pytest

from burnish.checkpoint.checkpoint import load
from burnish.loop.events import TrainerCallback
from burnish.run.recovery.interrupt import KEEP_RUNNING, SIGNALS, InterruptCallback
from regression_run import make_run, same, weights, without_times

pytestmark = pytest.mark.run


class SendSignals(TrainerCallback):
    """Sends signals to this process during a step or an evaluation."""

    def __init__(self, step, *numbers, event="on_optimizer_step"):
        self.step, self.numbers, self.event = step, numbers, event

    def _send(self, state):
        # on_optimizer_step comes before the step is counted.
        if state.global_step == self.step - (self.event == "on_optimizer_step"):
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.event == "on_optimizer_step":
            self._send(state)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.event == "on_prediction_step":
            self._send(state)


def interrupted(folder, kill, **options):
    interrupt = InterruptCallback()
    run, _ = make_run(folder, [kill, interrupt], **options)
    with interrupt:
        run.train()
    run.checkpoints.wait()
    return run, interrupt


@pytest.mark.parametrize("number", [n for n in SIGNALS if n not in KEEP_RUNNING], ids=lambda number: number.name)
def test_signal_ends_step_saves_checkpoint_and_sets_exit_status(tmp_path, capfd, number):
    before = [signal.getsignal(each) for each in SIGNALS]
    run, interrupt = interrupted(tmp_path, SendSignals(5, number), save_strategy="no")
    assert run.state.global_step == 5
    assert [path.name for path in run.checkpoints.all()] == ["checkpoint-5"]
    assert interrupt.exit_code == 128 + number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert f"{number.name}: stopping after this step, with a checkpoint." in capfd.readouterr().err


@pytest.mark.parametrize("number", KEEP_RUNNING, ids=lambda number: number.name)
@pytest.mark.parametrize("twice", [False, True])
def test_sigusr1_and_a_closed_terminal_save_a_checkpoint_and_training_continues(tmp_path, capsys, number, twice):
    run, interrupt = interrupted(tmp_path, SendSignals(5, *[number] * (1 + twice)), save_strategy="no")
    assert run.state.global_step == run.state.max_steps
    assert (tmp_path / "checkpoint-5").is_dir()
    assert interrupt.exit_code is None
    assert "saving a checkpoint after this step, then continuing." in capsys.readouterr().out


@pytest.mark.parametrize("has_trained", [False, True])
def test_terminal_closed_before_or_after_training_stops_nothing(tmp_path, has_trained):
    interrupt = InterruptCallback()
    run, _ = make_run(tmp_path, [interrupt], save_strategy="no")
    with interrupt:
        if has_trained:
            run.train()
        os.kill(os.getpid(), signal.SIGHUP)
        if not has_trained:
            run.train()
    assert (run.state.global_step, interrupt.exit_code) == (run.state.max_steps, None)


EVALUATED = {"eval_rows": 5, "eval_strategy": "epoch", "save_strategy": "epoch"}
VARIANTS = {
    "in the middle of an epoch": (5, EVALUATED),
    "at the last step of an epoch": (11, {**EVALUATED, "save_strategy": "no"}),
    "at the last step of an epoch that is logged": (11, {"logging_strategy": "epoch", "save_strategy": "no"}),
    "with evaluations by steps": (
        6,
        {"eval_rows": 5, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_interrupted_run_resumes_to_same_weights_and_log(tmp_path, variant):
    step, options = VARIANTS[variant]
    whole, _ = make_run(tmp_path / "whole", **options)
    whole.train()
    interrupted(tmp_path / "cut", SendSignals(step, signal.SIGTERM), **options)
    second, _ = make_run(tmp_path / "cut", **options)
    load(tmp_path / "cut" / f"checkpoint-{step}", second.parts)
    second.train()
    assert same(weights(second), weights(whole))
    assert without_times(second.state.log_history)[:-1] == without_times(whole.state.log_history)[:-1]


@pytest.mark.parametrize("max_steps", [-1, 17])
def test_checkpoint_saved_before_the_end_of_an_epoch_resumes_to_the_same_log(tmp_path, max_steps):
    """Also after the last step, when only the log and the evaluation of the epoch are left."""
    options = {"eval_rows": 5, "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "steps",
               "save_steps": 11, "num_train_epochs": 2, "max_steps": max_steps}  # fmt: skip
    whole, _ = make_run(tmp_path, **options)
    whole.train()
    whole.checkpoints.wait()
    expected = without_times(whole.state.log_history)
    assert [("eval_loss" in entry, entry["step"]) for entry in expected[:-1]] == [
        (is_eval, step) for step in (11, whole.state.max_steps) for is_eval in (False, True)
    ]
    for step in (11, whole.state.max_steps):
        resumed, _ = make_run(tmp_path / "resumed", **options)
        load(tmp_path / f"checkpoint-{step}", resumed.parts)
        resumed.train()
        assert same(weights(resumed), weights(whole))
        assert without_times(resumed.state.log_history)[:-1] == expected[:-1]


def test_finished_epoch_is_not_finished_again(tmp_path):
    options = {"eval_rows": 5, "eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 17}
    whole, _ = make_run(tmp_path, **options)
    whole.train()
    whole.checkpoints.wait()
    resumed, _ = make_run(tmp_path / "resumed", **options)
    load(tmp_path / "checkpoint-17", resumed.parts)
    resumed.train()
    assert without_times(resumed.state.log_history)[:-1] == without_times(whole.state.log_history)[:-1]


def test_signal_during_evaluation_does_not_wait_for_another_step(tmp_path):
    kill = SendSignals(3, signal.SIGTERM, event="on_prediction_step")
    run, interrupt = interrupted(tmp_path, kill, eval_rows=5, eval_strategy="steps", eval_steps=3, save_strategy="no")
    assert run.state.global_step == 3
    assert interrupt.exit_code == 143
    assert [path.name for path in run.checkpoints.all()] == ["checkpoint-3"]


def test_second_ctrl_c_stops_immediately_and_handlers_are_restored(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, SendSignals(5, signal.SIGINT, signal.SIGINT), save_strategy="no")
    assert not list(tmp_path.glob("checkpoint-*"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("has_trained", [False, True])
def test_signal_without_a_running_step_ends_the_run_immediately(tmp_path, number, kind, has_trained):
    interrupt = InterruptCallback()
    run, _ = make_run(tmp_path, [interrupt], save_strategy="no")
    with interrupt:
        if has_trained:
            run.train()
        with pytest.raises(kind) as caught:
            os.kill(os.getpid(), number)
    assert kind is KeyboardInterrupt or caught.value.code == 128 + number


def test_repeated_signals_of_a_scheduler_are_ignored(tmp_path):
    run, interrupt = interrupted(
        tmp_path, SendSignals(5, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), save_strategy="no"
    )
    assert interrupt.exit_code == 143
    assert run.state.global_step == 5


def test_signal_in_last_step_does_not_count_as_interruption(tmp_path):
    run, interrupt = interrupted(tmp_path, SendSignals(22, signal.SIGTERM), save_strategy="no")
    assert run.state.global_step == run.state.max_steps == 22
    assert interrupt.exit_code is None


def test_signal_ignored_by_parent_process_stays_ignored(tmp_path):
    """nohup ignores SIGHUP in this way."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run, interrupt = interrupted(tmp_path, SendSignals(5, signal.SIGHUP), save_strategy="no")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert interrupt.exit_code is None
    assert run.state.global_step == 22


def test_interrupt_in_another_thread_installs_no_handlers():
    before = signal.getsignal(signal.SIGTERM)
    recorded = []

    def work():
        with InterruptCallback():
            recorded.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert recorded == [before]


def test_processes_stop_at_the_same_step(tmp_path):
    """Another process receives a signal at step 7; this one does not."""
    answers = iter(range(1, 100))
    interrupt = InterruptCallback(any_process=lambda mine: mine or next(answers) >= 7)
    run, _ = make_run(tmp_path, [interrupt], save_strategy="no")
    with interrupt:
        run.train()
    assert run.state.global_step == 7
    assert interrupt.exit_code == 143
