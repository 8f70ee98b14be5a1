"""Image runs on two processes, one of which has batches without images, give the weights of one process."""

import pytest
import torch

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from image_runs import write_sets
from run_outputs import weights_in
from two_processes import train_with_one_and_two
from vision_models import golden, image_models

pytestmark = pytest.mark.run

TRAINED = {"finetuning_type": "full", "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
KINDS = {
    "frozen tower": {"finetuning_type": "full"},
    "trained tower": {**TRAINED, "ddp_find_unused_parameters": True},
    "pairs": {"stage": "dpo", "dataset": "pairs", "finetuning_type": "full"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the runs of one process and of two."""
    folder = tmp_path_factory.mktemp("ranks")
    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    image_models().save_processor(processor, folder / "model")
    records = [golden()["records"][name] for name in ("one", "text", "two", "turns")]
    image_models().write_images(folder / "data", {name for record in records for name in record["images"]})
    write_sets(folder / "data", records)
    options = {
        "model_name_or_path": str(folder / "model"), "template": "qwen2_vl", "stage": "sft", "dataset": "answers",
        "dataset_dir": str(folder / "data"), "cutoff_len": 512, "per_device_train_batch_size": 2, "max_steps": 4,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "use_cpu": True, "save_strategy": "no",
        "plot_loss": False, "report_to": "none", "logging_steps": 1,
    }  # fmt: skip
    train_with_one_and_two(folder, options, KINDS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_images_give_the_weights_of_one(folder, kind):
    started, one, two = (weights_in(path) for path in (folder / "model", folder / "one" / kind, folder / "two" / kind))
    changed = {name for name in started if not torch.equal(one[name], started[name])}
    assert any("visual" in name for name in changed) == (kind == "trained tower")
    assert any("visual" not in name for name in changed)
    for name, weight in one.items():  # sums over ranks are added in another order
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
