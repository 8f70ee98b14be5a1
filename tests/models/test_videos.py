"""Videos as lists of frames: rows, tensors, positions and losses equal transformers' processors."""

import json
from array import array
from itertools import islice, permutations
from types import SimpleNamespace

import pytest
import torch
from test_images import loss_of

from burnish.data.images.families import family_of
from burnish.data.images.family import Checkpoint
from burnish.data.images.image_file import images_of, read_header
from burnish.data.images.in_rows import Marks, images_column
from burnish.data.images.sources import MediaReader
from burnish.data.images.videos import read_video
from burnish.inference.images.reading import ImageReader
from burnish.models.images.collator import ImageCollator, ImageLayout
from burnish.models.images.features import patch_vision_model
from burnish.models.images.processor import ImageProcessor
from burnish.models.images.prompts import inputs_of_images
from burnish.models.patches.capabilities import find_capabilities
from vision_models import COLLATE_FUNCTIONS, GOLDEN, image_models

GOLD = json.loads((GOLDEN / "videos.json").read_text())
FAMILIES = list(dict.fromkeys(case["family"] for case in GOLD))
LEVEL = 0.02
"""One of 255 levels after normalization, by which the resizes of torchvision and Pillow differ."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function of a name: model, family, golden rows encoded by burnish, and a collator factory, cached."""
    cache = {}

    def of(name):
        if name not in cache:
            cache[name] = _build(name, tmp_path_factory.mktemp(name))
        return cache[name]

    return of


def _build(name, folder):
    model, composed = image_models().build(name)
    cases = {gold["case"]: gold for gold in GOLD if gold["family"] == name}
    settings = cases["even"]["settings"]
    family = family_of(Checkpoint(model.config, composed.image_processor, composed.tokenizer, video_settings=settings))
    patch_vision_model(model)
    layout, processor = ImageLayout.of(model.config), ImageProcessor.of(model, family.processor)

    def collator(collation):
        return ImageCollator(
            COLLATE_FUNCTIONS[collation],
            COLLATE_FUNCTIONS[collation],
            layout,
            processor,
            images_of,
            lambda image: processor.tensors(family.prepare(image)),
        )

    rows = {case: _row(family, gold, folder) for case, gold in cases.items()}
    capabilities = find_capabilities(model, padding_free=True)
    return SimpleNamespace(
        name=name, model=model, family=family, cases=cases, rows=rows, collator=collator, capabilities=capabilities
    )


def _row(family, gold, folder):
    names = gold["frames"]
    image_models().write_images(folder, [*names, *filter(None, [gold["image"]])])
    options = [read_video(MediaReader(), [str(folder / one) for one in names], "videos[0]", fps=gold["fps"])]
    if gold["image"]:
        options.insert(0, read_header(folder / gold["image"]))
    ids = array("i", family.tokenizer.encode(gold["text"], add_special_tokens=False))
    made = Marks(family).expand(ids, options)
    return {"input_ids": list(made.ids), "labels": list(made.ids), "images": images_column(made.images)}


@pytest.mark.parametrize("case", ["even", "odd", "large", "both"])
@pytest.mark.parametrize("name", FAMILIES)
def test_video_rows_tensors_and_positions_match_transformers(models, name, case):
    result, gold = models(name), models(name).cases[case]
    row = result.rows[case]
    assert row["input_ids"] == gold["input_ids"]
    video = images_of(row)[-1]
    assert [list(result.family.video_grid(video))] == gold["video_grid_thw"]
    patches, _ = result.family.prepare(video)
    assert result.family.patches_of(video) == len(patches)
    assert float(patches.mean()) == pytest.approx(gold["mean"], abs=LEVEL)
    assert float(abs(patches).mean()) == pytest.approx(gold["abs"], abs=LEVEL)
    assert patches[-1, :8].tolist() == pytest.approx(gold["corner"], abs=LEVEL)
    batch = result.collator("padded")([row])
    assert batch["position_ids"][:, 0].tolist() == gold["position_ids"]
    if "loss" in gold:
        with torch.no_grad():
            loss = loss_of(result, "padded", [row])
        assert loss.item() == pytest.approx(gold["loss"], abs=2e-3)  # of pixels that differ by a level


@pytest.mark.parametrize("name", FAMILIES)
def test_video_losses_and_gradients_match_single_rows(models, name):
    result = models(name)
    text = result.rows["even"]["input_ids"][-9:]
    rows = [result.rows["even"], result.rows["both"], {"input_ids": text, "labels": text}, result.rows["odd"]]
    count = sum(len(row["input_ids"]) - 1 for row in rows)
    result.model.requires_grad_(True).zero_grad()
    alone = sum(loss_of(result, "padded", [row]) * (len(row["input_ids"]) - 1) for row in rows) / count
    alone.backward()
    expected = {name: p.grad.clone() for name, p in result.model.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for collation in ("padded",) if name == "qwen3_5" else ("flat", "padded"):
        for order in islice(permutations(range(4)), 0, 24, 6):
            result.model.zero_grad()
            loss = loss_of(result, collation, [rows[number] for number in order])
            loss.backward()
            assert loss.item() == pytest.approx(alone.item(), abs=1e-5)
            for path, parameter in result.model.named_parameters():
                if path in expected:
                    assert float((parameter.grad - expected[path]).abs().max()) <= 1e-5 * largest, path


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_with_video_has_logits_of_its_row(models, name):
    result, row = models(name), models(name).rows["both"]
    reader = ImageReader(result.model, result.family, MediaReader())
    options = SimpleNamespace(ids=row["input_ids"], start=0, images=reader.of(row)["images"])
    ids = torch.tensor([row["input_ids"]])
    reported = torch.arange(ids.shape[1])[None]
    batch = result.collator("padded")([row])
    batch.pop("labels"), batch.pop("num_tokens", None), batch.pop("content_hashes")
    with torch.no_grad():
        expected = result.model(**batch, use_cache=False).logits
        logits = result.model(
            input_ids=ids, **inputs_of_images(result.model, [options], reported), use_cache=False
        ).logits
    assert torch.allclose(logits, expected, atol=1e-5)
