"""Costs of images: patches in budgets and estimates, one pass of the vision tower and one decoding per image of a
step."""

import pytest

from burnish.cli import main
from burnish.models.images import features
from burnish.models.images.processor import ImageProcessor
from image_runs import RECORDS, make_workspace, train
from vision_models import golden

LORA = {"finetuning_type": "lora", "max_steps": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("images"))


@pytest.fixture
def counts(monkeypatch):
    """The number of patches in each call of a vision tower, and the number of decoded images."""
    recorded = {"patches": [], "decoded": 0}
    image_features, tensors = features.image_features, ImageProcessor.tensors

    def counted_features(model, inputs):
        recorded["patches"].append(len(inputs["pixel_values"]))
        return image_features(model, inputs)

    def counted_tensors(self, image):
        recorded["decoded"] += 1
        return tensors(self, image)

    monkeypatch.setattr(features, "image_features", counted_features)
    monkeypatch.setattr(ImageProcessor, "tensors", counted_tensors)
    return recorded


def image_names():
    return {name for record in RECORDS for name in golden()["records"][record]["images"]}


def initial_counts(counts):
    """Return the counts before training, which include the calls of the probe."""
    return len(counts["patches"]), counts["decoded"]


@pytest.mark.parametrize(
    ("stage", "dataset", "overrides"),
    [
        ("dpo", "pairs", {}),
        pytest.param("sft", "answers", {}, marks=pytest.mark.slow),
        pytest.param("kto", "unpaired", {"per_device_train_batch_size": 8}, marks=pytest.mark.slow),
    ],
)
def test_vision_tower_runs_once_per_image_of_a_step(workspace, counts, monkeypatch, stage, dataset, overrides):
    from burnish.loop.loop import Loop

    step, initial = Loop.step, []

    def counted_step(self, *arguments, **kwargs):
        initial.append(initial_counts(counts))
        return step(self, *arguments, **kwargs)

    monkeypatch.setattr(Loop, "step", counted_step)
    train(workspace, f"towers-{stage}", stage=stage, dataset=dataset, **LORA, **overrides)
    calls, _ = initial[0]
    # Both responses of a pair, the policy and the reference, and the mismatched responses of KTO share the features. A
    # frozen tower on a CPU computes each image separately.
    assert len(counts["patches"]) - calls == len(image_names())
    sizes = {name: map(int, name.split("_")[1].split(".")[0].split("x")) for name in image_names()}
    grids = {name: [2 * round(side / 28) for side in size] for name, size in sizes.items()}
    assert sum(counts["patches"][calls:]) == sum(wide * high for wide, high in grids.values())


@pytest.mark.slow
def test_image_is_decoded_once_in_several_epochs(workspace, counts):
    options = {"finetuning_type": "lora", "per_device_train_batch_size": 1}
    train(workspace, "epochs-1", max_steps=4, **options)
    once = counts["decoded"]
    train(workspace, "epochs-3", max_steps=12, **options)
    assert counts["decoded"] == 2 * once


def test_patch_limit_splits_micro_batches_without_changing_update(workspace, counts):
    options = {"max_steps": 1, "freeze_vision_tower": False}  # a trained tower runs once per micro-batch
    train(workspace, "uncut", max_tokens_per_batch=4000, **options)
    num_calls = len(counts["patches"])
    train(workspace, "by-patches", max_tokens_per_batch=130, **options)
    assert len(counts["patches"]) - num_calls > num_calls


def test_explain_estimates_memory_of_vision_tower(workspace, capsys):
    options = {"model_name_or_path": workspace / "qwen2_5_vl", "template": "qwen2_vl", "dataset": "answers",
               "dataset_dir": workspace / "data", "output_dir": workspace / "explained", "use_cpu": "true"}  # fmt: skip
    totals = []
    for overrides in ({}, {"freeze_vision_tower": "false"}):
        argv = [f"{name}={value}" for name, value in {**options, **overrides}.items()]
        assert main(["explain", *argv]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "KiB of pixels" in line)
        assert "vision tower" in line
        totals.append(line)
    assert " 1 x " in totals[0]
    assert " 2 x " in totals[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {"vision tower": False, "projector": False, "language model": True}),
        ({"finetuning_type": "full", "train_mm_proj_only": "true"},
         {"vision tower": False, "projector": True, "language model": False}),
        ({"freeze_vision_tower": "false", "lora_target": "q_proj"},
         {"vision tower": True, "projector": False, "language model": True}),
    ],
)  # fmt: skip
def test_explain_lists_the_parts_of_a_vision_model(workspace, capsys, overrides, expected):
    options = {"model_name_or_path": workspace / "llava", "template": "llava", "dataset": "answers",
               "dataset_dir": workspace / "data", "output_dir": workspace / "explained", "use_cpu": "true"}  # fmt: skip

    def lines(**more):
        assert main(["explain", *(f"{name}={value}" for name, value in {**options, **more}.items())]) == 0
        return [line.strip() for line in capsys.readouterr().out.splitlines()]

    found = lines(**overrides)
    for part, is_trained in expected.items():
        line = next(line for line in found if line.startswith(part))
        assert (" 0 trained" not in line) == is_trained
    assert not any("of frozen parts" in line for line in found)
    assert any('"q_proj" also matches 2 layers of frozen parts' in line for line in lines(lora_target="q_proj"))
