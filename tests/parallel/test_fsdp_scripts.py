"""A ``burnish.Trainer`` script on two processes under FSDP, and DeepSpeed if installed, equals one process."""

import importlib.util
import json

import pytest
import torch

from burnish import Trainer, TrainingArguments
from two_processes import in_two_processes

pytestmark = pytest.mark.run


def script(folder, **options):
    """Train, save a checkpoint, evaluate, save the model."""
    from tiny_shapes import tiny
    from training_step import rows

    torch.manual_seed(0)
    data = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows(8)]
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        max_steps=3,
        save_steps=2,
        save_strategy="steps",
        logging_steps=1,
        learning_rate=0.01,
        report_to="none",
        **options,
    )
    trainer = Trainer(tiny("llama"), args, data_collator=padded, train_dataset=data, eval_dataset=data[:5])
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    if trainer.is_world_process_zero():
        with open(f"{folder}/metrics.json", "w") as file:
            json.dump(metrics["eval_loss"], file)


def padded(rows):
    width = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([list(row[name]) + [filler] * (width - len(row[name])) for row in rows])
        for name, filler in (("input_ids", 0), ("labels", -100))
    }


def sharded(folder):
    script(folder, per_device_train_batch_size=2, fsdp="full_shard", ddp_backend="gloo")


def third_stage(folder):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # the weights of this model are small
    settings = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    script(folder, per_device_train_batch_size=2, deepspeed={**settings, "zero_optimization": zero})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    script(folder / "one", per_device_train_batch_size=4)
    in_two_processes(sharded, str(folder / "two"))
    return folder


@pytest.mark.slow
def test_script_under_fsdp_gives_weights_of_one_process(folder):
    from safetensors.torch import load_file

    one, two = (load_file(folder / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
    losses = [json.loads((folder / name / "metrics.json").read_text()) for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_fsdp_model_keeps_its_class_and_checkpoint_is_sharded(folder):
    config = json.loads((folder / "two" / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "two" / "checkpoint-2" / "model.shards.json").is_file()
    assert (folder / "two" / "checkpoint-2" / "manifest.json").is_file()


@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_script_under_zero3_gives_weights_of_one_process(folder, tmp_path):
    from safetensors.torch import load_file

    in_two_processes(third_stage, str(tmp_path), environment={"DS_ACCELERATOR": "cpu"})
    one, two = (load_file(place / "model" / "model.safetensors") for place in (folder / "one", tmp_path))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
    losses = [json.loads((place / "metrics.json").read_text()) for place in (folder / "one", tmp_path)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
