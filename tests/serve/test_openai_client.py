"""A real model behind the routes, used by the openai client, sync and async: types, streams, log-probabilities."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("openai") is None:
    pytest.skip("the openai client is not installed", allow_module_level=True)

import openai

import burnish
from burnish.config.errors import UserError
from burnish.inference.loaded_model import LoadedModel
from burnish.inference.loading import load_for_inference, local_engine
from burnish.loop.types import Example, Message
from burnish.serve.api.app import ServerState, application
from burnish.serve.api.completions import CompletionService
from burnish.serve.api.options import ApiOptions
from burnish.serve.api.responses import OutputQueue
from burnish.serve.api.served import ServedModel
from burnish.serve.chat.backends import Request, ServerBackend
from burnish.serve.command_line import serving_of
from helpers.template_cases import byte_tokenizer
from serve.client import post
from serve.fakes import END
from serve.server_thread import serve_app, server_starter

pytestmark = pytest.mark.run

MODEL = Path(burnish.__file__).parent / "demo" / "model"
ASKED = [{"role": "user", "content": "opposite: hot"}]


@dataclass
class Real:
    port: int
    loaded: LoadedModel
    client: openai.OpenAI


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    loaded = load_for_inference(serving_of([str(MODEL)]).options, "demo")
    engine, loop, state = local_engine(loaded), asyncio.new_event_loop(), ServerState()
    served = ServedModel(loaded, engine, "demo", aliases=["gpt-3.5-turbo"])
    state.service, state.models, state.phase = (
        CompletionService(served, OutputQueue(loop), 64, 60.0, set()),
        served.models(),
        "ready",
    )
    port, end = serve_app(application(ApiOptions(), state, "a-key-for-tests"), loop)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key-for-tests", max_retries=0)
    yield Real(port, loaded, client)
    end()
    engine.close()


def test_models_are_listed_under_all_their_names(real: Real) -> None:
    listed = real.client.models.list().data
    assert [model.id for model in listed] == ["demo", "gpt-3.5-turbo"]
    assert real.client.models.retrieve("demo").owned_by == "burnish"
    assert str(MODEL) not in str(listed)


def test_complete_response_equals_stream_for_the_client(real: Real) -> None:
    options = {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 12, "logprobs": True}
    whole = real.client.chat.completions.create(**options)
    stream = real.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    tokens = [one for c in chunks if c.choices and c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.token for one in tokens] == [one.token for one in whole.choices[0].logprobs.content]


def test_terminal_chat_with_server_matches_client(real: Real, monkeypatch) -> None:
    url, requested = f"http://127.0.0.1:{real.port}/v1", {"temperature": 0, "max_new_tokens": 12}
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-for-tests")
    backend = ServerBackend(url)
    *pieces, end = backend.answer(Request(ASKED, requested))
    whole = real.client.chat.completions.create(model="demo", messages=ASKED, temperature=0, max_tokens=12)
    assert "".join(piece.text for piece in pieces) == whole.choices[0].message.content
    assert (end.end.tokens, end.end.reason) == (whole.usage.completion_tokens, whole.choices[0].finish_reason)
    with pytest.raises(UserError, match='"messages" must have at least 1 entry'):
        list(backend.answer(Request([], requested)))
    monkeypatch.setenv("OPENAI_API_KEY", "another-key")
    with pytest.raises(UserError, match="HTTP 401: The API key is not valid"):
        ServerBackend(url)


def test_prompt_has_ids_of_training(real: Real) -> None:
    messages = [
        {"role": "system", "content": "You answer in a word."},
        {"role": "user", "content": "opposite: hot"},
        {"role": "assistant", "content": "cold"},
        {"role": "user", "content": "opposite: <|im_end|> big"},
    ]
    _, result = post(real, "/tokenize", {"model": "demo", "messages": messages}, Authorization="Bearer a-key-for-tests")
    example = Example(
        tuple(Message(one["role"], one["content"]) for one in messages[1:]), system=messages[0]["content"]
    )
    assert result["tokens"] == real.loaded.template.prompt(example)


def test_continued_response_continues_its_text(real: Real) -> None:
    options = {"model": "demo", "temperature": 0, "max_tokens": 6}
    whole = real.client.chat.completions.create(messages=ASKED, **options, extra_body={"return_token_ids": True})
    first = real.loaded.tokenizer.decode(whole.choices[0].token_ids[:2])
    rest = real.client.chat.completions.create(
        messages=[*ASKED, {"role": "assistant", "content": first}], **options,
        extra_body={"continue_final_message": True},
    )  # fmt: skip
    assert whole.choices[0].message.content.startswith(first)
    assert (first + rest.choices[0].message.content).startswith(whole.choices[0].message.content)


def test_same_seed_gives_same_distinct_choices(real: Real) -> None:
    options = {"model": "demo", "messages": ASKED, "seed": 11, "n": 3, "temperature": 1.5, "max_tokens": 8}
    first, second = (real.client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    assert first.system_fingerprint == second.system_fingerprint


def test_echoed_prompt_log_probabilities_match_training_loss(real: Real) -> None:
    import torch

    ids = real.loaded.tokenizer("opposite: hot\ncold")["input_ids"]
    result = real.client.completions.create(model="demo", prompt=ids, echo=True, logprobs=1, max_tokens=1)
    logps = result.choices[0].logprobs.token_logprobs
    with torch.no_grad():
        loss = real.loaded.model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.float().item()
    measured = logps[1 : len(ids)]
    assert logps[0] is None
    # on processors with bfloat16, products depend on the batch shape
    assert -sum(measured) / len(measured) == pytest.approx(loss, rel=2e-2)
    assert math.isfinite(logps[len(ids)])


def test_errors_are_openai_client_exceptions(real: Real) -> None:
    create = real.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=ASKED)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="demo", messages=ASKED, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=str(real.client.base_url), api_key="another-key", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as thoughts:
        create(model="demo", messages=ASKED, reasoning_effort="high")
    assert thoughts.value.param == "reasoning_effort"
    assert create(model="demo", messages=ASKED, reasoning_effort="none", max_tokens=1).choices
    with pytest.raises(openai.BadRequestError):
        create(model="demo", messages=[{"role": "user", "content": "x " * 2000}])
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        real.client.embeddings.create(model="demo", input="hot")


def test_rejection_does_not_wait_for_the_rest_of_the_body(real: Real) -> None:
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            real.client.chat.completions.create(model="gpt-4o", messages=ASKED)
    assert time.monotonic() - began < 2.0  # each request takes a second


def test_text_completion_has_openai_default_length(real: Real) -> None:
    result = real.client.completions.create(model="demo", prompt="hot\n", extra_body={"ignore_eos": True})
    assert (result.usage.completion_tokens, result.choices[0].finish_reason) == (16, "length")


def test_concurrent_requests_get_their_own_responses(real: Real) -> None:
    words = ["hot", "big", "up", "old", "day", "in", "fast", "good", "wet", "open"]
    options = {"model": "demo", "temperature": 0, "max_tokens": 8}
    alone = [
        real.client.chat.completions.create(messages=[{"role": "user", "content": f"opposite: {word}"}], **options)
        for word in words
    ]

    async def together() -> list[str]:
        client = openai.AsyncOpenAI(base_url=str(real.client.base_url), api_key="a-key-for-tests", max_retries=0)

        async def one(word: str) -> str:
            text = ""
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": f"opposite: {word}"}], stream=True, **options
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return text

        async with client:
            return await asyncio.gather(*map(one, words))

    assert asyncio.run(together()) == [answer.choices[0].message.content for answer in alone]


def test_conversation_continues_from_the_cache_of_its_slot(real: Real) -> None:
    first = real.client.chat.completions.create(model="demo", messages=ASKED, temperature=0, max_tokens=8)
    longer = [*ASKED, first.choices[0].message.model_dump(), {"role": "user", "content": "opposite: big"}]
    second = real.client.chat.completions.create(model="demo", messages=longer, temperature=0, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


TOOL = {
    "type": "function",
    "function": {
        "name": "opposite_of",
        "description": "The opposite of a word.",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["hot", "big"]}}, "required": ["word"]},
    },
}


def test_json_schema_response_matches_the_schema(real: Real) -> None:
    schema = {"type": "object", "properties": {"word": {"enum": ["hot", "cold"]}}, "required": ["word"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    result = real.client.chat.completions.create(
        model="demo", messages=ASKED, response_format=wanted, temperature=0, max_tokens=60
    )
    assert json.loads(result.choices[0].message.content) in ({"word": "hot"}, {"word": "cold"})
    assert result.choices[0].finish_reason == "stop"
    bad = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"not": {"type": "object"}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        real.client.chat.completions.create(model="demo", messages=ASKED, response_format=bad)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("stop", ["{", '"', ":"])
@pytest.mark.parametrize("stream", [False, True])
def test_constrained_response_truncated_by_a_stop_string_is_not_complete(real: Real, stop: str, stream: bool) -> None:
    schema = {"type": "object", "properties": {"word": {"enum": ["hot"]}}, "required": ["word"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    result = real.client.chat.completions.create(
        model="demo", messages=ASKED, response_format=wanted, temperature=0, max_tokens=60, stop=stop, stream=stream
    )
    last = [part.choices[0] for part in result if part.choices][-1] if stream else result.choices[0]
    assert last.finish_reason == "length"


def test_constrained_response_truncated_by_a_stop_token_is_not_complete(real: Real) -> None:
    schema = {"type": "object", "properties": {"word": {"enum": ["hot"]}}, "required": ["word"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    quote = [
        token_id for token_id in range(len(real.loaded.tokenizer)) if '"' in real.loaded.tokenizer.decode([token_id])
    ]
    result = real.client.chat.completions.create(
        model="demo", messages=ASKED, response_format=wanted, temperature=0, max_tokens=60,
        extra_body={"stop_token_ids": quote[:64]},
    )  # fmt: skip
    assert result.choices[0].finish_reason == "length"


def test_schema_of_many_characters_is_refused(real: Real) -> None:
    schema = {"enum": [f"value {number}" for number in range(60_000)]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="the maximum is 500,000"):
        real.client.chat.completions.create(model="demo", messages=ASKED, response_format=wanted)


def test_tools_unsupported_by_the_template_are_rejected_by_name(real: Real) -> None:
    if real.loaded.form.tool_format:
        result = real.client.chat.completions.create(
            model="demo", messages=ASKED, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=60
        )
        call = result.choices[0].message.tool_calls[0]
        assert (result.choices[0].finish_reason, call.function.name) == ("tool_calls", "opposite_of")
        assert json.loads(call.function.arguments)["word"] in {"hot", "big"}
        return
    for choice in ("required", "auto"):
        with pytest.raises(openai.BadRequestError) as refused:
            real.client.chat.completions.create(model="demo", messages=ASKED, tools=[TOOL], tool_choice=choice)
        assert refused.value.param == "tools"
    result = real.client.chat.completions.create(
        model="demo", messages=ASKED, tools=[TOOL], tool_choice="none", max_tokens=1
    )
    assert result.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_adapters_are_served_side_by_side_under_their_names(tmp_path) -> None:
    from burnish.cli import main

    demo = MODEL.parent
    trained = [
        "train", f"model_name_or_path={MODEL}", f"dataset_dir={demo / 'data'}", "dataset=demo_train", "cutoff_len=64",
        "finetuning_type=lora", "per_device_train_batch_size=8", "report_to=none", "save_strategy=no", "bf16=false",
    ]  # fmt: skip
    assert main([*trained, "max_steps=3", "learning_rate=1e-2", f"output_dir={tmp_path / 'poet'}"]) == 0
    served = json.dumps({"poet": str(tmp_path / "poet")})
    loaded = load_for_inference(serving_of([str(MODEL), "--served_adapters", served]).options, "demo")
    engine, loop, state = local_engine(loaded), asyncio.new_event_loop(), ServerState()
    model = ServedModel(loaded, engine, "demo")
    state.service, state.models, state.phase = (
        CompletionService(model, OutputQueue(loop), 64, 60.0, set()),
        model.models(),
        "ready",
    )
    port, end = serve_app(application(ApiOptions(), state, None), loop)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    listed = {one.id: one.model_dump()["parent"] for one in client.models.list().data}
    assert listed == {"demo": None, "poet": "demo"}
    options = {"messages": ASKED, "temperature": 0, "max_tokens": 8, "logprobs": True}
    logps = {
        name: client.chat.completions.create(model=name, **options).choices[0].logprobs.content[0].logprob
        for name in ("demo", "poet", "demo:poet")
    }
    assert logps["poet"] == pytest.approx(logps["demo:poet"], abs=1e-3)
    assert abs(logps["poet"] - logps["demo"]) > 1e-3
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="sql", messages=ASKED)
    end()
    engine.close()


def test_adapter_with_a_colon_in_its_name_is_listed() -> None:
    loaded = SimpleNamespace(context=8, tokenizer=byte_tokenizer(), template=None, images=None, adapters=("sql:v2",))
    model = ServedModel(loaded, None, "demo")
    assert [entry["id"] for entry in model.models()] == ["demo", "sql:v2"]


GRADES = {
    "type": "function",
    "function": {
        "name": "mean_grade", "description": "The mean of grades, weighted by hours.",
        "parameters": {
            "type": "object", "required": ["grades", "hours"],
            "properties": {"grades": {"type": "string"}, "hours": {"type": "integer"}},
        },
    },
}  # fmt: skip
CALL = '[{"name": "mean_grade", "arguments": {"grades": "AC", "hours": 31}}]'


def test_tool_calls_of_llamafactory_example_get_responses() -> None:
    # A tool call, the client's message object sent back, a result without the id of its call, and the answer.
    replies = iter([CALL, "3.5, well done"])
    with server_starter() as start:
        running = start(lambda ask: [*next(replies).encode(), END], api_aliases=["test"])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="0", max_retries=0)
        messages: list = [{"role": "user", "content": "My grades are A and C, of 3 hours and 1."}]
        first = client.chat.completions.create(messages=messages, model="first", tools=[GRADES])
        call = first.choices[0].message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("mean_grade", {"grades": "AC", "hours": 31})
        messages += [first.choices[0].message, {"role": "tool", "content": '{"mean": 3.5}'}]
        second = client.chat.completions.create(messages=messages, model="first", tools=[GRADES])
        assert second.choices[0].message.content == "3.5, well done"


def test_images_of_llamafactory_example_are_rejected(real: Real) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/boxes.png"}}
    requests = [{"role": "user", "content": [{"type": "text", "text": "What is on it?"}, image]}]
    with pytest.raises(openai.BadRequestError, match="is a URL, and this server does not fetch URLs") as refused:
        real.client.chat.completions.create(model="demo", messages=requests)
    assert (refused.value.code, refused.value.param) == ("unsupported_content", "messages[0].content[1].image_url.url")
