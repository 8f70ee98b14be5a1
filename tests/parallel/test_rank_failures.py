"""A failure in one of several processes ends the run early, with one message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.run import launch as launching
from burnish.run.agreement import raise_unless_ranks_agree
from burnish.run.launch import launch
from burnish.run.plan.plan import Plan, RunOptions

pytestmark = pytest.mark.run


class Two:
    """An engine that hears of the other process what a test says of it."""

    world_size = 2

    def __init__(self, **other):
        self.other = other

    def gather_objects(self, value):
        _, mine = value
        return [value, ("elsewhere", {**mine, **self.other})]


def test_process_with_different_plan_is_rejected_with_the_difference():
    plan = Plan(RunOptions(seed=7))
    raise_unless_ranks_agree(plan, {"data": "abc"}, 5, Two())
    with pytest.raises(UserError, match="process 1 on elsewhere") as refused:
        raise_unless_ranks_agree(plan, {"data": "abc"}, 5, Two(seed=8, data="abd", torch="2.0"))
    message = str(refused.value)
    for words in ("seed is 8 instead of 7", 'data is "abd" instead of "abc"', 'torch is "2.0"'):
        assert words in message


def test_differing_secret_is_not_shown():
    with pytest.raises(UserError, match="hf_hub_token differs") as refused:
        raise_unless_ranks_agree(Plan(RunOptions(hf_hub_token="hf_SECRET")), {}, 5, Two(hf_hub_token="other"))
    assert "SECRET" not in str(refused.value)


STANDS_STILL = """
import os, time
from burnish.run.recovery.stall import StallWatch
watch = StallWatch(0.5)
watch.on_train_begin(None, None, None)
def waits_for_ever():
    time.sleep(600)
waits_for_ever()
"""


def test_stalled_run_ends_with_stack_traces_of_its_processes(monkeypatch, capfd):
    monkeypatch.setattr(launching, "PROGRAM", ("-c", STANDS_STILL))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = {"num_processes": RawValue(2), "use_cpu": RawValue(True), "stall_timeout_s": RawValue("0.5")}
    assert launch([], options) == 1
    output = capfd.readouterr().err
    assert "made no progress for longer than stall_timeout_s" in output
    assert output.count("in waits_for_ever") == 2
    assert "Process 0 of 2" in output
    assert "Process 1 of 2" in output


def test_finished_run_is_no_longer_watched():
    script = STANDS_STILL[: STANDS_STILL.index("def waits")] + "watch.on_train_end(None, None, None)\ntime.sleep(1.2)\n"
    source = str(Path(launching.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": source}, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
