"""The golden runs of LLaMA-Factory and TRL with burnish: models, records and settings."""

import json
import shutil
from functools import cache
from pathlib import Path

from burnish.config.options import RawValue
from burnish.run.build import train_run
from burnish.run.plan.plan import plan

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden():
    return json.loads((GOLDEN / "preference.json").read_text(encoding="utf-8"))


def make_material(folder):
    """Create the models, whose weights are determined by their names, and the two demo datasets."""
    module = {"__name__": "preference_models", "__file__": str(GOLDEN / "preference_models.py")}
    exec(compile((GOLDEN / "preference_models.py").read_text(), "preference_models.py", "exec"), module)
    module["main"](folder / "models")
    (folder / "data").mkdir()
    for name in ("dpo_en_demo", "kto_en_demo"):
        shutil.copy(GOLDEN / "sets" / f"{name}.json", folder / "data")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(golden()["rows"]["dataset_info"]))
    return folder


def golden_tokenizer(*_, **__):
    """Return the tokenizer with the class that encoded the golden rows. Other classes split numbers differently."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(GOLDEN / "tokenizer")


PLAIN = {
    "template": "chatml", "cutoff_len": 256, "truncation": "llamafactory", "max_samples": 20, "use_cpu": True,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 1e-3,
    "optim": "adamw_torch", "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "logging_steps": 1, "train_sampling_strategy": "sequential", "report_to": "none", "save_strategy": "no",
    "plot_loss": False, "finetuning_type": "full",
}  # fmt: skip


def run(folder, monkeypatch, **options):
    """Return the logs of a run, and the norms of its weights."""
    monkeypatch.setattr("burnish.run.prepare.load_tokenizer", golden_tokenizer)
    monkeypatch.setenv("BURNISH_CACHE", str(folder / "cache"))
    overrides = {**PLAIN, "dataset_dir": str(folder / "data"), "output_dir": str(folder / "out"), **options}
    overrides |= {"overwrite_output_dir": True}
    for left in ("adapter_model", "model", "value_head"):
        (folder / "out" / f"{left}.safetensors").unlink(missing_ok=True)
    for name in ("model_name_or_path", "ref_model", "adapter_name_or_path"):
        if overrides.get(name):
            overrides[name] = str(folder / "models" / overrides[name])
    train_run(plan({name: RawValue(value) for name, value in overrides.items() if value is not None}))
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    return [log for log in state["log_history"] if "loss" in log], norms(folder / "out")


def norms(folder):
    from safetensors.torch import load_file

    files = [
        path for name in ("adapter_model", "model", "value_head") if (path := folder / f"{name}.safetensors").exists()
    ]
    return {name: tensor.float().norm().item() for file in files for name, tensor in load_file(file).items()}
