"""Cards of exports and evaluations are updated in place, and copying says whether it was possible."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.run, pytest.mark.slow]
LINES = [f"line {number}\n" for number in range(40)]
JOB = {"id": "export-1", "kind": "export", "name": "first", "state": "running", "began": 1.0, "seconds": 2.0,
       "text": "".join(LINES), "folder": "exports/first", "written": 0, "expected": 0, "progress": {}, "lines": [],
       "metrics": {}, "run": "", "answers": False}  # fmt: skip


@pytest.fixture
def job(visitor, server):
    """A running export. The test changes the dictionary."""
    job = dict(JOB)

    def answer(route) -> None:
        body = {"jobs": [job]} if route.request.url.endswith("/jobs") else job
        route.fulfill(status=200, content_type="application/json", body=json.dumps(body))

    visitor.route("**/api/jobs", answer)
    visitor.route("**/api/jobs/export-1", answer)
    visitor.goto(f"{server.address}/export")
    visitor.locator(".job-log", has_text="line 39").wait_for()
    return job


def test_updates_of_a_job_keep_focus_selection_and_position(visitor, job) -> None:
    visitor.evaluate("""() => {
        const log = document.querySelector(".job-log");
        log.focus();
        getSelection().setBaseAndExtent(log.firstChild, 0, log.firstChild, 6);
        log.scrollTop = 0;
    }""")
    job.update(seconds=63.0, text="".join([*LINES, "the last line\n"]), progress={"done": 3, "total": 9})
    visitor.locator(".job", has_text="1:03 · 3 of 9").wait_for()
    visitor.locator(".job-log", has_text="the last line").wait_for()
    shown = "[document.activeElement.className, String(getSelection()), document.querySelector('.job-log').scrollTop]"
    assert visitor.evaluate(shown) == ["job-log", "line 0", 0]
    visitor.focus(".job-log summary, .job details summary")
    visitor.keyboard.press("Enter")
    job["seconds"] = 64.0
    visitor.locator(".job", has_text="1:04").wait_for()
    assert not visitor.locator(".job-log").is_visible()
    job.update(state="done", lines=["burnish chat exports/first"])
    visitor.locator(".job .state.done").wait_for()
    assert visitor.locator(".job progress").evaluate("(bar) => bar.value") == 1
    assert visitor.evaluate("document.activeElement.localName") == "summary"


def test_end_of_a_log_is_followed(visitor, job) -> None:
    distance = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
    assert visitor.locator(".job-log").evaluate(distance) < 2
    job["text"] += "the last line\n"
    visitor.locator(".job-log", has_text="the last line").wait_for()
    assert visitor.locator(".job-log").evaluate(distance) < 2


def test_copying_says_whether_it_was_possible(visitor, job) -> None:
    job.update(state="done", lines=["burnish chat exports/first"])
    button = visitor.locator(".line button")
    button.wait_for()
    # Without https, a browser has no clipboard, and only a selection can be copied.
    visitor.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button.click()
    visitor.locator("#toast", has_text="Copied.").wait_for()
    assert visitor.evaluate("document.activeElement.textContent") == "Copy"
    visitor.evaluate("document.execCommand = () => false")
    button.click()
    visitor.locator("#toast", has_text="did not allow copying").wait_for()
