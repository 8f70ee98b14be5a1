"""The chat completions route: shapes, streams, queue, cancellation, and invalid bodies."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from burnish.config.errors import Problem
from burnish.inference.types import EngineFacts, StepOutput
from burnish.serve.api.responses import OutputQueue
from serve.client import CHAT, events, post, send
from serve.fakes import END, FakeServed, ScriptedEngine, saying

pytestmark = pytest.mark.run

PARTS = '<I think>Für 你好 👍🏽 [{"name": "add", "arguments": {"a": 1}}][{"name": "neg", "arguments": {}}]'


def fold(chunks: list) -> dict:
    """Return the complete response that a client assembles from a stream."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": {}, "logprobs": None})
            message, delta = choice["message"], part["delta"]
            for key in ("role", "content", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if part.get("logprobs"):
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            if part.get("token_ids"):
                choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
            if part["finish_reason"]:
                choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 3, "seed": 7},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"stop": ["好", "ü"]},
        {"max_tokens": 5},
        {"parallel_tool_calls": False},
        {"n": 2, "logprobs": True, "stop": "Ö", "max_completion_tokens": 40},
    ],
)
def test_complete_response_equals_concatenated_stream(serve, settings) -> None:
    running = serve(saying(PARTS))
    status, whole = post(running, "/v1/chat/completions", {**CHAT, **settings})
    assert status == 200
    _, headers, text = send(running, "POST", "/v1/chat/completions", {**CHAT, **settings, "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    *chunks, done = events(text)
    assert done == "[DONE]"
    folded = fold(chunks)["choices"]
    for one, other in zip(whole["choices"], folded, strict=True):
        expected = {key: value for key, value in one["message"].items() if value is not None}
        assert expected == {k: v for k, v in other["message"].items() if v or expected.get(k) == v}
        assert (one["finish_reason"], one["logprobs"]) == (other["finish_reason"], other["logprobs"])
        assert one.get("token_ids") == other.get("token_ids")


def test_parts_of_a_response_are_in_their_fields(serve) -> None:
    _, whole = post(serve(saying(PARTS)), "/v1/chat/completions", CHAT)
    choice = whole["choices"][0]
    assert choice["message"]["reasoning_content"] == "I think"
    assert choice["message"]["content"] == "Für 你好 👍🏽 "
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add", "neg"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert choice["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens"] == len(PARTS.encode()) + 1
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("I think>")
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_stream_starts_with_role_and_ends_with_usage_and_done(serve) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(send(serve(), "POST", "/v1/chat/completions", body)[2])
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in [*chunks, usage]}) == 1


def test_truncated_response_has_finish_reason_length(serve) -> None:
    _, whole = post(serve(), "/v1/chat/completions", {**CHAT, "max_tokens": 3})
    assert whole["choices"][0]["message"]["content"] == "hel"
    assert whole["choices"][0]["finish_reason"] == "length"


def test_engine_step_wakes_the_event_loop_once() -> None:
    class Loop:
        def __init__(self) -> None:
            self.calls: list[Callable[[], None]] = []

        def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
            self.calls.append(call)

    loop, result, other_result = Loop(), [], []
    outputs = OutputQueue(loop)
    callbacks = [outputs.to(result.append) for _ in range(8)]
    outputs.deliver(
        [(callback, StepOutput((number,))) for number, callback in enumerate([*callbacks, other_result.append])]
    )
    assert (len(loop.calls), result, other_result) == (1, [], [StepOutput((8,))])
    callbacks[0](StepOutput((9,)))
    assert len(loop.calls) == 1
    loop.calls.pop()()
    assert [output.ids for output in result] == [(number,) for number in (*range(8), 9)]
    outputs.deliver([(callbacks[0], StepOutput((10,)))])
    assert len(loop.calls) == 1


def test_stop_string_is_not_part_of_the_text_and_frees_the_slot(serve) -> None:
    running = serve(lambda ask: [*b"one two three", *[65] * 400])
    _, whole = post(running, "/v1/chat/completions", {**CHAT, "stop": "two"})
    assert whole["choices"][0]["message"]["content"] == "one "
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert running.engine.num_open == 0


def test_choice_i_is_sampled_with_seed_plus_i(serve) -> None:
    running = serve()
    post(running, "/v1/chat/completions", {**CHAT, "n": 3, "seed": 40})
    assert [ask.sampling.seed for ask in running.engine.asks] == [40, 41, 42]


def test_response_is_limited_to_remaining_context(serve) -> None:
    running = serve()
    long = {"model": "first", "messages": [{"role": "user", "content": "x" * 500}]}
    post(running, "/v1/chat/completions", {**long, "max_tokens": 100})
    assert running.engine.asks[0].max_new_tokens == 512 - len("user:\n") - 500
    status, body = post(running, "/v1/chat/completions", {**long, "messages": [{"role": "user", "content": "x" * 600}]})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "606" in body["error"]["message"]
    assert "512" in body["error"]["message"]


def test_unknown_fields_are_named_and_rejected_by_strict_server(serve) -> None:
    _, headers, _ = send(serve(), "POST", "/v1/chat/completions", {**CHAT, "tempratur": 1, "user": "me"})
    assert headers["x-burnish-ignored"] == "tempratur"
    status, body = post(serve(api_strict=True), "/v1/chat/completions", {**CHAT, "tempratur": 1})
    assert (status, body["error"]["param"]) == (400, "tempratur")


def test_unknown_fields_of_messages_and_other_objects_are_named(serve) -> None:
    asked = {"role": "user", "content": "a", "name": "Ada"}
    call = {"id": "c", "function": {"name": "f", "arguments": "{}", "output": 1}}
    replies = [
        {"role": "assistant", "content": "b", "function_call": {"name": "f"}, "annotations": [], "audio": None},
        {"role": "assistant", "tool_calls": [call]},
    ]
    odd = {
        "messages": [asked, replies[0], asked, replies[1], asked], "response_format": {"type": "text", "schema": {}},
        "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False, "x": 1},
    }  # fmt: skip
    status, headers, _ = send(serve(), "POST", "/v1/chat/completions", {**CHAT, **odd})
    assert status == 200
    assert sorted(headers["x-burnish-ignored"].split(", ")) == [
        "messages.function_call", "messages.name", "messages.tool_calls.function.output", "response_format.schema",
        "stream_options.x",
    ]  # fmt: skip
    status, body = post(serve(api_strict=True), "/v1/chat/completions", {**CHAT, "messages": [asked]})
    assert (status, body["error"]["param"]) == (400, "messages.name")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}), ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"model": "first", "tokens": [97]}),
    ],
)  # fmt: skip
def test_unknown_fields_of_other_routes_are_named_and_rejected_by_strict_server(serve, path, body) -> None:
    odd = {**body, "add_special_tokens": False}
    status, headers, _ = send(serve(), "POST", path, odd)
    assert (status, headers["x-burnish-ignored"]) == (200, "add_special_tokens")
    strict = serve(api_strict=True)
    assert post(strict, path, odd)[1]["error"]["param"] == "add_special_tokens"
    assert post(strict, path, body)[0] == 200


def test_fields_that_change_a_prompt_change_its_tokens(serve) -> None:
    running, known = serve(), []
    running.state.service.served.counted_prompt = lambda request: known.append(request) or ([1], [])
    reply, function = {"role": "assistant", "content": "Yes"}, {"type": "function", "function": {"name": "add"}}
    chat = {"messages": CHAT["messages"], "tools": [function], "tool_choice": "none", "reasoning_effort": "none"}
    assert post(running, "/tokenize", chat)[0] == 200
    assert (known[-1].offered, known[-1].reasoning_effort) == ([], "none")
    continued = {"messages": [*CHAT["messages"], reply], "add_generation_prompt": False}
    assert post(running, "/tokenize", continued)[0] == 200
    assert known[-1].continue_final_message
    for path in ("/tokenize", "/v1/chat/completions"):  # there is no prompt that ends with the message of a user
        assert post(running, path, {**CHAT, "add_generation_prompt": False})[1]["error"]["param"] == (
            "add_generation_prompt"
        )


def test_unknown_model_is_404_and_known_ones_are_listed(serve) -> None:
    status, body = post(serve(), "/v1/chat/completions", {**CHAT, "model": "gpt-4"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert "first, poet" in body["error"]["message"]


# --- queue, failures, disconnects -------------------------------------------------------------------------------------


def test_full_queue_is_429_with_retry_after(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 400, slots=1, waiting=1, pause_s=0.05))
    streams = [open_stream(running) for _ in range(2)]
    wait_for(lambda: running.engine.num_open == 2)
    status, headers, text = send(running, "POST", "/v1/chat/completions", CHAT)
    assert (status, json.loads(text)["error"]["code"]) == (429, "queue_full")
    assert headers["retry-after"] == "7"
    for stream in streams:
        stream.close()


def test_request_that_does_not_fit_is_not_partially_started(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 400, slots=1, waiting=0, pause_s=0.05))
    stream = open_stream(running)
    wait_for(lambda: running.engine.num_open == 1)
    assert post(running, "/v1/chat/completions", {**CHAT, "n": 3})[0] == 429
    assert running.engine.num_open == 1
    stream.close()


def test_disconnected_client_frees_its_slots(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 400, slots=4, waiting=0, pause_s=0.02))
    streams = [open_stream(running) for _ in range(4)]
    for stream in streams:
        read_until(stream, b"chat.completion.chunk")
        stream.close()
    began = time.monotonic()
    wait_for(lambda: running.engine.num_open == 0)
    assert time.monotonic() - began < 2
    assert len(running.engine.cancelled) == 4


def test_client_that_disconnects_during_a_response_frees_its_slot(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 400, pause_s=0.02))
    waiting = open_stream(running, stream=False)
    wait_for(lambda: running.engine.num_open == 1)
    waiting.close()
    wait_for(lambda: running.engine.num_open == 0)
    assert not running.state.service.in_progress


def test_randomly_disconnecting_clients_leave_no_slots_occupied(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 60, slots=8, waiting=64, pause_s=0.001))
    draw = random.Random(5)
    for _ in range(40):
        stream = open_stream(running, n=draw.choice([1, 2]), stream=draw.random() < 0.7)
        stream.settimeout(0.5)
        num_bytes = draw.randrange(400)
        try:
            while num_bytes > 0 and (part := stream.recv(min(num_bytes, 64))):
                num_bytes -= len(part)
        except TimeoutError:
            pass
        stream.close()
    wait_for(lambda: running.engine.num_open == 0 and not running.state.service.in_progress)
    assert post(running, "/v1/chat/completions", {**CHAT, "max_tokens": 2})[0] == 200


def test_slow_client_does_not_block_others_and_gets_larger_deltas(serve) -> None:
    running = serve(engine=ScriptedEngine(lambda ask: [65] * 480))
    slow = open_stream(running, receive_buffer=2048)
    time.sleep(0.3)
    assert post(running, "/v1/chat/completions", CHAT)[0] == 200
    wait_for(lambda: running.engine.num_open == 0)
    text = b""
    while part := slow.recv(65536):
        text += part
        if b"[DONE]" in part:
            break
    content = "".join(
        chunk["choices"][0]["delta"].get("content", "") for chunk in events(_unchunked(text))[:-1] if chunk["choices"]
    )
    assert content == "A" * 480


@pytest.mark.parametrize(
    ("code", "status"), [("out_of_memory", 503), ("non_finite_logits", 503), ("grammar_failed", 400), ("strange", 500)]
)
def test_engine_failure_is_an_error_object_or_last_stream_event(serve, code, status) -> None:
    running = serve()
    running.engine.error = Problem("There was none.", code=code)
    result, body = post(running, "/v1/chat/completions", CHAT)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert (result, body["error"]["type"]) == (status, kind)
    *_, last = events(send(running, "POST", "/v1/chat/completions", {**CHAT, "stream": True})[2])
    assert last["error"]["code"] == body["error"]["code"]


def test_all_routes_but_health_are_503_while_the_model_loads(serve) -> None:
    running = serve(is_ready=False)
    status, headers, text = send(running, "POST", "/v1/chat/completions", CHAT)
    assert (status, headers["retry-after"]) == (503, "2")
    assert json.loads(text)["error"]["code"] == "model_loading"
    assert send(running, "GET", "/healthz")[0] == 200
    status, _, text = send(running, "GET", "/readyz")
    assert (status, json.loads(text)["status"]) == (503, "loading")


def test_draining_server_accepts_no_new_requests(serve) -> None:
    running = serve()
    running.state.phase = "draining"
    status, body = post(running, "/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (503, "draining")
    assert json.loads(send(running, "GET", "/readyz")[2])["status"] == "draining"


def test_requests_during_shutdown_are_503_in_every_queue(serve, tmp_path, monkeypatch) -> None:
    running, opening = serve(media_root=str(tmp_path)), threading.Event()
    monkeypatch.setattr(
        "burnish.serve.api.image_access.ImageAccess.load_images", lambda _, request: (opening.wait(20), request)[1]
    )
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    with_image = {"model": "first", "messages": [{"role": "user", "content": parts}]}
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(send, running, "POST", "/v1/chat/completions", with_image) for _ in range(5)]
        wait_for(lambda: running.state.opening._work_queue.qsize() == 1)
        running.state.phase = "draining"
        for threads in (running.state.prompts, running.state.opening):  # as drain() does
            threads.shutdown(wait=False, cancel_futures=True)
        opening.set()
        answers.append(pool.submit(send, running, "POST", "/v1/chat/completions", CHAT))
        assert [answer.result()[0] for answer in answers] == [503] * 6
        assert {json.loads(answer.result()[2])["error"]["code"] for answer in answers} == {"draining"}


# --- text completions, tokens, the rest -------------------------------------------------------------------------------


def test_text_completion_with_echo_scores_the_prompt(serve) -> None:
    running = serve(saying("!?"))
    body = {"model": "first", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
    _, whole = post(running, "/v1/completions", body)
    choice = whole["choices"][0]
    assert choice["text"] == "abc!"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    *chunks, done = events(send(running, "POST", "/v1/completions", {**body, "stream": True})[2])
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc!"
    joined = [lp for c in chunks if c["choices"][0]["logprobs"] for lp in c["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == choice["logprobs"]["token_logprobs"]


def test_prompt_is_only_scored_if_no_tokens_are_requested(serve) -> None:
    body = {"model": "first", "prompt": [97, 98], "echo": True, "logprobs": 0, "max_tokens": 0}
    _, whole = post(serve(), "/v1/completions", body)
    assert whole["choices"][0]["text"] == "ab"
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert whole["usage"]["completion_tokens"] == 0


def test_prompt_may_fill_the_context_if_it_is_only_scored(serve) -> None:
    running = serve()
    body = {"model": "first", "prompt": "a" * 512, "echo": True, "logprobs": 0}
    status, whole = post(running, "/v1/completions", {**body, "max_tokens": 0})
    assert (status, len(whole["choices"][0]["logprobs"]["tokens"])) == (200, 512)
    status, refused = post(running, "/v1/completions", {**body, "max_tokens": 1})
    assert (status, refused["error"]["param"]) == (400, "prompt")


def test_several_prompts_have_choices_in_their_order(serve) -> None:
    running = serve(lambda ask: [*ask.ids, END])
    _, whole = post(running, "/v1/completions", {"model": "first", "prompt": ["ab", "cd"], "n": 2})
    assert [choice["text"] for choice in whole["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 4


def test_tokenize_and_detokenize_are_inverse(serve) -> None:
    running = serve()
    _, result = post(running, "/tokenize", {"model": "first", "prompt": "hé"})
    assert result == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 512, "pieces": ["h", "Ã", "©"]}
    assert post(running, "/detokenize", {"tokens": result["tokens"]})[1] == {"prompt": "hé"}
    assert post(running, "/tokenize", {"messages": CHAT["messages"]})[1]["count"] == len("user:hi\n")
    assert post(running, "/detokenize", {"tokens": [257]})[0] == 400
    assert post(running, "/detokenize", {"model": "other", "tokens": [97]})[0] == 404


def test_unknown_route_lists_the_existing_ones(serve) -> None:
    running = serve()
    status, _, text = send(running, "POST", "/v1/embeddings", {})
    assert (status, json.loads(text)["error"]["code"]) == (404, "unknown_url")
    status, headers, text = send(running, "GET", "/v1/chat/completions")
    assert (status, headers["allow"], json.loads(text)["error"]["code"]) == (405, "POST", "method_not_allowed")
    assert send(running, "GET", "/v1/models/")[0] == 404
    status, _, text = send(running, "POST", "/v1/score/evaluation", {"model": "first", "messages": ["a"]})
    assert status == 405
    status, body = post(running, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"})
    assert (status, body["error"]["code"]) == (403, "loading_not_allowed")


def test_metrics_count_responses(serve) -> None:
    running = serve()
    post(running, "/v1/chat/completions", CHAT)
    post(running, "/v1/chat/completions", {})
    _, headers, text = send(running, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'burnish_requests_total{route="/v1/chat/completions",status="200"} 1' in text
    assert 'burnish_requests_total{route="/v1/chat/completions",status="400"} 1' in text
    assert "burnish_first_token_seconds_count 1" in text
    assert "burnish_ready 1" in text


def test_open_webui_requests_run_concurrently(serve) -> None:
    """Open WebUI sends concurrent requests for one message: a streamed chat, a title, and tags."""
    running = serve(engine=ScriptedEngine(lambda ask: [*b"<so>Hello", END], slots=4, pause_s=0.01))
    assert [one["id"] for one in json.loads(send(running, "GET", "/v1/models")[2])["data"]] == ["first"]
    streamed = open_stream(running, stream_options={"include_usage": True})
    for prompt in ("Write a title.", "Write tags as JSON."):
        body = {**CHAT, "messages": [{"role": "user", "content": prompt}], "stream": False, "max_completion_tokens": 50,
                "metadata": {"chat_id": "1"}, "user": "me"}  # fmt: skip
        assert post(running, "/v1/chat/completions", body)[1]["choices"][0]["message"]["reasoning_content"] == "so"
    read_until(streamed, b"[DONE]")
    streamed.close()
    command = [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]  # without the reasoning
    assert post(running, "/v1/chat/completions", {**CHAT, "messages": [*CHAT["messages"], *command]})[0] == 200


def open_stream(running, receive_buffer: int = 0, **settings) -> socket.socket:
    """Send a streaming request without reading its response."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 480, **settings}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{running.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stream = socket.socket()
    if receive_buffer:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    stream.connect(("127.0.0.1", running.port))
    stream.settimeout(10)
    stream.sendall(head.encode() + body)
    return stream


def read_until(stream: socket.socket, expected: bytes) -> None:
    text = b""
    while expected not in text:
        part = stream.recv(4096)
        assert part, text
        text += part


def wait_for(condition, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "The condition was not met in time."
        time.sleep(0.01)


def _unchunked(raw: bytes) -> str:
    """Return the body of a chunked response."""
    rest, body = raw.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size.strip():
            continue
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


def test_transformers_client_finds_model_loaded(serve) -> None:
    running = serve()
    status, _, text = send(running, "POST", "/load_model", {"model": "first"})
    assert (status, events(text)) == (200, [{"status": "ready", "cached": True}])
    assert send(running, "POST", "/load_model", {"model": "somebody/else"})[0] == 404
    assert send(running, "POST", "/load_model", {})[0] == 400


# --- limits per request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ä" * 9000}]}, "messages"),
        ("/v1/completions", {"prompt": ["a", "b" * 9000]}, "prompt"),
        ("/tokenize", {"prompt": "b" * 9000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "ä" * 9000}]}, "messages"),
    ],
)
def test_oversized_prompt_is_rejected_before_tokenization(serve, monkeypatch, path, body, param) -> None:
    running, recorded = serve(), []
    monkeypatch.setattr(FakeServed, "text_prompt", lambda self, prompt: recorded.append(len(prompt)) or [1])
    monkeypatch.setattr(FakeServed, "chat_prompt", lambda self, request: recorded.append(9000) or [1])
    status, answer = post(running, path, {"model": "first", **body})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", param)
    assert "at most 8,192" in answer["error"]["message"]
    assert 9000 not in recorded


def test_prompt_log_probabilities_are_limited(serve) -> None:
    body = {"model": "first", "prompt": [[1] * 400] * 64, "echo": True, "max_tokens": 0}
    status, answer = post(serve(), "/v1/completions", {**body, "logprobs": 20})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert "537,600 log-probabilities" in answer["error"]["message"]
    status, answer = post(serve(), "/v1/completions", {**body, "logprobs": 1})
    assert (status, len(answer["choices"])) == (200, 64)


def test_request_of_many_prompts_does_not_block_others(serve, monkeypatch) -> None:
    """Prompts are tokenized in turns, and each finished one makes room for a waiting one."""
    running = serve(saying("x" * 5), engine=ScriptedEngine(saying("x" * 5), slots=2, waiting=4, pause_s=0.02))
    plain = FakeServed.text_prompt
    monkeypatch.setattr(FakeServed, "text_prompt", lambda self, prompt: time.sleep(0.02) or plain(self, prompt))
    ends: list[tuple[str, float]] = []

    def many() -> None:
        status, answer = post(running, "/v1/completions", {"model": "first", "prompt": ["p"] * 40, "max_tokens": 5})
        ends.append(("many", time.monotonic()))
        assert (status, len(answer["choices"])) == (200, 40)

    thread = threading.Thread(target=many)
    thread.start()
    time.sleep(0.1)
    for _ in range(3):
        assert post(running, "/v1/chat/completions", CHAT)[0] == 200
        ends.append(("one", time.monotonic()))
    thread.join(30)
    assert [name for name, _ in ends] == ["one", "one", "one", "many"]


class _SlowEngine(ScriptedEngine):
    """Engine with a known rate."""

    def facts(self) -> EngineFacts:
        return replace(super().facts(), tokens_per_second=100.0)


def test_pending_choices_of_another_request_do_not_reject_a_request(serve) -> None:
    """40 choices of 400 tokens take 160 s at this rate, but only two run before the next request, which has a slot."""
    running = serve(engine=_SlowEngine(lambda ask: [65] * 400, slots=3, waiting=4, pause_s=0.002), api_timeout=20)
    many = {"model": "first", "prompt": ["p"] * 40, "max_tokens": 400}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(post, running, "/v1/completions", many)
        wait_for(lambda: running.engine.num_open == 2)
        assert post(running, "/v1/chat/completions", {**CHAT, "max_tokens": 2})[0] == 200
        running.engine.script = lambda ask: [65]


def test_request_waiting_for_rendering_of_others_times_out(serve, monkeypatch) -> None:
    monkeypatch.setattr("burnish.serve.api.app.PROMPT_WAIT_S", 0.2)
    running = serve()
    running.state.prompts.submit(10, time.sleep, 0.6)
    status, headers, text = send(running, "POST", "/v1/chat/completions", CHAT)
    assert (status, json.loads(text)["error"]["code"]) == (429, "queue_full")
    assert headers["retry-after"]
    assert post(running, "/v1/chat/completions", CHAT)[0] == 200
