"""Small models and rows, and a burnish ``Trainer`` over them."""

import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import PrinterCallback
from transformers.trainer_pt_utils import LabelSmoother

from burnish import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import parity

gpt2, text_rows, bert, classes = parity.lm, parity.text_rows, parity.classifier, parity.classes

smooths_a_whole_step = pytest.mark.skipif(
    "num_items_in_batch" not in signature(LabelSmoother.__call__).parameters,
    reason="before 5.16, transformers averages the label-smoothed loss of each micro-batch separately",
)


class Regression(nn.Module):
    """The model ``y = a x + b``."""

    def __init__(self, a=0.0, b=0.0, dropout=0.0):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        y = self.dropout(x * self.a + self.b)
        return {"logits": y} if labels is None else {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def points(number=22, seed=3):
    x = torch.randn(number, generator=torch.Generator().manual_seed(seed))
    return [{"x": value, "labels": 2 * value + 3} for value in x]


def arguments(folder, **options):
    defaults = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "learning_rate": 0.1,
                "save_strategy": "no", "logging_steps": 1, "num_train_epochs": 2}  # fmt: skip
    return TrainingArguments(str(folder), **{**defaults, **options})


def make_trainer(folder, kind=Trainer, model=None, train=None, trainer=None, **options):
    """Return a trainer of the regression without progress output. ``trainer`` are further constructor arguments."""
    result = kind(
        Regression() if model is None else model, arguments(folder, **options),
        train_dataset=points() if train is None else train, **(trainer or {}),
    )  # fmt: skip
    result.remove_callback(PrinterCallback)
    return result


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def transformers_arguments(folder, **options):
    """Return transformers' ``TrainingArguments``."""
    defaults = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    return transformers.TrainingArguments(str(folder), **{**defaults, **options})


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
