"""The client of the planner process."""

import asyncio

import pytest

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
