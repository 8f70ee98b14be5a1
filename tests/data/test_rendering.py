"""Chat templates are rendered in a worker process with a time limit, with the same text as transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import burnish
from burnish.config.errors import UserError
from burnish.data.chat import rendering
from burnish.data.chat.rendering import PROMPT, WHOLE, Conversation, chat_ids, marked_ids, render

LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
POWER = "{% set x = 9 %}{{ x ** (x ** (x * 2)) }}"  # a single bytecode instruction, which signals do not interrupt
CHAT = [{"role": "user", "content": "你好 \ud800 <|im_end|>"}, {"role": "assistant", "content": None, "x": (1, 2)}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(burnish.__file__).parent / "demo" / "model")


def test_time_limit_ends_with_its_block(tokenizer: Any) -> None:
    limit_s = rendering._workers.limit_s
    with (
        pytest.raises(UserError, match=r"took more than 0\.3 s"), rendering.limit_rendering(0.3)
    ):  # fmt: skip
        render(tokenizer, [Conversation(CHAT)], LOOPS)
    assert rendering._workers.limit_s == limit_s


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [LOOPS, POWER])
def test_endless_rendering_is_stopped_in_every_thread(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(rendering._workers, "limit_s", 0.3)
    errors: list[Exception] = []

    def work() -> None:
        try:
            render(tokenizer, [Conversation(CHAT)], body)
        except UserError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [str(error).partition(" to render ")[0] for error in errors] == [
        "the chat template took more than 0.3 s"
    ] * 2
    assert render(tokenizer, [Conversation(CHAT)], "{{ messages | length }}")[0].text == "2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 99999999999 }}", "its memory limit"),
        (
            "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "its memory limit",
        ),
        ("{% if %}", "line 1 of the chat template is not valid Jinja"),
        ("{{ raise_exception('no tools') }}", "the chat template raised an error: no tools"),
        ("{{ a.b.c }}", "the chat template raised an error: 'a' is undefined"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_rendering_error_belongs_to_its_conversation(tokenizer: Any, template: str, message: str) -> None:
    (result,) = render(tokenizer, [Conversation(CHAT)], template)
    assert message in str(result.error)


def test_texts_and_ids_match_transformers(tokenizer: Any) -> None:
    chats = [[{"role": "user", "content": f"{n} ä 你"}, {"role": "assistant", "content": "Ja."}] for n in range(3)]
    conversations = [Conversation(chat, parts=[WHOLE, PROMPT, (1, True)]) for chat in chats]
    expected = []
    for chat in chats:
        for part, is_prompt in ((chat, False), (chat, True), (chat[:1], True)):
            expected.append(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=is_prompt))
    assert [result.text for result in render(tokenizer, conversations)] == expected
    ids = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    assert chat_ids(tokenizer, [Conversation(chat) for chat in chats]) == ids


def test_assistant_masks_match_transformers(tokenizer: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}" \
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"  # fmt: skip
    chat = [{"role": role, "content": f"{role} says 你好 {n}"} for n in range(3) for role in ("user", "assistant")]
    original, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        expected = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert marked_ids(tokenizer, Conversation(chat)) == (expected["input_ids"], expected["assistant_masks"])
    finally:
        tokenizer.chat_template = original


def test_looping_templates_delay_no_other_thread(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _stop_worker()
    rendering._workers.reset()
    monkeypatch.setattr(rendering._workers, "LIMIT", 2)
    everyone = [
        threading.Thread(target=render, args=(tokenizer, [Conversation(CHAT)], "{{ messages | length }}"))
        for _ in range(rendering._workers.LIMIT)
    ]  # so that no worker has to start while the others loop
    for thread in everyone:
        thread.start()
    for thread in everyone:
        thread.join()
    assert len(rendering._workers.processes) == rendering._workers.LIMIT
    monkeypatch.setattr(rendering._workers, "limit_s", 1)
    stuck = rendering._workers.LIMIT - 1
    failures: list[str] = []

    def loop() -> None:
        try:
            render(tokenizer, [Conversation(CHAT)], LOOPS)
        except UserError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=loop) for _ in range(stuck)]
    for thread in threads:
        thread.start()
    while len(rendering._workers.processes) - len(rendering._workers._idle) < stuck:
        time.sleep(0.01)
    assert render(tokenizer, [Conversation(CHAT)], "{{ messages | length }}")[0].text == "2"
    assert failures == []
    for thread in threads:
        thread.join(30)
    assert len(failures) == stuck


@pytest.mark.run
def test_forked_process_gets_its_own_worker_and_stale_responses_are_dropped(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_text(word: str) -> str:
        return render(tokenizer, [Conversation([{"role": "user", "content": word}])], "{{ messages[0].content }}")[
            0
        ].text

    _stop_worker()  # workers of other tests
    assert render_text("a") == "a"
    child = os.fork()
    if child == 0:
        os._exit(0 if render_text("b") == "b" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_text("c") == "c"

    class Interrupted:
        def __init__(self, file: Any) -> None:
            self.file = file

        def readline(self) -> bytes:
            raise KeyboardInterrupt

    (process,) = rendering._workers._idle
    process.stdout, original = Interrupted(process.stdout), process.stdout  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        render_text("d")
    assert process.wait(10) != 0
    assert render_text("e") == "e"
    assert original is not None


def test_first_rendering_uses_a_worker_that_was_started_before(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = rendering._Workers()
    monkeypatch.setattr(rendering, "_workers", workers)
    rendering.start_rendering()
    rendering.start_rendering()
    (process,) = workers.processes
    assert render(tokenizer, [Conversation(CHAT[:1], variables={"x": 1})], "{{ x }}")[0].text == "1"
    assert workers.processes == [process]
    rendering.stop_rendering()
    process.wait(10)


@pytest.mark.run
@pytest.mark.parametrize("code", ["print('Welcome!')", "raise ImportError('no such library')"])
def test_library_that_prints_or_fails_on_import(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'transformers': {code}\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _stop_worker()
    chat = [Conversation([{"role": "user", "content": "x"}])]
    try:
        if "print" in code:
            assert render(tokenizer, chat, "{{ messages[0].content }}")[0].text == "x"
        else:
            with pytest.raises(UserError, match="ended with exit status 1"):
                render(tokenizer, chat)
    finally:
        _stop_worker()


def _stop_worker() -> None:
    rendering.stop_rendering()
    for process in rendering._workers.processes:
        process.wait()


@pytest.mark.slow
def test_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The worker ends even if the parent is killed during rendering."""
    script = f"""
import time
from transformers import AutoTokenizer
from burnish.data.chat import rendering
rendering._workers.limit_s = 2
tokenizer = AutoTokenizer.from_pretrained({str(Path(burnish.__file__).parent / "demo" / "model")!r})
chat = [{{"role": "user", "content": "x"}}]
rendering.render(tokenizer, [rendering.Conversation(chat)])
print(rendering._workers.processes[0].pid, flush=True)
rendering.render(tokenizer, [rendering.Conversation(chat)], {LOOPS!r})
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(burnish.__file__).parents[1])}
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    time.sleep(0.2)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_chat_templates_are_rendered_in_the_worker_only() -> None:
    """The demo is an exception: it renders the template of its own model."""
    package = Path(burnish.__file__).parent
    calls = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"(?<!\")\w\.apply_chat_template\b(?!`|\.__module__)", file.read_text("utf-8"))
    }
    assert calls == {
        "data/chat/rendering.py", "data/chat/render_worker.py", "demo/command.py", "demo/images.py", "report/card.py",
    }  # fmt: skip
