"""Costs of images: patches in budgets and estimates, one vision-tower pass and one decoding per image of a step."""

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
def towers(monkeypatch):
    """The patches of each call of a tower, and the images that were decoded."""
    recorded = {"patches": [], "decoded": 0}
    plain, tensors = features.image_features, ImageProcessor.tensors

    def counted(model, inputs):
        recorded["patches"].append(len(inputs["pixel_values"]))
        return plain(model, inputs)

    def decoded(self, image):
        recorded["decoded"] += 1
        return tensors(self, image)

    monkeypatch.setattr(features, "image_features", counted)
    monkeypatch.setattr(ImageProcessor, "tensors", decoded)
    return recorded


def image_names():
    return {name for record in RECORDS for name in golden()["records"][record]["images"]}


def initial_counts(towers):
    """What was seen before the training: the probe's own calls."""
    return len(towers["patches"]), towers["decoded"]


@pytest.mark.parametrize(
    ("stage", "dataset", "more"),
    [
        ("dpo", "pairs", {}),
        pytest.param("sft", "answers", {}, marks=pytest.mark.slow),
        pytest.param("kto", "verdicts", {"per_device_train_batch_size": 8}, marks=pytest.mark.slow),
    ],
)
def test_vision_tower_runs_once_per_image_of_a_step(workspace, towers, monkeypatch, stage, dataset, more):
    from burnish.loop.loop import Loop

    step, before = Loop.step, []

    def counted(self, *arguments, **kwargs):
        before.append(initial_counts(towers))
        return step(self, *arguments, **kwargs)

    monkeypatch.setattr(Loop, "step", counted)
    train(workspace, f"towers-{stage}", stage=stage, dataset=dataset, **LORA, **more)
    calls, _ = before[0]
    # Both answers of a pair, the policy and the reference, and the other answers of KTO share what the tower made. A
    # frozen tower on a CPU computes each image separately.
    assert len(towers["patches"]) - calls == len(image_names())
    sizes = {name: map(int, name.split("_")[1].split(".")[0].split("x")) for name in image_names()}
    grids = {name: [2 * round(side / 28) for side in size] for name, size in sizes.items()}
    assert sum(towers["patches"][calls:]) == sum(wide * high for wide, high in grids.values())


@pytest.mark.slow
def test_image_is_decoded_once_in_several_epochs(workspace, towers):
    options = {"finetuning_type": "lora", "per_device_train_batch_size": 1}
    train(workspace, "epochs-1", max_steps=4, **options)
    once = towers["decoded"]
    train(workspace, "epochs-3", max_steps=12, **options)
    assert towers["decoded"] == 2 * once


def test_patch_limit_splits_micro_batches_without_changing_update(workspace, towers):
    options = {"max_steps": 1, "freeze_vision_tower": False}  # a trained tower runs once per micro-batch
    train(workspace, "uncut", max_tokens_per_batch=4000, **options)
    whole = len(towers["patches"])
    train(workspace, "by-patches", max_tokens_per_batch=130, **options)
    assert len(towers["patches"]) - whole > whole


def test_explain_estimates_memory_of_vision_tower(workspace, capsys):
    options = {"model_name_or_path": workspace / "qwen2_5_vl", "template": "qwen2_vl", "dataset": "answers",
               "dataset_dir": workspace / "data", "output_dir": workspace / "explained", "use_cpu": "true"}  # fmt: skip
    totals = []
    for more in ({}, {"freeze_vision_tower": "false"}):
        argv = [f"{name}={value}" for name, value in {**options, **more}.items()]
        assert main(["explain", *argv]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "KiB of pixels" in line)
        assert "vision tower" in line
        totals.append(line)
    assert " 1 x " in totals[0]
    assert " 2 x " in totals[1]
