"""A failure in one of several processes ends the run early, with one message."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.parallel.multi_process import _open_process_group
from burnish.parallel.process_counts import free_port
from burnish.run import launch as launching
from burnish.run.agreement import raise_unless_ranks_agree
from burnish.run.launch import launch
from burnish.run.plan.plan import Plan, RunOptions

pytestmark = pytest.mark.run


class TwoProcesses:
    """Backend of two processes. Args: other: values of the plan that differ in the other process."""

    world_size = 2

    def __init__(self, **other):
        self.other = other

    def gather_objects(self, value):
        _, values = value
        return [value, ("elsewhere", {**values, **self.other})]


def test_process_with_different_plan_is_rejected_with_the_difference():
    plan = Plan(RunOptions(seed=7))
    raise_unless_ranks_agree(plan, {"data": "abc"}, 5, TwoProcesses())
    with pytest.raises(UserError, match="rank 1 on elsewhere") as refused:
        raise_unless_ranks_agree(plan, {"data": "abc"}, 5, TwoProcesses(seed=8, data="abd", torch="2.0"))
    message = str(refused.value)
    for expected in ("seed is 8 instead of 7", 'data is "abd" instead of "abc"', 'torch is "2.0"'):
        assert expected in message


def test_differing_secret_is_not_shown():
    with pytest.raises(UserError, match="hf_hub_token differs") as refused:
        raise_unless_ranks_agree(Plan(RunOptions(hf_hub_token="hf_SECRET")), {}, 5, TwoProcesses(hf_hub_token="other"))
    assert "SECRET" not in str(refused.value)


STALLS = """
import os, time
from burnish.run.recovery.stall import StallWatch
watch = StallWatch(0.5)
watch.on_train_begin(None, None, None)
def waits_for_ever():
    time.sleep(600)
waits_for_ever()
"""


@pytest.mark.slow
def test_stalled_run_ends_with_stack_traces_of_its_processes(monkeypatch, capfd):
    monkeypatch.setattr(launching, "PROGRAM", ("-c", STALLS))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = {"num_processes": RawValue(2), "use_cpu": RawValue(True), "stall_timeout_s": RawValue("0.5")}
    assert launch([], options) == 1
    output = capfd.readouterr().err
    assert "made no progress for longer than stall_timeout_s" in output
    assert output.count("in waits_for_ever") == 2
    assert "Process 0 of 2" in output
    assert "Process 1 of 2" in output


@pytest.mark.slow
def test_finished_run_is_no_longer_watched():
    script = STALLS[: STALLS.index("def waits")] + "watch.on_train_end(None, None, None)\ntime.sleep(1.2)\n"
    source = str(Path(launching.__file__).parents[2])
    process = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": source}, capture_output=True, timeout=60
    )
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("no-such-host.invalid", "The host name cannot be resolved"),
        ("127.0.0.1", "Not all processes connected in time"),
    ],
)
def test_unreachable_process_group_is_reported_with_its_address(address, why, monkeypatch):
    port = str(free_port())
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        _open_process_group("gloo", timedelta(seconds=1))
    (problem,) = raised.value.problems
    assert f"{address}:{port} within 1 s (ddp_timeout)" in problem.what
    assert problem.why.startswith(why)
