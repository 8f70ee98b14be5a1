"""Records with images, in every form that the peers read, become messages with an image at each place."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from burnish.config.errors import UserError
from burnish.data.images.sources import Sight
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.formats import convert_records
from burnish.data.sets.layouts import layout_of
from burnish.data.sets.records import RecordNeeds
from burnish.data.sets.trl import examples_of, trl_layout
from burnish.data.stats import DataStats
from burnish.loop.types import Example


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    for name, size in (("a.png", (8, 4)), ("b.png", (5, 6))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    return tmp_path


def content(name: str, folder: Path) -> bytes:
    return (folder / name).read_bytes()


def read(values: dict[str, Any], folder: Path, kind: str = "answers", model_type: str = "", **more: Any) -> Example:
    needs = RecordNeeds(kind, sight=Sight((folder,), 1024, 589824, model_type))
    layout = layout_of(DataSource("v", "records", [], "v.json", **more), [values], "v.json", needs)
    return convert_records([(values, "v.json", 7)], layout, DataStats())[0]


def seen(example: Example) -> list[Any]:
    """What the messages say, sizes for images."""
    return [
        [(one.value.width, one.value.height) if one.kind == "image" else one.value for one in message.parts]
        for message in example.messages
    ]


ASKED = ["Compare ", (8, 4), " with ", (5, 6), "."]
TEXT, TWO = "Compare <image> with <image>.", ["a.png", "b.png"]


def records(folder: Path) -> dict[str, dict[str, Any]]:
    uri = "data:image/png;base64," + base64.b64encode(content("b.png", folder)).decode()
    parts = [
        {"type": "text", "text": "Compare "}, {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "text", "text": " with "}, {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": "."},
    ]  # fmt: skip
    answer = {"role": "assistant", "content": "Red."}
    return {
        "alpaca": {"instruction": TEXT, "input": "", "output": "Red.", "images": TWO},
        "sharegpt": {
            "conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": "Red."}], "images": TWO,
        },
        "openai": {"messages": [{"role": "user", "content": TEXT}, answer], "images": TWO},
        "parts": {"messages": [{"role": "user", "content": parts}, answer]},
        "bytes": {
            "messages": [{"role": "user", "content": TEXT}, answer],
            "images": [{"bytes": content(name, folder), "path": None} for name in TWO],
        },
        "file": {
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "Compare "}, {"type": "image", "image": f"file://{folder}/a.png"},
                {"type": "text", "text": " with "}, {"type": "image", "image": str(folder / "b.png")},
                {"type": "text", "text": "."},
            ]}, answer],
        },
        "filled": {
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "Compare "}, {"type": "image", "text": None},
                {"type": "text", "text": " with "}, {"type": "image"}, {"type": "text", "text": "."},
            ]}, answer],
            "images": TWO,
        },
    }  # fmt: skip


@pytest.mark.parametrize("form", ["alpaca", "sharegpt", "openai", "parts", "bytes", "file", "filled"])
def test_each_form_of_a_record_gives_the_same_messages(folder, form):
    assert seen(read(records(folder)[form], folder)) == [ASKED, ["Red."]]


def test_a_column_alone_goes_before_the_first_user_message(folder):
    values = {"instruction": "What?", "output": "Red.", "images": "a.png"}
    assert seen(read(values, folder)) == [[(8, 4), "What?"], ["Red."]]


def test_without_a_column_of_images_the_mark_is_a_word(folder):
    values = {"instruction": "What is <image>?", "output": "A tag."}
    assert seen(read(values, folder)) == [["What is <image>?"], ["A tag."]]


def test_pairs_and_verdicts_have_their_images_in_the_prompt(folder):
    pair = {
        "conversations": [{"from": "human", "value": TEXT}], "images": TWO,
        "chosen": {"from": "gpt", "value": "Red."}, "rejected": {"from": "gpt", "value": "Blue."},
    }  # fmt: skip
    example = read(pair, folder, "pairs")
    assert seen(example) == [ASKED]
    assert (example.chosen[0].text, example.rejected[0].text) == ("Red.", "Blue.")
    verdict = {"instruction": TEXT, "output": "Red.", "images": TWO, "kto_tag": True}
    columns = {"prompt": "instruction", "response": "output", "images": "images", "kto_tag": "kto_tag"}
    assert seen(read(verdict, folder, "verdicts", columns=columns)) == [ASKED, ["Red."]]


def test_limits_of_one_image(folder):
    part = {"type": "image", "image": "a.png", "max_pixels": 16}
    values = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Red."}]}
    (image,) = read(values, folder).messages[0].images
    assert (image.min_pixels, image.max_pixels) == (1024, 16)


def trl(values: dict[str, Any], kind: Any = "texts") -> Example:
    layout = trl_layout(kind, values, sight=Sight())
    (example,) = examples_of([(values, "set", 7)], layout, DataStats(), "raise")
    assert example is not None
    return example


def test_records_of_trl(folder):
    image = Image.open(folder / "a.png")
    user, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}
    plain = trl({"messages": [user, answer], "images": [image]})
    assert seen(plain) == [[(8, 4), "What?"], ["Red."]]
    assert plain.messages[0].raw["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    split = trl({"prompt": [user], "completion": [answer], "image": image})
    assert seen(split) == [[(8, 4), "What?"], ["Red."]]
    pair = trl(
        {"prompt": [user], "chosen": [answer], "rejected": [{**answer, "content": "Blue."}], "images": [image]}, "pairs"
    )
    assert seen(pair) == [[(8, 4), "What?"]]
    part = {
        "role": "user",
        "content": [{"type": "image", "image": image, "text": None}, {"type": "text", "text": "What?"}],
    }
    assert seen(trl({"messages": [part, answer]})) == [[(8, 4), "What?"], ["Red."]]


def bad(**change: Any) -> dict[str, Any]:
    return {"instruction": TEXT, "output": "Red.", "images": TWO, **change}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (bad(instruction="One <image>."), '2 images and 1 "<image>".'),
        (bad(images=["a.png"]), '1 image and 2 "<image>"'),
        (bad(images=["a.png", "c.png"]), 'images[1] "c.png" was not found. Searched:'),
        (bad(images=["a.png", "http://x/y.png"]), "images[1] is a URL. Images are not downloaded during training"),
        (bad(images=["a.png", "data:image/png;base64,iVB*"]), "invalid base64 at character 4"),
        (bad(images=["a.png", 3]), "must be a path, a data URI, bytes or a Pillow image. Received: int"),
        (bad(images=["a.png", ""]), "images[1] is an empty path"),
        (bad(videos=["v.mp4"]), "it contains video (videos[0]); this model supports images only."),
        (bad(audios=["v.wav"]), "it contains audio; burnish trains on text and images."),
        (bad(system="See <image>"), "the system message contains an image"),
    ],
)
def test_bad_records_are_refused_by_number(folder, values, said):
    with pytest.raises(UserError) as refused:
        read(values, folder)
    assert "v.json, record 7" in str(refused.value)
    assert said in " ".join(str(refused.value).split())


def test_a_file_that_is_no_image_is_refused_by_what_it_begins_with(folder):
    (folder / "c.png").write_text("<!DOCTYPE html>")
    with pytest.raises(UserError, match=r'images.1. "c.png" is not an image .begins "<!DOCTYPE ht"'):
        read(bad(images=["a.png", "c.png"]), folder)


def test_a_model_of_text_refuses_images_by_its_name(folder):
    with pytest.raises(UserError, match=r'contains images .*"images".*, but qwen2 is a text-only model'):
        read(bad(), folder, model_type="qwen2")


def test_the_same_bytes_are_kept_once(folder):
    sight, data = Sight(), io.BytesIO(content("a.png", folder)).getvalue()
    first, second = (sight.image({"bytes": data, "path": "x/a.png"}, "images[0]") for _ in range(2))
    assert first == second
    assert Path(first.path).read_bytes() == data
