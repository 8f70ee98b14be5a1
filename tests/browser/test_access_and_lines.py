"""The page for everybody: what axe finds on each screen, and rows that arrive whole over a slow line that is cut."""

from __future__ import annotations

import json
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from browser.conftest import wait_for

pytestmark = [pytest.mark.run, pytest.mark.slow]
SCREENS = ("sign-in", "runs", "new", "runs/{id}", "compare?runs={id}", "talk", "export", "settings")


@pytest.fixture
def axe() -> str:
    """The script of axe-core, which only the tests load."""
    found = find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        if os.environ.get("BURNISH_BROWSER") == "required":
            pytest.fail("axe-playwright-python is not installed")
        pytest.skip('axe-playwright-python is not installed: pip install -e ".[browser]"')
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def run(server) -> str:
    """The id of a run that the server shows."""
    from burnish.web.runs import id_of
    from web.conftest import make_runs

    shutil.rmtree(server.root / "saves")
    make_runs(server.root)
    return id_of(server.root / "saves/first")


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_any_screen(chromium, server, run, axe, theme, language) -> None:
    found = {}
    for width in (1280, 360):
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=theme, locale=language)
        page = context.new_page()
        page.goto(server.link)
        page.wait_for_url("**/runs")
        for screen in SCREENS:
            page.goto(
                f"{server.address}/{screen.format(id=run)}", wait_until="networkidle" if screen == "new" else None
            )
            if screen.startswith("runs/"):
                page.check("#as-table")
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            page.evaluate(axe)
            violations = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
            found |= {(screen, width, one["id"]): one["nodes"][0]["html"][:200] for one in violations}
        context.close()
    assert found == {}


def test_rows_are_whole_over_a_slow_line_that_is_cut_again_and_again(visitor, server, run) -> None:
    line = visitor.context.new_cdp_session(visitor)
    usual = {"latency": 80, "downloadThroughput": 12_500, "uploadThroughput": 12_500}  # 100 kbit/s
    visitor.goto(f"{server.address}/runs/{run}")
    visitor.locator(".chart canvas").first.wait_for()
    log = server.root / "saves/first/trainer_log.jsonl"
    steps = range(41, 101)
    for step in steps:
        with log.open("a") as file:
            file.write(json.dumps({"current_steps": step, "total_steps": 100, "loss": 1 + step / 1000}) + "\n")
        line.send("Network.emulateNetworkConditions", {"offline": step % 10 == 0, **usual})
        time.sleep(0.5 if step % 10 == 0 else 0.2)
    line.send("Network.emulateNetworkConditions", {"offline": False, **usual})
    visitor.locator("#summary", has_text="over 100 steps").wait_for()
    visitor.check("#as-table")

    rows = [*range(1, 41), 20, *range(41, 101)]  # step 20 has an evaluation too
    first = "rows => rows.map(row => Number(row.cells[0].textContent))"
    wait_for(lambda: sorted(visitor.eval_on_selector_all("#table tbody tr", first)) == sorted(rows), 30)
