"""Generators in attributes of a script's collator or dataset continue in a resumed run."""

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

from burnish import Trainer
from small_run import make_model
from trainer_run import gpt2, make_trainer, same, text_rows, weights
from two_processes import in_two_processes

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


class AugmentingCollator:
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

    class LoaderTrainer(Trainer):
        def get_train_dataloader(self):
            return DataLoader(text_rows(), batch_size=4, shuffle=True, collate_fn=self.data_collator)

    collator = plain if owner == "dataset" else AugmentingCollator(plain, generator)
    trainer = make_trainer(
        folder, LoaderTrainer if owner == "collator of an own loader" else Trainer, model=gpt2(),
        train=Augmented(generator) if owner == "dataset" else text_rows(),
        trainer={"data_collator": collator}, **OPTIONS,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [3, 6, 8])
@pytest.mark.parametrize("owner", ["collator", "dataset", "collator of an own loader"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_generator_of_collator_or_dataset_continues(tmp_path, kind, owner, step):
    """Resumed within an epoch, and between two epochs of six steps."""
    whole = train(tmp_path / "a", None, GENERATORS[kind](), owner)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    resumed = train(tmp_path / "b", True, GENERATORS[kind](), owner)
    assert same(weights(whole), weights(resumed))


class GeneratorSampler:
    """A sampler with its own generator."""

    def __init__(self, generator):
        self.rng = generator

    def __len__(self):
        return len(text_rows())

    def __iter__(self):
        order = list(range(len(text_rows())))
        self.rng.shuffle(order)
        return iter(order)


class ShuffledStream(IterableDataset):
    """A stream that shuffles with its own generator and has a state if ``has_state``."""

    def __init__(self, generator, has_state):
        self.rng, self.start, self.position, self.at = generator, generator.getstate(), 0, 0
        if has_state:
            self.state_dict, self.load_state_dict = self._state, self._load

    def __iter__(self):
        self.start = self.rng.getstate()
        order = list(range(len(text_rows())))
        self.rng.shuffle(order)
        begin, self.at = self.at, 0
        for self.position in range(begin + 1, len(order) + 1):
            yield text_rows()[order[self.position - 1]]

    def _state(self):
        return {"start": self.start, "position": self.position}

    def _load(self, state):
        self.rng.setstate(state["start"])
        self.at = state["position"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [3, 8])
@pytest.mark.parametrize("kind", ["sampler", "stream", "stream with a state"])
def test_order_from_an_own_generator_continues(tmp_path, kind, step):
    """Resumed in the first epoch and in the second."""

    def run(folder, resume):
        class CustomTrainer(Trainer):
            def get_train_dataloader(self):
                generator = random.Random(5)
                if kind == "sampler":
                    return DataLoader(
                        text_rows(), batch_size=4, sampler=GeneratorSampler(generator), collate_fn=self.data_collator
                    )
                rows = ShuffledStream(generator, kind == "stream with a state")
                return DataLoader(rows, batch_size=4, collate_fn=self.data_collator)

        trainer = make_trainer(folder, CustomTrainer, model=gpt2(), train=text_rows(), **OPTIONS)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "a", None)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    assert same(weights(whole), weights(run(tmp_path / "b", True)))


@dataclass(frozen=True)
class FrozenCollator:
    inner: Any
    rng: random.Random

    def __call__(self, rows):
        return self.inner([shifted(row, self.rng) for row in rows])

    @property
    def transform(self):
        raise NotImplementedError


def test_frozen_collator_with_a_property_that_fails_is_resumed(tmp_path):
    def run(folder, resume):
        plain = make_trainer(folder, Trainer, model=gpt2(), train=text_rows(), **OPTIONS).data_collator
        collator = FrozenCollator(plain, random.Random(5))
        trainer = make_trainer(
            folder, Trainer, model=gpt2(), train=text_rows(), trainer={"data_collator": collator}, **OPTIONS
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "a", None)
    shutil.copytree(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3")
    assert same(weights(whole), weights(run(tmp_path / "b", True)))


@pytest.mark.sample(1)
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


def run_of_each_rank(folder):
    """Train in two processes with different generators, and resume from steps 2 and 4."""
    rank = int(os.environ["RANK"])
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "learning_rate": 1e-2, "ddp_backend": "gloo"}

    def run(kind, resume):
        plain = make_trainer(folder, Trainer, model=gpt2(), train=text_rows(), **options).data_collator
        collator = AugmentingCollator(plain, random.Random(rank))

        class CustomTrainer(Trainer):
            def get_train_dataloader(self):
                rows = DataLoader(text_rows(), batch_size=4, shuffle=True, collate_fn=self.data_collator)
                return rows if kind == "own" else super().get_train_dataloader()

        trainer = make_trainer(
            Path(folder) / kind,
            CustomTrainer,
            model=gpt2(),
            train=text_rows(),
            trainer={"data_collator": collator},
            **options,
        )
        trainer.train(resume_from_checkpoint=resume and str(Path(folder) / kind / f"checkpoint-{resume}"))
        return [parameter.detach().flatten().tolist() for parameter in trainer.model.parameters()]

    equal = {kind: [run(kind, None) == run(kind, step) for step in (2, 4)] for kind in ("usual", "own")}
    if rank == 0:
        (Path(folder) / "equal.json").write_text(json.dumps(equal))


@pytest.mark.slow
@pytest.mark.run
def test_generators_of_each_rank_continue(tmp_path):
    in_two_processes(run_of_each_rank, str(tmp_path))
    assert json.loads((tmp_path / "equal.json").read_text()) == {"usual": [True, True], "own": [True, True]}
