"""Accessibility of the web UI: axe on each screen, keyboard use, and slow or interrupted connections."""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from browser.conftest import wait_for

pytestmark = [pytest.mark.run, pytest.mark.slow]
SCREENS = ("sign-in", "runs", "new", "runs/{id}", "compare?runs={id}", "chat", "evaluate", "export", "settings")

FORM = {
    "model_name_or_path": "model", "dataset": "demo_train", "dataset_dir": "data", "cutoff_len": "128",
    "finetuning_type": "full", "max_steps": "300", "logging_steps": "5", "save_steps": "100",
}  # fmt: skip


@pytest.fixture
def axe() -> str:
    """The script of axe-core."""
    result = find_spec("axe_playwright_python")
    if result is None or not result.submodule_search_locations:
        if os.environ.get("BURNISH_BROWSER") == "required":
            pytest.fail("axe-playwright-python is not installed")
        pytest.skip('axe-playwright-python is not installed: pip install -e ".[browser]"')
    return (Path(result.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def run(sample_runs, server) -> str:
    """The id of a run that the server lists."""
    from burnish.serve.page.runs.runs import id_of

    return id_of(server.root / "saves/first")


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_accessibility_violations(chromium, server, run, axe, theme, language) -> None:
    result = {}
    for width in (1280, 360):
        context = chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme=theme, locale=language,
            reduced_motion="reduce",  # the contrast of a color is undefined during its transition
        )  # fmt: skip
        page = context.new_page()
        page.set_default_timeout(90_000)
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
            result |= {(screen, width, element["id"]): element["nodes"][0]["html"][:200] for element in violations}
        context.close()
    assert result == {}


def test_rows_are_complete_over_slow_interrupted_connection(visitor, server, run) -> None:
    connection = visitor.context.new_cdp_session(visitor)
    defaults = {"latency": 80, "downloadThroughput": 12_500, "uploadThroughput": 12_500}  # 100 kbit/s
    visitor.goto(f"{server.address}/runs/{run}")
    visitor.locator(".chart canvas").first.wait_for()
    log = server.root / "saves/first/trainer_log.jsonl"
    steps = range(41, 101)
    for step in steps:
        with log.open("a") as file:
            file.write(json.dumps({"current_steps": step, "total_steps": 100, "loss": 1 + step / 1000}) + "\n")
        connection.send("Network.emulateNetworkConditions", {"offline": step % 10 == 0, **defaults})
        time.sleep(0.5 if step % 10 == 0 else 0.2)
    connection.send("Network.emulateNetworkConditions", {"offline": False, **defaults})
    visitor.locator("#summary", has_text="over 100 steps").wait_for()
    visitor.check("#as-table")

    rows = [*range(1, 41), 20, *range(41, 101)]  # step 20 also has an evaluation
    first = "rows => rows.map(row => Number(row.cells[0].textContent))"
    wait_for(lambda: sorted(visitor.eval_on_selector_all("#table tbody tr", first)) == sorted(rows), 30)


def test_run_is_configured_started_stopped_and_resumed_by_keyboard(visitor, server) -> None:
    press = visitor.keyboard.press

    def tab_to(selector: str, max_presses: int = 300) -> None:
        for _ in range(max_presses):
            if visitor.evaluate("wanted => document.activeElement?.matches(wanted)", selector):
                return
            press("Tab")
        raise AssertionError(f"{selector} is not reached within {max_presses} presses of Tab")

    tab_to("header a[href$='new'], nav a[href$='new']")
    press("Enter")
    visitor.wait_for_selector("#box-model_name_or_path")
    visitor.evaluate("[...document.querySelectorAll('.topic')].slice(0, 3).forEach(one => { one.open = true })")
    visitor.wait_for_selector("#box-max_steps")
    for name, value in FORM.items():
        visitor.evaluate("document.querySelector('main').focus()")
        tab_to(f"#box-{name}")
        visitor.keyboard.type(value)  # typing also selects an item of a list
    visitor.wait_for_selector("#start:not([disabled])")
    tab_to("#start")
    press("Enter")
    visitor.wait_for_url("**/runs/*")
    visitor.locator("#state", has_text="running").wait_for()
    tab_to("#stop")
    press("Enter")
    wait_for(lambda: visitor.inner_text("#state") == "stopped")
    visitor.wait_for_selector("#resume:not([hidden])")
    tab_to("#resume")
    press("Enter")
    wait_for(lambda: visitor.inner_text("#state") == "done", 240)
    visitor.locator("#panel-log", has_text="Trained").wait_for()
    tab_to("[role=tab]")
    press("ArrowRight")
    assert visitor.evaluate("document.activeElement.id") == "tab-events"


IS_COVERED = """() => {
    const place = document.activeElement.getBoundingClientRect();
    const top = document.elementFromPoint(place.left + place.width / 2, place.top + place.height / 2);
    return document.activeElement !== document.body && !top?.contains(document.activeElement)
        && !document.activeElement.contains(top) && !top?.closest("label")?.contains(document.activeElement);
}"""


@pytest.mark.parametrize("screen", ["runs", "compare?runs={run}", "evaluate"])
def test_navigation_bar_does_not_cover_the_focus(visitor, server, run, screen) -> None:
    visitor.set_viewport_size({"width": 390, "height": 560})
    visitor.goto(f"{server.address}/{screen.format(run=run)}")
    visitor.wait_for_load_state("load")
    for _ in range(40):
        visitor.keyboard.press("Tab")
        assert not visitor.evaluate(IS_COVERED), visitor.evaluate("document.activeElement.outerHTML")


def test_another_window_takes_over_when_streaming_window_closes(visitor, server, run) -> None:
    windows = [visitor, visitor.context.new_page(), visitor.context.new_page()]
    for window in windows:
        window.goto(f"{server.address}/runs/{run}")
        window.locator(".chart canvas").first.wait_for()
    for last in (50, 60):
        windows.pop(0).close()
        with (server.root / "saves/first/trainer_log.jsonl").open("a") as file:
            file.write(json.dumps({"current_steps": last, "total_steps": last, "loss": 0.5}) + "\n")
        for window in windows:
            window.locator("#summary", has_text=f"over {last} steps").wait_for()


def test_page_falls_back_to_polling_behind_buffering_proxy(visitor, server, run) -> None:
    visitor.context.route("**/api/stream**", lambda route: None)  # no response
    visitor.goto(f"{server.address}/runs/{run}")
    visitor.locator(".chart canvas").first.wait_for()
    for last in (50, 60):
        with (server.root / "saves/first/trainer_log.jsonl").open("a") as file:
            file.write(json.dumps({"current_steps": last, "total_steps": last, "loss": 0.5}) + "\n")
        visitor.locator("#summary", has_text=f"over {last} steps").wait_for()


def test_start_is_a_few_keys_away_from_the_top_of_the_form(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-model_name_or_path")
    visitor.fill("#box-model_name_or_path", "model")
    visitor.fill("#box-dataset", "data/train.jsonl")
    visitor.wait_for_selector("#start:not([disabled])")
    visitor.locator("a.skip", has_text="Skip to the plan").focus()
    visitor.keyboard.press("Enter")
    for _ in range(10):
        visitor.keyboard.press("Tab")
        if visitor.evaluate("document.activeElement.id") == "start":
            return
    raise AssertionError("Start is more than ten keys away")
