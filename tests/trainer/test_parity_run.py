"""``burnish train`` compared with transformers' Trainer: same model, rows, order and seed, fifty steps, float32."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from burnish.cli import main
from burnish.data.batches.batching import collate_padded
from burnish.run.plan.config_files import read_arguments
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from representative import representative_slow
from small_run import as_arguments, make_workspace
from trainer_run import smooths_a_whole_step

pytestmark = pytest.mark.run

CASES = {
    "plain": {},
    "accumulated, the last group not full": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "cosine with warm-up and decay": {"lr_scheduler_type": "cosine", "warmup_steps": 7, "weight_decay": 0.1},
    "clipped hard": {"max_grad_norm": 0.05},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def theirs(options, folder, rows):
    """Train with transformers' Trainer. Return its losses and the model."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=50, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, seed=42, data_seed=42, learning_rate=options["learning_rate"],
        per_device_train_batch_size=options["per_device_train_batch_size"],
        gradient_accumulation_steps=options["gradient_accumulation_steps"],
        lr_scheduler_type=options["lr_scheduler_type"], warmup_steps=options.get("warmup_steps", 0),
        weight_decay=options.get("weight_decay", 0.0), max_grad_norm=options.get("max_grad_norm", 1.0),
        label_smoothing_factor=options.get("label_smoothing_factor", 0.0), dataloader_pin_memory=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options["model_name_or_path"])
    trainer = Trainer(model, arguments, train_dataset=Rows(rows), data_collator=lambda some: collate_padded(some, 0))
    trainer.train()
    return trainer.state.log_history, model


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=smooths_a_whole_step) if case == "label smoothing" else case
        for case in representative_slow(CASES, ("accumulated, the last group not full",))
    ],
)
def test_fifty_steps_match_transformers_up_to_rounding(tmp_path, case):
    options = make_workspace(
        tmp_path, count=23, max_steps=50, logging_steps=1, save_strategy="no", lr_scheduler_type="linear"
    )
    options |= CASES[case]
    _, flags = read_arguments(as_arguments(options))
    rows = [dict(row) for row in prepare(plan(flags)).rows]
    assert main(["train", *as_arguments(options)]) == 0
    ours = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    history, model = theirs(options, tmp_path / "theirs", rows)
    for a, b in zip(ours[:50], history[:50], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)
        assert a["learning_rate"] == pytest.approx(b["learning_rate"], rel=1e-12)
        assert a["epoch"] == pytest.approx(b["epoch"])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, a), (_, b) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name
