"""Rows with images equal those of LLaMA-Factory and TRL; sizes come from file headers.

The numbers come from ``golden/images.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.data.chat.choose import TemplateOptions, configure_tokenizer, load_template
from burnish.data.chat.plain import PlainOptions, PlainTemplate
from burnish.data.chat.truncate import EncodingOptions
from burnish.data.images.families import check_family, family_of
from burnish.data.images.family import Checkpoint, Family
from burnish.data.images.image_file import ImageFile, images_of, load, read_header
from burnish.data.images.in_rows import without_expansion
from burnish.data.stats import DataStats
from burnish.explain.explain import pieces_of
from burnish.loop.types import IGNORE_INDEX, ContentPart, Example, Message
from vision_models import golden, image_models

GOLDEN = golden()


@dataclass
class Options(TemplateOptions, EncodingOptions):
    """Options of templates and rows."""


@cache
def parts(name: str) -> Any:
    model, composed = image_models().FAMILIES[name]()
    return model.config, composed


def family(name: str, shrinks: bool = False) -> Family:
    config, composed = parts(name)
    settings = getattr(composed, "golden_config", {})
    composed.tokenizer.chat_template = composed.chat_template
    return family_of(Checkpoint(config, composed.image_processor, composed.tokenizer, settings, shrinks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    image_models().write_images(folder, [n for record in GOLDEN["records"].values() for n in record["images"]])
    return folder


def example(
    folder: Path, name: str, max_pixels: int | None = 589824, min_pixels: int | None = 1024, raw: bool = False
) -> Example:
    record = GOLDEN["records"][name]
    images = iter(
        read_header(folder / file_name, place=f"images[{at}]", max_pixels=max_pixels, min_pixels=min_pixels)
        for at, file_name in enumerate(record["images"])
    )
    messages = []
    for message in record["messages"]:
        first, *others = message["content"].split("<image>")
        result = [ContentPart("text", first)]
        for other in others:
            result += [ContentPart("image", next(images)), ContentPart("text", other)]
        content = tuple(p for p in result if p.value != "")
        raw_parts = [{"type": "image"} if p.kind == "image" else {"type": "text", "text": p.value} for p in content]
        options = {"role": message["role"], "content": raw_parts if others else message["content"]} if raw else None
        messages.append(Message(message["role"], content if others else message["content"], raw=options))
    system = None if raw or messages[0].role != "system" else messages.pop(0).text
    return Example(messages=tuple(messages), system=system, source="v.json", number=7)


def encode(case: dict[str, Any], folder: Path, **more: Any) -> tuple[Any, Family, DataStats]:
    result, options = family(case["family"]), dict(case["options"]) | more
    max_pixels, stats = options.pop("image_max_pixels", 589824), DataStats()
    template = load_template(Options(template=case["template"], **options), result.tokenizer, family=result)
    configure_tokenizer(template, result.tokenizer)
    (row,) = template.encode([example(folder, case["record"], max_pixels)], stats)
    return row, result, stats


def name_of(case: dict[str, Any]) -> str:
    return f"{case['family']}-{case['record']}-{case.get('mode', '')}{len(case.get('options') or '')}"


@pytest.mark.parametrize("case", [*GOLDEN["llamafactory"], *GOLDEN["upright_on_white"]], ids=name_of)
def test_rows_match_llamafactory(case, folder):
    row, result, _ = encode(case, folder)
    assert row["input_ids"] == case["input_ids"]
    assert row["labels"] == case["labels"]
    images = images_of(row)
    sizes = [list(result.given_sizes(image)[-1]) for image in images]
    assert sizes == case.get("sizes_given_to_the_processor", [])
    assert [result.resize(image).size for image in images] == [tuple(size) for size in sizes]
    stored = [at for image in images for at in range(image.begin, image.end)]
    placeholders = [at for at, token in enumerate(row["input_ids"]) if token == result.placeholder_id]
    assert set(placeholders) <= set(stored)
    assert len(placeholders) == case["image_tokens"]


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN["llamafactory"] if not c["options"] and c["record"] != "tool"], ids=name_of
)
def test_saved_chat_template_writes_the_placeholders_of_the_trained_row(case, folder):
    row, result, _ = encode(case, folder)
    template = load_template(Options(template=case["template"]), result.tokenizer, family=result)
    chat = [dict(message.raw) for message in example(folder, case["record"], raw=True).messages]
    text = result.tokenizer.apply_chat_template(chat, chat_template=template.jinja(), tokenize=False)
    written = text.replace(result.mark, result.chat_template_text)  # as transformers' processor does
    expected = without_expansion(row["input_ids"], images_of(row), result.mark_id)
    assert result.tokenizer.encode(written, add_special_tokens=False) == expected


@pytest.mark.parametrize(
    "case", [c for c in (*GOLDEN["llamafactory"], *GOLDEN["upright_on_white"]) if c["tensors"]], ids=name_of
)
def test_upright_pixels_on_white_match_llamafactory(case, folder):
    row, result, _ = encode(case, folder)
    images = [result.prepare(image) for image in images_of(row)]
    pixels = np.asarray(result.processor(images=images, return_tensors="np")["pixel_values"], np.float64).ravel()
    ramp = (7919 * np.arange(len(pixels)) % 1009) / 1009 - 0.5
    expected = case["tensors"]["pixel_values"]
    options = [pixels.mean(), np.abs(pixels).mean(), (pixels * ramp).mean()]
    assert options == pytest.approx([expected["mean"], expected["abs"], expected["ramp"]], abs=2e-6)


@pytest.mark.parametrize("case", GOLDEN["trl"], ids=name_of)
def test_rows_match_trl_except_for_trained_placeholders(case, folder):
    result = family(case["family"])
    options = PlainOptions(None, "keep_start", assistant_only=case["mode"] == "assistant")
    template, question = (
        PlainTemplate(options, result.tokenizer, result),
        example(folder, case["record"], None, None, raw=True),
    )
    if case["mode"] == "completion":
        before = [replace(message, train=False) for message in question.messages[:-1]]
        question = replace(question, messages=(*before, question.messages[-1]))
    (row,) = template.encode([question], DataStats())
    assert row["input_ids"] == case["input_ids"]
    pairs = zip(case["input_ids"], case["labels"], strict=True)
    assert row["labels"] == [IGNORE_INDEX if token == result.placeholder_id else label for token, label in pairs]
    assert case["mode"] != "all" or row["labels"] != case["labels"]


@pytest.mark.parametrize("case", GOLDEN["counts"], ids=lambda case: case["family"])
def test_placeholders_from_image_size_match_processor(case):
    result = family(case["family"])
    for width, height, count in case["width_height_placeholders"]:
        assert result.ids(width, height).count(result.placeholder_id) == count, (width, height)


def test_placeholders_are_never_trained_on(folder):
    for case in GOLDEN["not_to_match"]:
        if case["record"] in ("one", "in_answer"):
            row, result, _ = encode(case, folder)
            assert row["input_ids"] == case["input_ids"]
            assert row["labels"] != case["labels"]
            assert result.placeholder_id in case["labels"]
            assert result.placeholder_id not in row["labels"]


def test_image_is_never_truncated(folder):
    for case in GOLDEN["not_to_match"]:
        if "cutoff_len" in (case.get("options") or {}):
            row, result, stats = encode(case, folder)
            if row is None:
                assert any("would split an image" in reason for reason in stats.records)
                continue
            num_tokens = sum(image.end - image.begin for image in images_of(row))
            assert row["input_ids"].count(result.placeholder_id) == num_tokens


def test_text_is_truncated_before_an_image(folder):
    case = {"family": "qwen2_5_vl", "template": "qwen2_vl", "record": "large", "options": {}}
    row, _, _ = encode(case, folder)
    (image,) = images_of(row)
    shorter, _, _ = encode(case, folder, cutoff_len=len(row["input_ids"]) - 4)
    assert len(shorter["input_ids"]) == len(row["input_ids"]) - 4
    assert images_of(shorter)[0].end - images_of(shorter)[0].begin == image.end - image.begin


def test_images_are_downscaled_until_their_row_fits(folder):
    result = family("qwen2_5_vl", shrinks=True)
    options, stats = Options(template="qwen2_vl", cutoff_len=54), DataStats()
    template = load_template(options, result.tokenizer, family=result)
    (row,) = template.encode([example(folder, "large")], stats)
    (image,) = images_of(row)
    assert len(row["input_ids"]) <= 54
    assert image.max_pixels < 300 * 200
    assert result.of(image).count(result.placeholder_id) == row["input_ids"].count(result.placeholder_id) > 0
    assert any("images resized to fit" in reason for reason in stats.records)


def test_control_token_in_a_text_is_text(folder):
    result = family("qwen2_5_vl")
    template = load_template(Options(template="qwen2_vl"), result.tokenizer, family=result)
    (row,) = template.encode([example(folder, "marks")], DataStats())
    assert row["input_ids"].count(result.placeholder_id) == 4
    plain = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result)
    (row,) = plain.encode([example(folder, "marks", raw=True)], DataStats())
    assert row["input_ids"].count(result.placeholder_id) == sum(len(result.of(image)) for image in images_of(row))


def test_template_of_another_family_is_rejected_naming_both_tokens():
    with pytest.raises(UserError, match=r"qwen2_vl uses the placeholder <\|image_pad\|>, but gemma3 uses <image_so"):
        check_family("qwen2_vl", family("gemma3"))


def test_prompt_ends_where_the_response_begins(folder):
    result = family("qwen2_5_vl")
    template = load_template(Options(template="qwen2_vl"), result.tokenizer, family=result)
    (row,) = template.encode([example(folder, "two")], DataStats())
    requested = template.prompt_row(example(folder, "two"))
    first = next(at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX)
    assert requested["input_ids"] == row["input_ids"][:first]
    assert requested["images"] == row["images"]


def test_images_are_upright_and_on_white(folder):
    turned, clear = (read_header(folder / name) for name in ("p12_84x42_turned.jpg", "p11_64x64_clear.png"))
    assert (turned.width, turned.height) == load(turned).size == (42, 84)
    assert load(clear).getpixel((0, 0)) == (255, 255, 255)


def test_image_hash_depends_on_file_and_limits(folder):
    image = read_header(folder / "p1_64x48.png")
    others = [read_header(folder / "p4_48x48.png"), replace(image, modified_ns=1), replace(image, max_pixels=9)]
    assert len({image.identity, *(other.identity for other in others)}) == 4
    assert ImageFile(**image.as_json()) == image


def test_explain_shows_an_image_at_its_position(folder):
    row, result, _ = encode({"family": "qwen2_5_vl", "template": "qwen2_vl", "record": "two", "options": {}}, folder)
    pieces = pieces_of(row, result.tokenizer, result)
    described = [text for text, _, _ in pieces if text.startswith("[image")]
    assert [text.split("/")[-1] for text in described] == [
        "p2_100x40.png 100x40 -> 112x28, 4 tokens]", "p3_30x70.png 30x70 -> 28x56, 2 tokens]",
    ]  # fmt: skip
    assert [token for _, _, ids in pieces for token in ids] == row["input_ids"]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("size", ["20x9", "64x48", "300x220", "40x410"])
def test_resizing_before_the_processor_gives_the_pixels_of_its_resize(tmp_path, name, size):
    result = family(name)
    image_models().write_images(tmp_path, [f"p3_{size}.png"])
    image = read_header(tmp_path / f"p3_{size}.png", min_pixels=1024)
    tensors = [
        result.processor(images=[pixels], return_tensors="np")
        for pixels in (result.resize(image), result.prepare(image))
    ]
    assert result.prepare(image).size == result.resized_size(*result.given_sizes(image)[-1])
    for key in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(tensors[0][key], tensors[1][key])
