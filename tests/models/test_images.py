"""Vision models: losses, gradients and tensors equal transformers' for any layout."""

import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from burnish.adapters.base import ADAPTERS
from burnish.kernels.model_parts import has_vision_tower, part_at, parts_of
from burnish.losses.lm import LmOptions, SftObjective
from burnish.models.images.ahead import ImagePrefetcher
from burnish.models.images.collator import ImageCollator, grid_positions
from burnish.models.images.probe import isolates_images
from burnish.models.patches.capabilities import find_capabilities
from burnish.run.plan.options import RunOptions
from vision_models import golden, image_models, image_rows, load_image_model

STEPS = {step["family"]: step for step in golden()["steps"]}
FIRST = list(STEPS)
SECOND = [
    "qwen2_vl",
    "llava_next",
    "llava_onevision",
    "gemma4",
    "paligemma",
    "idefics3",
    "pixtral",
    "mistral3",
    "glm4v",
    "aya_vision",
]


@pytest.fixture(scope="module")
def models():
    """Return a function: family -> model. Each model is created once."""
    built: dict[str, SimpleNamespace] = {}

    def of(family: str) -> SimpleNamespace:
        if family not in built:
            result = built[family] = load_image_model(family)
            result.capabilities = find_capabilities(
                result.model, padding_free=True, prefix_sharing=True, head_of=result.model
            )
        return built[family]

    return of


def objective_of(result: SimpleNamespace, collation: str, one_by_one: bool = False) -> SftObjective:
    choices = SimpleNamespace(**{field.name: field.default for field in fields(LmOptions)})
    more = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None, "patches": True, "leave_out": None}
    vars(choices).update(more, device="cpu")
    objective = SftObjective(choices, None)
    collator = result.collator(collation, one_by_one=True) if one_by_one else result.collator(collation)
    objective.configure(result.capabilities, collator)
    return objective


def loss_of(result: SimpleNamespace, collation: str, rows: list) -> torch.Tensor:
    """Return the mean loss over the trained tokens of a micro-batch."""
    objective = objective_of(result, collation)
    batch = objective.collate(rows)
    return objective.loss(objective.module(result.model), batch).total / objective.num_items(batch)


def part_of_golden(name: str) -> str:
    """Return the part of the model to which a parameter belongs in ``gradient_norms``, by its name."""
    if any(word in name for word in ("multi_modal_projector", "connector", "embed_vision", ".merger")):
        return "projector"
    return "vision" if any(word in name for word in ("vision", "visual", "image_newline")) else "language"


@pytest.mark.sample(9)
@pytest.mark.parametrize("collation", ["flat", "shared", "padded"])
@pytest.mark.parametrize("family", FIRST)
def test_step_has_loss_and_gradients_of_transformers(models, family, collation):
    result, step = models(family), STEPS[family]
    rows = image_rows(result, step["rows"])
    result.model.requires_grad_(True).zero_grad()
    loss = loss_of(result, collation, rows)
    loss.backward()
    assert loss.item() == pytest.approx(step["loss"], abs=1e-5)
    norms: dict[str, float] = {}
    for name, parameter in result.model.named_parameters():
        if parameter.grad is not None:
            norms[part_of_golden(name)] = norms.get(part_of_golden(name), 0) + float(parameter.grad.norm() ** 2)
    assert {part: norm**0.5 for part, norm in norms.items()} == pytest.approx(step["gradient_norms"], rel=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("collation", ["flat", "padded"])
@pytest.mark.parametrize("family", FIRST)
def test_row_has_same_loss_at_any_position(models, family, collation):
    result, step = models(family), STEPS[family]
    rows = image_rows(result, step["rows"])
    expected = [row["loss"] for row in step["rows"]]
    with torch.no_grad():
        for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 6):
            objective = objective_of(result, collation)
            batch = objective.collate([rows[number] for number in order])
            for index, number in enumerate(order):
                labels = torch.full_like(batch["labels"], -100)
                if collation == "padded":
                    labels[index] = batch["labels"][index]
                else:
                    begin = sum(len(rows[n]["input_ids"]) for n in order[:index])
                    own = slice(begin, begin + len(rows[number]["input_ids"]))
                    labels[:, own] = batch["labels"][:, own]
                row_batch = {**batch, "labels": labels}
                loss = objective.loss(objective.module(result.model), row_batch).total / objective.num_items(row_batch)
                assert loss.item() == pytest.approx(expected[number], abs=1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", [*FIRST, *SECOND])
def test_probe_detects_that_images_stay_separate(models, family):
    result = models(family)
    assert isolates_images(result.model, result.collator("flat"))
    assert isolates_images(result.model, result.collator("padded"))


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_image_probe_detects_what_text_probe_misses(models, family):
    result = models(family)
    assert result.capabilities.is_padding_free
    for collation in ("flat", "padded"):
        collator = result.collator(collation)
        causal = ImageCollator(
            collator.collate, collator.collate_images, replace(result.layout, bidirectional=""), *_rest(collator)
        )
        assert not isolates_images(result.model, causal)


def _rest(collator: ImageCollator) -> tuple:
    return collator.processor, collator.images_of, collator.prepare


def test_model_that_mixes_rows_is_padded(models):
    result = models("qwen3_5")
    assert not isolates_images(result.model, result.collator("flat"))
    assert isolates_images(result.model, result.collator("padded"))


@pytest.mark.parametrize("family", FIRST)
def test_frozen_tower_computes_images_one_by_one(models, family):
    result, step = models(family), STEPS[family]
    rows = image_rows(result, step["rows"])
    parts = parts_of(result.model)
    for name, weight in result.model.named_parameters():
        weight.requires_grad_(part_at(name, parts) == "language_model")
    objective = objective_of(result, "padded", one_by_one=True)
    batch = objective.collate(rows)
    assert "pixel_values" not in batch
    assert len(batch["images"].each) > 1
    loss = objective.loss(objective.module(result.model), batch).total / objective.num_items(batch)
    result.model.requires_grad_(True)
    assert loss.item() == pytest.approx(step["loss"], abs=1e-5)


def test_trained_tower_that_computes_images_one_by_one_has_gradients(models):
    result, step = models("qwen2_5_vl"), STEPS["qwen2_5_vl"]
    rows = image_rows(result, step["rows"])
    norms = []
    for one_by_one in (False, True):
        result.model.requires_grad_(True).zero_grad()
        objective = objective_of(result, "flat", one_by_one)
        objective.loss(objective.module(result.model), objective.collate(rows)).total.backward()
        norms.append({name: float(p.grad.norm()) for name, p in result.model.named_parameters() if p.grad is not None})
    assert norms[1] == pytest.approx(norms[0], rel=1e-4, abs=1e-6)


def test_image_of_several_rows_is_encoded_once(models):
    result = models("qwen2_5_vl")
    row = image_rows(result, STEPS["qwen2_5_vl"]["rows"])[0]
    batch = result.collator("flat")([row, row])
    assert batch["pixel_values"].shape[0] == 16
    assert batch["image_features"].tolist()[0].count(1) == 2
    with torch.no_grad():
        twice = loss_of(result, "flat", [row, row])
    assert twice.item() == pytest.approx(STEPS["qwen2_5_vl"]["rows"][0]["loss"], abs=1e-5)


def test_text_batch_is_collated_as_without_images(models):
    result = models("qwen2_5_vl")
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    ours, theirs = result.collator("flat")(rows), result.collator("flat").collate(rows)
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("record", ["one", "two", "turns", "large"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_match_transformers(models, family, record):
    result = models(family)
    row = next(r for r in golden()["llamafactory"] if (r["family"], r["record"]) == (family, record))
    grids = row["tensors"]["image_grid_thw"]["values"]
    positions = [index for index, token in enumerate(row["input_ids"]) if token == result.layout.placeholder]
    positions_of_images = []
    for grid in grids:
        count = grid[1] * grid[2] // 4
        positions_of_images.append(positions[:count])
        positions = positions[count:]
    result_positions = grid_positions(len(row["input_ids"]), positions_of_images, grids, merge=2)
    assert [list(axis) for axis in result_positions] == row["position_ids"]


@pytest.mark.parametrize("family", [*FIRST, "llava_next", "glm4v", "mllama"])
def test_every_parameter_belongs_to_a_part(family):
    model, _ = image_models().build(family)
    parts = parts_of(model)
    assert has_vision_tower(model)
    assert set(parts.values()) == {"vision_tower", "multi_modal_projector", "language_model"}
    for name, _ in model.named_parameters():
        inside = [path for path in parts if name == path or name.startswith(f"{path}.")]
        assert inside, name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next", "idefics3", "glm4v"])
@pytest.mark.parametrize(
    ("frozen", "trained"),
    [({}, {"language"}), ({"freeze_vision_tower": False}, {"language", "vision"}),
     ({"freeze_multi_modal_projector": False}, {"language", "projector"}),
     ({"train_mm_proj_only": True}, {"projector"})],
)  # fmt: skip
def test_full_training_trains_unfrozen_parts(family, frozen, trained):
    model, _ = image_models().build(family)
    ADAPTERS["full"](RunOptions(finetuning_type="full", **frozen), []).attach(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    result = {"projector" if "newline" in name or "merger" in name else part_of_golden(name) for name in names}
    assert result == trained


@pytest.mark.parametrize(("kind", "trained"), [("lora", "lora_"), ("oft", "oft_R")])
def test_adapter_is_added_to_the_unfrozen_parts_only(kind, trained):
    for frozen, part in (
        ({}, "language_model"),
        ({"freeze_vision_tower": False, "freeze_language_model": True}, "visual"),
    ):
        model, _ = image_models().build("qwen2_5_vl")
        model = ADAPTERS[kind](RunOptions(finetuning_type=kind, **frozen), []).attach(model)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert names
        assert all(f"model.{part}" in name and trained in name for name in names)


def test_peft_finds_only_the_layers_of_a_saved_adapter(tmp_path):
    import peft

    model, _ = image_models().build("qwen2_5_vl")
    adapter = ADAPTERS["lora"](RunOptions(freeze_vision_tower=False), [])
    adapter.save(adapter.attach(model), str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(image_models().build("qwen2_5_vl")[0], str(tmp_path))
    count = sum(".lora_A." in name for name, _ in model.named_parameters())
    assert count == sum(".lora_A." in name for name, _ in loaded.named_parameters())


def test_freeze_counts_layers_of_the_language_model():
    model, _ = image_models().build("llava")
    ADAPTERS["freeze"](RunOptions(finetuning_type="freeze", freeze_trainable_layers=1), []).attach(model)
    names = {name.rsplit(".layers.", 1)[0] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"model.language_model"}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llava", {"freeze_language_model": True}, "all frozen"),
        (None, {"freeze_vision_tower": False}, "without a vision tower"),
    ],
)
def test_invalid_part_selection_is_rejected(family, options, message):
    from tiny_models import tiny_model

    model = image_models().build(family)[0] if family else tiny_model("llama")
    for kind in ("full", "lora", "oft"):
        problems = ADAPTERS[kind](RunOptions(finetuning_type=kind, **options), []).check(model)
        assert any(message in str(problem.what) for problem in problems)


def test_images_are_prepared_once_and_prefetched(models):
    result = models("qwen2_5_vl")
    rows = image_rows(result, STEPS["qwen2_5_vl"]["rows"])
    recorded: list[str] = []

    def prepare(image):
        recorded.append(image.identity)
        return result.processor.tensors(image.image)

    ahead = ImagePrefetcher(prepare, lambda row: row["images"], 2, ahead_bytes=1 << 20, kept_bytes=1 << 30)
    groups = ahead.rows(iter([rows[:2], rows[2:], rows[:2]]))
    assert next(groups) == rows[:2]
    for group in [rows[:2], rows[2:], rows[:2]]:
        for row in group:
            for image in row["images"]:
                ahead(image)
    assert sorted(recorded) == sorted({image.identity for row in rows for image in row["images"]})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_cached_images_are_restored_bit_for_bit_in_half_the_memory(models, family):
    result = models(family)
    image = image_rows(result, STEPS[family]["rows"])[0]["images"][0]
    num_frames = getattr(result.processor.processor, "temporal_patch_size", 1)
    prepare = lambda one: result.processor.tensors(one.image)  # noqa: E731
    ahead = ImagePrefetcher(prepare, lambda row: row["images"], 1, 1 << 20, 1 << 30, num_frames)
    expected = prepare(image)
    for found in (ahead(image), ahead(image)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = ahead._kept[image.identity]["pixel_values"]
    assert kept.numel() * (1 if family == "llava" else 2) == expected["pixel_values"].numel()


def _has_own_sizes(case: dict) -> bool:
    """Return whether the images are passed to the processor in their original sizes, which their names contain."""
    names = golden()["records"][case["record"]]["images"]
    sizes = [[int(side) for side in name.split("_")[1].split(".")[0].split("x")] for name in names]
    return "loss" in case and case.get("sizes_given_to_the_processor", sizes) == sizes


GOLDEN_LOSSES = [case for door in ("llamafactory", "trl") for case in golden()[door] if _has_own_sizes(case)]


@pytest.mark.parametrize(
    "case", GOLDEN_LOSSES, ids=lambda c: f"{c['family']}-{c['record']}-{c.get('mode') or c.get('template')}"
)
def test_llamafactory_and_trl_rows_have_their_reference_loss(models, case):
    result = models(case["family"])
    with torch.no_grad():
        loss = loss_of(result, "flat", image_rows(result, [case]))
    assert loss.item() == pytest.approx(case["loss"], abs=2e-5)
