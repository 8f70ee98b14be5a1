"""The openai client with a vision model: data URIs, files below media_root, rejections."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("openai") is None:
    pytest.skip("the openai client is not installed", allow_module_level=True)

import openai

from burnish.inference.loading import engine_of, load_for_inference
from burnish.run.plan.options import RunOptions
from burnish.serve.api.app import ServerState, application
from burnish.serve.api.completions import CompletionService
from burnish.serve.api.options import ApiOptions
from burnish.serve.api.responses import OutputQueue
from burnish.serve.api.served import ServedModel
from serve.client import post
from serve.server_thread import serve_app
from vision_models import image_models

pytestmark = pytest.mark.run
NAMES = ("p1_64x48.png", "p2_48x64.png")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    image_models().save_processor(processor, folder / "model")
    image_models().write_images(folder / "media", NAMES)
    loaded = load_for_inference(
        RunOptions(model_name_or_path=str(folder / "model"), template="qwen2_vl", max_new_tokens=5)
    )
    loop, state = asyncio.new_event_loop(), ServerState()
    outputs = OutputQueue(loop)
    engine = engine_of(loaded, 8, outputs.deliver)
    served = ServedModel(loaded, engine, "vision")
    state.service, state.models = CompletionService(served, outputs, 16, 60.0, set()), served.models()
    state.phase = "ready"
    port, end = serve_app(application(ApiOptions(media_root=str(folder / "media")), state, None), loop)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    yield SimpleNamespace(client=client, folder=folder, port=port)
    end()
    engine.close()


def messages_about(url):
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


def data_uri(real, name):
    return f"data:image/png;base64,{base64.b64encode((real.folder / 'media' / name).read_bytes()).decode()}"


def create_completion(real, url, **more):
    return real.client.chat.completions.create(
        model="vision", messages=messages_about(url), temperature=0, max_tokens=4, logprobs=True, **more
    )


def chances(answer):
    return [one.logprob for one in answer.choices[0].logprobs.content]


def test_image_is_accepted_as_data_uri_and_file_below_media_root(real):
    by_name = {name: chances(create_completion(real, data_uri(real, name))) for name in NAMES}
    assert by_name[NAMES[0]] != pytest.approx(by_name[NAMES[1]], abs=1e-4)
    for name in NAMES:
        for url in (name, f"file://{real.folder}/media/{name}"):
            assert chances(create_completion(real, url)) == pytest.approx(by_name[name], abs=1e-4)
    assert create_completion(real, data_uri(real, NAMES[0])).usage.prompt_tokens > 4


def test_streamed_image_response_equals_complete_one(real):
    whole = create_completion(real, data_uri(real, NAMES[0])).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in create_completion(real, data_uri(real, NAMES[0]), stream=True)
    ]
    assert "".join(pieces) == whole


@pytest.mark.parametrize("url", ["https://example.com/a.png", "../model/config.json", "file:///etc/passwd", "no.png"])
def test_rejected_image_source_is_a_bad_request_with_its_location(real, url):
    with pytest.raises(openai.BadRequestError) as refused:
        create_completion(real, url)
    assert refused.value.param == "messages[0].content[0].image_url.url"


def test_non_image_file_is_a_bad_request(real):
    (real.folder / "media" / "note.txt").write_text("hello")
    with pytest.raises(openai.BadRequestError, match="is not an image"):
        create_completion(real, "note.txt")


def test_tokens_of_an_image_prompt_can_be_counted(real):
    result = [
        post(real, "/tokenize", {"model": "vision", "messages": messages_about(url)})[1]
        for url in (NAMES[0], data_uri(real, NAMES[0]))
    ]
    assert result[0] == result[1]
    assert result[0]["images"] == [{"width": 64, "height": 48, "tokens": 4}]
    assert result[0]["count"] > 4
