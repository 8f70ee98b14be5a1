"""Images in terminal chat, the API, and predictions."""

import base64
import io
import json
import struct
import zlib

import pytest

from burnish.cli import main
from burnish.data.images.sources import MediaReader
from burnish.inference.images.reading import LOW_PIXELS, ImageReader
from burnish.inference.loading import engine_of, load_for_inference
from burnish.run.plan.options import RunOptions
from burnish.serve.api.body import read
from burnish.serve.api.prompts import Prompter
from burnish.serve.api.requests import ChatRequest
from burnish.serve.api.served import ServedModel
from burnish.serve.chat.backends import LocalBackend, Request
from burnish.serve.chat.console import Console
from burnish.serve.chat.session import ChatSession
from burnish.serve.http.errors import APIError
from vision_models import golden, image_models


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    image_models().save_processor(processor, folder / "model")
    image_models().write_images(folder / "images", ["p1_64x48.png", "p2_48x64.png"])
    return folder


@pytest.fixture(scope="module")
def loaded(workspace):
    return load_for_inference(
        RunOptions(model_name_or_path=str(workspace / "model"), template="qwen2_vl", max_new_tokens=5, do_sample=False)
    )


def uri(workspace, name="p1_64x48.png"):
    content = (workspace / "images" / name).read_bytes()
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def chat_request(*parts):
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image_url", "image_url": p} for p in parts
    ]
    return read(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": content}]})


def test_image_prompt_has_ids_of_training(workspace, loaded):
    golden_row = next(r for r in golden()["llamafactory"] if (r["family"], r["record"]) == ("qwen2_5_vl", "one"))
    learned = next(at for at, label in enumerate(golden_row["labels"]) if label != -100)
    row = Prompter(loaded.template, loaded.images).row(chat_request({"url": uri(workspace)}, "What is it?"))
    assert row["input_ids"] == golden_row["input_ids"][:learned]
    assert len(row["images"]) == 1


@pytest.mark.parametrize(("limit", "expected"), [(None, LOW_PIXELS), (2**20, LOW_PIXELS), (65536, 65536)])
def test_low_detail_does_not_exceed_the_limit_of_the_server(workspace, loaded, limit, expected):
    reader = ImageReader(loaded.model, loaded.images.family, MediaReader(max_pixels=limit))
    assert reader.image(uri(workspace), "x", "low").max_pixels == expected
    assert reader.image(uri(workspace), "x").max_pixels == limit


def test_literal_placeholder_is_text(loaded):
    row = Prompter(loaded.template, loaded.images).row(chat_request("<|image_pad|> \ufdd1"))
    assert loaded.images.family.placeholder_id not in row["input_ids"]
    assert "images" not in row


@pytest.mark.parametrize(
    ("url", "message"),
    [("https://example.com/a.png", "this server does not fetch URLs"), ("/etc/passwd", "files are not opened"),
     ("file:///etc/passwd", "files are not opened"), ("data:image/png;base64,####", "invalid base64"),
     (f"data:image/png;base64,{base64.b64encode(b'<html>').decode()}", "is not an image")],
)  # fmt: skip
def test_other_image_sources_are_rejected(loaded, url, message):
    with pytest.raises(APIError) as refused:
        Prompter(loaded.template, loaded.images).row(chat_request({"url": url}, "What?"))
    assert refused.value.status == 400
    assert message in refused.value.message
    assert "messages[0].content[0].image_url.url" in refused.value.message


def messages_of(*messages):
    content = [{"role": role, "content": [part_of(part) for part in parts]} for role, *parts in messages]
    return read(ChatRequest, {"model": "m", "messages": content})


def part_of(part):
    return {"type": "image_url", "image_url": part} if isinstance(part, dict) else {"type": "text", "text": part}


def test_adjacent_messages_of_one_role_keep_image_order(workspace, loaded):
    images = [{"url": uri(workspace, name)} for name in ("p1_64x48.png", "p2_48x64.png", "p1_64x48.png")]
    request = messages_of(("user", "a", images[0]), ("user", images[1]), ("assistant", "b"), ("user", images[2], "c"))
    row = Prompter(loaded.template, loaded.images).row(request)
    sizes = [(image["width"], image["height"]) for image in row["images"]]
    assert sizes == [(64, 48), (48, 64), (64, 48)]


def test_image_in_system_message_is_rejected_and_not_dropped(workspace, loaded):
    with pytest.raises(APIError, match="role user or tool"):
        Prompter(loaded.template, loaded.images).row(messages_of(("system", {"url": uri(workspace)}), ("user", "a")))


def test_rejection_names_location_of_image_in_request(workspace, loaded):
    bad = {"url": "data:image/png;base64,####"}
    with pytest.raises(APIError) as refused:
        Prompter(loaded.template, loaded.images).row(
            messages_of(("system", "s"), ("user", "a", {"url": uri(workspace)}), ("user", "b", bad))
        )
    assert refused.value.param == "messages[2].content[1].image_url.url"


def png_of(width, height):
    """Return a small PNG file with this size in its header; its pixels are equal or missing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def test_decompression_bombs_are_rejected_from_their_headers(loaded, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("pixels were decoded"))
    prompter = Prompter(loaded.template, loaded.images)
    with pytest.raises(APIError, match="60000x60000 pixels; the maximum is 178,956,970"):
        prompter.row(chat_request({"url": png_of(60000, 60000)}))
    with pytest.raises(APIError, match="200,000,000 pixels in total"):
        prompter.row(chat_request(*[{"url": png_of(10000, 10000)}] * 2))


def test_truncated_image_is_rejected(loaded):
    served = ServedModel(loaded, None, "m")
    row = served.prompt_row(chat_request({"url": png_of(640, 480)}))
    with pytest.raises(APIError, match=r"truncated|corrupted") as refused:
        served.image_fields(row)
    assert refused.value.status == 400


def test_request_images_are_not_cached_on_disk(workspace, loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    served = ServedModel(loaded, None, "m")
    fields = served.image_fields(served.prompt_row(chat_request({"url": uri(workspace)}, "What?")))
    assert fields["images"]
    assert not list(tmp_path.rglob("*"))


def test_text_model_rejects_images(workspace, loaded):
    with pytest.raises(APIError, match="supports text only"):
        Prompter(loaded.template).row(chat_request({"url": uri(workspace)}, "What?"))


def test_chat_responds_to_images_and_distinguishes_them(workspace, loaded):
    out = io.StringIO()
    engine = engine_of(loaded)
    session = ChatSession(LocalBackend(loaded, engine), Console(out=out))
    try:
        for name in ("p1_64x48.png", "p2_48x64.png"):
            assert session.take(f"/image {workspace / 'images' / name}") == 0
            assert session.take("What is it?") == 0
            session.take("/new")
        assert session.take("/image nothing.png") == 1
    finally:
        engine.close()
    assert "p1_64x48.png: 64x48, 4 tokens" in out.getvalue()
    assert "cannot be read" in out.getvalue()


def test_same_text_with_another_image_gets_another_response(workspace, loaded):
    engine = engine_of(loaded)
    backend = LocalBackend(loaded, engine)

    def ids(name):
        content = [{"type": "image_url", "image_url": {"url": uri(workspace, name)}}, {"type": "text", "text": "Say."}]
        *_, last = backend.answer(Request([{"role": "user", "content": content}], {"do_sample": False}))
        return last.end.chances

    try:
        first, second, again = (ids(name) for name in ("p1_64x48.png", "p2_48x64.png", "p1_64x48.png"))
    finally:
        engine.close()
    assert first != second
    assert first == pytest.approx(again, rel=1e-4)


def test_single_message_of_a_chat_may_have_images(workspace, capsys, monkeypatch):
    options = ["template=qwen2_vl", "max_new_tokens=5", "do_sample=false"]
    ask = ["chat", str(workspace / "model"), *options, "--once", "What is it?", "--image"]
    answers = []
    for name in ("p1_64x48.png", "p2_48x64.png"):
        assert main([*ask, str(workspace / "images" / name)]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]
    assert main([*ask, str(workspace / "missing.png")]) == 2
    assert "missing.png" in capsys.readouterr().err
    monkeypatch.setattr("burnish.serve.chat.command.is_typed", lambda: True)
    assert main(["chat", str(workspace / "model"), *options, "--image", str(workspace / "images" / name)]) == 2
    assert "--once" in capsys.readouterr().err


def test_predictions_accept_records_with_images(workspace, tmp_path):
    records = [
        {"messages": golden()["records"]["one"]["messages"], "images": [str(workspace / "images" / name)]}
        for name in ("p1_64x48.png", "p2_48x64.png")
    ]
    (tmp_path / "v.json").write_text(json.dumps(records))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": "v.json", "formatting": "sharegpt", "tags": tags,
             "columns": {"messages": "messages", "images": "images"}}  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps({"v": entry}))
    options = {"model_name_or_path": workspace / "model", "template": "qwen2_vl", "dataset_dir": tmp_path,
               "eval_dataset": "v", "do_predict": "true", "predict_with_generate": "true", "max_new_tokens": 4,
               "predict_metrics": "exact_match", "output_dir": tmp_path / "out", "use_cpu": "true", "stage": "sft",
               "finetuning_type": "full"}  # fmt: skip
    assert main(["train", *(f"{name}={value}" for name, value in options.items())]) == 0
    lines = (tmp_path / "out" / "generated_predictions.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert all(json.loads(line)["predict"] is not None for line in lines)
