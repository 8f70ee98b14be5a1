"""Runs on images: tiny models, image data sets in each format, and one training run over them."""

import json

import torch

from burnish.cli import main
from vision_models import golden, image_models

TEMPLATES = {"qwen2_5_vl": "qwen2_vl", "gemma3": "gemma3", "llava": "llava", "internvl": "intern_vl"}
OTHERS = {"paligemma": "paligemma", "mistral3": None, "mllama": "mllama", "llava_onevision": None, "smolvlm": None}
"""Families without golden rows of LLaMA-Factory, and their named templates."""
GLM = {"glm4v": "glm4v", "glm46v": "glm4_5v"}
"""GLM-4.1V and GLM-4.6V, for which golden rows of videos exist."""
RECORDS = ("one", "two", "turns", "text")


def make_workspace(folder):
    """Return the folder, filled with models, images and data sets for SFT, DPO and KTO."""
    models = image_models()
    for family in (*TEMPLATES, *OTHERS):
        save_model(folder, family)
    records = [golden()["records"][name] for name in RECORDS]
    models.write_images(folder / "data", {name for record in records for name in record["images"]})
    write_sets(folder / "data", records)
    return folder


def save_model(folder, family):
    """Write a model and its processor. Returns both."""
    model, processor = image_models().build(family)
    if family in GLM:  # as in published models, the tokenizer has all stop words of its template
        processor.tokenizer.add_tokens(["</answer>"], special_tokens=True)
        torch.manual_seed(0)
        model.resize_token_embeddings(len(processor.tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    model.save_pretrained(folder / family)
    image_models().save_processor(processor, folder / family)
    return model, processor


def write_sets(folder, records):
    answers = [{"messages": record["messages"], "images": record["images"]} for record in records]
    pairs, unpaired = [], []
    for record in answers:
        *prompt, answer = record["messages"]
        other = {"role": "assistant", "content": "Nothing of that kind."}
        pairs.append({**record, "messages": prompt, "chosen": answer, "rejected": other})
        unpaired += [{**record, "label": True}, {**record, "messages": [*prompt, other], "label": False}]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
            "system_tag": "system"}  # fmt: skip
    columns = {"messages": "messages", "images": "images"}
    entries = {
        "answers": {"columns": columns},
        "pairs": {"ranking": True, "columns": {**columns, "chosen": "chosen", "rejected": "rejected"}},
        "unpaired": {"columns": {**columns, "kto_tag": "label"}},
    }
    for name, rows in (("answers", answers), ("pairs", pairs), ("unpaired", unpaired)):
        (folder / f"{name}.json").write_text(json.dumps(rows))
        entries[name] |= {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def train(workspace, out, family="qwen2_5_vl", **changes):
    """Train a run and return its folder."""
    folder = workspace / out
    options = {
        "model_name_or_path": str(workspace / family), "template": (TEMPLATES | OTHERS | GLM)[family], "stage": "sft",
        "finetuning_type": "full", "dataset_dir": str(workspace / "data"), "dataset": "answers", "cutoff_len": 512,
        "output_dir": str(folder), "overwrite_output_dir": "resume_from_checkpoint" not in changes,
        "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "plot_loss": False, "lr_scheduler_type": "constant",
        **changes,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    overrides = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    assert main(["train", *(f"{name}={value}" for name, value in overrides.items())]) == 0
    return folder
