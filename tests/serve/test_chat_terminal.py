"""``burnish chat``: commands, escaping of terminal control characters, single messages from a pipe."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from burnish.config.errors import UserError
from burnish.report.streams import OutputError, visible
from burnish.serve.chat.backends import AnswerEnded, Event, Request
from burnish.serve.chat.command import chat
from burnish.serve.chat.console import Console, is_typed
from burnish.serve.chat.help import HELP
from burnish.serve.chat.records import read_image
from burnish.serve.chat.session import ChatSession
from small_run import make_model

pytestmark = pytest.mark.run

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class ScriptedBackend:
    """Backend that returns scripted answers and records the requests."""

    name, adapters = "scripted", ("poet",)
    has_reasoning: bool | None = True

    def __init__(self, *answers) -> None:
        self.waiting, self.requests = list(answers), []

    def answer(self, request: Request):
        self.requests.append(request)
        for event in self.waiting.pop(0) if self.waiting else [Event("content", "Yes.")]:
            if event is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield event
        yield Event("end", end=AnswerEnded("stop", 2, 0.1, 0.2, 90, (1, 2), (3, 4), (0.9, 0.05)))

    def pieces(self, ids):
        return [(f"w{i}", i == 1) for i in ids]

    def defaults(self):
        return {"temperature": 0.95}

    def num_tokens(self, url):
        return None

    def close(self) -> None: ...


def talk_of(*answers) -> tuple[ChatSession, ScriptedBackend, io.StringIO]:
    out, backend = io.StringIO(), ScriptedBackend(*answers)
    return ChatSession(backend, Console(out=out)), backend, out


def roles(talk: ChatSession) -> list[str]:
    return [message["role"] for message in talk.messages]


def test_full_closed_or_ascii_output_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, pytest.raises(OutputError, match="no space left on device"):
        Console(out=full).stream("Yes.")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(out=narrow).say("河 …")
    assert narrow.buffer.getvalue() == b"\\u6cb3 ...\n"
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stdin", None)
    console = Console()
    console.say("Yes.")
    console.keep_history()
    assert not is_typed()


def test_message_gets_a_response_and_extends_the_conversation() -> None:
    talk, backend, out = talk_of()
    assert talk.take("Hello?") == 0
    talk.take("And now?")
    assert roles(talk) == ["user", "assistant"] * 2
    assert [m["content"] for m in backend.requests[1].messages] == ["Hello?", "Yes.", "And now?"]
    assert "2 tokens, 10.0 tokens/s, first token after 0.10 s, 90 tokens of context left" in out.getvalue()


def test_retry_undo_and_edit_revert_turns() -> None:
    talk, backend, _ = talk_of()
    talk.settings = {"seed": 7}
    talk.take("One?")
    talk.take("/retry")
    assert [request.settings["seed"] for request in backend.requests] == [7, 8]
    talk.take("Two?")
    talk.take("/undo")
    assert roles(talk) == ["user", "assistant"]
    talk.take("/edit")
    assert (talk.messages, talk._prefill) == ([], "One?")
    talk.take("/undo")  # no message is left
    assert talk.messages == []


def test_message_that_begins_with_clear_is_sent() -> None:
    talk, backend, _ = talk_of()
    talk.take("clear skies today?")
    talk.take("clear")
    assert [request.messages[-1]["content"] for request in backend.requests] == ["clear skies today?"]
    assert talk.messages == []


def test_system_message_restarts_the_conversation() -> None:
    talk, backend, _ = talk_of()
    talk.take("One?")
    talk.take("/system Be brief.")
    talk.take("Two?")
    assert [m["role"] for m in backend.requests[-1].messages] == ["system", "user"]


def test_settings_can_be_typed_and_show_their_source() -> None:
    talk, _, out = talk_of()
    talk.take("/set temperature=0.2 seed=5 do_sample=false")
    assert talk.settings == {"temperature": 0.2, "seed": 5, "do_sample": False}
    assert talk.take("/set temprature=1") == 1
    assert 'Did you mean "temperature"?' in out.getvalue()
    talk.take("/set temperature=")
    talk.take("/set")
    assert "temperature" not in talk.settings
    assert "0.95         the model" in out.getvalue()


def test_thoughts_are_shown_or_summarized_and_stored_separately() -> None:
    thinking = [Event("thought", "Hm."), Event("content", "Yes.")]
    talk, backend, out = talk_of(thinking, thinking)
    talk.take("One?")
    assert talk.messages[-1]["reasoning_content"] == "Hm."
    talk.take("/think hide")
    talk.take("Two?")
    assert out.getvalue().count("Hm.") == 1
    assert "3 characters" in out.getvalue()
    talk.take("/think off")
    talk.take("Three?")
    assert [request.enable_thinking for request in backend.requests] == [None, True, False]


def test_reasoning_of_a_template_without_it_cannot_be_switched() -> None:
    talk, backend, out = talk_of()
    backend.has_reasoning = False
    for switch in ("on", "off"):
        talk.take(f"/think {switch}")
        assert "The template of this model has no reasoning" in out.getvalue()
    talk.take("/think hide")
    talk.take("One?")
    assert [request.enable_thinking for request in backend.requests] == [None]


def test_tool_call_is_shown_and_waits_for_its_result(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([TOOL["function"]]))
    talk, backend, out = talk_of([Event("call", call={"name": "f", "arguments": '{"a": 1}'})])
    talk.take(f"/tools {tmp_path / 'tools.json'}")
    talk.take("Call.")
    assert backend.requests[0].tools == (TOOL,)
    assert '│ {"a": 1}' in out.getvalue()
    assert talk.take("Go on.") == 1  # a call has no result yet
    talk.take("/answer 42")
    assert roles(talk) == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[2]["tool_call_id"] == talk.messages[1]["tool_calls"][0]["id"]


def test_stopped_response_is_kept_and_marked() -> None:
    talk, _, out = talk_of([Event("content", "Once upon"), KeyboardInterrupt])
    assert talk.take("Tell.") == 0
    assert talk.messages[-1]["content"] == "Once upon"
    assert "[stopped]" in out.getvalue()


def test_missing_response_leaves_conversation_unchanged() -> None:
    talk, backend, out = talk_of()
    talk.take("One?")
    before = list(talk.messages)

    def refuse(request):
        raise UserError("the prompt has 1,800 tokens.")
        yield

    backend.answer = refuse
    for line in ("Too long.", "/retry"):
        assert talk.take(line) == 1
        assert talk.messages == before
    del backend.answer
    backend.waiting = [[KeyboardInterrupt]]
    talk.take("Stopped before the first word?")
    assert talk.messages == before
    assert "1,800 tokens" in out.getvalue()


def test_help_and_sentences_wrap_at_terminal_width(monkeypatch) -> None:
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        talk, _, out = talk_of()
        talk.take("/help")
        assert max(map(len, out.getvalue().splitlines())) < columns
        assert " ".join(out.getvalue().split()) == " ".join(HELP.split())
    assert "\n" + " " * 22 + "p=0.9" not in out.getvalue()
    assert "\n/new, /exit           new conversation" in out.getvalue()


def test_failed_response_removes_its_question() -> None:
    talk, _, out = talk_of([Event("end", end=AnswerEnded("failed", error="non_finite_logits"))])
    talk.backend.answer = lambda request: iter([Event("end", end=AnswerEnded("failed", error="non_finite_logits"))])
    talk.backend.answer = _closable(talk.backend.answer)
    assert talk.take("One?") == 1
    assert talk.messages == []
    assert "non_finite_logits" in out.getvalue()


def _closable(answer):
    def generator(request):
        yield from answer(request)

    return generator


def test_adapters_can_be_switched_and_compared() -> None:
    talk, backend, _ = talk_of()
    talk.take("/adapter poet")
    talk.take("One?")
    talk.take("/both base")
    assert [request.adapter for request in backend.requests] == ["poet", "poet", ""]
    assert roles(talk) == ["user", "assistant"]
    assert talk.take("/adapter pote") == 1


def test_saved_conversation_is_a_record_and_never_overwritten(tmp_path: Path) -> None:
    talk, _, _ = talk_of()
    talk.take("/system Be brief.")
    talk.take("One?")
    talk.take(f"/save {tmp_path / 'a.jsonl'}")
    record = json.loads((tmp_path / "a.jsonl").read_text())
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    assert talk.take(f"/save {tmp_path / 'a.jsonl'}") == 1
    other, _, _ = talk_of()
    other.take(f"/load {tmp_path / 'a.jsonl'}")
    assert (other.system, roles(other)) == ("Be brief.", ["user", "assistant"])


WEATHER_CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("call", [WEATHER_CALL, {"function": WEATHER_CALL}, {"id": "x", "function": WEATHER_CALL}])
def test_record_of_training_can_be_continued(call: dict, is_text: bool, tmp_path: Path) -> None:
    """Tool calls may lack ids and content, and tools may be functions or JSON text."""
    tools = [TOOL["function"]]
    record = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Call."}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."},
        ],
        "tools": json.dumps(tools) if is_text else tools,
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(record))
    talk, backend, out = talk_of()
    assert talk.take(f"/load {tmp_path / 'a.json'}") == 0
    for line in ("/system", "/tools", "And now?", "/undo", "/undo"):
        assert talk.take(line) == 0
    assert "Be brief." in out.getvalue()
    (request,) = backend.requests
    assert request.tools == (TOOL,)
    tool_call = request.messages[2]["tool_calls"][0]
    assert tool_call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert request.messages[3]["tool_call_id"] == tool_call["id"] == call.get("id", "call00200")
    assert talk.messages == []


def of_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a record with one message of one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([], 'must contain a record with "messages"'),
        ({"messages": [{"role": "user"}]}, 'message 1 must have "content"'),
        ({"messages": [{"role": "robot", "content": ""}]}, 'message 1 must have a "role"'),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, 'each of "tool_calls" must have'),
        ({"messages": [], "tools": [5]}, "a JSON list of tools"),
        ({"messages": [], "tools": "["}, '"tools" is not valid JSON'),
        ({"messages": [], "tools": 5}, "a JSON list of tools"),
        ({"messages": [], "tools": "true"}, "a JSON list of tools"),
        (of_part({"type": "text", "text": None}), 'message 1 must have "content"'),
        (of_part({"type": "image_url", "image_url": "a.png"}), '"image_url": {"url"'),
    ],
    ids=str,
)
def test_file_without_a_conversation_is_reported(record: Any, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record))
    talk, _, out = talk_of()
    talk.take("One?")
    assert talk.take(f"/load {tmp_path / 'a.json'}") == 1
    assert expected in out.getvalue().replace("\n", " ")
    assert roles(talk) == ["user", "assistant"]


def test_edited_message_keeps_its_images(image_file: Path) -> None:
    talk, backend, out = talk_of()
    talk.take(f"/image {image_file}")
    talk.take("What is this?")
    talk.take("/edit")
    assert "Images of the message: 1." in out.getvalue()
    talk.take("What is that?")
    first, second = (request.messages[-1]["content"] for request in backend.requests)
    assert first[0] == second[0]
    assert second[1]["text"] == "What is that?"


def test_truncated_image_is_refused_with_its_name(image_file: Path) -> None:
    """The header of the file is valid."""
    content = image_file.read_bytes()
    image_file.write_bytes(content[: len(content) - 30])
    with pytest.raises(UserError, match=re.escape(str(image_file))):
        read_image(image_file)


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "i.png")
    return tmp_path / "i.png"


@pytest.mark.parametrize(
    "pair",
    [
        "temperature=-3", "temperature=nan", "top_p=0", "top_p=7", "top_k=-4", "min_p=2", "repetition_penalty=0",
        "max_new_tokens=0", "presence_penalty=3", f"seed={2**63}",
    ],
)  # fmt: skip
def test_setting_out_of_range_is_refused(pair: str) -> None:
    talk, _, out = talk_of()
    name = pair.partition("=")[0]
    assert talk.take(f"/set {pair}") == 1
    assert name not in talk.settings
    assert "must be" in out.getvalue()
    talk.take(f"/set {name}=1")
    assert talk.take(f"/set {pair}") == 1
    assert talk.settings[name] == 1  # the earlier setting is kept


def test_tokens_can_be_inspected() -> None:
    talk, _, out = talk_of()
    assert talk.take("/tokens") == 1
    talk.take("One?")
    talk.take("/tokens p")
    assert "w3(90%)·w4(5%)" in out.getvalue()
    assert "[1, 2]" in out.getvalue()


def test_ctrl_c_after_the_last_token_does_not_end_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, _, out = talk_of([Event("content", "a"), Event("end", end=AnswerEnded("stop"))])

    def print_wrapped(text: str, color: str = "") -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(talk.console, "print_wrapped", print_wrapped)
    assert talk.take("One?") == 0
    assert "[stopped]" in out.getvalue()


def test_unknown_command_suggests_nearest() -> None:
    talk, _, out = talk_of()
    assert talk.take("/retyr") == 1
    assert 'Did you mean "retry"?' in out.getvalue()


def test_model_output_cannot_control_the_terminal() -> None:
    talk, _, out = talk_of([Event("content", "a\x1b]52;c;AAAA\x07b\r\x7f\u202ec")])
    talk.take("One?")
    assert "a␛]52;c;AAAA␇b␍␡�c" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert visible("tab\tline\n") == "tab\tline\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "burnish", "chat", *argv]


@pytest.mark.slow
def test_piped_message_prints_only_its_response(model: Path) -> None:
    argv = command(str(model), "max_new_tokens=5", "do_sample=false")
    runs = [subprocess.run(argv, input="Hello", capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.count("\n") <= 6
    assert not runs[0].stderr


@pytest.mark.parametrize("argv", [[], ["--once", "caf\udce9"], ["--once", "hi", "--system", "caf\udce9"]])
def test_message_that_is_not_utf8_is_refused_before_the_model_is_loaded(monkeypatch, argv: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="is not valid UTF-8 text, at character 4"):
        chat(["missing-model", *argv])


def test_empty_message_is_refused_before_the_model_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" \n"), encoding="utf-8"))
    for argv in ([], ["--once", ""]):
        with pytest.raises(UserError, match="message is empty"):
            chat(["missing-model", *argv])


@pytest.mark.slow
def test_options_of_predictions_are_reported_as_without_effect(model: Path) -> None:
    argv = command(str(model), "--once", "Hello", "max_new_tokens=2", "num_beams=3", "infer_context=64")
    run = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, '"num_beams" has no effect here: it applies to predictions only.\n')


@pytest.fixture
def endless_model(tmp_path: Path) -> Path:
    """Save a model that always responds with "a" until it is stopped, also when sampling."""
    folder = make_model(tmp_path / "model", max_position_embeddings=4096)
    model = LlamaForCausalLM.from_pretrained(folder)
    token = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("a")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[token] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_conversation_in_a_terminal_works(endless_model: Path, tmp_path: Path) -> None:
    main, child = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command(str(endless_model), "max_new_tokens=5"), stdin=child, stdout=child, stderr=child, env=environment
    )
    seen = ""

    def read_until(text: str, more: int = 0, key: bytes = b"") -> None:
        """Read until ``text`` and ``more`` characters appear, and type ``key`` at each second of waiting."""
        nonlocal seen
        until, typed = time.monotonic() + 120, time.monotonic()
        while text not in seen or len(seen) < seen.index(text) + len(text) + more:
            assert process.poll() is None, seen
            assert time.monotonic() < until, seen
            if key and time.monotonic() > typed + 1:
                typed = time.monotonic()
                os.write(main, key)
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 4096).decode("utf-8", "replace")

    read_until("> ")
    assert "/help lists the commands" in seen
    os.write(main, b"Hello\n")
    read_until("context left")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    # Python handles a signal that arrives just before readline waits only at the next key.
    read_until("Ctrl-C again", key=b" \x7f")
    os.write(main, b"/set max_new_tokens=4000\nTell me.\n")
    read_until("> Tell me.\r\n", more=20)  # after the prompt: text typed ahead is shown once before it
    process.send_signal(signal.SIGINT)
    read_until("[stopped]")
    os.write(main, b"/exit\n")
    assert process.wait(30) == 0
    os.close(main)
    os.close(child)
    history = tmp_path / "burnish" / "chat_history"
    assert "Hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_unreachable_url_is_reported() -> None:
    from burnish.serve.chat.backends import ServerBackend

    with pytest.raises(UserError, match="cannot connect"):
        ServerBackend("http://127.0.0.1:9/v1")
