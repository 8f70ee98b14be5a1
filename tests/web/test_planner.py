"""The client of the planner process."""

import asyncio
import sys
from contextlib import aclosing

import pytest

from burnish.serve.page.jobs import planner as planner_module
from burnish.serve.page.jobs.planner import Planner
from burnish.serve.page.places import Roots


@pytest.mark.run
def test_pipes_of_a_stopped_planner_are_closed_before_the_event_loop(tmp_path):
    """Otherwise "Event loop is closed" is raised at garbage collection. pytest formats this error during another test,
    and in CPython 3.11 an interrupted ``ast.parse`` fails."""

    async def start_and_stop() -> asyncio.subprocess.Process:
        planner = Planner(Roots([str(tmp_path)]), tmp_path / "planner.log")
        child = await planner._running()
        await planner.stop()
        await planner.stop()  # without a process
        return child

    child = asyncio.run(start_and_stop())
    assert child.returncode is not None
    assert child._transport.is_closing()


ANSWERS = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    for at in range(2):
        time.sleep(question["seconds"])
        print(json.dumps({"id": question["id"], "is_last": at == 1}), flush=True)
"""


async def _start_stub():
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", ANSWERS, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.run
@pytest.mark.parametrize(("seconds", "limit_s", "is_same"), [(100, 0.5, False), (0.2, 30.0, True)])
def test_request_that_was_given_up_does_not_block_the_next_one(tmp_path, monkeypatch, seconds, limit_s, is_same):
    """A process with a quick request is kept, since a new one loads the model libraries again."""
    monkeypatch.setattr(planner_module, "PATIENCE_S", limit_s)
    monkeypatch.setattr(planner_module, "START_S", limit_s)

    async def ask() -> bool:
        planner = Planner(Roots([str(tmp_path)]), tmp_path / "planner.log")
        planner._start = _start_stub
        async with aclosing(planner.ask({"seconds": seconds}, replaces=True)) as parts:
            given_up = asyncio.ensure_future(anext(parts))
            await asyncio.sleep(0.3)
            given_up.cancel()
            await asyncio.wait([given_up])
        before = planner._child
        found = await asyncio.wait_for(planner.whole({"seconds": 0}), 30)
        assert found["is_last"]
        assert planner._unfinished is None
        is_kept = planner._child is before
        await planner.stop()
        return is_kept

    assert asyncio.run(ask()) is is_same
