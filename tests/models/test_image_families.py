"""Vision model families: flat or padded batches in any row order give the results of transformers for single rows."""

import itertools

import pytest
import torch
from test_images import loss_of
from torch.nn.functional import cross_entropy

from burnish.loop.types import IGNORE_INDEX
from burnish.models.images.probe import collator_of_drawn_images, isolates_images, random_rows, transformers_inputs
from burnish.models.patches.capabilities import find_capabilities
from vision_models import load_image_model

FLAT = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_next", "llava_onevision", "gemma3", "gemma4",
    "paligemma", "internvl", "smolvlm", "idefics3", "pixtral", "mistral3", "glm4v", "glm46v", "aya_vision", "llama4",
    "glm4v_moe", "glm_ocr", "vipllava", "llava_next_video",
]  # fmt: skip
PADDED = ["qwen3_5", "qwen3_5_moe", "qwen4_exp", "lfm2_vl"]
NEED_TORCHVISION = ("llama4", "lfm2_vl")
ORDERS = list(itertools.permutations(range(4)))[::6]
"""Four orders of four rows."""


@pytest.fixture(scope="module", params=[*FLAT, *PADDED])
def family(request):
    """Return a model, four rows, and transformers' loss and gradients for each single row."""
    if request.param in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    result = load_image_model(request.param)
    result.name, result.capabilities = request.param, find_capabilities(result.model, padding_free=True)
    drawn = collator_of_drawn_images(result.collator("padded"))
    result.rows = [
        _with_labels(row)
        for row in [*random_rows(result.model, drawn), *itertools.islice(random_rows(result.model, drawn), 1, 2)]
    ]
    result.collator_of_drawn = result.collator
    result.collator = lambda collation: collator_of_drawn_images(result.collator_of_drawn(collation))
    result.model.requires_grad_(True).zero_grad()
    total = torch.zeros(())
    for row in result.rows:
        batch = transformers_inputs(result.model, drawn, row)
        logits = result.model(**batch, use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, torch.tensor(row["labels"])[1:], reduction="sum")
    count = sum(label != IGNORE_INDEX for row in result.rows for label in row["labels"][1:])
    (total / count).backward()
    result.loss = total.item() / count
    result.gradients = {n: p.grad.clone() for n, p in result.model.named_parameters() if p.grad is not None}
    return result


def _with_labels(row):
    """Return the row with labels for its last text."""
    last = max((image.end for image in row["images"]), default=4)
    ids = row["input_ids"]
    return {**row, "labels": [IGNORE_INDEX] * (last + 1) + ids[last + 1 :]}


@pytest.mark.sample(40)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("collation", ["flat", "padded"])
def test_losses_and_gradients_match_single_rows(family, collation, order):
    if collation == "flat" and family.name in PADDED:
        assert not isolates_images(family.model, family.collator("flat"))
        return
    family.model.zero_grad()
    loss = loss_of(family, collation, [family.rows[number] for number in order])
    loss.backward()
    assert loss.item() == pytest.approx(family.loss, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in family.gradients.values())
    for name, parameter in family.model.named_parameters():
        expected = family.gradients.get(name)
        if expected is not None:
            assert float((parameter.grad - expected).abs().max()) <= 1e-5 * largest, name
