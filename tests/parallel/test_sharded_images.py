"""Runs with images in two processes, one of which may have a micro-batch without images, equal runs in one process."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import burnish
import burnish.run.build
from image_runs import OTHERS, TEMPLATES, make_workspace
from representative import collected_values, representative_slow
from run_outputs import weights_in
from two_processes import in_two_processes, train_with_one_and_two

pytestmark = pytest.mark.run

FSDP = {"fsdp": "full_shard"}
ZERO = {"deepspeed": "zero3"}
KINDS = {
    "tower trained, sharded": {"freeze_vision_tower": False, **FSDP},
    "adapter, sharded": {"finetuning_type": "lora", **FSDP},
    "tower trained": {"freeze_vision_tower": False, "freeze_multi_modal_projector": False},
    "pairs, sharded": {"stage": "dpo", "dataset": "pairs", "finetuning_type": "lora", **FSDP},
    "pairs, tower trained": {"stage": "dpo", "dataset": "pairs", "freeze_vision_tower": False},
}
if find_spec("deepspeed") is not None:
    KINDS |= {
        "adapter, ZeRO 3": {"finetuning_type": "lora", **ZERO},
        "tower trained, ZeRO 3": {"freeze_vision_tower": False, **ZERO},
        "tower trained, ZeRO 2": {"freeze_vision_tower": False, "deepspeed": "zero2"},
        "pairs, ZeRO 3": {"stage": "dpo", "dataset": "pairs", "finetuning_type": "lora", **ZERO},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    folder = make_workspace(tmp_path_factory.mktemp("image-ranks"))
    options = {
        "model_name_or_path": str(folder / "qwen2_5_vl"), "template": TEMPLATES["qwen2_5_vl"], "dataset": "answers",
        "dataset_dir": str(folder / "data"), "cutoff_len": 512, "max_steps": 4, "per_device_train_batch_size": 2,
        "finetuning_type": "full", "learning_rate": 1e-3, "use_cpu": True, "save_strategy": "no", "plot_loss": False,
        "logging_steps": 1, "lr_scheduler_type": "constant", "val_size": 0.0,
    }  # fmt: skip
    kinds = collected_values(request, "kind")
    train_with_one_and_two(folder, options, {kind: KINDS[kind] for kind in KINDS if kind in kinds})
    return folder


@pytest.mark.parametrize("kind", representative_slow(KINDS, 0))
def test_two_processes_with_images_give_the_weights_of_one(folder, kind):
    one, two = (weights_in(folder / count / kind) for count in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():  # sums over ranks are added in another order
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=2e-5)
    if "tower" in kind and "lora" not in kind:
        start = weights_in(folder / "qwen2_5_vl")
        assert any("visual" in name and not torch.equal(one[name], start[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3", "llava", "internvl", "smolvlm", "llava_onevision", "paligemma", "mistral3"]
)
def test_sharded_family_with_a_trained_tower_gives_the_weights_of_one_process(family, tmp_path):
    folder = make_workspace(tmp_path)
    template = {**TEMPLATES, **OTHERS}[family]
    options = {
        "model_name_or_path": str(folder / family), "dataset": "answers", "dataset_dir": str(folder / "data"),
        "cutoff_len": 512, "max_steps": 3, "per_device_train_batch_size": 2, "finetuning_type": "full",
        "optim": "sgd", "learning_rate": 1e-2, "use_cpu": True, "save_strategy": "no", "plot_loss": False,
        "logging_steps": 1, "lr_scheduler_type": "constant", "freeze_vision_tower": False, "eval_dataset": "answers",
        "eval_strategy": "epoch", "per_device_eval_batch_size": 1, **({"template": template} if template else {}),
    }  # fmt: skip
    train_with_one_and_two(folder, options, {"sharded": FSDP})
    one, two = (weights_in(folder / count / "sharded") for count in ("one", "two"))
    for name, weight in one.items():  # SGD: Adam would scale the rounding of gradients that are 0
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-5)
    first, second = (json.loads((folder / n / "sharded" / "all_results.json").read_text()) for n in ("one", "two"))
    assert first["eval_loss"] == pytest.approx(second["eval_loss"], rel=1e-3)


def train_script(folder, out, kind):
    """Train with a class of TRL; only two of four records have images."""
    args = {"output_dir": out, "max_steps": 3, "report_to": "none", "save_strategy": "no", "use_cpu": True,
            "bf16": False, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1")), "logging_steps": 1,
            "gradient_checkpointing": False, "ddp_find_unused_parameters": False, "max_grad_norm": 0.1,
            "train_sampling_strategy": "sequential"}  # fmt: skip
    user, answer = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A wall of bricks."}
    image = sorted(str(path) for path in (Path(folder) / "data").rglob("*.png"))[0]
    images = [[image], [image], [], []]  # the second process has no images
    if kind == "pairs":
        chosen, rejected = [[answer]] * 4, [[{**answer, "content": "A door."}]] * 4
        rows = {"prompt": [[user]] * 4, "chosen": chosen, "rejected": rejected, "images": images}
        trainer = burnish.DPOTrainer(
            f"{folder}/qwen2_5_vl", args=burnish.DPOConfig(**args), train_dataset=Dataset.from_dict(rows)
        )
    else:
        rows = {"prompt": [[user]] * 4, "completion": [[answer]] * 4, "images": images}
        trainer = burnish.SFTTrainer(
            f"{folder}/qwen2_5_vl", args=burnish.SFTConfig(**args), train_dataset=Dataset.from_dict(rows)
        )
    trainer.train()
    trainer.save_model(out)


@pytest.mark.parametrize("kind", representative_slow(["sft", "pairs"], 0))
def test_script_with_images_in_two_processes_gives_the_weights_of_one(kind, tmp_path, monkeypatch):
    folder = make_workspace(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    train_script(str(folder), str(tmp_path / "one"), kind)
    in_two_processes(train_script, str(folder), str(tmp_path / "two"), kind)
    one, two = (weights_in(tmp_path / count) for count in ("one", "two"))
    start = weights_in(folder / "qwen2_5_vl")
    assert any("visual" in name and not torch.equal(one[name], start[name]) for name in one)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-5)
