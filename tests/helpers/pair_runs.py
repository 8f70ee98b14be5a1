"""Training runs on a few preference pairs with a tiny model."""

import json
from pathlib import Path

from burnish.config.options import RawValue
from burnish.run.build import train_run
from burnish.run.plan.plan import plan
from small_run import WORDS, make_model


def pairs(count=12):
    return [
        {"instruction": f"Repeat: {WORDS[i % 10]}", "input": "", "chosen": " ".join([WORDS[i % 10]] * (1 + i % 4)),
         "rejected": WORDS[(i + 3) % 10]}
        for i in range(count)
    ]  # fmt: skip


def make_pair_workspace(folder):
    """Fill a folder with three models and a dataset of pairs, and return it."""
    make_model(folder / "model")
    make_model(folder / "other", seed=1)
    make_model(folder / "dropping", dropout=0.5)
    (folder / "pairs.json").write_text(json.dumps(pairs()))
    return folder


def run_options(workspace, **changes):
    options = {
        "stage": "dpo", "model_name_or_path": "model", "dataset": str(workspace / "pairs.json"), "template": "chatml",
        "finetuning_type": "full", "cutoff_len": 128, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "save_strategy": "no", "plot_loss": False, "use_cpu": True, "report_to": "none",
        "output_dir": str(workspace / "out"), "overwrite_output_dir": True, **changes,
    }  # fmt: skip
    for name in ("model_name_or_path", "ref_model"):
        if name in options:
            options[name] = str(workspace / options[name])
    return {name: RawValue(value) for name, value in options.items()}


def train_on_pairs(workspace, monkeypatch, **changes):
    monkeypatch.setenv("BURNISH_CACHE", str(workspace / "cache"))
    return train_run(plan(run_options(workspace, **changes)))


def losses(workspace, monkeypatch, **changes):
    train_on_pairs(workspace, monkeypatch, **changes)
    folder = Path(changes.get("output_dir", workspace / "out"))
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [log["loss"] for log in history if "loss" in log]
