"""Records with images, in all formats that LLaMA-Factory and TRL accept."""

from __future__ import annotations

import base64
import errno
import io
import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from burnish.config.errors import UserError
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.data.images.sources import MediaReader
from burnish.data.images.videos import read_video
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.formats import convert_records
from burnish.data.sets.images import with_paths
from burnish.data.sets.layouts import layout_of
from burnish.data.sets.records import Layout, Record, RecordNeeds
from burnish.data.sets.trl import examples_of, trl_layout
from burnish.data.sets.turns import OPENAI_TAGS
from burnish.data.stats import DataStats
from burnish.loop.types import ContentPart, Example, Message


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    for name, size in (("a.png", (8, 4)), ("b.png", (5, 6))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    return tmp_path


def content(name: str, folder: Path) -> bytes:
    return (folder / name).read_bytes()


def read(values: dict[str, Any], folder: Path, kind: str = "answers", model_type: str = "", **more: Any) -> Example:
    needs = RecordNeeds(kind, reader=MediaReader((folder,), 1024, 589824, model_type))
    layout = layout_of(DataSource("v", "records", [], "v.json", **more), [values], "v.json", needs)
    return convert_records([(values, "v.json", 7)], layout, DataStats())[0]


def summarize(example: Example) -> list[Any]:
    """Return the contents of the messages, with sizes instead of images."""
    return [
        [(part.value.width, part.value.height) if part.kind == "image" else part.value for part in message.parts]
        for message in example.messages
    ]


QUESTION = ["Compare ", (8, 4), " with ", (5, 6), "."]
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
def test_all_record_formats_give_the_same_messages(folder, form):
    assert summarize(read(records(folder)[form], folder)) == [QUESTION, ["Red."]]


def test_image_column_alone_precedes_first_user_message(folder):
    values = {"instruction": "What?", "output": "Red.", "images": "a.png"}
    assert summarize(read(values, folder)) == [[(8, 4), "What?"], ["Red."]]


@pytest.mark.parametrize("form", ["alpaca", "openai", "TRL"])
def test_column_with_one_image_is_read(folder, form):
    user, answer = {"role": "user", "content": "What? <image>"}, {"role": "assistant", "content": "Red."}
    values = {
        "alpaca": {"instruction": user["content"], "input": "", "output": "Red."},
        "openai": {"messages": [user, answer]},
        "TRL": {"prompt": [user], "completion": [answer]},
    }[form]
    assert summarize(read({**values, "image": "a.png"}, folder)) == [["What? ", (8, 4)], ["Red."]]


def test_image_in_another_column_than_in_the_first_records_is_reported(folder):
    needs = RecordNeeds(reader=MediaReader((folder,), 1024, 589824, ""))
    first = {"instruction": "What?", "output": "Red.", "images": ["a.png"]}
    layout = layout_of(DataSource("v", "records", [], "v.json"), [first], "v.json", needs)
    other = {"instruction": "What?", "output": "Red.", "image": "a.png"}
    with pytest.raises(UserError, match=r'the column "image", but images .* are read from images, videos') as raised:
        convert_records([(other, "v.json", 21)], layout, DataStats())
    assert "audio" not in str(raised.value)


def test_placeholder_without_image_column_is_plain_text(folder):
    values = {"instruction": "What is <image>?", "output": "A tag."}
    assert summarize(read(values, folder)) == [["What is <image>?"], ["A tag."]]


def test_images_of_pairs_and_kto_examples_are_in_the_prompt(folder):
    pair = {
        "conversations": [{"from": "human", "value": TEXT}], "images": TWO,
        "chosen": {"from": "gpt", "value": "Red."}, "rejected": {"from": "gpt", "value": "Blue."},
    }  # fmt: skip
    example = read(pair, folder, "pairs")
    assert summarize(example) == [QUESTION]
    assert (example.chosen[0].text, example.rejected[0].text) == ("Red.", "Blue.")
    verdict = {"instruction": TEXT, "output": "Red.", "images": TWO, "kto_tag": True}
    columns = {"prompt": "instruction", "response": "output", "images": "images", "kto_tag": "kto_tag"}
    assert summarize(read(verdict, folder, "unpaired", columns=columns)) == [QUESTION, ["Red."]]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"max_pixels": 2048}, (1024, 2048)),
        ({"max_pixels": 16}, (16, 16)),
        ({"min_pixels": 1_000_000}, (1_000_000, 1_000_000)),
        ({"min_pixels": 4, "max_pixels": 16}, (4, 16)),
    ],
)
def test_pixel_limits_of_an_image_take_precedence_over_those_of_the_options(folder, own, expected):
    part = {"type": "image", "image": "a.png", **own}
    values = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Red."}]}
    (image,) = read(values, folder).messages[0].images
    assert (image.min_pixels, image.max_pixels) == expected


def trl(values: dict[str, Any], kind: Any = "texts") -> Example:
    layout = trl_layout(kind, values, reader=MediaReader())
    (example,) = examples_of([(values, "set", 7)], layout, DataStats(), "raise")
    assert example is not None
    return example


def test_trl_records_are_read(folder):
    image = Image.open(folder / "a.png")
    user, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}
    plain = trl({"messages": [user, answer], "images": [image]})
    assert summarize(plain) == [[(8, 4), "What?"], ["Red."]]
    assert plain.messages[0].raw["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    split = trl({"prompt": [user], "completion": [answer], "image": image})
    assert summarize(split) == [[(8, 4), "What?"], ["Red."]]
    pair = trl(
        {"prompt": [user], "chosen": [answer], "rejected": [{**answer, "content": "Blue."}], "images": [image]}, "pairs"
    )
    assert summarize(pair) == [[(8, 4), "What?"]]
    part = {
        "role": "user",
        "content": [{"type": "image", "image": image, "text": None}, {"type": "text", "text": "What?"}],
    }
    assert summarize(trl({"messages": [part, answer]})) == [[(8, 4), "What?"], ["Red."]]


VIDEO: dict[str, Any] = {"instruction": "<video>What moves?", "output": "Red."}


def message_with(**part: Any) -> dict[str, Any]:
    """Return a record with a message that contains an image part."""
    user = {"role": "user", "content": [{"type": "image", **part}]}
    return {"messages": [user, {"role": "assistant", "content": "Red."}]}


def bad(**change: Any) -> dict[str, Any]:
    """Return an image record with changes that make it invalid."""
    return {"instruction": TEXT, "output": "Red.", "images": TWO, **change}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (bad(instruction="One <image>."), '2 images and 1 "<image>".'),
        (bad(images=["a.png"]), '1 image and 2 "<image>"'),
        (bad(images=["a.png", "c.png"]), 'images[1] "c.png" was not found. Searched:'),
        (bad(images=["a.png", "http://x/y.png"]), "images[1] is a URL. Images are not downloaded during training"),
        (bad(images=["a.png", "data:image/png;base64,iVB*"]), "invalid base64 at character 4"),
        (bad(images=["a.png", {"bytes": "text"}]), 'images[1] "text" was not found'),
        (bad(images=["a.png", {"bytes": [1]}]), "must be a path, a data URI, bytes or a Pillow image. Received: list"),
        (bad(images=["a.png", "b" * 5000]), "cannot be read: File name too long"),
        (bad(images=["a.png", "\ud800.png"]), 'images[1] "\\ud800.png" cannot be read: its path is not valid Unicode'),
        (bad(images=["a.png", 3]), "must be a path, a data URI, bytes or a Pillow image. Received: int"),
        (bad(images=["a.png", ""]), "images[1] is an empty path"),
        (VIDEO | {"videos": [["a.png"], ["a.png"]]}, '2 videos and 1 "<video>"'),
        (VIDEO | {"videos": ["v.mp4"]}, 'videos[0] "v.mp4" was not found'),
        (VIDEO | {"videos": ["a.png"]}, 'videos[0] "a.png" is a file; video files are not decoded. Extract its frames'),
        (VIDEO | {"videos": ["v" * 5000]}, "cannot be read: File name too long"),
        (VIDEO | {"videos": ["\ud800"]}, 'videos[0] "\\ud800" was not found'),
        (VIDEO | {"videos": ["a.png/v"]}, 'videos[0] "a.png/v" was not found'),
        (VIDEO | {"videos": [[]]}, "videos[0] has no frames"),
        (VIDEO | {"videos": [["a.png", "b.png"]]}, "videos[0][1] has 5x6, but the first has 8x4"),
        (VIDEO | {"videos": [["a.png", "c.png"]]}, 'videos[0][1] "c.png" was not found'),
        (VIDEO | {"videos": [3]}, "videos[0] must be a list of frames, or a folder of them. Received: int"),
        (bad(audios=["v.wav"]), "it contains audio; burnish trains on text, images and videos."),
        (bad(system="See <image>"), "the system message contains an image"),
        (
            message_with(image="a.png", min_pixels=9, max_pixels=4),
            'min_pixels" must not exceed "messages[0].content[0]',
        ),
    ],
)
def test_bad_image_records_are_rejected_by_number(folder, values, message):
    with pytest.raises(UserError) as raised:
        read(values, folder)
    assert "v.json, record 7" in str(raised.value)
    assert message in " ".join(str(raised.value).split())


@pytest.mark.parametrize("kind", ["answers", "pairs"])
def test_system_messages_with_an_image_are_refused(folder, kind):
    turns = [{"role": "system", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Brief."}]}]
    turns.append({"role": "user", "content": "Hello."})
    answer = {"role": "assistant", "content": "Hello."}
    values: dict[str, Any] = {"messages": [*turns, answer]}
    if kind == "pairs":
        values = {"messages": turns, "chosen": answer, "rejected": answer | {"content": "No."}}
    with pytest.raises(UserError, match="record 7"):
        read(values, folder, kind)


def video_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return records with a video of three frames followed by an image, in all formats."""
    names = ["f/1.png", "f/2.png", "f/10.png"]
    (folder / "f").mkdir()
    for name in names:
        Image.new("RGB", (8, 4), "blue").save(folder / name)
    text, answer = "<video>See <image>.", {"role": "assistant", "content": "Red."}
    parts = [
        {"type": "video", "video": names, "fps": 4, "max_pixels": 900}, {"type": "text", "text": "See "},
        {"type": "image", "image": "b.png"}, {"type": "text", "text": "."},
    ]  # fmt: skip
    empty = [part | {"video": None} if part["type"] == "video" else part for part in parts]
    video_records = {"videos": [names], "images": ["b.png"]}
    return {
        "alpaca": {"instruction": text, "output": "Red.", **video_records},
        "folder": {"instruction": text, "output": "Red.", **video_records, "videos": ["f"]},
        "sharegpt": {
            "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Red."}], **video_records,
        },
        "parts": {"messages": [{"role": "user", "content": parts}, answer]},
        "filled": {"messages": [{"role": "user", "content": empty}, answer], "videos": [names]},
    }  # fmt: skip


@pytest.mark.parametrize("form", ["alpaca", "folder", "sharegpt", "parts", "filled"])
def test_all_video_formats_become_frames(folder, form):
    (question, _) = read(video_records(folder)[form], folder).messages
    kinds = [part.kind for part in question.parts]
    assert kinds == ["video", "text", "image", "text"]
    video, image = question.images
    assert [Path(frame.path).name for frame in video.frames] == ["1.png", "2.png", "10.png"]
    assert (video.width, video.height, image.width, image.frames) == (8, 4, 5, ())
    assert (video.fps, video.max_pixels) == ((4, 900) if form == "parts" else (2.0, None))


def test_frames_are_limited_and_paired_as_in_llamafactory(folder):
    video_records(folder)
    reader = MediaReader((folder,), 1024, 589824, video_min_pixels=256, video_max_pixels=65536, video_fps=1.0)
    video = read_video(reader, "f", "videos[0]")
    assert [Path(frame.path).name for frame in video.frames] == ["1.png", "2.png", "10.png", "10.png"]
    assert (video.min_pixels, video.max_pixels, video.fps) == (256, 65536, 1.0)


def test_folder_of_frames_that_cannot_be_listed_is_rejected(folder, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # root may list any folder
    with pytest.raises(BadImage, match="Permission denied"):
        read_video(MediaReader((folder,)), ".", "videos[0]")


def test_order_of_frames_with_equal_numbers_does_not_depend_on_the_file_system(folder, monkeypatch):
    (folder / "f").mkdir()
    for name in ("1.png", "01.png"):
        Image.new("RGB", (8, 4), "blue").save(folder / "f" / name)
    orders, scandir = [], os.scandir
    for is_reversed in (False, True):
        monkeypatch.setattr(
            os,
            "scandir",
            lambda path, r=is_reversed: nullcontext(sorted(scandir(path), key=attrgetter("name"), reverse=r)),
        )
        video = read_video(MediaReader((folder,)), "f", "videos[0]")
        orders.append([Path(frame.path).name for frame in video.frames])
    assert orders[0] == orders[1]


def test_videos_without_placeholder_precede_first_user_message(folder):
    record = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}]}
    (question, _) = read(record | {"videos": video_records(folder)["alpaca"]["videos"]}, folder).messages
    assert [part.kind for part in question.parts] == ["video", "text"]


@pytest.mark.parametrize("kind", [["image"], {"image": 1}, 3])
def test_content_part_with_non_string_type_is_rejected(folder, kind):
    parts = [{"type": kind}, {"type": "image", "image": "a.png"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Red."}]}
    with pytest.raises(UserError, match='must be a part of type "text", "image" or "video"'):
        read(record, folder)


def test_pipe_is_rejected_without_opening(folder):
    os.mkfifo(folder / "c.png")
    with pytest.raises(UserError, match=r'images.1. "c.png" is a named pipe, which is not supported'):
        read(bad(images=["a.png", "c.png"]), folder)


def test_non_image_file_is_rejected_by_its_first_bytes(folder):
    (folder / "c.png").write_text("<!DOCTYPE html>")
    with pytest.raises(UserError, match=r'images.1. "c.png" is not an image .begins "<!DOCTYPE ht"'):
        read(bad(images=["a.png", "c.png"]), folder)


def test_text_model_rejects_images_by_its_name(folder):
    with pytest.raises(UserError, match=r'contains images .*"images".*, but qwen2 supports text only'):
        read(bad(), folder, model_type="qwen2")


@pytest.mark.parametrize("form", ["alpaca", "sharegpt", "parts", "filled"])
def test_text_model_rejects_videos_by_its_name(folder, form):
    record = {name: value for name, value in video_records(folder)[form].items() if name != "images"}
    with pytest.raises(UserError, match=r'contains (videos .*"videos".*|image, video), but qwen2 supports text only'):
        read(record, folder, model_type="qwen2")


def test_media_without_placeholders_are_noted_by_their_kind(folder):
    values = {"instruction": "What?", "output": "Red.", "videos": video_records(folder)["alpaca"]["videos"]}
    needs = RecordNeeds(reader=MediaReader((folder,)))
    layout = layout_of(DataSource("v", "records", [], "v.json"), [values], "v.json", needs)
    convert_records([(values, "v.json", 1)], layout, DataStats())
    assert 'no "<video>" in the text: videos are placed before the first user message' in layout.notes
    assert not any("image" in note for note in layout.notes)


@pytest.mark.parametrize("model_type", ["qwen2", ""])
@pytest.mark.parametrize(
    "prompt", [{"instruction": "<image>Hi"}, {"prompt": [{"role": "user", "content": "<image>Hi"}]}]
)
@pytest.mark.parametrize("kind", ["pairs", "unpaired"])
def test_images_of_detected_preferences_are_read_or_rejected(folder, model_type, prompt, kind):
    def answer(text):
        return text if "instruction" in prompt else [{"role": "assistant", "content": text}]

    if kind == "pairs":
        values = {**prompt, "chosen": answer("Yes."), "rejected": answer("No."), "images": ["a.png"]}
    else:
        name = "output" if "instruction" in prompt else "completion"
        values = {**prompt, name: answer("Yes."), "label": True, "images": ["a.png"]}
    if model_type:
        with pytest.raises(UserError, match=r'contains images .*"images".*, but qwen2 supports text only'):
            read(values, folder, kind, model_type)
        return
    needs = RecordNeeds(kind, reader=MediaReader((folder,), 1024, 589824))
    layout = layout_of(DataSource("v", "records", [], "v.json"), [values], "v.json", needs)
    assert not any("images" in note for note in layout.notes)
    (example,) = convert_records([(values, "v.json", 7)], layout, DataStats())
    assert summarize(example)[0][:2] == [(8, 4), "Hi"]


_SPOKEN = {"conversations": [{"speaker": "human", "text": "Hi"}, {"speaker": "gpt", "text": "Yes."}]}
_PAIR = {"instruction": "Hi", "chosen": "Yes.", "rejected": "No."}


@pytest.mark.parametrize(
    ("values", "kind", "more"),
    [
        ({"instruction": "Hi", "output": "Yes."}, "answers", {}),
        ({"instruction": "Hi", "output": "Yes."}, "answers", {"is_described": True}),
        (_SPOKEN, "answers", {"formatting": "sharegpt", "tags": {"role_tag": "speaker", "content_tag": "text"}}),
        (_PAIR, "pairs", {}),
    ],
    ids=["detected", "entry", "formatting", "pairs"],
)
def test_images_are_read_or_rejected_in_any_record_without_columns(folder, values, kind, more):
    for model_type, first in product(("", "qwen2"), (values, {**values, "images": ["a.png"]})):
        needs = RecordNeeds(kind, reader=MediaReader((folder,), 1024, 589824, model_type))
        layout = layout_of(DataSource("v", "records", [], "v.json", **more), [first], "v.json", needs)
        assert not any("images" in note for note in layout.notes)
        later = [({**values, "images": ["a.png"]}, "v.json", 21)]
        if model_type:
            with pytest.raises(UserError, match=r'contains images .*"images".*, but qwen2 supports text only'):
                convert_records(later, layout, DataStats())
        else:
            (example,) = convert_records(later, layout, DataStats())
            assert summarize(example)[0] == [(8, 4), "Hi"]


def test_identical_bytes_are_stored_once(folder):
    reader, data = MediaReader(), io.BytesIO(content("a.png", folder)).getvalue()
    first, second = (reader.image({"bytes": data, "path": "x/a.png"}, "images[0]") for _ in range(2))
    assert first == second
    assert Path(first.path).read_bytes() == data


def test_columns_of_reward_functions_keep_the_frames_of_each_video_together():
    def frame(name: str) -> ImageFile:
        return ImageFile(name, 8, 4)

    videos = [
        replace(frame("a"), frames=(frame("a"), frame("b"))),
        replace(frame("c"), frames=(frame("c"), frame("d"))),
    ]
    parts = (*(ContentPart("video", one) for one in videos), ContentPart("image", frame("e")))
    layout = Layout("alpaca", {}, frozenset(), OPENAI_TAGS, images="images", videos="videos")
    columns = {"videos": ["v", "w"], "images": ["e"], "answer": "x"}
    example = Example((Message("user", parts),))
    found = with_paths(columns, Record(columns, "set", 1, layout), example)
    assert found == {"videos": [["a", "b"], ["c", "d"]], "images": ["e"], "answer": "x"}
