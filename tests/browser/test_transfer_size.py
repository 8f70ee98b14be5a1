"""Transfer size of the first visit to each page: at most 90 kB compressed, headers included, in either language."""

from __future__ import annotations

import pytest

from burnish.serve.page.runs.runs import id_of

pytestmark = [pytest.mark.run, pytest.mark.slow]
BUDGET_BYTES = 90_000
SELECTORS = {"runs": "#runs", "new": "#essentials .field", "runs/{id}": "#panel-log pre",
         "compare?runs={id}": ".chart canvas", "chat": "#message", "evaluate": "form", "export": "form"}  # fmt: skip
"""The element that shows that the first view of a page is complete."""


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_first_visit_to_a_page_transfers_at_most_90_kb(sample_runs, chromium, server, language) -> None:
    sizes = {screen: _transferred_bytes(chromium, server, screen, language) for screen in SELECTORS}
    assert {screen: size for screen, size in sizes.items() if not 20_000 < size <= BUDGET_BYTES} == {}


def _transferred_bytes(chromium, server, screen: str, language: str) -> int:
    """Return the size of all responses, with an empty browser cache."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, locale=language)
    page = context.new_page()
    page.goto(server.link.replace("/sign-in", "/sign-in?to=nowhere"))  # signs in without loading another page
    page.wait_for_url("**/nowhere")
    network, sizes = context.new_cdp_session(page), []
    network.send("Network.enable")
    network.send("Network.clearBrowserCache")
    network.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(f"{server.address}/{screen.format(id=id_of(server.root / 'saves/first'))}")
    page.locator(SELECTORS[screen]).first.wait_for(timeout=60_000)
    page.wait_for_load_state("networkidle" if screen == "new" else "load")
    context.close()
    return int(sum(sizes))
