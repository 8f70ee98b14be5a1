"""LLaMA-Factory's image datasets in each format: alpaca and sharegpt, with responses, rankings and KTO labels."""

import json

import pytest

from burnish.cli import main
from representative import representative_slow
from run_outputs import history
from vision_models import image_models

NAMES = ("p1_64x48.png", "p2_48x64.png", "p3_80x60.png", "p4_40x40.png")
ALPACA = {"prompt": "instruction", "query": "input", "images": "images"}
SHAREGPT = {"messages": "conversations", "images": "images"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    image_models().save_processor(processor, folder / "model")
    image_models().write_images(folder / "data" / "media", NAMES)
    return folder


def record(form, number, answers):
    """Return a record with one image. Args: answers: column -> response, or KTO label."""
    images = [f"media/{NAMES[number]}"]
    if form == "alpaca":
        return {"instruction": "<image>What is it?", "input": "", "images": images, **answers}
    turns = [{"from": "human", "value": "<image>What is it?"}]
    if "output" in answers:
        turns.append({"from": "gpt", "value": answers.pop("output")})
    reported = {
        name: {"from": "gpt", "value": text} if isinstance(text, str) else text for name, text in answers.items()
    }
    return {"conversations": turns, "images": images, **reported}


def answers_of(stage, number):
    if stage == "dpo":
        return {"chosen": f"It is number {number}.", "rejected": "No idea."}
    return {"output": f"It is number {number}.", **({"kto_tag": number % 2 == 0} if stage == "kto" else {})}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", representative_slow(["sharegpt", "alpaca"], 1))
@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
def test_each_image_dataset_format_trains(workspace, form, stage):
    name = f"{form}_{stage}"
    rows = [record(form, number, answers_of(stage, number)) for number in range(len(NAMES))]
    columns = dict(ALPACA if form == "alpaca" else SHAREGPT)
    columns |= {"dpo": {"chosen": "chosen", "rejected": "rejected"}, "kto": {"kto_tag": "kto_tag"}}.get(stage, {})
    if form == "alpaca" and stage != "dpo":
        columns["response"] = "output"
    entry = {"file_name": f"{name}.json", "formatting": form, "columns": columns, "ranking": stage == "dpo"}
    (workspace / "data" / f"{name}.json").write_text(json.dumps(rows))
    (workspace / "data" / "dataset_info.json").write_text(json.dumps({name: entry}))
    lines = [
        f"model_name_or_path: {workspace / 'model'}", f"stage: {stage}", "do_train: true", "finetuning_type: lora",
        "lora_target: all", "freeze_vision_tower: true", "freeze_multi_modal_projector: true",
        "image_max_pixels: 262144", "video_max_pixels: 16384", "trust_remote_code: true", f"dataset: {name}",
        f"dataset_dir: {workspace / 'data'}", "template: qwen2_vl", "cutoff_len: 512", "max_samples: 1000",
        "overwrite_cache: true", "preprocessing_num_workers: 1", f"output_dir: {workspace / name}",
        "logging_steps: 1", "save_steps: 500", "plot_loss: false", "overwrite_output_dir: true",
        "per_device_train_batch_size: 2", "gradient_accumulation_steps: 1", "learning_rate: 1.0e-4",
        "max_steps: 2", "report_to: none", "use_cpu: true",
    ]  # fmt: skip
    (workspace / f"{name}.yaml").write_text("\n".join(lines))
    assert main(["train", str(workspace / f"{name}.yaml")]) == 0
    losses = [entry["loss"] for entry in history(workspace / name) if "loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
