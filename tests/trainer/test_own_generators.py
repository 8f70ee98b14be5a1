"""Generators that a script's collator and dataset have as attributes continue in a resumed run."""

import random
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

from burnish import Trainer
from representative import representative_slow
from small_run import make_model
from trainer_run import gpt2, make_trainer, same, text_rows, weights

pytestmark = pytest.mark.run

OPTIONS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 9, "learning_rate": 1e-2}
GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(7),
    "numpy": lambda: np.random.default_rng(7),
    "numpy, Mersenne Twister": lambda: np.random.Generator(np.random.MT19937(7)),
    "numpy, Philox": lambda: np.random.Generator(np.random.Philox(7)),
    "numpy, legacy": lambda: np.random.RandomState(7),
    "python": lambda: random.Random(7),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


def shifted(row, generator):
    by = int(draw(generator) * 20)
    return {name: [(id + by) % 32 for id in ids] if name != "attention_mask" else ids for name, ids in row.items()}


class Collate:
    def __init__(self, inner, generator):
        self.inner, self.rng = inner, generator

    def __call__(self, rows):
        return self.inner([shifted(row, self.rng) for row in rows])


class Augmented(Dataset):
    def __init__(self, generator):
        self.rows, self.rng = text_rows(), generator

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return shifted(self.rows[index], self.rng)


def train(folder, resume, generator, owner):
    plain = make_trainer(folder, Trainer, model=gpt2(), train=text_rows(), **OPTIONS).data_collator

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return DataLoader(text_rows(), batch_size=4, shuffle=True, collate_fn=self.data_collator)

    collator = plain if owner == "dataset" else Collate(plain, generator)
    trainer = make_trainer(
        folder, OwnLoader if owner == "collator of an own loader" else Trainer, model=gpt2(),
        train=Augmented(generator) if owner == "dataset" else text_rows(),
        trainer={"data_collator": collator}, **OPTIONS,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("step", representative_slow([3, 6, 8], 2))
@pytest.mark.parametrize("owner", ["collator", "dataset", "collator of an own loader"])
@pytest.mark.parametrize("kind", representative_slow(GENERATORS, ("torch", "numpy", "python")))
def test_generator_of_collator_or_dataset_continues(tmp_path, kind, owner, step):
    """In the middle of an epoch, and between two (six steps each)."""
    whole = train(tmp_path / "a", None, GENERATORS[kind](), owner)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    resumed = train(tmp_path / "b", True, GENERATORS[kind](), owner)
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("step", [2, 6])
def test_seeded_masks_of_masked_language_modeling_continue(tmp_path, step):
    """transformers' collator creates its generator with the first batch."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    tokenizer.mask_token = tokenizer.mask_token or tokenizer.pad_token
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )

    def run(folder, resume):
        torch.manual_seed(0)
        trainer = make_trainer(
            folder, Trainer, model=BertForMaskedLM(config),
            train=[{"input_ids": row["input_ids"]} for row in text_rows()],
            trainer={"data_collator": DataCollatorForLanguageModeling(tokenizer, seed=3)}, **OPTIONS,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "a", None)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    assert same(weights(whole), weights(run(tmp_path / "b", True)))
