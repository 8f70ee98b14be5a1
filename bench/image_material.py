"""Create the material for measurements with images: a small Qwen2.5-VL with random weights, generated photos,
questions.

Written to a folder: ``model`` with tokenizer and processors, ``media`` with JPEG files, ``photos.json`` (alpaca records
with ``<image>``), ``dataset_info.json`` and ``facts.json``. Everything is derived from ``SEED``.

A photo is enlarged noise, so that its file is about as large as that of a real photo of its size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from material import SEED, SIZES, Writer, make_tokenizer

MAX_PIXELS = 768 * 768
PHOTOS = ((640, 480), (1280, 960), (1280, 960), (4032, 3024), (1280, 960), (640, 480))
"""Sizes of the photos of a step, in turn."""
_CONTROLS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'text' %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Photos:
    """Options of the material.

    Args:
        rows: number of records, each with one photo.
        sizes: sizes of the photos, in turn.
    """

    rows: int = 24
    sizes: Sequence[tuple[int, int]] = PHOTOS

    @property
    def name(self) -> str:
        return f"photos-{self.rows}-{len(set(self.sizes))}"


def photo(number: int, width: int, height: int) -> Any:
    """Return a generated photo."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(SEED + number)
    coarse = random.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=numpy.uint8)
    fine = random.integers(-12, 13, (height // 2, width // 2, 3), dtype=numpy.int16)
    image = numpy.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(numpy.int16)
    image += numpy.repeat(numpy.repeat(fine, 2, 0), 2, 1)
    return Image.fromarray(numpy.clip(image, 0, 255).astype(numpy.uint8))


def make(photos: Photos, folder: Path) -> dict[str, Any]:
    """Create all files, unless they exist. Returns the facts."""
    if not (folder / "facts.json").exists():
        (folder / "media").mkdir(parents=True, exist_ok=True)
        weights = _model(folder / "model")
        writer, records = Writer(SEED), []
        for number in range(photos.rows):
            width, height = photos.sizes[number % len(photos.sizes)]
            name = f"media/{number:05}.jpg"
            photo(number, width, height).save(folder / name, quality=90)
            question, response = writer.text(8, 0.3, 16), writer.text(40, 0.5, 100)
            records.append({"instruction": f"<image>{question}", "input": "", "output": response, "images": [name]})
        (folder / "photos.json").write_text(json.dumps(records))
        columns = {"prompt": "instruction", "query": "input", "response": "output", "images": "images"}
        entries = {"photos": {"file_name": "photos.json", "columns": columns}}
        (folder / "dataset_info.json").write_text(json.dumps(entries))
        (folder / "facts.json").write_text(json.dumps({"weights": weights, "rows": photos.rows}))
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def _model(folder: Path) -> int:
    """Write the model and its processors and return the number of weights."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tokenizer(folder, None)
    tokenizer.add_tokens(list(_CONTROLS), special_tokens=True)
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, _CONTROLS)
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1_000_000.0}
    text = {**SIZES["small"], "vocab_size": len(tokenizer), "max_position_embeddings": 32_768, "rope_parameters": rope,
            "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    vision = {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "window_size": 112,
              "fullatt_block_indexes": [1, 3], "out_hidden_size": text["hidden_size"]}  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    limits = {"min_pixels": 56 * 56, "max_pixels": MAX_PIXELS, "patch_size": 14, "temporal_patch_size": 2,
              "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
              "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "Qwen2VLImageProcessor",
              "processor_class": "Qwen2_5_VLProcessor"}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(limits, indent=2))
    (folder / "chat_template.jinja").write_text(_CHAT)
    return int(model.num_parameters())
