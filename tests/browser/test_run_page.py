"""The page of a run: names of its metrics and events, and what appears on it while the run goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time

import pytest

from browser.conftest import wait_for

pytestmark = [pytest.mark.run, pytest.mark.slow]


@pytest.fixture
def first(sample_runs, visitor, server):
    """The folder of a finished run, whose page is open."""
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.locator(".chart canvas").first.wait_for()
    return server.root / "saves" / "first"


@pytest.fixture
def alive(first):
    """The same run with a process, so that it counts as running."""
    from burnish.report.metadata import launch_record

    process = subprocess.Popen(["sleep", "100"])
    (first / "outcome.json").unlink()
    (first / "launch.json").write_text(json.dumps({**launch_record(["cpu"], process.pid), "folder": str(first)}))
    yield first
    process.kill()
    process.wait()


def end_run(folder, state: str) -> None:
    (folder / "outcome.json").write_text(json.dumps({"state": state, "time": time.time() + 1, "step": 40}))


def add_row(folder, **values) -> None:
    with (folder / "trainer_log.jsonl").open("a") as file:
        file.write(json.dumps({"current_steps": 41, "total_steps": 41, "loss": 0.5, **values}) + "\n")


def test_metrics_of_rollouts_have_names_in_both_languages(visitor, server, first) -> None:
    values = {"reward": 0.5, "eval_reward": 0.4, "clip_ratio/low_mean": 0.1, "eval_pass@1": 0.2, "time/train": 1.0}
    add_row(first, **values)
    visitor.reload()
    visitor.get_by_role("heading", name="Fraction of clipped tokens").wait_for()
    assert "Reward (evaluation)" in visitor.inner_text("#charts")
    assert "pass@1 (evaluation)" in visitor.inner_text("#charts")
    visitor.click("#language")
    visitor.get_by_role("heading", name="被裁剪的 token 占比").wait_for()
    visitor.click("#tab-events")
    visitor.locator("#panel-events", has_text="开始训练").wait_for()


def test_completions_appear_while_the_page_is_open(visitor, server, first) -> None:
    assert visitor.is_hidden("#tab-completions")
    row = {
        "step": 41,
        "record": "data, record 1",
        "sample": 0,
        "prompt": "p",
        "completion": "c",
        "rewards": {"exact": 1},
    }
    (first / "completions.jsonl").write_text(json.dumps(row) + "\n")
    add_row(first, **{"reward": 0.5, "completions/mean_length": 3.0})
    visitor.locator("#tab-completions").wait_for(state="visible")
    visitor.click("#tab-completions")
    visitor.locator("#panel-completions .tag", has_text="exact").wait_for()


def test_all_completions_of_a_step_can_be_shown(visitor, server, first) -> None:
    rows = [{"step": 1, "record": "a", "sample": sample, "prompt": "p", "completion": f"c{sample}"}
            for sample in range(100)]  # fmt: skip
    (first / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    visitor.reload()
    visitor.click("#tab-completions")
    visitor.get_by_text("64 of 100 completions").wait_for()
    visitor.get_by_role("button", name="Show more").click()
    visitor.locator(".completion", has_text="c99").wait_for()
    assert visitor.locator(".completion").count() == 100
    assert not visitor.get_by_role("button", name="Show more").is_visible()


def test_selection_in_the_log_stays_while_lines_are_added(visitor, first, alive) -> None:
    visitor.reload()
    visitor.locator("#log-text", has_text="step 1").wait_for()
    visitor.evaluate("""() => {
        const text = document.querySelector("#log-text").firstChild;
        getSelection().setBaseAndExtent(text, 0, text, 6);
    }""")
    with (first / "console.log").open("a") as file:
        file.write("a new line\n")
    visitor.locator("#log-text", has_text="a new line").wait_for()
    assert visitor.evaluate("String(getSelection())") == "step 1"


def test_earlier_lines_of_a_log_are_loaded_at_its_beginning(visitor, server, first) -> None:
    (first / "console.log").write_text("".join(f"line {n} {'x' * 60}\n" for n in range(9000)))
    visitor.reload()
    visitor.locator("#log-text", has_text="line 8999").wait_for()
    assert "line 1000 " not in visitor.inner_text("#log-text")
    visitor.focus("#panel-log")
    top = "document.querySelector('#panel-log').scrollTop"
    for line in (5000, 1000, 0):
        visitor.keyboard.press("Home")
        visitor.locator("#log-text", has_text=f"line {line} ").wait_for()
        assert line == 0 or visitor.evaluate(top) > 200  # the lines that were shown stay in their place
    visitor.keyboard.press("End")
    with (first / "console.log").open("a") as file:
        file.write("a new line\n")
    visitor.locator("#log-text", has_text="a new line").wait_for()
    lines = visitor.evaluate("document.querySelector('#log-text').textContent").splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(9000)]


def test_lines_of_a_log_are_searched(visitor, server, first) -> None:
    log = first / "console.log"
    log.write_text("".join(f"{'Warning' if n % 1000 == 1 else 'line'} {n} {'x' * 60}\n" for n in range(30_000)))
    visitor.reload()
    visitor.locator("#log-text", has_text="line 29999").wait_for()
    visitor.get_by_role("searchbox", name="Search").fill("warning")
    visitor.locator("#log-text", has_text="Warning 1 ").wait_for()
    shown = "document.querySelector('#log-text').textContent.trim().split('\\n').map((line) => line.split(' ')[1])"
    assert visitor.evaluate(shown) == [str(n) for n in range(1, 30_000, 1000)]
    with log.open("a") as file:
        file.write("a line\na warning\n")
    visitor.locator("#log-text", has_text="a warning").wait_for()
    assert "a line" not in visitor.inner_text("#log-text")
    visitor.get_by_role("searchbox", name="Search").fill("no such text")
    visitor.locator("#log-text", has_text="Nothing found.").wait_for()
    visitor.get_by_role("searchbox", name="Search").fill("")
    visitor.locator("#log-text", has_text="a line").wait_for()


def test_values_that_are_not_finite_are_marked_on_the_axis(visitor, server, first) -> None:
    rows = [json.loads(line) for line in (first / "trainer_log.jsonl").read_text().splitlines()]
    reddish = """(canvas) => {
        const {width, height} = canvas, pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        let inked = 0;
        for (let y = Math.floor(height * 0.75); y < height * 0.93; y += 1)
            for (let x = Math.floor(width * 0.1); x < width; x += 1)
                inked += pixels[4 * (y * width + x) + 3] > 200;
        return inked;
    }"""
    found = []
    for value in (1.0, math.nan):
        rows = [{**row, "loss": value} if "loss" in row else row for row in rows]
        (first / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        visitor.reload()
        visitor.locator(".chart canvas").first.wait_for()
        found.append(visitor.locator(".chart canvas").first.evaluate(reddish))
    assert found[1] > found[0]


def test_run_of_one_row_has_a_point_in_each_chart(visitor, server, first) -> None:
    row = (first / "trainer_log.jsonl").read_text().partition("\n")[0]
    (first / "trainer_log.jsonl").write_text(row + "\n")
    visitor.reload()
    visitor.locator(".chart canvas").first.wait_for()
    inked = """(canvas) => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let at = 0; at < pixels.length; at += 4)
            count += pixels[at + 2] - pixels[at] > 100 && pixels[at + 3] > 200; // blue
        return count;
    }"""
    assert visitor.locator(".chart canvas").first.evaluate(inked) > 5
    assert "over 1 steps" not in visitor.inner_text("main")


def test_options_of_a_run_can_be_copied(visitor, server, first) -> None:
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.click("#tab-options")
    visitor.locator("#panel-options button").first.click()
    visitor.locator("#toast", has_text="Copied.").wait_for()
    assert visitor.evaluate("navigator.clipboard.readText()") == (first / "run.yaml").read_text()


def test_chat_is_offered_in_the_list_for_runs_with_weights(visitor, server, first) -> None:
    visitor.goto(f"{server.address}/runs")
    shown = """(links) => Object.fromEntries(
        links.map((link) => [link.closest("tr").querySelector("a").innerText, !link.hidden])
    )"""
    visitor.locator(".to-chat").first.wait_for(state="attached")
    offered = visitor.locator(".to-chat").evaluate_all(shown)
    assert offered["first"]
    assert not offered["<img src=x onerror=alert(1)>"]


def test_reward_model_is_not_offered_for_chat(visitor, server, first) -> None:
    assert visitor.is_visible("#to-chat")
    run = visitor.url.rpartition("/")[2]
    with (first / "run.yaml").open("a") as file:
        file.write('stage: "rm"\n')
    visitor.reload()
    visitor.locator("#to-chat").wait_for(state="hidden")
    visitor.goto(f"{server.address}/chat?target={run}")
    wait_for(lambda: visitor.locator("select[data-side='0'] option").count() > 1)
    assert visitor.locator("select[data-side='0'] option", has_text="first").count() == 0


def test_usual_sentences_about_the_end_are_translated(visitor, server, first) -> None:
    said = {
        "sentence": "Stopped at step 40.",
        "remedy": "Run the same command again to resume from the last checkpoint.",
    }
    (first / "outcome.json").write_text(json.dumps({"state": "stopped", "time": 1.8e9, "step": 40, **said}))
    visitor.click("#language")
    visitor.locator("#sentence", has_text="已在第 40 步停止。 可以从最近的检查点恢复。").wait_for()


def test_run_of_another_machine_is_resumed_after_a_question(visitor, server, first) -> None:
    (first / "outcome.json").unlink()
    launch = json.loads((first / "launch.json").read_text())
    (first / "launch.json").write_text(json.dumps({**launch, "host": "node-7"}))
    for name in ("launch.json", "trainer_log.jsonl"):
        os.utime(first / name, (1.79e9, 1.79e9))
    requests: list[str] = []
    visitor.on("request", lambda one: requests.append(one.url) if one.url.endswith("/continue") else None)
    visitor.route("**/continue", lambda route: route.fulfill(json={}))
    visitor.reload()
    visitor.locator("#sentence", has_text="Started on node-7, no updates").wait_for()
    visitor.click("#resume")
    visitor.locator("dialog[open]", has_text="may still be active there").wait_for()
    visitor.keyboard.press("Escape")
    visitor.locator("dialog[open]").wait_for(state="detached")
    assert not requests
    visitor.click("#language")
    visitor.locator("#sentence", has_text="在 node-7 上启动").wait_for()
    visitor.click("#resume")
    with visitor.expect_request("**/continue"):
        visitor.locator("dialog[open] footer button").last.click()
    assert len(requests) == 1


def test_ended_run_leaves_the_running_ones_and_the_filtered_list(visitor, server, alive) -> None:
    shutil.rmtree(server.root / "trl")  # would count as running, since its files are new
    visitor.wait_for_timeout(2000)  # the list of runs is kept for a moment
    visitor.goto(f"{server.address}/runs")
    visitor.locator("[data-live]", has_text="first").wait_for()
    visitor.select_option("#state-filter", "running")
    row = visitor.locator("tr[data-run]").filter(has=visitor.get_by_role("link", name="first", exact=True))
    row.wait_for()
    end_run(alive, "done")
    visitor.locator("#running-now").wait_for(state="hidden")
    assert visitor.locator("[data-live]").count() == 0
    assert row.is_hidden()


def test_run_that_starts_while_the_list_is_kept_gets_its_card(visitor, server, alive) -> None:
    visitor.goto(f"{server.address}/runs")
    visitor.locator("[data-live]", has_text="first").wait_for(timeout=15_000)


def test_focus_moves_from_stop_to_resume(visitor, server, alive) -> None:
    visitor.reload()
    visitor.locator("#stop").wait_for()
    visitor.focus("#stop")
    end_run(alive, "stopped")
    visitor.locator("#resume").wait_for()
    assert visitor.evaluate("document.activeElement.id") == "resume"


def test_print_of_a_run_has_its_charts_and_no_navigation(visitor, server, first) -> None:
    visitor.emulate_media(media="print")
    for hidden in (".side-bar", "#x-axis", ".tabs", "#to-chat", ".chart summary"):
        assert visitor.locator(hidden).first.is_hidden(), hidden
    assert visitor.locator(".chart canvas").first.is_visible()


def test_evaluate_and_export_select_the_run_of_its_link(visitor, server, first) -> None:
    shutil.copytree(first, first.with_name("second"))
    (first.with_name("second") / "trainer_log.jsonl").touch()  # the newest is selected without a link
    for number in range(45):  # a page lists the newest 40, and the run of its link
        shutil.copytree(first.with_name("second"), server.root / f"many/{number}")
        (server.root / f"many/{number}/trainer_log.jsonl").touch()
    visitor.wait_for_timeout(2000)  # the list of runs is kept for a moment
    target = visitor.url.rpartition("/")[2]
    visitor.goto(f"{server.address}/evaluate?target={target}")
    visitor.locator("#source option").nth(1).wait_for(state="attached")
    assert visitor.input_value("#source") == target
    visitor.goto(f"{server.address}/export?target={target}")
    visitor.locator("#source option").nth(1).wait_for(state="attached")
    assert visitor.input_value("#source") == target


def test_filters_stay_and_a_vanished_run_leaves_the_list(visitor, server, first) -> None:
    visitor.goto(f"{server.address}/runs")
    visitor.fill("#search", "saves/first")
    visitor.select_option("#state-filter", "done")
    visitor.reload()
    visitor.locator("#shown-count", has_text="1 of 4").wait_for()
    assert visitor.input_value("#search") == "saves/first"
    assert visitor.input_value("#state-filter") == "done"
    shutil.rmtree(first)
    visitor.locator("#shown-count", has_text="0 of 3").wait_for()


def test_action_without_a_server_says_so(visitor, server, alive) -> None:
    visitor.reload()
    visitor.locator("#stop").wait_for()
    visitor.locator("#log-text").wait_for()
    server.kill()
    visitor.locator("#toast", has_text="Connection to the server lost").wait_for()
    visitor.locator("#toast", has_text="Connection").wait_for(state="hidden")
    visitor.click("#stop")
    visitor.locator("#toast", has_text="The server cannot be reached.").wait_for()


def test_charts_are_printed_in_light_colors(visitor, first) -> None:
    picture = "document.querySelector('.chart canvas').toDataURL()"
    pictures = {}
    for scheme in ("light", "dark"):
        visitor.emulate_media(color_scheme=scheme)
        visitor.wait_for_timeout(300)
        pictures[scheme] = visitor.evaluate(picture)
    assert pictures["light"] != pictures["dark"]
    visitor.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert visitor.evaluate(picture) == pictures["light"]
    visitor.evaluate("dispatchEvent(new Event('afterprint'))")
    assert visitor.evaluate(picture) == pictures["dark"]


def test_page_of_a_vanished_run_says_so(visitor, first) -> None:
    visitor.locator("#log-text").wait_for()
    shutil.rmtree(first)
    visitor.wait_for_url("**/runs")
    visitor.locator("#toast", has_text="The folder of first was deleted or moved.").wait_for()


def test_run_that_failed_before_its_first_step_offers_no_chat(visitor, server, first) -> None:
    folder = server.root / "saves" / "failed"
    folder.mkdir()
    (folder / "launch.json").write_text((first / "launch.json").read_text())
    (folder / "run.yaml").write_text((first / "run.yaml").read_text())
    end_run(folder, "failed")
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="failed", exact=True).click()
    visitor.locator("#resume").wait_for()
    assert not visitor.is_visible("#to-chat")
    assert "Waiting" not in visitor.inner_text("main")
    visitor.goto(f"{server.address}/chat")
    visitor.locator("select[data-side='0'] option", has_text="first").first.wait_for(state="attached")
    assert visitor.locator("select[data-side='0'] option", has_text="failed").count() == 0


def test_list_keeps_focus_selection_and_text_when_a_run_appears_and_fails(visitor, server, first) -> None:
    visitor.goto(f"{server.address}/runs")
    visitor.fill("#search", "saves")
    visitor.get_by_role("row", name="saves/first").get_by_role("checkbox").check()
    visitor.focus("#search")
    visitor.evaluate("window.isSame = true")
    second = server.root / "saves" / "second"
    shutil.copytree(first, second)
    row = visitor.locator("#runs tr[data-run]").filter(has=visitor.get_by_role("link", name="second", exact=True))
    row.locator("summary").wait_for()
    outcome = {"state": "failed", "time": 1.9e9, "sentence": "Out of memory.", "remedy": "Use fewer rows.", "step": 40}
    (second / "outcome.json").write_text(json.dumps(outcome))
    row.locator(".problem", has_text="Out of memory. Use fewer rows.").wait_for()
    assert visitor.evaluate("[window.isSame, document.activeElement.id]") == [True, "search"]
    assert visitor.locator("#runs tr input:checked").count() == 1


def test_notification_is_shown_above_an_open_dialog(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.evaluate("document.querySelector('#yaml-dialog').showModal()")
    visitor.evaluate("""async () => {
        const dom = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/dom.js")).name;
        (await import(dom)).notify("Not connected");
    }""")
    box = visitor.locator("#toast").bounding_box()
    at = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
    assert visitor.evaluate("([x, y]) => document.elementFromPoint(x, y).id", at) == "toast"
    visitor.keyboard.press("Escape")
    visitor.locator("#yaml-dialog").wait_for(state="hidden")
    visitor.locator("#toast").wait_for()
