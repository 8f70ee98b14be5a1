"""Progress output in a terminal and elsewhere."""

import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from burnish.config.errors import Problem
from burnish.loop.events import IntervalOptions, num_events
from burnish.loop.schedule import StepPlan
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report import console
from burnish.report.options import ReportOptions
from burnish.report.pace import Pace, short_loss, short_number, short_time
from burnish.report.progress import (
    EVAL_LINES,
    TRAIN_LINES,
    EvenlySpacedEvents,
    PrinterCallback,
    ProgressCallback,
    RunFacts,
    _LiveLine,
    progress_callback,
)

pytestmark = pytest.mark.run

FACTS = RunFacts(StepPlan(3200, 8, 400, 1200, 3), 4, 2, 1, 90_000, 9_000_000)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fake_run(callback, steps, log_every, eval_every=0, clock=None, first=0, state=None):
    """Fire the events of a run in the loop's order. A step takes 1 s and has 100 tokens, an evaluation takes 10 s."""
    clock = clock or Clock()
    state = state or TrainerState(max_steps=steps, global_step=first)
    control = TrainerControl()

    def fire(event, **details):
        getattr(callback, event)(SimpleNamespace(), state, control, **details)

    fire("on_train_begin")
    for step in range(first + 1, steps + 1):
        fire("on_step_begin")
        clock.now_s += 1
        state.global_step = step
        fire("on_step_end")
        if step % log_every == 0:
            state.num_input_tokens_seen += 100 * log_every
            fire("on_log", logs={"loss": 4.0 / step, "learning_rate": 2e-4, "grad_norm": 1.0})
        if eval_every and step % eval_every == 0:
            clock.now_s += 10
            fire("on_prediction_step")
            fire("on_log", logs={"eval_loss": 3.0})
            fire("on_evaluate", metrics={"eval_loss": 3.0, "eval_runtime": 10.0})
    fire("on_log", logs={"train_runtime": float(steps), "train_loss": 1.5, "total_flos": 12})
    fire("on_train_end")
    return state


@pytest.mark.parametrize("log_every", [1, 7, 100])
def test_log_file_gets_few_lines_for_any_logging_interval(capsys, log_every):
    fake_run(ProgressCallback(FACTS), 1000, log_every, eval_every=20)
    lines = capsys.readouterr().out.splitlines()
    train = [line for line in lines if " loss " in line and line.startswith("step")]
    assert 5 <= len(train) <= TRAIN_LINES
    assert len([line for line in lines if "eval_loss" in line]) == EVAL_LINES
    assert len(lines) <= 30


def test_skipped_steps_give_a_warning(capsys):
    progress, state = ProgressCallback(FACTS), TrainerState(max_steps=8, global_step=4)
    progress.on_train_begin(None, state, None)
    progress.on_log(None, state, None, logs={"loss": 1.0, "learning_rate": 0.1, "skipped_steps": 2})
    assert "warning: 2 of the most recent optimizer steps (up to step 4) were skipped" in capsys.readouterr().err


def test_plain_line_has_step_loss_time_left_learning_rate_and_throughput(capsys):
    clock = Clock()
    fake_run(ProgressCallback(FACTS, Pace(clock)), 40, 10, clock=clock)
    lines = capsys.readouterr().out.splitlines()
    assert "step 10/40  loss 0.4000  0:30 left  lr 2.0e-04  100 tok/s" in lines


def test_line_shows_preference_rewards_and_response_length(capsys):
    progress, state = ProgressCallback(FACTS), TrainerState(max_steps=8, global_step=8)
    progress.on_train_begin(None, state, None)
    logs = {
        "loss": 1.0,
        "rewards/margins": 0.25,
        "rewards/accuracies": 0.5,
        "kl": 0.125,
        "completions/mean_length": 31.5,
    }
    progress.on_log(None, state, None, logs={**logs, "logps/chosen": -9.0, "learning_rate": 0.1})
    end = "rewards/accuracies 0.5  rewards/margins 0.25  kl 0.125  completions/mean_length 31.5"
    assert capsys.readouterr().out.splitlines()[-1].endswith(end)


def test_last_step_is_printed(capsys):
    fake_run(ProgressCallback(FACTS), 997, 1)
    assert "step 997/997" in capsys.readouterr().out


def test_run_starts_with_its_numbers_and_ends_with_a_summary(capsys):
    fake_run(ProgressCallback(FACTS), 1200, 100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Training for 1,200 steps: 3 epochs of 3,200 examples",
        "  Effective batch size 8 = 4 per device x 2 gradient accumulation x 1 process",
        "  90,000 of 9,000,000 parameters are trained (1%)",
    ]
    assert lines[-1].startswith("Trained 1,200 steps in 20:00, mean loss 1.5000, last 0.0033")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (StepPlan(200, 8, 25, 400, 16), "Training for 400 steps: 16 epochs of 200 examples"),
        (StepPlan(200, 8, 25, 30, 2), "Training for 30 steps: 1.2 epochs of 200 examples"),
        (StepPlan(200, 200, 1, 1, 1), "Training for 1 step: 1 epoch of 200 examples"),
        (StepPlan(4000, 8, 500, 1, 1), "Training for 1 step: 0.002 epochs of 4,000 examples"),
        (StepPlan(None, 16, 400, 400, 1), "Training for 400 steps on a streamed dataset"),
    ],
)
def test_first_line_matches_the_plan(steps, message):
    assert RunFacts(steps, 2, 4, 2, 1, 2).messages()[0] == message


def test_effective_batch_size_names_its_factors():
    facts = RunFacts(StepPlan(200, 16, 25, 400, 16), 2, 4, 2, 1, 2)
    assert facts.messages()[1] == ("  Effective batch size 16 = 2 per device x 4 gradient accumulation x 2 processes")


def test_stopped_run_reports_where(capsys):
    callback = ProgressCallback()
    state, control = TrainerState(max_steps=100), TrainerControl()
    callback.on_train_begin(None, state, control)
    state.global_step, state.best_metric, state.best_global_step = 40, 0.5, 20
    callback.on_train_end(None, state, control)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Stopped after step 40 of 100 in 0:00",
        "Best evaluation: 0.5000 at step 20",
    ]


def test_resumed_run_is_reported_and_counts_only_its_steps(capsys):
    clock = Clock()
    fake_run(ProgressCallback(FACTS, Pace(clock)), 100, 10, clock=clock, first=50)
    lines = capsys.readouterr().out.splitlines()
    assert "  resumed from step 50" in lines
    assert any("step  60/100" in line and "0:40 left" in line for line in lines)


def test_summary_of_a_resumed_run_counts_only_its_steps(capsys):
    clock = Clock()
    fake_run(ProgressCallback(FACTS, Pace(clock)), 100, 10, clock=clock, first=60)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Trained 40 steps since step 60 in ")


def test_stopped_resumed_run_reports_its_steps(capsys):
    callback = ProgressCallback()
    state, control = TrainerState(max_steps=100, global_step=30), TrainerControl()
    callback.on_train_begin(None, state, control)
    state.global_step = 40
    callback.on_train_end(None, state, control)
    assert capsys.readouterr().out.splitlines()[-1] == "Stopped after step 40 of 100, 10 steps since step 30 in 0:00"


def test_evaluation_does_not_reduce_reported_throughput(capsys):
    clock = Clock()
    fake_run(ProgressCallback(FACTS, Pace(clock)), 60, 10, eval_every=15, clock=clock)
    rates = re.findall(r"(\d+) tok/s", capsys.readouterr().out)
    assert rates
    assert set(rates) == {"100"}


def test_reported_throughput_includes_the_generation_of_a_batch(capsys):
    clock, state, control = Clock(), TrainerState(max_steps=2), TrainerControl()
    callback = ProgressCallback(FACTS, Pace(clock))
    callback.on_train_begin(None, state, control)
    for step in (1, 2):
        clock.now_s += 3  # GRPO generates completions before the step begins
        callback.on_step_begin(None, state, control)
        clock.now_s += 1
        state.global_step, state.num_input_tokens_seen = step, 400 * step
        callback.on_step_end(None, state, control)
        callback.on_log(None, state, control, logs={"loss": 1.0})
    assert re.findall(r"(\d+) tok/s", capsys.readouterr().out) == ["100", "100"]


def test_other_ranks_print_nothing(capsys):
    fake_run(ProgressCallback(FACTS), 20, 1, state=TrainerState(max_steps=20, is_world_process_zero=False))
    assert capsys.readouterr().out == ""


def test_disable_tqdm_prints_every_log(capsys):
    options = ReportOptions(disable_tqdm=True)
    callback = progress_callback(options, FACTS)
    assert isinstance(callback, PrinterCallback)
    fake_run(callback, 200, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "grad_norm" in line]) == 200
    assert isinstance(progress_callback(ReportOptions()), ProgressCallback)


@pytest.mark.parametrize(("steps", "log_every", "shown"), [(17, 1, 17), (330, 20, 16), (310, 10, 31), (340, 10, 16)])
def test_every_log_of_a_short_run_is_printed(capsys, steps, log_every, shown):
    state = TrainerState(max_steps=steps, logging_steps=log_every)
    facts = replace(FACTS, num_events=num_events(IntervalOptions(), state))
    fake_run(ProgressCallback(facts), steps, log_every)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]) == shown


def test_thinning_keeps_first_and_last_and_spreads_the_rest():
    thinned = EvenlySpacedEvents(5)
    passed = [step for step in range(1, 101) if thinned.is_due(step, 100)]
    assert passed == [1, 25, 50, 75, 100]


# --- the live line ----------------------------------------------------------------------------------------------------


def live_line(step=523, max_steps=1200):
    clock = Clock()
    callback = ProgressCallback(pace=Pace(clock))
    recorded = callback.seen
    recorded.step, recorded.max_steps = step, max_steps
    recorded.loss, recorded.learning_rate, recorded.tokens_per_second, recorded.eval_loss = (
        0.43211,
        1.8e-4,
        12_345.0,
        0.5123,
    )
    clock.now_s += step
    return _LiveLine(recorded, callback.pace)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_live_line_fits_every_width(width):
    text = live_line().line(width)
    assert text.cell_len <= width
    assert "523/1200" in text.plain
    if width >= 80:
        for word in ("loss 0.4321", "11:17 left", "lr 1.8e-04", "12.3k tok/s", "eval 0.5123"):
            assert word in text.plain
        assert "━" in text.plain


def test_progress_bar_is_readable_without_color():
    plain = live_line(600, 1200).line(120).plain
    assert plain.count("━") == plain.count("─") > 10


def test_terminal_without_unicode_gets_a_bar():
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True, _environ={}).print(live_line().line(80, ascii_only=True))
    assert "##" in file.getvalue()
    assert file.getvalue().isascii()


# Run in a pseudo-terminal by a child process.
CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from test_report_progress import FACTS, ProgressCallback, fake_run
from burnish.report import console
class Slow(ProgressCallback):
    def on_step_begin(self, *args, **kwargs):
        time.sleep(0.03)
        super().on_step_begin(*args, **kwargs)
        if args[1].global_step == 5:
            console.warn("said while the line is drawn")
        if args[1].global_step == {fail}:
            raise SystemExit("stopped")
fake_run(Slow(FACTS), 20, 1, eval_every=10)
"""


def in_terminal(columns=80, fail=-1, stderr=None, **environment):
    """Return the output of the child process in a terminal of this width, without that in the file ``stderr``."""
    main, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    tests_folder = Path(__file__).parent
    paths = os.pathsep.join(
        map(str, [tests_folder.parents[1] / "src", tests_folder.parent, tests_folder.parent / "helpers"])
    )
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(tests=str(tests_folder), fail=fail)],
        stdin=child, stdout=child, stderr=stderr or child,
        env={**variables, "PYTHONPATH": paths, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(child)
    received = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # on Linux, the other end was closed
            break
        if not chunk:
            break
        received += chunk
    process.wait()
    os.close(main)
    return received.decode()


def test_terminal_gets_one_live_line_and_its_cursor_back():
    shown = in_terminal()
    assert "\x1b[?25l" in shown
    assert "\x1b[?25h" in shown.split("\x1b[?25l")[-1]
    assert shown.count("/20") > 3  # redrawn repeatedly
    assert "Trained 20 steps" in shown
    assert "\x1b[32m" in shown or "\x1b[92m" in shown  # the bar is green
    assert "warning:" in shown
    assert "said while the line is drawn" in shown
    # Permanent lines: start, evaluations, warning and summary; no line per log.
    assert shown.count("\n") < 30


def test_warnings_during_training_go_to_a_redirected_standard_error(tmp_path):
    with (tmp_path / "errors").open("w") as file:
        shown = in_terminal(stderr=file)
    assert "Trained 20 steps" in shown
    assert "said while the line is drawn" not in shown
    assert (tmp_path / "errors").read_text() == "warning: said while the line is drawn\n"


@pytest.mark.slow
def test_no_color_disables_colors():
    shown = in_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[(\d;)?(3|9)\d", shown)
    assert "━" in shown


@pytest.mark.slow
def test_failed_run_restores_the_cursor():
    shown = in_terminal(fail=10)
    assert "\x1b[?25h" in shown.split("\x1b[?25l")[-1]


# --- text and numbers -------------------------------------------------------------------------------------------------


def test_notes_go_to_stdout_and_errors_to_stderr(capsys):
    console.note("one")
    console.warn("two")
    console.problem(Problem("Three is wrong.", where="run.yaml, line 3", remedy="Write 3."))
    captured = capsys.readouterr()
    assert captured.out == "one\n"
    assert captured.err == "warning: two\nerror: run.yaml, line 3: Three is wrong.\n  Write 3.\n"


def test_bracketed_words_are_printed_unchanged(capsys, monkeypatch):
    monkeypatch.setattr(console, "is_terminal", lambda stream=None: True)
    console.problem('Received: [bold]["a", 1]')
    assert '[bold]["a", 1]' in capsys.readouterr().err


def test_control_characters_in_a_table_are_shown_as_symbols(capsys, monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(console, "is_terminal", lambda stream=None, shown=is_terminal: shown)
        console.table("Completions", ["completion"], [["a\x1b[2Jb"]])
        assert "a␛[2Jb" in capsys.readouterr().out


def test_problem_with_an_undecodable_file_name_reaches_the_parent_process(monkeypatch, tmp_path):
    monkeypatch.setenv(console.FAILURE_FILE, str(tmp_path / "failure"))
    console.problem(Problem("No such file.", where="caf\udce9.yaml"))
    assert "caf\\udce9.yaml: No such file." in (tmp_path / "failure").read_text()


@pytest.mark.parametrize(
    ("value", "shown"), [(873, "873"), (12_345, "12.3k"), (999_999, "1.00M"), (4_560_000, "4.56M"), (0.25, "0.2")]
)
def test_changing_numbers_are_abbreviated(value, shown):
    assert short_number(value) == shown


def test_times_and_losses_have_minimal_length():
    assert [short_time(s) for s in (5, 83, 7283, 273_600)] == ["0:05", "1:23", "2:01:23", "3 d 4 h"]
    assert [short_loss(v) for v in (1.23456, 0.0000123)] == ["1.2346", "1.23e-05"]
    assert [short_loss(v) for v in (0.0, -1.39e-17, 2.98e-09, -0.0)] == ["0.0000"] * 4


def test_log_levels_follow_the_process(monkeypatch):
    import logging

    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.delenv("DATASETS_VERBOSITY", raising=False)
    logger = logging.getLogger("burnish")
    before = logger.level
    options = ReportOptions(log_level="debug", log_level_replica="error")
    try:
        console.set_log_levels(options, is_main=True, is_node_main=True)
        assert logger.level == logging.DEBUG
        console.set_log_levels(options, is_main=False, is_node_main=False)
        assert logger.level == logging.ERROR
        console.set_log_levels(ReportOptions(), is_main=True, is_node_main=True)
        assert logger.level == logging.ERROR  # "passive" does not change it
        console.set_log_levels(ReportOptions(log_level="detail"), is_main=True, is_node_main=True)
        assert logger.level == logging.DEBUG  # transformers' name for the most verbose level
        console.set_log_levels(options, is_main=False, is_node_main=True)
        assert logger.level == logging.DEBUG
        console.set_log_levels(replace(options, log_on_each_node=False), is_main=False, is_node_main=True)
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
        os.environ.pop("TRANSFORMERS_VERBOSITY", None)
        os.environ.pop("DATASETS_VERBOSITY", None)


@pytest.mark.parametrize(
    ("losses", "warns"),
    [([2, 5, 6, 7, 8, 9], 1), ([2, 5, 2, 5, 2, 5], 0), ([0.1, 0.3, 0.4, 0.5], 0), ([2, 1.5, 1.2, 1], 0)],
)
def test_diverging_loss_gives_one_warning(losses, warns, capsys):
    from burnish.run.callbacks import DivergenceCallback

    callback, state = DivergenceCallback(), TrainerState(max_steps=10)
    for step, loss in enumerate(losses, 1):
        state.global_step = step
        callback.on_log(None, state, TrainerControl(), logs={"loss": float(loss)})
    assert "".join(capsys.readouterr()).count("training is diverging") == warns


def test_warnings_of_bitsandbytes_are_not_printed() -> None:
    """bitsandbytes warns of a missing kernel on import, which peft does for every model, and of a conversion to float16
    at every product with an 8-bit weight."""
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("bitsandbytes.autograd._functions").isEnabledFor(logging.WARNING)
