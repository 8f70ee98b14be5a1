"""``burnish demo picture``: train a small, randomly initialized vision model to name drawn shapes and digits.

Options of ``train`` may be overridden. The trained model is saved in ``./demo-image-run``, the initial model in
``demo-image-run-model`` and the drawn images in ``demo-image-run-data``. A table shows images with the responses before
and after training. Responses are generated with transformers only, to show that the saved model works without burnish.
"""

from __future__ import annotations

import json
import random
import shlex
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import torch
from torch import nn

from burnish.data.images.image_file import load, read_header
from burnish.demo.report import BUNDLED, DemoQuestion, demo_plan, exact_match_rate, next_steps, report
from burnish.models.quiet import suppress_loading_messages
from burnish.report.console import note

QUESTION = "What is in the image?"
SIDE, PATCH = 56, 14  # pixels
_COLORS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 200), "yellow": (220, 180, 20)}
_SHAPES = ("circle", "square", "triangle", "cross")
_TRAINED, _HELD_OUT = 2400, 80


def demo_picture(argv: list[str]) -> int:
    """Create model and images, train, print responses before and after. Returns the exit status."""
    from burnish.checkpoint.checkpoint import output_folder
    from burnish.run.build import train_run

    folder = output_folder(demo_plan(argv, "demo_picture.yaml").options)
    base, data = folder.with_name(f"{folder.name}-model"), folder.with_name(f"{folder.name}-data")
    run = demo_plan(argv, "demo_picture.yaml", base, data)
    note(f"Creating a randomly initialized model, and drawing {_TRAINED + _HELD_OUT:,} images ...")
    make_model(base)
    questions = draw_set(data)
    note(f"Generating responses to {len(questions)} held-out images before training ...")
    before = seen_answers(base, base, data, questions)
    result = train_run(run)
    if result.exit_code is not None:
        return result.exit_code
    after = seen_answers(folder, base, data, questions)
    note(report(questions, before, after, "image"))
    place, image = shlex.quote(str(folder)), shlex.quote(str(data / questions[0].prompt))
    asked = f"chat {place} --once {shlex.quote(QUESTION)} --image {image} temperature=0"
    if exact_match_rate(questions, after) <= exact_match_rate(questions, before):
        note("The share of correct responses did not increase. Train for more steps; the default is enough.")
    note(next_steps([asked, f"chat {place}", f"api {place}"]))
    return 0


# --- images ---------------------------------------------------------------------------------------------------------


def draw_set(folder: Path) -> list[DemoQuestion]:
    """Draw the images of the dataset and write its records. Returns the held-out ones: file name and answer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)  # noqa: S311 - of images, not of keys
    records, held_out = [], []
    for number in range(_TRAINED + _HELD_OUT):
        name = f"{number:04}.png"
        answer = draw(chance, folder / name)
        messages = [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": answer}]
        if number < _TRAINED:
            records.append({"messages": messages, "images": [name]})
        else:
            held_out.append(DemoQuestion(name, answer))
    (folder / "images.json").write_text(json.dumps(records), encoding="utf-8")
    entry = {
        "file_name": "images.json",
        "formatting": "openai",
        "columns": {"messages": "messages", "images": "images"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({"demo_pictures": entry}), encoding="utf-8")
    return held_out


def draw(chance: random.Random, path: Path) -> str:
    """Draw one image of a shape or digit with random position, size and color. Returns its description."""
    from PIL import Image, ImageDraw, ImageFont

    paper = Image.new("RGB", (SIDE, SIDE), tuple(chance.randint(225, 255) for _ in range(3)))
    pen, radius = ImageDraw.Draw(paper), chance.randint(17, 21)
    x, y = (SIDE // 2 + chance.randint(-4, 4) for _ in range(2))
    name, color = chance.choice(list(_COLORS.items()))
    if chance.random() < 0.5:
        digit = str(chance.randrange(10))
        pen.text((x, y), digit, fill=color, anchor="mm", font=ImageFont.load_default(2 * radius))
        paper.save(path)
        return f"the digit {digit} in {name}"
    shape = chance.choice(_SHAPES)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    elif shape == "triangle":
        corners = [(x + radius * sin(2 * pi * k / 3), y - radius * cos(2 * pi * k / 3)) for k in range(3)]
        pen.polygon(corners, fill=color)
    else:
        pen.line((x - radius, y, x + radius, y), fill=color, width=7)
        pen.line((x, y - radius, x, y + radius), fill=color, width=7)
    paper.save(path)
    return f"a {name} {shape}"


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """Save a LLaVA model of 0.4 million parameters with random weights, and its processor."""
    from transformers import AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration, SiglipImageProcessorPil

    with suppress_loading_messages():
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "model")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 256, **shape, **ends,
        },
        vision_config={
            "model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False,
            **shape,
        },
        image_token_index=tokenizer.get_vocab()["<image>"], image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1, vision_feature_select_strategy="full", tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    with suppress_loading_messages():
        model.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    kind = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "num_additional_image_tokens": 0}
    settings = {**kind, "vision_feature_select_strategy": "full", "image_token": "<image>"}
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


_CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}" + _CONTENT + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def seen_answers(
    folder: Path, base: Path, data: Path, questions: list[DemoQuestion], batch_size: int = 40
) -> list[str]:
    """Return greedy responses of the model in ``folder`` to images, using transformers only."""
    from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

    with suppress_loading_messages():
        model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(base)
        images = AutoImageProcessor.from_pretrained(base, backend="pil")
    marks = "<image>" * model.config.image_seq_length
    chat: list[dict[str, Any]] = [{"role": "user", "content": marks + QUESTION}]
    prompt_ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    prompt_ids = prompt_ids["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found: list[str] = []
    for start in range(0, len(questions), batch_size):
        some = [load(read_header(data / question.prompt)) for question in questions[start : start + batch_size]]
        pixels = images(images=some, return_tensors="pt")["pixel_values"]
        ids = torch.tensor([prompt_ids] * len(some))
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, max_new_tokens=32, do_sample=False,
            eos_token_id=stop, pad_token_id=stop,
        )  # fmt: skip
        found += tokenizer.batch_decode(made[:, len(prompt_ids) :], skip_special_tokens=True)
    return [text.strip() for text in found]
