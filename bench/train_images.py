"""Measure one training on images with TRL, LLaMA-Factory or burnish. Runs in the environment of the library.

    python bench/train_images.py trl|llamafactory|burnish MATERIAL OUTPUT [name=value ...]

Takes the folder of ``image_material.py`` and arguments of the library. Prints the line of ``gauge.py``; rows are
counted instead of labels. LoRA on the linear layers of the language model; the vision tower is frozen. Only the image
processor of the checkpoint limits sizes, so that every library gets the same pixels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gauge import Gauge, as_callback, common_arguments

ROWS_PER_STEP = 4
_LINEAR = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_UNLIMITED = 10**9  # image_max_pixels: only the limit of the image processor applies


def trl(material: Path, overrides: dict[str, Any]) -> None:
    import load_torchvision  # noqa: F401 - before transformers looks for torchvision
    from datasets import Dataset, Image, List
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gauge = Gauge(ROWS_PER_STEP)
    rows = [
        {"prompt": [{"role": "user", "content": record["instruction"].removeprefix("<image>")}],
         "completion": [{"role": "assistant", "content": record["output"]}],
         "images": [str(material / name) for name in record["images"]]}
        for record in json.loads((material / "photos.json").read_text())
    ]  # fmt: skip
    arguments = {"max_length": None, "bf16": True, "gradient_checkpointing": False, **overrides}
    dtype = "bfloat16" if arguments["bf16"] else "float32"
    model = AutoModelForImageTextToText.from_pretrained(material / "model", dtype=dtype)
    trainer = SFTTrainer(
        model, args=SFTConfig(**arguments), train_dataset=Dataset.from_list(rows).cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(material / "model"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=_LINEAR, task_type="CAUSAL_LM"),
        callbacks=[as_callback(gauge, TrainerCallback, counts_labels=False)],
    )  # fmt: skip
    trainer.train()
    gauge.report()


def llamafactory(material: Path, overrides: dict[str, Any]) -> None:
    import load_torchvision  # noqa: F401
    import without_torchaudio  # noqa: F401
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    gauge = Gauge(ROWS_PER_STEP)
    config = {
        "model_name_or_path": str(material / "model"), "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "lora_target": "all", "dataset": "photos", "dataset_dir": str(material), "media_dir": str(material),
        "template": "qwen2_vl", "cutoff_len": 4096, "overwrite_cache": True, "plot_loss": False, "bf16": True,
        "image_max_pixels": _UNLIMITED, **overrides,
    }  # fmt: skip
    run_exp(config, [as_callback(gauge, TrainerCallback, counts_labels=False)])
    gauge.report()


def burnish(material: Path, overrides: dict[str, Any]) -> None:
    from train_burnish import connect

    from burnish.parallel.create import create_parallel
    from burnish.run.build import build_loop
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan
    from burnish.run.prepare import prepare

    options = {
        "model_name_or_path": material / "model", "finetuning_type": "lora", "lora_target": "all", "dataset": "photos",
        "dataset_dir": material, "template": "qwen2_vl", "cutoff_len": 4096, "overwrite_cache": True, "bf16": True,
        "overwrite_output_dir": True, "image_max_pixels": _UNLIMITED, **overrides,
    }  # fmt: skip
    file, flags = read_arguments([f"--{name}={value}" for name, value in options.items()])
    planned = plan(merge(file, flags, aliases()))
    prepared, gauge = prepare(planned), Gauge(ROWS_PER_STEP)
    loop = build_loop(planned, prepared, create_parallel(planned.options), None)
    connect(gauge, loop)
    loop.train()
    gauge.report()


def main(argv: list[str]) -> None:
    import ast

    library, folder, output, *options = argv
    overrides = {name: ast.literal_eval(value) for name, value in (option.split("=", 1) for option in options)}
    defaults = {**common_arguments(output), "per_device_train_batch_size": ROWS_PER_STEP}
    {"trl": trl, "llamafactory": llamafactory, "burnish": burnish}[library](Path(folder), {**defaults, **overrides})


if __name__ == "__main__":
    main(sys.argv[1:])
