"""The web UI's chat with a scripted engine: tool calls, their results, and held-out records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import burnish
from browser.conftest import wait_for

pytestmark = [pytest.mark.run, pytest.mark.slow]
ENGINE = {"id": "e" * 12, "name": "first", "state": "ready", "said": ""}
TOOLS = [{"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}]


def chunks(*deltas: dict[str, object]) -> str:
    bodies: list[object] = [{"choices": [{"delta": delta}]} for delta in deltas]
    bodies.append({"choices": [], "usage": {"completion_tokens": 3}})
    return "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + "data: [DONE]\n\n"


def call(number: int, arguments: str) -> tuple[dict[str, object], ...]:
    return {"tool_calls": [{"index": number, "id": f"call_{number}", "function": {"name": "add", "arguments": ""}}]}, {
        "tool_calls": [{"index": number, "function": {"arguments": arguments}}]
    }


@pytest.fixture
def requests(sample_runs, visitor, server):
    """The recorded requests to the engine, which calls ``add`` twice if tools are offered and responds to the
    results."""
    values = {"model_name_or_path": "model", "dataset": "demo_train", "val_size": "0.1", "output_dir": "saves/first"}
    (server.root / "saves/first/run.yaml").write_text(json.dumps(values))
    requests: list[dict[str, object]] = []

    def answer(route) -> None:
        body = json.loads(route.request.post_data)
        requests.append(body)
        calls_tools = body.get("tools") and body["messages"][-1]["role"] == "user"
        deltas = (*call(0, '{"a": 1}'), *call(1, '{"a": 2}')) if calls_tools else ({"content": "It is three."},)
        route.fulfill(status=200, content_type="text/event-stream", body=chunks(*deltas))

    visitor.route("**/api/engines", lambda route: route.fulfill(
        status=200, content_type="application/json",
        body=json.dumps(ENGINE if route.request.method == "POST" else {"engines": [ENGINE]}),
    ))  # fmt: skip
    visitor.route("**/api/chat/*", answer)
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.get_by_role("main").get_by_role("link", name="Chat").first.click()
    visitor.locator("#engine-states", has_text="first ✓").wait_for()
    return requests


def test_tool_call_waits_for_its_result_and_response_continues(visitor, requests) -> None:
    visitor.get_by_text("Generation settings", exact=True).click()
    visitor.fill("#tools", "{")
    visitor.fill("#message", "1 + 2?")
    visitor.click("#send")
    visitor.get_by_text("The tools must be a JSON list").wait_for()
    assert requests == []
    visitor.click("#new-chat")
    visitor.fill("#tools", json.dumps(TOOLS))
    visitor.fill("#message", "1 + 2?")
    visitor.click("#send")
    visitor.locator(".result-form").nth(1).wait_for()
    visitor.fill("#message", "And?")
    visitor.click("#send")
    visitor.get_by_text("A tool call is waiting for its result.").wait_for()
    visitor.locator(".result-form textarea").first.fill("one")
    visitor.locator(".result-form button").first.click()
    visitor.locator(".result", has_text="one").wait_for()
    visitor.reload()  # the first result is saved with the conversation
    visitor.locator("#engine-states", has_text="first ✓").wait_for()
    visitor.locator(".result", has_text="one").wait_for()
    visitor.locator(".result-form textarea").fill("<b>two</b>")
    visitor.locator(".result-form button").click()
    visitor.get_by_text("It is three.").wait_for()
    first, second = requests
    assert first["tools"] == second["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [message["content"] for message in second["messages"][2:]] == ["one", "<b>two</b>"]
    assert [message["id"] for message in second["messages"][1]["tool_calls"]] == ["call_0", "call_1"]
    visitor.click(".chat-head .menu summary")
    with visitor.expect_download() as result:
        visitor.click("#record")
    record = json.loads(Path(result.value.path()).read_text(encoding="utf-8"))
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]


def test_markdown_of_a_message_is_rendered_without_html(visitor, requests) -> None:
    text = "Steps:\n1. **one** with `code`\n   - [two](https://example.org/a)\n\n> <b>three</b> ![four](https://example.org/b)"
    visitor.fill("#message", text)
    visitor.click("#send")
    shown = visitor.locator('.side[data-side="0"] .turn.user .text')
    assert shown.locator("ol > li > p > b").inner_text() == "one"
    links = {link.inner_text(): link.get_attribute("href") for link in shown.locator("a[rel*=noreferrer]").all()}
    assert links == {"two": "https://example.org/a", "four": "https://example.org/b"}
    assert shown.locator("blockquote").inner_text() == "<b>three</b> four"
    assert shown.locator("img").count() == 0


WRITTEN = """Steps:
1. **one** with `code`
   - two

   more
2. three

```python
def f(x):
    return x  # one
```
> quoted
> - item

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

## Heading
---
The end."""
COMPARE_EVERY_BEGINNING = """async (text) => {
  const script = document.querySelector("script[src*='chat.js']").src;
  const { nodes, update } = await import(new URL("md.js", script));
  const grown = document.createElement("div"), kept = [];
  for (let end = 1; end <= text.length; end += 1) {
    const whole = document.createElement("div");
    whole.append(...nodes(text.slice(0, end)));
    update(grown, text.slice(0, end));
    if (grown.innerHTML !== whole.innerHTML) return [text.slice(0, end), grown.innerHTML, whole.innerHTML];
    kept.push(["ol > li", "pre", "tbody tr"].map((selector) => grown.querySelector(selector)));
  }
  const complete = ["   - two", "return", "| 3"].map((later) => text.indexOf(later));
  return complete.map((begin, at) => new Set(kept.slice(begin).map((nodes) => nodes[at])).size);
}"""
"""Number of nodes that a list item, a code block and a row had after their first line was complete."""


def test_text_being_written_equals_whole_text_and_keeps_its_nodes(visitor, requests) -> None:
    assert visitor.evaluate(COMPARE_EVERY_BEGINNING, WRITTEN) == [1, 1, 1]


GROW_A_LONG_CODE_BLOCK = """async () => {
  const loaded = performance.getEntriesByType("resource").find(({ name }) => /md[.]js/.test(name)).name;
  const { update } = await import(loaded);
  const place = document.createElement("div"), line = "x = 12  # comment\\n", counts = [];
  document.body.append(place);
  for (const end of ["", "```"]) {
    for (let size = 100; size <= 1500; size += 100) update(place, "```py\\n" + line.repeat(size) + end);
    counts.push(place.querySelectorAll("code span").length);
  }
  return [...counts, place.querySelector("code").textContent === line.repeat(1500).trimEnd()];
}"""


def test_long_code_block_is_highlighted_after_its_end(visitor, requests) -> None:
    while_written, at_end, is_complete = visitor.evaluate(GROW_A_LONG_CODE_BLOCK)
    assert 0 < while_written < 1000  # of 3,000 in all, which took half a minute to draw with each token
    assert (at_end, is_complete) == (3000, True)


def test_code_of_a_truncated_response_is_highlighted(visitor, requests) -> None:
    body = chunks({"content": "```py\n" + "x = 12  # comment\n" * 500})
    visitor.route("**/api/chat/*", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))
    visitor.fill("#message", "Write.")
    visitor.click("#send")
    visitor.wait_for_selector("#stop-response", state="hidden")
    assert visitor.locator('.side[data-side="0"] .turn.assistant code span').count() == 1000


def test_tokens_that_arrive_together_are_drawn_together(visitor, requests) -> None:
    deltas = [{"content": "word "} for _ in range(500)]
    visitor.route("**/api/chat/*", lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body=chunks(*deltas)
    ))  # fmt: skip
    visitor.evaluate("""() => {
        window.changes = 0;
        const count = (records) => { window.changes += records.length; };
        new MutationObserver(count).observe(document.querySelector("#sides"), { childList: true, subtree: true });
    }""")
    visitor.fill("#message", "Write.")
    visitor.click("#send")
    visitor.wait_for_selector("#stop-response", state="hidden")
    visitor.locator('.side[data-side="0"] .turn.assistant', has_text="word " * 499).wait_for()
    assert visitor.evaluate("window.changes") < 100


def test_past_conversation_is_reopened_and_deleted_one_restored(visitor, requests) -> None:
    for question in ("First question", "Second question"):
        visitor.click("#new-chat")
        visitor.fill("#message", question)
        visitor.click("#send")
        visitor.get_by_text("It is three.").wait_for()
    visitor.click("#history")
    entries = visitor.locator("#history-list .history-entry")
    visitor.get_by_role("button", name="Delete the conversation First question").click()
    visitor.get_by_text("The conversation was deleted.").wait_for()
    visitor.get_by_role("button", name="Undo").click()
    entries.filter(has_text="First question").locator("button.grow").click()
    visitor.locator('.side[data-side="0"] .turn.user', has_text="First question").wait_for()
    assert visitor.locator('.side[data-side="0"] .turn.user', has_text="Second question").count() == 0
    visitor.fill("#message", "And then?")
    visitor.click("#send")
    visitor.locator('.side[data-side="0"] .turn.user', has_text="And then?").wait_for()
    assert [message["content"] for message in requests[-1]["messages"]] == [
        "First question",
        "It is three.",
        "And then?",
    ]


def test_edit_is_cancelled_with_escape_and_keeps_the_image(visitor, server, requests) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save(server.root / "red.png")
    visitor.set_input_files("input[type=file]", server.root / "red.png")
    visitor.fill("#message", "Which color?")
    visitor.click("#send")
    visitor.get_by_text("It is three.").wait_for()
    asked = visitor.locator('.side[data-side="0"] .turn.user')
    assert asked.locator("img").count() == 1
    asked.get_by_role("button", name="Edit").click()
    visitor.keyboard.press("Escape")
    assert asked.locator("textarea").count() == 0
    assert asked.locator("img").count() == 1
    assert visitor.evaluate("document.activeElement.title") == "Edit"


def test_reopened_conversation_names_the_model_of_each_response(visitor, requests) -> None:
    visitor.fill("#message", "First question")
    visitor.click("#send")
    visitor.get_by_text("It is three.").wait_for()
    heading = visitor.locator('.side[data-side="0"] .turn.assistant h2')
    assert heading.inner_text() == "first"
    visitor.goto(visitor.url.partition("?")[0])
    heading.wait_for()
    assert heading.inner_text() == "first"
    visitor.select_option("select[data-side='0']", "path:model")
    visitor.reload()
    heading.wait_for()
    assert heading.inner_text() == "first"


def test_stop_and_edit_during_a_response_leave_one_response(visitor, requests) -> None:
    release = []

    def hold(route) -> None:
        if len(requests) < 2:
            requests.append(json.loads(route.request.post_data))
            release.append(route)  # the response never begins
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=chunks({"content": "It is four."}))

    visitor.unroute("**/api/chat/*")
    visitor.route("**/api/chat/*", hold)
    visitor.fill("#message", "1 + 2?")
    visitor.click("#send")
    visitor.click("#stop-response")
    visitor.locator('.side[data-side="0"] .figures', has_text="stopped").wait_for()
    assert visitor.evaluate("document.activeElement.id") == "message"
    visitor.fill("#message", "1 + 3?")
    visitor.click("#send")
    wait_for(lambda: len(requests) == 2)
    last = visitor.locator('.side[data-side="0"] .turn.user').last
    last.get_by_role("button", name="Edit").click()
    last.locator("textarea").fill("2 + 2?")
    last.get_by_role("button", name="Send").click()
    visitor.get_by_text("It is four.").wait_for()
    visitor.wait_for_selector("#stop-response", state="hidden")
    assert visitor.locator('.side[data-side="0"] .turn.user').count() == 2
    assert visitor.locator('.side[data-side="0"] .turn.assistant').count() == 2


def test_refused_message_leaves_no_empty_bubble(visitor, requests) -> None:
    error = json.dumps({"error": {"message": "The prompt is too long.", "code": "context_length_exceeded"}})
    visitor.route("**/api/chat/*", lambda route: route.fulfill(status=400, content_type="application/json", body=error))
    visitor.click("#new-chat")
    visitor.fill("#message", "A long question")
    visitor.click("#send")
    turn = visitor.locator(".turn.assistant", has_text="The prompt is too long.")
    turn.wait_for()
    assert not turn.locator(".bubble").is_visible()


def test_held_out_record_shows_its_answer_next_to_model_response(visitor, server, requests) -> None:
    visitor.click(".chat-head .menu summary")
    visitor.click("#held-out")
    reference = visitor.locator(".side[data-side=reference]")
    reference.get_by_text("validation example").wait_for()
    visitor.get_by_text("It is three.").wait_for()
    requested = requests[0]["messages"][-1]["content"]
    records = [json.loads(line) for line in (server.root / "data/train.jsonl").read_text().splitlines()]
    answers = [
        record["output"]
        for record in records
        if requested == "\n".join(filter(None, (record["instruction"], record["input"])))
    ]
    assert reference.locator(".text").inner_text().strip() in {answer.strip() for answer in answers}


def ask(visitor, question: str) -> None:
    visitor.click("#new-chat")
    visitor.fill("#message", question)
    visitor.click("#send")
    visitor.get_by_text("It is three.").wait_for()


def wait_until(visitor, held: list[object]) -> None:
    """Wait until a request is held. Its handler runs only while the browser is waited for."""
    for _ in range(100):
        if held:
            return
        visitor.wait_for_timeout(100)
    raise AssertionError("no request was held")


def select_conversation(visitor, question: str) -> None:
    visitor.click("#history")
    visitor.locator("#history-list .history-entry", has_text=question).locator("button.grow").click()


def test_conversation_that_cannot_be_read_is_not_replaced(visitor, server, requests) -> None:
    ask(visitor, "First question")
    ask(visitor, "Second question")
    shown = visitor.locator('.side[data-side="0"] .turn.user .text')
    visitor.route("**/api/chats/*", lambda route: route.fulfill(status=429, body="{}"))
    select_conversation(visitor, "First question")
    visitor.locator("#toast", has_text="The server returned HTTP 429.").wait_for()
    assert shown.all_inner_texts() == ["Second question"]
    visitor.reload()
    visitor.locator("#toast", has_text="The server returned HTTP 429.").wait_for()
    visitor.unroute("**/api/chats/*")
    visitor.reload()
    shown.get_by_text("Second question").wait_for()
    visitor.route("**/api/chats", lambda route: route.abort("connectionreset"))
    visitor.click("#history")
    visitor.locator("#toast", has_text="The server cannot be reached.").wait_for()
    chats = [json.loads(path.read_text()) for path in server.home.rglob("chats/*.json")]
    assert sorted(chat["turns"][0]["user"] for chat in chats) == ["First question", "Second question"]


def test_conversation_selected_last_is_shown(visitor, requests) -> None:
    for question in ("First question", "Second question"):
        ask(visitor, question)
    held: list[object] = []
    visitor.route("**/api/chats/*", lambda route: route.continue_() if held else held.append(route))
    select_conversation(visitor, "First question")
    wait_until(visitor, held)
    select_conversation(visitor, "Second question")
    shown = visitor.locator('.side[data-side="0"] .turn.user .text')
    shown.get_by_text("Second question").wait_for()
    held[0].continue_()
    visitor.wait_for_timeout(500)
    assert shown.all_inner_texts() == ["Second question"]


def test_model_selected_last_answers_and_unload_ends_all(visitor, server, requests) -> None:
    held: list[object] = []
    ended: list[str] = []
    other = {**ENGINE, "id": "f" * 12, "name": "model"}

    def begin(route) -> None:
        if route.request.method == "GET":
            route.fulfill(status=200, content_type="application/json", body=json.dumps({"engines": [ENGINE, other]}))
        elif "path" in json.loads(route.request.post_data):
            held.append(route)
        else:
            route.fulfill(status=200, content_type="application/json", body=json.dumps(ENGINE))

    def end(route) -> None:
        ended.append(route.request.url[-12:])
        route.fulfill(status=202, content_type="application/json", body="{}")

    visitor.unroute("**/api/engines")
    visitor.route("**/api/engines", begin)
    visitor.route("**/api/engines/*", end)
    first = visitor.locator("select[data-side='0']").input_value()
    visitor.select_option("select[data-side='0']", "path:model")
    wait_until(visitor, held)
    visitor.select_option("select[data-side='0']", first)
    visitor.locator("#engine-states", has_text="first ✓").wait_for()
    held[0].fulfill(status=200, content_type="application/json", body=json.dumps(other))
    visitor.wait_for_timeout(500)
    assert "first ✓" in visitor.inner_text("#engine-states")
    with visitor.expect_request("**/api/chat/*") as request:
        ask(visitor, "1 + 2?")
    assert request.value.url.endswith(ENGINE["id"])
    visitor.click(".chat-head .menu summary")
    with visitor.expect_response(f"**/api/engines/{other['id']}"):
        visitor.click("#unload")
    assert sorted(ended) == [ENGINE["id"], other["id"]]


def test_tool_result_waits_for_the_response_of_the_other_model(visitor, server, requests) -> None:
    held: list[object] = []

    def answer(route) -> None:
        messages = json.loads(route.request.post_data)["messages"]
        if messages[-1]["role"] == "tool":
            deltas = ({"content": "It is five."},)
        elif not held:
            held.append(route)
            return
        else:
            deltas = call(0, "{}")
        route.fulfill(status=200, content_type="text/event-stream", body=chunks(*deltas))

    visitor.unroute("**/api/chat/*")
    visitor.route("**/api/chat/*", answer)
    visitor.select_option("select[data-side='1']", "path:model")
    visitor.locator('#engine-states [data-side="1"]', has_text="✓").wait_for()
    visitor.get_by_text("Generation settings", exact=True).click()
    visitor.fill("#tools", json.dumps(TOOLS))
    visitor.fill("#message", "2 + 3?")
    visitor.click("#send")
    visitor.locator(".result-form textarea").fill("5")
    visitor.locator(".result-form button").click()
    wait_until(visitor, held)
    held[0].fulfill(status=200, content_type="text/event-stream", body=chunks({"content": "It is four."}))
    visitor.get_by_text("It is four.").wait_for()
    visitor.get_by_text("It is five.").wait_for()
    visitor.wait_for_selector("#stop-response", state="hidden")


def test_webchat_opens_conversation_with_model_of_inference_file(chromium, tmp_path) -> None:
    shutil.copytree(Path(burnish.__file__).parent / "demo/model", tmp_path / "model")
    (tmp_path / "inference.yaml").write_text("model_name_or_path: model\ntemplate: default\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "burnish", "webchat", "inference.yaml", "web_port=0"], cwd=tmp_path,
        env={**os.environ, "BURNISH_HOME": str(tmp_path / "home")}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    page = chromium.new_page()
    try:
        page.goto(child.stdout.readline().split()[1])
        page.wait_for_url("**/chat")
        page.locator("#engine-states", has_text="inference.yaml ✓").wait_for(timeout=90_000)
        page.fill("#message", "What is 2 + 3?")
        page.click("#send")
        page.locator(".turn.assistant .text:not(:empty)").wait_for(timeout=60_000)
    finally:
        page.close()
        child.terminate()
        child.wait(20)
