"""The web UI in a browser, from the link to a trained model that responds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from browser.conftest import wait_for
from burnish.serve.page.runs.runs import id_of

pytestmark = [pytest.mark.run, pytest.mark.slow]

VALUES = {
    "model_name_or_path": "model", "dataset": "demo_train", "dataset_dir": "data", "cutoff_len": "128",
    "per_device_train_batch_size": "8", "max_steps": "60", "logging_steps": "2", "learning_rate": "5e-4",
    "save_steps": "20", "val_size": "0.02", "eval_steps": "20",
}  # fmt: skip


def fill(page, **changes: str) -> None:
    page.wait_for_selector("#box-model_name_or_path")
    unfold(page)
    page.select_option("#box-finetuning_type", "full")
    page.select_option("#box-eval_strategy", "steps")
    for name, value in {**VALUES, **changes}.items():
        page.fill(f"#box-{name}", value)


def unfold(page) -> None:
    """Open the topics whose fields the tests fill."""
    page.evaluate("[...document.querySelectorAll('.topic')].slice(0, 3).forEach(one => { one.open = true })")
    page.wait_for_selector("#box-max_steps")


def click_menu_item(page, item: str) -> None:
    """Click an item of a collapsed menu."""
    page.evaluate("wanted => { document.querySelector(wanted).closest('details').open = true }", item)
    page.click(item)


def state(page) -> str:
    return page.inner_text("#state")


def test_two_quickly_selected_runs_are_compared(visitor, server) -> None:
    for name in ("first", "second"):
        (server.root / "saves" / name).mkdir()
        rows = [{"current_steps": step, "total_steps": 3, "loss": 3.0 / step, "epoch": 1.0} for step in (1, 2, 3)]
        (server.root / "saves" / name / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def both_listed() -> bool:
        visitor.goto(f"{server.address}/compare")
        visitor.wait_for_timeout(500)
        return visitor.locator(".chip").count() == 2

    wait_for(both_listed)
    visitor.route("**/series*", lambda route: (visitor.wait_for_timeout(300), route.continue_()))
    visitor.evaluate("for (const one of document.querySelectorAll('.chip input')) one.click()")
    visitor.wait_for_selector("#charts")
    wait_for(lambda: "second" in visitor.inner_text("#charts") and "first" in visitor.inner_text("#charts"))


def test_link_to_a_comparison_has_its_whole_view(sample_runs, visitor, server) -> None:
    runs = f"{id_of(server.root / 'saves/first')},{id_of(server.root / 'factory')}"
    visitor.goto(f"{server.address}/compare?runs={runs}")
    visitor.locator(".chart canvas").first.wait_for()
    visitor.select_option("#x-axis", "tokens")
    visitor.fill("#smoothing", "0.25")
    visitor.check("#log-scale")
    visitor.uncheck("#only-different")
    assert visitor.url.endswith(f"?runs={runs}&x=tokens&smoothing=0.25&log=true&different=false")
    other = visitor.context.new_page()
    other.goto(visitor.url)
    other.locator(".chart canvas").first.wait_for()
    controls = "['x-axis', 'smoothing'].map(id => document.getElementById(id).value)"
    assert other.evaluate(controls) == ["tokens", "0.25"]
    assert [other.is_checked(f"#{name}") for name in ("log-scale", "clip", "only-different")] == [True, False, False]
    other.locator("#options", has_text="learning_rate").wait_for()
    other.goto(f"{server.address}/compare?runs={runs}&x=moon&smoothing=2&log=perhaps")
    other.locator(".chart canvas").first.wait_for()
    assert other.evaluate(controls)[0] == "step"


def test_sign_in_with_wrong_key_typed_key_and_expired_cookie(visitor, server) -> None:
    visitor.context.clear_cookies()
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_url("**/sign-in?to=new")
    visitor.fill("#key", "wrong")
    visitor.click("button.main")
    visitor.get_by_text("Invalid key").wait_for()
    assert visitor.evaluate("document.activeElement.id") == "key"
    visitor.fill("#key", server.link.partition("key=")[2])
    visitor.keyboard.press("Enter")
    visitor.wait_for_url("**/new")
    visitor.context.clear_cookies()
    visitor.goto(f"{server.address}/runs?state=done")
    visitor.fill("#key", server.link.partition("key=")[2])
    visitor.keyboard.press("Enter")
    visitor.wait_for_url("**/runs?state=done")


def test_printed_link_signs_in_on_open_sign_in_page(visitor, server) -> None:
    visitor.context.clear_cookies()
    visitor.goto(f"{server.address}/sign-in")
    visitor.goto(server.link)  # only the URL fragment changes, so the browser loads nothing
    visitor.wait_for_url("**/runs")


def test_form_to_trained_model_survives_a_killed_server(visitor, server) -> None:
    page, address = visitor, server.address
    port = int(address.rpartition(":")[2])
    page.goto(f"{address}/new")
    fill(page)
    page.wait_for_selector("#start:not([disabled])")
    assert "60" in page.inner_text("#plan dd >> nth=0")
    assert "<|im_end|>" in page.inner_text("#sample mark")
    assert "max_steps: 60" in page.inner_text("#yaml")
    page.evaluate("scrollTo(0, 0)")
    page.click("#start")
    page.wait_for_url(re.compile(r"/runs/[0-9a-f]{12}$"))
    page.locator(".chart canvas").first.wait_for()
    page.reload()
    page.locator(".chart canvas").first.wait_for()
    page.locator("#log-text").wait_for()
    server.kill()  # the run continues
    server.start(port)
    page.goto(page.url)
    page.locator(".chart canvas").first.wait_for()
    if page.is_visible("#stop"):
        page.click("#stop")
        wait_for(lambda: state(page) in ("stopped", "done"))
    if state(page) == "stopped":
        page.click("#resume")
    wait_for(lambda: state(page) == "done", 240)
    assert "step 60 of 60" in page.inner_text("#progress-text")
    log = (server.root / "saves/first/trainer_log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["current_steps"] for line in log if '"loss"' in line]
    assert steps == sorted(set(steps))
    with page.expect_download() as result:
        page.locator(".chart .menu summary").first.click()
        page.locator(".chart button", has_text="PNG").first.click()
    assert Path(result.value.path()).read_bytes().startswith(b"\x89PNG")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
    page.click("#theme")
    run = page.url.rpartition("/")[2]
    page.goto(f"{address}/chat?target={run}")
    page.locator("#engine-states", has_text="first ✓").wait_for(timeout=180_000)
    page.select_option("select[data-side='1']", "path:model")
    page.locator("#engine-states", has_text="model ✓").wait_for(timeout=180_000)
    page.fill("#max_tokens", "24") if page.is_visible("#max_tokens") else None
    page.fill("#message", "opposite: hot")
    page.keyboard.press("Control+Enter")
    for side in (0, 1):
        page.locator(f".side[data-side='{side}'] .figures", has_text="tokens/s").wait_for()
    page.goto(f"{address}/export?target={run}")
    page.select_option("#format", "gguf f16")
    page.click("#job-form button.main")
    page.locator(".job-lines code", has_text="llama-server").wait_for()
    shutil.copytree(server.root / "saves/first", server.root / "saves/second")
    page.goto(f"{address}/runs")
    page.locator("tr[data-run]").nth(1).wait_for()
    for box in page.locator("tr[data-run] input").all():
        box.check()
    page.click("#compare")
    page.locator(".chart canvas").first.wait_for()
    page.click("#language")
    page.get_by_text("比较").first.wait_for()
    page.goto(f"{address}/runs")


def test_invalid_field_shows_its_error_and_disables_start(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    fill(visitor, max_steps="many")
    field = visitor.locator("[data-option=max_steps]")
    field.locator(".problem", has_text="must be an integer").wait_for()
    assert visitor.get_attribute("#box-max_steps", "aria-invalid") == "true"
    assert visitor.is_disabled("#start")
    visitor.fill("#box-max_steps", "3")
    visitor.wait_for_selector("#start:not([disabled])")
    visitor.fill("#box-output_dir", "../outside")
    visitor.locator("[data-option=output_dir] .problem", has_text="must be a path inside").first.wait_for()
    assert visitor.is_disabled("#start")


def test_plan_with_a_problem_shows_no_skeleton_and_its_details_are_text(visitor, server) -> None:
    (server.root / "data/torn.jsonl").write_text('{"instruction": "a", "output": "b"}\nnot JSON\n')
    visitor.goto(f"{server.address}/new")
    fill(visitor, dataset="data/torn.jsonl")
    visitor.locator("#problems", has_text="invalid JSON").wait_for()
    visitor.locator("#plan-status", has_text="Problems: 1").wait_for()
    assert visitor.locator("#plan-tabs .skeleton, #plan .skeleton").count() == 0
    fill(visitor)
    visitor.wait_for_selector("#start:not([disabled])")
    visitor.click("#tab-more")
    assert "[object" not in visitor.inner_text("#panel-more")
    assert visitor.locator("#panel-more dt").count() > 5


def test_tabs_of_the_dataset_picker_have_names(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.locator("[data-option=dataset] button").click()
    tabs = visitor.locator("dialog[open] [role=tab]")
    tabs.first.wait_for()
    assert tabs.all_inner_texts() == ["On this machine", "Hugging Face Hub", "Upload"]


def test_empty_dataset_offers_no_column_mapping(visitor, server) -> None:
    (server.root / "data/empty.jsonl").touch()
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-dataset")
    with visitor.expect_response("**/api/datasets/columns*"):
        visitor.fill("#box-dataset", "data/empty.jsonl")
    visitor.wait_for_timeout(500)
    assert visitor.locator("#columns").count() == 0


def test_deleted_run_is_not_counted_and_undo_restores_it(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/runs")
    rows = visitor.locator("tr[data-run]")
    row = rows.filter(has=visitor.get_by_role("link", name="first", exact=True))
    row.wait_for()
    count = rows.count()
    row.locator("summary").click()
    row.get_by_role("button", name="Delete").click()
    visitor.locator("#shown-count", has_text=f"{count - 1} of {count - 1}").wait_for()
    visitor.fill("#search", "saves/first")
    assert visitor.inner_text("#shown-count") == f"0 of {count - 1}"
    visitor.locator("#toast button").click()
    row.wait_for()


def test_table_of_a_run_shows_the_time_since_its_first_row(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.check("#as-table")
    visitor.locator("#table th", has_text="Time").wait_for()
    place = visitor.locator("#table th").all_inner_texts().index("Time")
    assert visitor.locator("#table tbody tr").nth(10).locator("td").nth(place).inner_text() == "0:10"


def test_long_tag_does_not_widen_the_list_of_runs(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/runs")
    row = visitor.locator("tr[data-run]").filter(has=visitor.get_by_role("link", name="first", exact=True))
    row.locator("summary").click()
    row.get_by_role("button", name="Name, tags and notes").click()
    visitor.fill("#label-tags", "w" * 40)
    visitor.click("#label-keep")
    visitor.locator(".tag", has_text="w" * 40).wait_for()
    for width in (360, 1280):
        visitor.set_viewport_size({"width": width, "height": 720})
        assert not visitor.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_long_names_and_counts_fit_every_width(sample_runs, visitor, server) -> None:
    first, long = server.root / "saves/first", server.root / "saves" / ("n" * 150)
    shutil.copytree(first, long)
    row = {"current_steps": 100_000, "total_steps": 100_000, "loss": 0.0999, "time": 1.79e9 + 1e5}
    with (long / "trainer_log.jsonl").open("a") as file:
        file.write(json.dumps({**row, "total_tokens": 1e9}) + "\n")
    for path in ("runs", f"compare?runs={id_of(first)},{id_of(long)}"):
        visitor.goto(f"{server.address}/{path}")
        visitor.get_by_text("n" * 150).first.wait_for()
        for width in (360, 761, 861, 900, 1024, 1061, 1100, 1271, 1280):
            visitor.set_viewport_size({"width": width, "height": 720})
            overflows = visitor.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not overflows, (path, width)


def test_unknown_columns_are_mapped_in_the_form(visitor, server) -> None:
    lines = [json.dumps({"frage": f"{n} + 1", "antwort": str(n + 1)}) for n in range(40)]
    (server.root / "own.jsonl").write_text("\n".join(lines) + "\n")
    visitor.goto(f"{server.address}/new")
    fill(visitor, dataset="own.jsonl", val_size="0.1", max_steps="2")
    visitor.get_by_text("the columns do not match a known format").first.wait_for()
    assert visitor.is_disabled("#start")
    visitor.select_option("#columns-format", "alpaca")
    visitor.select_option("#columns-prompt", "frage")
    visitor.select_option("#columns-response", "antwort")
    visitor.locator("#columns .hint", has_text="0 + 1 · 1 + 1 · 2 + 1").wait_for()
    visitor.wait_for_selector("#start:not([disabled])")
    assert "frage" in visitor.inner_text("#yaml")
    assert " + 1" in visitor.inner_text("#sample")
    visitor.fill("#columns-name", "sums")
    visitor.click("#columns-keep")
    visitor.get_by_text("sums was added to dataset_info.json.").wait_for()
    assert visitor.input_value("#box-dataset") == "sums"
    visitor.locator("#yaml", has_text=re.compile(r"dataset: .*sums")).wait_for(state="attached")
    visitor.wait_for_selector("#start:not([disabled])")
    assert json.loads((server.root / "dataset_info.json").read_text())["sums"]["columns"]["response"] == "antwort"


def test_form_is_saved_as_preset_and_restored(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    fill(visitor, learning_rate="3e-4")
    visitor.locator("#yaml", has_text="max_steps: 60").wait_for(state="attached")
    click_menu_item(visitor, "#save-preset")
    visitor.fill("#preset-name", "mine")
    visitor.click("#preset-keep")
    visitor.get_by_text("Saved as mine.").wait_for()
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-model_name_or_path")
    visitor.locator("#preset option[value=mine]").wait_for(state="attached")
    unfold(visitor)
    visitor.select_option("#preset", "mine")
    assert float(visitor.input_value("#box-learning_rate")) == 3e-4
    assert visitor.input_value("#box-max_steps") == "60"
    click_menu_item(visitor, "#drop-preset")
    visitor.wait_for_selector("#preset option[value=mine]", state="detached")


def test_preset_replaces_the_values_of_the_one_before(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-model_name_or_path")
    visitor.select_option("#preset", "DPO")
    assert visitor.input_value("#box-stage") == "dpo"
    visitor.fill("#box-num_train_epochs", "7")
    visitor.select_option("#preset", "LoRA")
    assert visitor.input_value("#box-stage") == ""
    assert visitor.input_value("#box-learning_rate") == "0.0001"
    visitor.fill("#box-num_train_epochs", "8")
    visitor.select_option("#preset", "")
    assert visitor.input_value("#box-learning_rate") == ""
    assert visitor.input_value("#box-num_train_epochs") == "8"


def test_preset_is_saved_from_the_form_before_the_plan_is_ready(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-model_name_or_path")
    visitor.fill("#box-learning_rate", "3e-4")
    click_menu_item(visitor, "#save-preset")
    visitor.fill("#preset-name", "quick")
    visitor.click("#preset-keep")
    visitor.get_by_text("Saved as quick.").wait_for()
    assert next(server.home.rglob("quick.yaml")).read_text() == "learning_rate: 3e-4\n"


def test_problem_without_a_visible_field_is_shown_and_its_value_can_be_removed(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    fill(visitor)
    visitor.wait_for_selector("#start:not([disabled])")
    for name, text in (("learning_rat", "learning_rat: 3"), ("trust_remote_code", "trust_remote_code: true")):
        click_menu_item(visitor, "#load-yaml")
        visitor.fill("#yaml-text", text)
        visitor.click("#yaml-take")
        visitor.locator("#problems", has_text=name).wait_for()
        visitor.locator("#problems button", has_text=name).click()
        visitor.wait_for_selector("#start:not([disabled])")
    visitor.fill("#box-max_steps", "many")
    visitor.evaluate("for (const one of document.querySelectorAll('.topic')) one.open = false")
    visitor.locator("#problems", has_text="must be an integer").wait_for()


def test_value_that_is_no_choice_is_shown_with_its_error_and_kept(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    fill(visitor)
    click_menu_item(visitor, "#load-yaml")
    visitor.fill("#yaml-text", "stage: sftt\nlr_scheduler_type: cosin\nbf16: maybe")
    visitor.click("#yaml-take")
    shown = "(select) => [select.value, select.selectedOptions[0]?.textContent]"
    visitor.locator("[data-option=stage] .problem", has_text="stage").wait_for()
    assert visitor.locator("#box-stage").evaluate(shown) == ["sftt", "sftt (not in the list)"]
    visitor.evaluate("for (const one of document.querySelectorAll('.topic')) one.open = true")
    visitor.locator("[data-option=lr_scheduler_type] .problem", has_text="cosin").wait_for()
    assert visitor.locator("#box-lr_scheduler_type").evaluate(shown) == ["cosin", "cosin (not in the list)"]
    assert visitor.locator("#box-bf16").evaluate(shown) == ["maybe", "maybe (not in the list)"]
    click_menu_item(visitor, "#save-preset")
    visitor.fill("#preset-name", "kept")
    visitor.click("#preset-keep")
    visitor.get_by_text("Saved as kept.").wait_for()
    assert '"sftt"' in next(server.home.rglob("kept.yaml")).read_text()
    visitor.select_option("#box-stage", "dpo")
    visitor.select_option("#preset", "LoRA")
    assert visitor.locator("#box-stage").evaluate(shown)[0] == "dpo"


def test_dialogs_close_with_escape_and_return_the_focus(visitor, server) -> None:
    visitor.goto(f"{server.address}/new")
    visitor.wait_for_selector("#box-model_name_or_path")
    menu = "document.activeElement.closest('details.menu') !== null"
    for item in ("#load-yaml", "#save-preset"):
        visitor.locator("details.menu summary").first.focus()
        visitor.keyboard.press("Enter")
        visitor.locator(item).focus()
        visitor.keyboard.press("Enter")
        visitor.wait_for_selector("dialog[open]")
        visitor.keyboard.press("Escape")
        visitor.wait_for_selector("dialog[open]", state="detached")
        assert visitor.evaluate(menu)
        assert visitor.locator("details.menu[open]").count() == 0


def test_hostile_texts_are_displayed_inertly(sample_runs, visitor, server) -> None:
    dialogs = []
    visitor.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_text("<script>alert(1)</script>").wait_for()
    visitor.get_by_role("link", name="<img src=x onerror=alert(1)>").click()
    visitor.locator("#sentence", has_text="<script>alert(1)</script>").wait_for()
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.click("#tab-log")
    visitor.locator("#log-text", has_text="<img src=x onerror=alert(1)>").wait_for()
    assert dialogs == []


def test_page_fits_a_narrow_window_and_is_keyboard_navigable(visitor, server) -> None:
    for width in (360, 1280):
        visitor.set_viewport_size({"width": width, "height": 720})
        for path in ("runs", "new", "compare", "chat", "evaluate", "export", "settings"):
            visitor.goto(f"{server.address}/{path}")
            visitor.wait_for_load_state("networkidle") if path in ("settings", "export") else None
            overflows = visitor.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not overflows, (path, width)
    visitor.goto(f"{server.address}/runs")
    visitor.keyboard.press("Tab")
    assert visitor.evaluate("document.activeElement.className") == "skip"
    focused = set()
    for _ in range(14):
        visitor.keyboard.press("Tab")
        focused.add(visitor.evaluate("document.activeElement.textContent.trim()"))
    assert {"New run", "Runs", "Compare", "Chat", "Evaluate", "Export"} <= focused


def test_runs_and_metrics_are_readable_without_javascript(sample_runs, chromium, server) -> None:
    context = chromium.new_context(java_script_enabled=False, locale="en-US")
    page = context.new_page()
    page.goto(f"{server.address}/runs")
    page.fill("#key", server.link.partition("key=")[2])
    page.click("button.main")
    page.get_by_role("link", name="first", exact=True).click()
    page.get_by_text("Loss 3 to 0.075 over 40 steps").wait_for()
    context.close()


def test_many_windows_follow_one_run_and_all_load(sample_runs, visitor, server) -> None:
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.locator(".chart canvas").first.wait_for()
    windows = [visitor, *(visitor.context.new_page() for _ in range(7))]
    for window in windows[1:]:
        window.goto(visitor.url)
        window.locator(".chart canvas").first.wait_for()
    with (server.root / "saves/first/trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 77, "total_steps": 77, "loss": 0.5}\n')
    for window in windows:
        window.locator("#summary", has_text="over 77 steps").wait_for()


def test_comparison_of_more_runs_than_fit_says_so(visitor, server) -> None:
    for number in range(10):
        folder = server.root / "saves" / f"run-{number}"
        folder.mkdir(parents=True)
        rows = [{"current_steps": step, "total_steps": 3, "loss": 3.0 / step, "epoch": 1.0} for step in (1, 2, 3)]
        (folder / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    visitor.goto(f"{server.address}/runs")
    visitor.locator("tr[data-run] input").nth(9).wait_for()
    for box in visitor.locator("tr[data-run] input").all():
        box.check()
    visitor.click("#compare")
    visitor.locator("#most", has_text="At most 8 runs").wait_for()
    assert visitor.locator(".chip input:checked").count() == 8
    assert visitor.locator(".chip input:disabled").count() == 2
    visitor.locator(".chip input:checked").first.uncheck()
    visitor.locator("#most").wait_for(state="hidden")
    assert visitor.locator(".chip input:disabled").count() == 0


def test_unsent_form_is_kept_over_a_reload_and_the_way_back_without_secrets(visitor, server) -> None:
    page = visitor
    page.goto(f"{server.address}/new")
    fill(page, learning_rate="3e-4")
    page.fill("#search-options", "hub_token")
    page.evaluate("document.querySelector('#box-hub_token').disabled = false")  # as with web_allow
    page.fill("#box-hub_token", "hf_" + "a" * 34)
    page.reload()
    wait_for(lambda: page.input_value("#box-model_name_or_path") == "model")
    page.goto(f"{server.address}/runs")
    page.go_back()
    wait_for(lambda: page.input_value("#box-model_name_or_path") == "model")
    unfold(page)
    assert page.input_value("#box-learning_rate") == "3e-4"
    assert "hf_" not in page.evaluate("JSON.stringify(sessionStorage)")
    page.locator("#toast button").click()
    wait_for(lambda: page.input_value("#box-model_name_or_path") == "")
