"""Images in the web UI's chat: picked, pasted or dropped, sent as data URIs, kept in the tab only."""

from __future__ import annotations

import base64
import json

import pytest

from browser.conftest import wait_for
from vision_models import image_models

pytestmark = [pytest.mark.run, pytest.mark.slow]
PASTE = """async ([name, encoded, kind]) => {
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: "image/png" }));
  const event =
    kind === "paste"
      ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
      : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector(kind === "paste" ? "#message" : ".chat").dispatchEvent(event);
}"""


def stored_chats(server) -> str:
    """Return the content of all saved conversations."""
    return "".join(path.read_text() for path in server.home.rglob("chats/*.json"))


@pytest.fixture
def chat(visitor, server):
    """The chat page, with the files of a vision model with random weights."""
    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained(server.root / "vision")
    image_models().save_processor(processor, server.root / "vision")
    image_models().write_images(server.root / "files", ["p1_64x48.png", "p2_48x64.png", "p3_80x60.png"])
    visitor.goto(f"{server.address}/chat")
    return visitor


def load_engine(chat, server):
    """Load the model through the page's routes, so that the conversation has an engine."""
    chat.evaluate(
        """async (path) => fetch("api/engines", {method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify({path})})""",
        str(server.root / "vision"),
    )


def test_images_are_picked_pasted_dropped_and_sent(chat, server):
    requests = []

    def answer(route):
        requests.append(json.loads(route.request.post_data))
        if route.request.url.endswith("/tokens"):
            body = {"count": 12, "images": [{"width": 64, "height": 48, "tokens": 4}]}
            route.fulfill(status=200, content_type="application/json", body=json.dumps(body))
            return
        chunk = {"choices": [{"delta": {"content": "A square."}}]}
        route.fulfill(
            status=200, content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        )

    engine = {"id": "e" * 12, "name": "vision", "state": "ready", "said": ""}
    chat.route("**/api/engines", lambda route: route.fulfill(
        status=200, content_type="application/json",
        body=json.dumps(engine if route.request.method == "POST" else {"engines": [engine]}),
    ))  # fmt: skip
    chat.route("**/api/chat/**", answer)
    chat.reload()
    choice = chat.locator('select[data-side="0"]')
    choice.select_option(index=1)
    chat.locator("#engine-states", has_text="✓").wait_for()

    chat.set_input_files("#pick-image", str(server.root / "files" / "p1_64x48.png"))
    chat.locator("#attached .thumb", has_text="p1_64x48.png 64x48, 4 tokens").wait_for()
    for name, kind in (("p2_48x64.png", "paste"), ("p3_80x60.png", "drop")):
        encoded = base64.b64encode((server.root / "files" / name).read_bytes()).decode()
        chat.evaluate(PASTE, [name, encoded, kind])
        chat.locator("#attached .thumb", has_text=name).wait_for()
    chat.get_by_role("button", name="Remove p3_80x60.png").click()
    assert chat.locator("#attached .thumb").count() == 2
    chat.fill("#message", "What is it?")
    chat.click("#send")
    chat.get_by_text("A square.").wait_for()
    assert chat.locator("#attached .thumb").count() == 0
    assert chat.locator('.side[data-side="0"] .turn.user .thumb img').count() == 2

    parts = next(body for body in reversed(requests) if body.get("stream"))["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    sent = base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2])
    assert sent == (server.root / "files" / "p1_64x48.png").read_bytes()
    wait_for(lambda: "What is it?" in stored_chats(server))  # saved after the response
    stored = stored_chats(server)
    assert "base64" not in stored
    chat.reload()
    chat.locator(".turn.user .thumb", has_text="not saved").first.wait_for()


def test_model_on_the_page_responds_to_an_image(chat, server):
    load_engine(chat, server)
    path = server.root / "files" / "p1_64x48.png"
    uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What?"}]
    fetch_script = """async (messages) => {
      const engines = (await (await fetch("api/engines")).json()).engines;
      if (engines[0]?.state !== "ready") return engines[0];
      const headers = { "Content-Type": "application/json" }, method = "POST";
      const told = {};
      for (const path of ["/tokens", ""]) {
        const body = JSON.stringify({ messages, max_tokens: 3 });
        told[path] = await (await fetch(`api/chat/${engines[0].id}${path}`, { method, headers, body })).json();
      }
      return told;
    }"""
    result = None
    for _ in range(240):
        result = chat.evaluate(fetch_script, [{"role": "user", "content": parts}])
        if result and "" in result:
            break
        assert not result or result.get("state") != "ended", result
        chat.wait_for_timeout(500)
    assert result["/tokens"]["images"] == [{"width": 64, "height": 48, "tokens": 4}]
    assert result[""]["usage"]["completion_tokens"] <= 3
    assert result[""]["usage"]["prompt_tokens"] == result["/tokens"]["count"]


@pytest.fixture
def image_records(chat, server):
    """Image records with files inside the server's folder."""
    names = ["p1_64x48.png", "p2_48x64.png", "p3_80x60.png"]
    records = [
        {"instruction": "<image>What is it?", "output": "A square.", "images": [f"files/{name}"]} for name in names
    ]
    (server.root / "photos.json").write_text(json.dumps(records))
    columns = {"prompt": "instruction", "response": "output", "images": "images"}
    entry = {"file_name": "photos.json", "columns": columns}
    (server.root / "dataset_info.json").write_text(json.dumps({"photos": entry}))
    return chat


def is_displayed(image) -> bool:
    image.wait_for()
    return image.evaluate("async (node) => { await node.decode(); return node.naturalWidth > 0; }")


def test_plan_examples_show_their_images(image_records, server):
    image_records.goto(f"{server.address}/new")
    image_records.wait_for_selector("#box-model_name_or_path", timeout=180_000)
    for name, value in {"model_name_or_path": "vision", "dataset": "photos.json", "output_dir": "saves/a"}.items():
        image_records.fill(f"#box-{name}", value)
    image = image_records.locator("#sample .thumb img").first
    image.wait_for(timeout=120_000)
    assert is_displayed(image)
    assert "48" in image_records.locator("#sample .thumb figcaption").first.inner_text()


def test_predictions_show_images_of_their_prompts(image_records, server):
    image_records.goto(f"{server.address}/evaluate")
    image_records.wait_for_selector("#job-form button.main:not([disabled])")
    image_records.select_option("#source", label="vision")
    image_records.select_option("#dataset", index=0)
    image_records.click("#job-form button.main")
    image = image_records.locator(".predictions .thumb img").first
    image.wait_for(timeout=180_000)
    assert is_displayed(image)
    assert image_records.locator(".predictions .prediction").count() == 3
    assert "A square." in image_records.locator(".predictions").inner_text()
    run = image_records.evaluate("async () => (await (await fetch('api/runs')).json()).runs[0].id")
    image_records.goto(f"{server.address}/runs/{run}")
    assert is_displayed(image_records.locator("#panel-predictions .thumb img").first)
