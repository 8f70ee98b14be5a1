"""Requests that fail, are refused, or are overtaken by later ones: the page says so, and recovers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from urllib.parse import unquote

import pytest

from burnish.serve.page.runs.runs import id_of

pytestmark = [pytest.mark.run, pytest.mark.slow]
REFUSED = {"status": 429, "content_type": "application/json", "body": json.dumps({"error": {"message": "Not now."}})}
JOB = {"id": "export-1", "kind": "export", "name": "first", "state": "running", "began": 1.0, "seconds": 2.0,
       "text": "", "folder": "exports/first", "written": 0, "expected": 0, "progress": {}, "lines": [], "metrics": {},
       "run": "", "answers": False}  # fmt: skip


def refuse(visitor, pattern: str, method: str) -> None:
    visitor.route(
        pattern, lambda route: route.fulfill(**REFUSED) if route.request.method == method else route.continue_()
    )


def expect_message(visitor, text: str = "Not now.") -> None:
    visitor.locator("#toast", has_text=text).wait_for()
    visitor.evaluate("document.querySelector('#toast').replaceChildren()")


def test_refused_actions_show_the_reason(sample_runs, visitor, server) -> None:
    refuse(visitor, "**/sign-out", "POST")
    visitor.goto(f"{server.address}/settings")
    visitor.click("#sign-out")
    expect_message(visitor)
    refuse(visitor, "**/api/runs/*", "DELETE")
    visitor.goto(f"{server.address}/runs")
    visitor.locator("tr[data-run] .menu summary").first.click()
    visitor.locator("tr[data-run] .menu[open] .danger").click()
    expect_message(visitor)
    refuse(visitor, "**/api/yaml", "POST")
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#essentials .field")
    visitor.evaluate("document.querySelector('#load-yaml').click()")
    visitor.click("#yaml-take")
    visitor.locator("#yaml-problems", has_text="Not now.").wait_for()


def test_page_whose_first_request_fails_says_so(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/new?from=000000000000")
    expect_message(visitor, "The run was not found.")
    visitor.fill("#box-model_name_or_path", "model")  # the form can be used
    visitor.locator("#plan-empty [data-requires=model_name_or_path].done").wait_for()
    refuse(visitor, "**/api/models", "GET")
    visitor.goto(f"{server.address}/evaluate")
    expect_message(visitor)


def test_expired_session_leads_from_the_updates_to_the_sign_in_page(sample_runs, visitor, server) -> None:
    with visitor.expect_response("**/api/stream*"):  # a later request would leave the page before the event below
        visitor.goto(f"{server.address}/runs?state=done")
    visitor.context.clear_cookies()
    visitor.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # begins the updates again
    visitor.wait_for_url("**/sign-in?to=runs%3Fstate%3Ddone")


def test_job_is_followed_over_a_lost_connection_and_missing_model_is_not_replaced(sample_runs, visitor, server) -> None:
    states = iter(["running", "", "done", "done"])

    def answer(route) -> None:
        state = next(states)
        if state:
            route.fulfill(status=200, content_type="application/json", body=json.dumps({**JOB, "state": state}))
        else:
            route.abort("connectionreset")

    jobs = json.dumps({"jobs": [JOB]})
    visitor.route("**/api/jobs", lambda route: route.fulfill(status=200, content_type="application/json", body=jobs))
    visitor.route("**/api/jobs/export-1", answer)
    visitor.goto(f"{server.address}/export?target={id_of(server.root / 'saves/first')}/39")
    expect_message(visitor, "The server cannot be reached.")
    visitor.locator(".job .state.done").wait_for()
    assert visitor.input_value("#source") == ""
    visitor.click("#job-form button.main")
    visitor.locator("#source[aria-invalid=true]").wait_for()
    visitor.select_option("#source", "path:model")
    visitor.fill("#folder", "../outside")
    visitor.click("#job-form button.main")
    visitor.locator("#folder[aria-invalid=true]").wait_for()
    assert visitor.locator("#source[aria-invalid]").count() == 0


def test_added_run_of_a_comparison_is_followed_from_its_last_row(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/compare?runs={id_of(server.root / 'saves/first')}")
    visitor.locator(".chart canvas").first.wait_for()
    other = id_of(server.root / "factory")
    for _ in range(2):
        with visitor.expect_request(lambda request: f"{other}:" in unquote(request.url)) as added:
            visitor.locator(f".chip input[value='{other}']").check()
        places = dict(part.split(":")[:2] for part in unquote(added.value.url).partition("&after=")[2].split(","))
        assert int(places[other]) == (server.root / "factory/trainer_log.jsonl").stat().st_size
        visitor.locator(f".chip input[value='{other}']").uncheck()
        visitor.locator("#figures tbody tr").nth(1).wait_for(state="detached")


def test_log_is_not_repeated_after_another_tab(sample_runs, visitor, server) -> None:
    from burnish.report.metadata import launch_record

    first = server.root / "saves" / "first"
    process = subprocess.Popen(["sleep", "100"])
    (first / "outcome.json").unlink()
    (first / "launch.json").write_text(json.dumps({**launch_record(["cpu"], process.pid), "folder": str(first)}))
    visitor.goto(f"{server.address}/runs/{id_of(first)}")

    def write(line: str) -> None:
        with (first / "console.log").open("a") as file:
            file.write(f"{line}\n")

    visitor.locator("#log-text", has_text="step 1").wait_for()
    visitor.click("#tab-events")
    visitor.locator("#panel-events li").first.wait_for()
    write("step 2")
    visitor.wait_for_timeout(600)
    visitor.click("#tab-log")
    visitor.locator("#log-text", has_text="step 2").wait_for()
    write("step 3")
    visitor.locator("#log-text", has_text="step 3").wait_for()
    lines = [line for line in visitor.inner_text("#log-text").splitlines() if line.startswith("step")]
    process.kill()
    process.wait()
    assert lines == ["step 1", "step 2", "step 3"]


def test_run_that_is_gone_leaves_the_comparison_once(sample_runs, visitor, server) -> None:
    first, other = id_of(server.root / "saves/first"), id_of(server.root / "factory")
    visitor.goto(f"{server.address}/compare?runs={first},{other}")
    visitor.locator(".chart canvas").first.wait_for()
    visitor.evaluate(
        "() => { window.writes = 0; const write = history.replaceState.bind(history);"
        " history.replaceState = (...all) => { window.writes += 1; write(...all) } }"
    )
    shutil.rmtree(server.root / "saves/first")
    visitor.wait_for_url(f"**/compare?runs={other}")
    visitor.wait_for_timeout(2500)
    assert visitor.evaluate("window.writes") == 1
    with (server.root / "factory/trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 10, "total_steps": 10, "loss": 0.5}\n')
    visitor.locator("#figures", has_text="10").wait_for()


def test_stream_that_became_silent_is_opened_again(sample_runs, visitor, server) -> None:
    visitor.clock.install()
    with visitor.expect_response("**/api/stream*"):
        visitor.goto(f"{server.address}/runs/{id_of(server.root / 'saves/first')}")
    visitor.locator(".chart canvas").first.wait_for()
    visitor.wait_for_timeout(1000)
    server.child.send_signal(signal.SIGSTOP)  # the connection stays open, as after a change of the network
    try:
        with visitor.expect_request("**/api/stream*"):
            visitor.clock.fast_forward(41_000)
            visitor.clock.fast_forward(2_000)
    finally:
        server.child.send_signal(signal.SIGCONT)
