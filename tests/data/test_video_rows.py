"""Rows with videos equal those of LLaMA-Factory: ids, labels, grids and frame sizes."""

import json
import re

import pytest
from test_image_rows import Options, family

from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.images.image_file import images_of
from burnish.data.images.options import ImageOptions, limits_of
from burnish.data.images.sources import MediaReader
from burnish.data.images.videos import read_video
from burnish.data.stats import DataStats
from burnish.loop.types import ContentPart, Example, Message
from vision_models import GOLDEN, image_models

CASES = json.loads((GOLDEN / "llamafactory_videos.json").read_text())


def example_of(case, folder):
    """Return the example of a case, with the default image limits of ``burnish train``."""
    reader = limits_of(ImageOptions(**case["options"]))
    image_models().write_images(folder, [*case["images"], *(name for video in case["frames"] for name in video)])
    media = {
        "image": iter(
            reader.image(str(folder / name), f"images[{number}]") for number, name in enumerate(case["images"])
        ),
        "video": iter(
            read_video(reader, [str(folder / name) for name in names], f"videos[{number}]")
            for number, names in enumerate(case["frames"])
        ),
    }
    messages = []
    for number, text in enumerate(case["texts"]):
        pieces = text.replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
        parts = [ContentPart(p, next(media[p])) if p in media else ContentPart("text", p) for p in pieces if p]
        messages.append(Message(("user", "assistant")[number % 2], tuple(parts)))
    return Example(messages=tuple(messages), source="v.json", number=1)


@pytest.mark.sample(14)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['family']}-{case['case']}")
def test_rows_with_videos_match_llamafactory(case, tmp_path):
    result = family(case["family"])
    template = load_template(Options(template=case["template"]), result.tokenizer, family=result)
    configure_tokenizer(template, result.tokenizer)
    (row,) = template.encode([example_of(case, tmp_path)], DataStats())
    videos = [image for image in images_of(row) if image.frames]
    assert [list(result.given_sizes(video)[-1]) for video in videos] == case["sizes"]
    assert [list(result.video_grid(video)) for video in videos] == case["video_grid_thw"]
    if "glm" in case["family"]:
        assert without_times(result, row["input_ids"]) == without_times(result, case["input_ids"])
        assert [token for token in row["labels"] if token >= 0] == [token for token in case["labels"] if token >= 0]
    else:
        assert result.tokenizer.decode(row["input_ids"]) == result.tokenizer.decode(case["input_ids"])
        assert row["input_ids"] == case["input_ids"]
        assert row["labels"] == case["labels"]


def test_record_is_dropped_with_the_kind_that_its_chat_template_does_not_write(tmp_path):
    case, result = next(case for case in CASES if case["family"] == "qwen2_5_vl"), family("qwen2_5_vl")
    result.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else "
        "('<|image_pad|>' if p['type'] == 'image' else '') }}{% endfor %}<|im_end|>{% endfor %}"
    )
    template, stats = load_template(Options(), result.tokenizer, family=result), DataStats()
    assert template.encode([example_of(case, tmp_path)], stats) == [None]
    assert 'the template outputs "<|video_pad|>" 0 times for 1 video' in stats.sentences()[0]


def without_times(result, ids):
    """Return the text of a row without the time after each frame. LLaMA-Factory's times are 0, since transformers 5 no
    longer returns them, and it omits "seconds" for GLM-4.6V."""
    return re.sub(r"(?<=<\|end_of_image\|>)\d+(\.\d seconds)?", "", result.tokenizer.decode(ids))


def test_a_repeated_last_frame_has_the_time_of_the_last_frame(tmp_path):
    result = family("qwen3_vl")
    names = [f"p{number}_64x48.png" for number in range(5)]
    image_models().write_images(tmp_path, names)
    for reader in (
        limits_of(ImageOptions()),
        MediaReader(),
    ):  # only the limits of LLaMA-Factory repeat frames
        for count, stamps in ((1, [0.0]), (2, [0.25]), (5, [0.25, 1.25, 2.0])):
            video = read_video(reader, [str(tmp_path / name) for name in names[:count]], "videos[0]")
            assert result.stamps(video) == stamps
    repeated = read_video(
        MediaReader(), [str(tmp_path / name) for name in (*names[:2], names[2], names[2])], "videos[0]"
    )
    assert result.stamps(repeated) == [0.25, 1.25]
