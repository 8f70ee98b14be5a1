"""TRL's ``SFTTrainer`` checkpoints resume in burnish and vice versa, full and LoRA."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from small_run import make_model, records

pytestmark = pytest.mark.slow


def trained(library: Any, model: Path, folder: Path, method: str, resume: bool = False, **options: Any) -> list[float]:
    """Train nine steps, or resume after the first three. Return the losses."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = [
        [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        for row in records(24)
    ]
    arguments = library.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=9, save_steps=3, logging_steps=1, use_cpu=True,
        bf16=False, report_to="none", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    adapter = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    trainer = library.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), args=arguments,
        train_dataset=Dataset.from_dict({"messages": chats}), processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=adapter if method == "lora" else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("begins_here", [False, True], ids=["TRL to burnish", "burnish to TRL"])
def test_checkpoints_resume_between_burnish_and_trl(method: str, begins_here: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    model = make_model(tmp_path / "model")
    first, second = (burnish, trl) if begins_here else (trl, burnish)
    whole = trained(first, model, tmp_path / "a", method, **({"save_hf_format": True} if begins_here else {}))
    shutil.copytree(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3")
    # float32 sums in another order; measured: 2e-7
    assert trained(second, model, tmp_path / "b", method, resume=True) == pytest.approx(whole, rel=1e-5)
