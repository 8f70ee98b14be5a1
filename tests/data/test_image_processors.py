"""Rows with images equal those of transformers' processors for the same text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from burnish.config.errors import UserError
from burnish.data.chat.choose import TemplateOptions, load_template
from burnish.data.chat.plain import PlainOptions, PlainTemplate
from burnish.data.chat.truncate import EncodingOptions
from burnish.data.images.families import AnyFamily, family_of
from burnish.data.images.family import Checkpoint, Family
from burnish.data.images.image_file import BadImage, ImageFile, images_of, read_header
from burnish.data.stats import DataStats
from burnish.loop.types import ContentPart, Example, Message
from burnish.models.images.collator import ImageCollator, ImageLayout
from burnish.models.images.features import num_features, patch_vision_model
from burnish.models.images.probe import isolates_images
from burnish.models.images.processor import ImageProcessor
from vision_models import COLLATE_FUNCTIONS, image_models

NAMES = ["p4_48x48.png", "p5_200x40.png", "p6_40x130.png"]


class Options(TemplateOptions, EncodingOptions):
    """Options of templates and rows."""


@pytest.fixture
def folder(tmp_path):
    image_models().write_images(tmp_path, NAMES)
    return tmp_path


def parts(*pieces: Any) -> tuple[ContentPart, ...]:
    return tuple(ContentPart("text" if isinstance(piece, str) else "image", piece) for piece in pieces)


def image_example(folder, *pieces: str) -> Example:
    """Return an example whose question consists of texts and of images, which are given as file names."""
    content = [read_header(folder / piece) if piece in NAMES else piece for piece in pieces]
    raw = [{"type": "image"} if piece in NAMES else {"type": "text", "text": piece} for piece in pieces]
    return Example(
        messages=(
            Message("user", parts(*content), raw={"role": "user", "content": raw}),
            Message("assistant", "A shape.", raw={"role": "assistant", "content": "A shape."}),
        ),
        source="v.json", number=7,
    )  # fmt: skip


def images(example: Example) -> list[Any]:
    return [image_models().image(image.path.rsplit("/", 1)[-1]) for image in example.messages[0].images]


def load_family(config: Any, composed: Any, with_processor: bool = False, pan_and_scan: bool | None = None) -> Family:
    composed.tokenizer.chat_template = composed.chat_template
    options = composed if with_processor else None
    settings = composed.golden_config
    result = Checkpoint(
        config, composed.image_processor, composed.tokenizer, settings, composed=options, pan_and_scan=pan_and_scan
    )
    return family_of(result)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["Say this: ", "What is this?", ""])
def test_gemma_pan_and_scan_crops_match_its_processor(folder, name, text):
    model, composed = image_models().FAMILIES["gemma3"]()
    composed.image_processor.pan_and_scan_min_crop_size = 20
    result = load_family(model.config, composed, pan_and_scan=True)
    example = image_example(folder, text, name, "Well?")
    (row,) = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result).encode([example], DataStats())
    chat = composed.apply_chat_template([message.raw for message in example.messages], tokenize=False)
    expected = composed(
        text=chat, images=images(example), add_special_tokens=False, return_tensors="pt", do_pan_and_scan=True,
        pan_and_scan_min_crop_size=20,
    )  # fmt: skip
    assert row["input_ids"] == expected["input_ids"][0].tolist()
    processor = ImageProcessor(composed.image_processor, ["pixel_values"], result.options)
    (image,) = images_of(row)
    assert torch.equal(processor.tensors(result.prepare(image))["pixel_values"], expected["pixel_values"])
    assert (len(expected["pixel_values"]) > 1) == (name != NAMES[0])


def test_paligemma_images_precede_text(folder):
    model, composed = image_models().FAMILIES["paligemma"]()
    result = load_family(model.config, composed)
    template = load_template(_options(template="paligemma"), result.tokenizer, family=result)
    example = image_example(folder, "What ", NAMES[0], "is ", NAMES[1], "this?")
    (row,) = template.encode([example], DataStats())
    text = result.placeholder * 2 + "What is this?"
    expected = composed(text=text, images=[images(example)], suffix="A shape.")
    assert row["input_ids"] == list(expected["input_ids"][0])
    assert row["labels"] == list(expected["labels"][0])
    assert [(image.begin, image.end) for image in images_of(row)] == [(0, 16), (16, 32)]
    prompt = template.prompt_row(example)
    assert prompt["input_ids"] == row["input_ids"][: len(prompt["input_ids"])]
    assert prompt["images"] == row["images"]


def _options(**values: Any) -> Any:
    options = Options()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def test_mllama_text_attends_to_preceding_images(folder):
    model, composed = image_models().build("mllama")
    result = load_family(model.config, composed)
    layout, processor = ImageLayout.of(model.config), ImageProcessor.of(model, composed.image_processor)
    collate = ImageCollator(
        COLLATE_FUNCTIONS["padded"], COLLATE_FUNCTIONS["padded"], layout, processor, images_of,
        lambda image: processor.tensors(result.prepare(image)),
    )  # fmt: skip
    template = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result)
    for pieces in ([NAMES[0], "What?"], ["See ", NAMES[0], NAMES[1], " and ", NAMES[2], "?"]):
        example = image_example(folder, *pieces)
        (row,) = template.encode([example], DataStats())
        chat = composed.apply_chat_template([message.raw for message in example.messages], tokenize=False)
        expected = composed(text=chat, images=[images(example)], add_special_tokens=False, return_tensors="pt")
        batch = collate([row])
        assert row["input_ids"] == expected["input_ids"][0].tolist()
        for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"):
            assert torch.equal(batch[name], expected[name]), name


def idefics2() -> tuple[Any, Any]:
    """Return a model without a supported family, and its processor."""
    models = image_models()
    library, words = models.T, ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
    tokenizer = models.tokenizer_of(*words, eos="<end_of_utterance>")
    vision = {
        "model_type": "idefics2_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    resampler = {
        "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
        "resampler_head_dim": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = library.Idefics2Config(
        text_config=models.text_of(tokenizer, model_type="mistral", sliding_window=None), vision_config=vision,
        perceiver_config=resampler, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    options = {"size": {"longest_edge": 56, "shortest_edge": 28}, "do_image_splitting": False}
    composed = models.composed(
        "Idefics2Processor", image_processor=models.pil("Idefics2ImageProcessor", **options), tokenizer=tokenizer,
        image_seq_len=4, chat_template=models.CHATML.replace("{I}", "<image>"),
    )  # fmt: skip
    return models.fill(library.Idefics2ForConditionalGeneration(config)), composed


def test_model_of_unknown_family_uses_its_processor(folder):
    model, composed = idefics2()
    result = load_family(model.config, composed, with_processor=True)
    assert isinstance(result, AnyFamily)
    assert "are processed by transformers' Idefics2Processor" in result.note
    example = image_example(folder, "What is ", NAMES[0], " and ", NAMES[2], " now?")
    (row,) = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result).encode([example], DataStats())
    chat = composed.apply_chat_template([message.raw for message in example.messages], tokenize=False)
    expected = composed(text=chat, images=[images(example)], add_special_tokens=False)
    assert row["input_ids"] == list(expected["input_ids"][0])
    patch_vision_model(model)
    layout, processor = ImageLayout.of(model.config), ImageProcessor.of(model, composed.image_processor)
    for kind in ("flat", "padded"):
        collate = ImageCollator(
            COLLATE_FUNCTIONS[kind], COLLATE_FUNCTIONS[kind], layout, processor, lambda row: row.get("images", []),
            lambda image_input: processor.tensors(image_input.image),
        )  # fmt: skip
        assert isolates_images(model, collate)


def test_unknown_family_without_processor_is_rejected_with_supported_ones():
    model, composed = idefics2()
    with pytest.raises(UserError, match=r"(?s)type idefics2 cannot be trained on images.*llava.*qwen2_5_vl"):
        load_family(model.config, composed)


TILES = {
    "llama4": [(138, 583, 20), (515, 233, 16), (1, 1, 4), (1000, 50, 20), (56, 56, 4), (112, 56, 12), (640, 480, 20)],
    "lfm2_vl": [(138, 583, 24), (515, 233, 42), (1, 1, 4), (19, 407, 15), (56, 56, 4), (112, 56, 8), (640, 480, 36)],
}
"""Width, height and number of placeholders, from transformers 5.23 with torchvision 0.28."""
SETTINGS = {
    "llama4": {"size": {"height": 56}, "max_patches": 4, "resize_to_max_canvas": False},
    "lfm2_vl": {
        "encoder_patch_size": 14, "downsample_factor": 2, "tile_size": 56, "max_image_tokens": 16,
        "min_image_tokens": 4, "max_num_patches": 64, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10,
        "use_thumbnail": True, "max_pixels_tolerance": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(TILES))
def test_tiles_are_counted_without_torchvision(name):
    tiny = image_models().FAMILIES[name]
    vision = SimpleNamespace(patch_size=14)
    tokenizer = image_models().tokenizer_of(*tiny.words, *tiny.named.values(), eos=tiny.eos, **tiny.named)
    result = family_of(
        Checkpoint(SimpleNamespace(model_type=name, vision_config=vision), SimpleNamespace(**SETTINGS[name]), tokenizer)
    )
    assert [(w, h, result.ids(w, h).count(result.placeholder_id)) for w, h, _ in TILES[name]] == TILES[name]


@pytest.mark.parametrize("name", list(TILES))
def test_rows_of_torchvision_models_match_their_processors(folder, name):
    pytest.importorskip("torchvision")
    model, composed = image_models().build(name)
    result = load_family(model.config, composed)
    processor = ImageProcessor.of(model, composed.image_processor)
    for width, height, _ in TILES[name]:
        image = Image.new("RGB", (width, height), "blue")
        expected = composed(text=[result.mark], images=[image], add_special_tokens=False)
        assert list(result.ids(width, height)) == list(expected["input_ids"][0])
        count = num_features(model, processor.tensors(image))
        assert result.ids(width, height).count(result.placeholder_id) == count
    example = image_example(folder, "What is ", NAMES[0], " and ", NAMES[2], " now?")
    (row,) = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result).encode([example], DataStats())
    chat = composed.apply_chat_template([message.raw for message in example.messages], tokenize=False)
    expected = composed(text=chat, images=[images(example)], add_special_tokens=False)
    assert row["input_ids"] == list(expected["input_ids"][0])


def test_lfm2_image_with_too_many_patches_is_rejected():
    tiny = image_models().FAMILIES["lfm2_vl"]
    tokenizer = image_models().tokenizer_of(*tiny.words, eos=tiny.eos, **tiny.named)
    config = SimpleNamespace(model_type="lfm2_vl", vision_config=SimpleNamespace(patch_size=14))
    result = family_of(Checkpoint(config, SimpleNamespace(**SETTINGS["lfm2_vl"]), tokenizer))
    with pytest.raises(BadImage, match="is 1000x10, which gives 160 patches; the maximum of this model is 64"):
        result.check(ImageFile("x.png", 1000, 10))


def test_onevision_images_are_padded_to_a_square_if_a_row_has_several(folder):
    model, composed = image_models().build("llava_onevision")
    result = load_family(model.config, composed)
    example = image_example(folder, "Compare ", NAMES[1], " and ", NAMES[2])
    (row,) = PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result).encode([example], DataStats())
    processor = ImageProcessor.of(model, composed.image_processor, result.options)
    tiles = [processor.tensors(result.prepare(image))["pixel_values"][0, 0] for image in images_of(row)]
    expected = composed.image_processor([images(example)], return_tensors="pt")["pixel_values"][:, 0]
    assert torch.equal(torch.stack(tiles), expected)


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_pixtral_images_have_complete_placeholders(folder, name):
    model, composed = image_models().build(name)
    result = load_family(model.config, composed)
    processor = ImageProcessor.of(model, composed.image_processor, result.options)
    for image in map(read_header, map(folder.joinpath, NAMES)):
        count = result.of(image).count(result.placeholder_id)
        assert num_features(model, processor.tensors(result.prepare(image))) == count


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_pixtral_image_is_rejected_if_a_side_would_be_resized_to_zero(tmp_path, name):
    image_models().write_images(tmp_path, ["p7_804x4.png", "p8_4x336.png"])
    model, composed = image_models().FAMILIES[name]()
    result = load_family(model.config, composed)
    with pytest.raises(BadImage, match=r"p7_804x4\.png is 804x4; the maximum aspect ratio of this model is 84:1"):
        result.check(read_header(tmp_path / "p7_804x4.png"))
    accepted = read_header(tmp_path / "p8_4x336.png")  # 84:1
    result.check(accepted)
    processor = ImageProcessor.of(model, composed.image_processor, result.options)
    assert processor.tensors(result.prepare(accepted))["pixel_values"].numel()


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_image_is_rejected_if_the_limits_of_pixels_give_a_side_of_zero(tmp_path, name):
    image_models().write_images(tmp_path, ["p7_150x1.png"])
    model, composed = image_models().FAMILIES[name]()
    with pytest.raises(BadImage, match=r"p7_150x1\.png is 150x1; the limits of pixels resize it to 122x0"):
        load_family(model.config, composed).check(read_header(tmp_path / "p7_150x1.png", max_pixels=100))


def test_image_with_aspect_ratio_above_200_is_rejected_before_its_step(tmp_path):
    image_models().write_images(tmp_path, ["p7_804x4.png"])
    model, composed = image_models().FAMILIES["qwen2_5_vl"]()
    result = load_family(model.config, composed)
    part = ContentPart("image", read_header(tmp_path / "p7_804x4.png"))
    raw = {"role": "user", "content": [{"type": "image"}]}
    answer = {"role": "assistant", "content": "A line."}
    example = Example(
        messages=(Message("user", (part,), raw=raw), Message("assistant", "A line.", raw=answer)),
        source="v.json", number=7,
    )  # fmt: skip
    with pytest.raises(
        UserError, match=r"v.json, record 7.*p7_804x4.png is 804x4; the maximum aspect ratio of this model is 200:1"
    ):
        list(PlainTemplate(PlainOptions(None, "keep_start"), result.tokenizer, result).encode([example], DataStats()))


class WordProcessor:
    """A composed processor of whole words, which returns tensors only if they are requested, as Ovis2's."""

    image_token = "<image>"

    def __init__(self, tokenizer: Any, numbers: bool = False, fails: bool = False) -> None:
        self.tokenizer, self.numbers, self.fails = tokenizer, numbers, fails

    def __call__(self, images: Any, text: list[str], add_special_tokens: bool, return_tensors: str) -> Any:
        if self.fails:
            raise RuntimeError("no grid")
        words = text[0]
        for number, image in enumerate(images[0]):
            before = str(number) if self.numbers else ""
            words = words.replace("<image>", f"{before}<fake_token_around_image>{'<mark>' * (image.width // 32)}", 1)
        words = words.replace("<mark>", "<image>")
        return self.tokenizer([words], add_special_tokens=False, return_tensors=return_tensors)


@pytest.mark.parametrize(
    ("behavior", "message"),
    [
        ({"numbers": True}, "records with several images are not supported, because WordProcessor numbers the images"),
        ({"fails": True}, r"WordProcessor cannot process an image of 64x64 pixels \(RuntimeError: no grid\)"),
    ],
)
def test_record_that_an_unknown_processor_cannot_process_is_rejected(folder, behavior, message):
    model, composed = idefics2()
    tokenizer = composed.tokenizer
    tokenizer.chat_template = composed.chat_template
    example = image_example(folder, "What is ", NAMES[0], " and ", NAMES[2], " now?")

    def encode(processor: WordProcessor) -> list[Any]:
        family = AnyFamily(Checkpoint(model.config, composed.image_processor, tokenizer, composed=processor))
        return list(PlainTemplate(PlainOptions(None, "keep_start"), tokenizer, family).encode([example], DataStats()))

    (row,) = encode(WordProcessor(tokenizer))
    assert [image["end"] - image["begin"] for image in row["images"]] == [2, 2]
    with pytest.raises(UserError, match=message):
        encode(WordProcessor(tokenizer, **behavior))
