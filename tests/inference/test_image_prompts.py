"""Generation for prompts with images equals transformers' ``generate``, with chunked prefill and in batches."""

from types import SimpleNamespace

import pytest
import torch

from burnish.inference.batch import generate_all
from burnish.inference.images.reading import ImageReader
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest
from burnish.models.images.prompts import PromptImages
from vision_models import golden, image_rows, load_image_model

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl", "smolvlm"]
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def vision_model(request):
    tiny = load_image_model(request.param)
    tiny.model.eval()
    step = next(step for step in golden()["steps"] if step["family"] == request.param)
    rows = image_rows(tiny, step["rows"])
    tiny.prompts = []
    for row in rows:
        response_begin = next(at for at, label in enumerate(row["labels"]) if label != -100)
        images = [image for image in row["images"] if image.end <= response_begin]
        tiny.prompts.append({"input_ids": row["input_ids"][:response_begin], "images": images})
    return tiny


def expected(vision_model, row):
    """Return the greedy response of transformers' ``generate``."""
    ids = torch.tensor([row["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_image = (ids == vision_model.layout.placeholder).long()
    if row["images"]:
        inputs |= vision_model.processor.join([vision_model.processor.tensors(image.image) for image in row["images"]])
    names = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    if name := names.get(vision_model.model.config.model_type):
        inputs[name] = is_image
    output = vision_model.model.generate(
        **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=None, use_cache=True
    )
    return output[0, ids.shape[1] :].tolist()


def request_of(vision_model, row, ids=None):
    images = PromptImages.of(row, vision_model.collator("padded")) if row["images"] else None
    hashes = None if images is None else images.content_hashes
    return GenerationRequest(ids or row["input_ids"], MAX_NEW_TOKENS, images=images, content_hashes=hashes)


@pytest.mark.sample(6)
@pytest.mark.parametrize("piece", [512, 7])
def test_responses_match_transformers(vision_model, monkeypatch, piece):
    monkeypatch.setattr("burnish.inference.scheduler.MAX_CHUNK_TOKENS", piece)
    loop = Scheduler(vision_model.model, SlotLimits(3, 512))
    assert loop.backend.name == "slots"
    answers = generate_all(loop, [request_of(vision_model, row) for row in vision_model.prompts])
    assert [answer.ids for answer in answers] == [expected(vision_model, row) for row in vision_model.prompts]


def test_prompts_of_text_are_read_bidirectionally_if_the_model_does_so():
    """The response also must not depend on other requests, or on the prefix of an earlier prompt."""
    tiny = load_image_model("paligemma")
    tiny.model.eval()
    family = SimpleNamespace(processor=tiny.composed.image_processor, options=None, prepare=None)
    reader = ImageReader(tiny.model, family, None)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 900, (40,), generator=generator).tolist() for _ in range(8)]
    prompts.append(prompts[-1][:20])
    requests = [GenerationRequest(ids, MAX_NEW_TOKENS, **reader.of({"input_ids": ids})) for ids in prompts]
    answers = [
        answer.ids
        for slots in (1, 3)
        for answer in generate_all(Scheduler(tiny.model, SlotLimits(slots, 512)), requests)
    ]
    assert answers == [expected(tiny, {"input_ids": ids, "images": []}) for ids in prompts] * 2


# In the other families, the ids depend on the image size.
@pytest.mark.parametrize("vision_model", [name for name in FAMILIES if name in ("llava", "gemma3")], indirect=True)
def test_cached_prefix_is_not_reused_for_another_image(vision_model):
    row = next(row for row in vision_model.prompts if len(row["images"]) == 1)
    count = row["images"][0].end - row["images"][0].begin
    other = {**row, "images": [type(row["images"][0])("p9_50x60.png", row["images"][0].begin, row["images"][0].end)]}
    loop = Scheduler(vision_model.model, SlotLimits(1, 512))
    first, second, again = (
        generate_all(loop, [request_of(vision_model, variant)])[0].ids for variant in (row, other, row)
    )
    assert count > 1
    assert [first, second] == [expected(vision_model, row), expected(vision_model, other)]
    assert again == first


@pytest.mark.sample(2)
def test_vision_tower_does_not_run_for_cached_images(vision_model, monkeypatch):
    row = next(row for row in vision_model.prompts if row["images"])
    loop = Scheduler(vision_model.model, SlotLimits(2, 512))
    (first,) = generate_all(loop, [request_of(vision_model, row)])
    longer = [*row["input_ids"], *first.ids, 5, 6]
    images = {"input_ids": longer, "images": row["images"]}
    request = request_of(vision_model, images)
    monkeypatch.setattr(PromptImages, "compute", lambda *_: pytest.fail("the vision tower was called"))
    (second,) = generate_all(loop, [request])
    monkeypatch.undo()
    assert second.ids == expected(vision_model, images)
