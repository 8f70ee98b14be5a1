"""Invalid request bodies: no 5xx, no traceback, all problems at once, each with its parameter."""

from __future__ import annotations

import json
import random
import re

import pytest

from burnish.serve.api.messages import MOST_MESSAGES
from burnish.serve.api.requests import ChatRequest, CompletionRequest, read_request
from burnish.serve.http.bodies import parse_object
from burnish.serve.http.errors import APIError
from serve.client import CHAT, post, send

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def request_error(changes: dict, kind=ChatRequest) -> APIError:
    with pytest.raises(APIError) as caught:
        read_request(kind, {**CHAT, **changes}, 8, False)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": None}, "missing_required_parameter", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "invalid_value", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "aGk="}}]}]},
            "unsupported_content", "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "1", "tool_call_id": "x"}]},
            "invalid_value", "messages[1].tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)}, "invalid_value", "messages"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 9}, "invalid_value", "n"),
        ({"n": 1.5}, "invalid_type", "n"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ["a", 1]}, "invalid_type", "stop[1]"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias.1"),
        ({"presence_penalty": -3}, "invalid_value", "presence_penalty"),
        ({"functions": []}, "unsupported_parameter", "functions"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "invalid_value", "tool_choice.function.name",
        ),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        ({"continue_final_message": True}, "invalid_value", "messages"),
        ({"guided_json": {"type": "object"}}, "unsupported_parameter", "guided_json"),
        ({"structured_outputs": {"regex": "a"}}, "unsupported_parameter", "structured_outputs"),
        ({"bad_words": ["a"]}, "unsupported_parameter", "bad_words"),
        ({"chat_template": "{{ messages }}"}, "unsupported_parameter", "chat_template"),
    ],
)  # fmt: skip
def test_invalid_field_is_named(changes, code, param) -> None:
    result = request_error(changes)
    assert (result.status, result.code, result.param) == (400, code, param)
    assert param in result.message


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": -Infinity}'])
def test_arguments_of_a_call_are_a_json_object(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    result = request_error({"messages": [{"role": "assistant", "tool_calls": [call]}, CHAT["messages"][0]]})
    assert result.param == "messages[0].tool_calls[0].function.arguments"
    assert "must be a JSON object as a string" in result.message


def test_all_problems_of_a_body_are_in_one_message() -> None:
    result = request_error({"temperature": 3, "n": 0, "stop": "", "messages": [{"role": "user", "content": 1}]})
    for param in ("temperature", '"n"', '"stop"', "messages[0].content"):
        assert param in result.message


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"seed": 2**70}, ChatRequest, f'"seed" must be less than {2**63}. Received: {2**70}.'),
        ({"top_p": 1.5}, ChatRequest, '"top_p" must be less than or equal to 1. Received: 1.5.'),
        ({"messages": []}, ChatRequest, '"messages" must have at least 1 entry. Received: 0.'),
        ({"stop": 5}, ChatRequest, '"stop" must be a string or a list. Received: an integer.'),
        ({"tool_choice": 5}, ChatRequest, '"tool_choice" must be a string or an object. Received: an integer.'),
        ({"prompt": [-1]}, CompletionRequest, '"prompt[0][0]" must be greater than or equal to 0. Received: -1.'),
    ],
)
def test_message_has_limit_and_value(changes, kind, message) -> None:
    assert (
        request_error({**({"messages": None} if kind is CompletionRequest else {}), **changes}, kind).message == message
    )


def test_text_completion_rejects_unsupported_fields() -> None:
    for changes, param in (
        ({"prompt": None}, "prompt"), ({"prompt": [[]]}, "prompt[0]"), ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 65}, "prompt"),
    ):  # fmt: skip
        assert request_error({"messages": None, **changes}, CompletionRequest).param == param


def test_format_of_a_required_call_is_ignored_by_name() -> None:
    body = {**CHAT, "tools": [TOOL], "response_format": {"type": "json_object"}}
    named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
    for choice, ignored in (("required", ("response_format",)), (named, ("response_format",)), ("auto", ())):
        assert read_request(ChatRequest, {**body, "tool_choice": choice}, 8, is_strict=False).ignored == ignored
    text = {**body, "response_format": {"type": "text"}, "tool_choice": "required"}
    assert read_request(ChatRequest, text, 8, is_strict=False).ignored == ()


def test_additional_openai_client_fields_are_accepted() -> None:
    body = {"user": "me", "metadata": {}, "store": False, "service_tier": "auto", "verbosity": "low", "n": None}
    result = read_request(ChatRequest, {**CHAT, **body}, 8, is_strict=True)
    assert result.ignored == ()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1, "a": 2}',
        b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a":' * 65 + b"1" + b"}" * 65, b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1e999}', b'{"a": [-1e999]}', b'{"a": 1} x', b'{"a": -}', b"{'a': 1}", b'{"\\udfff": 1}',
    ],
)  # fmt: skip
def test_invalid_json_is_400(body) -> None:
    with pytest.raises(APIError) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_brackets_in_texts_do_not_count_as_nesting() -> None:
    assert parse_object(json.dumps({"a": "[" * 500, "b": '\\"]' * 9}).encode())["a"] == "[" * 500


# --- thousands of bodies ----------------------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 1e308, -0.0, 0.5, "", "x", "☃", "\u0000", "\u202e", "a" * 3000,
    [], {}, [[]], [{}], {"": None}, [None], ["", 1], [-1], [2**40],
    {"type": "function"}, {"type": "text", "text": 1}, [1, 2, 3],
    "auto", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}, {"role": "user"},
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}], {"1": 5}, {"999999": 1},
    {"include_usage": 1}, [{"role": "user", "content": [{"type": "image_url"}]}],
]  # fmt: skip
NAMES = [
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
    "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "tools",
    "response_format", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "top_k",
    "min_p", "repetition_penalty", "do_sample", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "prompt", "continue_final_message", "return_token_ids", "functions", "modalities", "audio", "echo", "best_of",
    "suffix", "tokens", "add_generation_prompt", "max_length", "lora_name", "nobody knows me",
]  # fmt: skip
ROUTES = [
    "/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize",
    "/v1/score/evaluation", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
]  # fmt: skip


def odd_body(draw: random.Random) -> dict:
    body = {**CHAT, "prompt": "hi", "max_tokens": 4} if draw.random() < 0.8 else {}
    for _ in range(draw.randint(1, 4)):
        body[draw.choice(NAMES)] = draw.choice(ODD)
    return body


def broken_text(draw: random.Random) -> bytes:
    """Return a body with some bytes removed, doubled or swapped."""
    data = bytearray(json.dumps(odd_body(draw)).encode())
    for _ in range(draw.randint(1, 5)):
        index = draw.randrange(len(data))
        data[index : index + draw.randint(0, 2)] = bytes(draw.choice([0, 34, 44, 91, 123, 128, 255]) for _ in range(2))
    return bytes(data)


@pytest.mark.parametrize("bodies", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_invalid_bodies_are_never_server_errors(serve, bodies: int) -> None:
    running, draw = serve(), random.Random(17)
    recorded: dict[int, int] = {}
    for turn in range(bodies):
        body = odd_body(draw) if turn % 3 else broken_text(draw)
        route = draw.choice(ROUTES)
        status, _, text = send(running, "POST", route, body)
        recorded[status] = recorded.get(status, 0) + 1
        assert status < 500, (route, body, text)
        assert "Traceback" not in text
        if status >= 400:
            error = json.loads(text)["error"]
            assert error["message"].endswith((".", "!", "?")), error
            assert error["code"], error
            assert not re.search(r"\.(str|int|dict|list\[)|constrained|union|validat", error["message"]), error
    assert recorded[200] > bodies // 30
    assert recorded[400] > bodies // 3
    assert post(running, "/v1/chat/completions", CHAT)[0] == 200
    assert running.engine.num_open == 0
