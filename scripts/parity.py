"""Compare burnish's Trainer with transformers', step by step: the table of docs/parity.md.

    python scripts/parity.py            # print the table
    python scripts/parity.py --write    # write it into docs/parity.md

Each case is trained twice, by the two Trainers, from the same model, rows, arguments and seed, on the CPU. Compared are
the logged losses, learning rates and gradient norms of every step, and the final weights. Models are tiny and created
here; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback

DOCUMENT = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- table: made by scripts/parity.py -->", "<!-- end of table -->"
NUM_STEPS = 50
VOCAB = 64


@dataclass(frozen=True)
class Case:
    """A training that is run with both Trainers.

    Args:
        model: creates the model, the same each time.
        rows: creates the rows.
        arguments: of TrainingArguments, besides those of all cases.
        trainer: creates further arguments of the Trainer's constructor.
        mixin: methods that override the Trainer's.
        differs: why results are expected to differ; empty if they are not.
    """

    name: str
    model: Callable[[], nn.Module]
    rows: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    mixin: type | None = None
    differs: str = ""


@dataclass(frozen=True)
class Difference:
    """The largest differences over a run; relative, except for weights."""

    steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    weights: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.learning_rate, self.grad_norm, self.weights)


# --- models -----------------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return make()

    return made


def gpt2(dropout: float = 0.1) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return get_peft_model(gpt2(), config)


def bert(kind: str, **config: Any) -> nn.Module:
    return getattr(transformers, f"BertFor{kind}")(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            **config,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_ff=32,
            d_kv=8,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )


class Linear(nn.Module):
    """A plain module: no config, no **kwargs, returns a tuple of (loss, output)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = self.layer(inputs).squeeze(-1)
        return (nn.functional.mse_loss(output, labels), output) if labels is not None else (output,)


# --- rows -------------------------------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCAB, (length,), generator=generator)


def text_rows(number: int = 22) -> list[dict[str, Any]]:
    """Return rows whose prompts are not trained and vary in length, so that micro-batches have different weights."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for _ in range(number):
        ids = tokens(generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, 8, (), generator=generator))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def labelled(label: Callable[[torch.Generator], dict[str, Any]]) -> Callable[[], list[dict[str, Any]]]:
    def rows() -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(2)
        return [{"input_ids": tokens(generator), **label(generator)} for _ in range(22)]

    return rows


def whole(high: int) -> Callable[[torch.Generator], int]:
    return lambda generator: int(torch.randint(0, high, (), generator=generator))


classes = labelled(lambda g: {"labels": whole(3)(g)})
numbers = labelled(lambda g: {"labels": float(torch.randn((), generator=g))})
several = labelled(lambda g: {"labels": torch.randint(0, 2, (3,), generator=g).float()})
tags = labelled(lambda g: {"labels": torch.randint(0, 3, (12,), generator=g)})
spans = labelled(lambda g: {"start_positions": whole(6)(g), "end_positions": 6 + whole(6)(g)})
pairs = labelled(lambda g: {"labels": tokens(g, 8)})


def points() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(22, 4, generator=generator)
    return [{"inputs": x, "labels": x.sum()} for x in inputs]


class Endless(torch.utils.data.IterableDataset):
    """Rows that come without a length."""

    def __init__(self, number: int) -> None:
        self.rows = text_rows(number)

    def __iter__(self) -> Any:
        return iter(self.rows)


# --- what a user may give ---------------------------------------------------------------------------------------------


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A compute_loss_func as in transformers' guide: a sum divided by the number of items of the batch."""
    logits, targets = outputs["logits"][:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


class WeightedLoss:
    """Overrides compute_loss as in transformers' guide: weighted classes."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


lm, classifier = seeded(gpt2), seeded(lambda: bert("SequenceClassification", num_labels=3))
GROUPED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
ONE_RULE = "the model's loss ignores num_items_in_batch; transformers adds the means of micro-batches"
BUNDLED = "transformers adds the gradient of the last incomplete group to the next step"

CASES = [
    Case("causal LM, dropout", lm, text_rows),
    Case("causal LM, no dropout", seeded(lambda: gpt2(0.0)), text_rows),
    Case("causal LM, accumulation, ragged last group", lm, text_rows, GROUPED),
    Case("causal LM, label smoothing", lm, text_rows, {"label_smoothing_factor": 0.1, **GROUPED}),
    Case("causal LM, clipped to 0.1", lm, text_rows, {"max_grad_norm": 0.1}),
    Case("causal LM, not clipped", lm, text_rows, {"max_grad_norm": 0.0}),
    Case("causal LM, weight decay", lm, text_rows, {"weight_decay": 0.1}),
    Case("causal LM, drop last", lm, text_rows, {"dataloader_drop_last": True}),
    Case("causal LM, data_seed", lm, text_rows, {"data_seed": 7}),
    Case("causal LM, NEFTune", lm, text_rows, {"neftune_noise_alpha": 5.0}),
    Case("causal LM, evaluation in between", lm, text_rows, {"eval_strategy": "steps", "eval_steps": 9},
         lambda: {"eval_dataset": text_rows(8)}),
    Case("causal LM, rows without a length", lm, lambda: Endless(24), GROUPED),
    Case("causal LM, rows without a length, ragged", lm, lambda: Endless(22), GROUPED, differs=BUNDLED),
    Case("causal LM, compute_loss_func", lm, text_rows, GROUPED, lambda: {"compute_loss_func": summed_loss}),
    Case("LoRA through peft", seeded(with_lora), text_rows, GROUPED),
    Case("classification", classifier, classes),
    Case("classification, accumulation", classifier, classes, GROUPED, differs=ONE_RULE),
    Case("classification, label smoothing", classifier, classes, {"label_smoothing_factor": 0.1, **GROUPED}),
    Case("classification, compute_loss overridden", classifier, classes,
         {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "dataloader_drop_last": True},
         mixin=WeightedLoss),
    Case("several labels", seeded(lambda: bert("SequenceClassification", num_labels=3,
                                              problem_type="multi_label_classification")), several),
    Case("regression", seeded(lambda: bert("SequenceClassification", num_labels=1)), numbers),
    Case("regression, accumulation", seeded(lambda: bert("SequenceClassification", num_labels=1)), numbers, GROUPED,
         differs=ONE_RULE),
    Case("token classification", seeded(lambda: bert("TokenClassification", num_labels=3)), tags),
    Case("question answering", seeded(lambda: bert("QuestionAnswering")), spans),
    Case("sequence to sequence", seeded(t5), pairs),
    Case("sequence to sequence, accumulation", seeded(t5), pairs, GROUPED, differs=ONE_RULE),
    Case("a plain nn.Module", seeded(Linear), points),
    *[
        Case(f"schedule {name}", lm, text_rows, {"lr_scheduler_type": name, "warmup_steps": 7, **more})
        for name, more in {
            "linear": {}, "cosine": {}, "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "polynomial": {}, "constant": {}, "constant_with_warmup": {}, "inverse_sqrt": {},
            "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
            "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 10}},
        }.items()
    ],
    *[
        Case(f"schedule {name}", lm, text_rows,
             {"lr_scheduler_type": name, "eval_strategy": "steps", "eval_steps": 5,
              "lr_scheduler_kwargs": {"patience": 1}}, lambda: {"eval_dataset": text_rows(8)})
        for name in ("reduce_lr_on_plateau", "greedy")
    ],
    *[Case(f"optimizer {name}, not clipped", lm, text_rows, {"optim": name, "max_grad_norm": 0.0}) for name in
      ("adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor")],
]  # fmt: skip


# --- the comparison ---------------------------------------------------------------------------------------------------


def train(case: Case, trainer_class: type, arguments_class: type, num_steps: int) -> tuple[list[Any], nn.Module]:
    """Return the logs of every step and the trained model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
            output_dir=folder, use_cpu=True, max_steps=num_steps, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", disable_tqdm=True, report_to="none",
            **{"per_device_train_batch_size": 4, **case.arguments},
        )  # fmt: skip
        bases = (trainer_class,) if case.mixin is None else (case.mixin, trainer_class)
        made = type("Trainer", bases, {})
        trainer = made(case.model(), arguments, train_dataset=case.rows(), **case.trainer())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], trainer.model


def compare(case: Case, num_steps: int = NUM_STEPS) -> Difference:
    """Train with both Trainers and compare the results."""
    import burnish

    ours, our_model = train(case, burnish.Trainer, burnish.TrainingArguments, num_steps)
    theirs, their_model = train(case, transformers.Trainer, transformers.TrainingArguments, num_steps)
    if len(ours) != len(theirs):
        raise RuntimeError(f"{case.name}: {len(ours)} steps with burnish, {len(theirs)} with transformers")

    def largest(name: str) -> float:
        return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-12) for a, b in zip(ours, theirs, strict=True))

    weights = zip(our_model.parameters(), their_model.parameters(), strict=True)
    return Difference(
        len(ours), largest("loss"), largest("learning_rate"), largest("grad_norm"),
        max(float((a - b).detach().abs().max()) for a, b in weights),
    )  # fmt: skip


def table(cases: list[Case], num_steps: int = NUM_STEPS) -> str:
    lines = ["| case | steps | loss | learning rate | gradient norm | weights | |", "|---|---|---|---|---|---|---|"]
    for case in cases:
        found = compare(case, num_steps)
        numbers = [found.loss, found.learning_rate, found.grad_norm, found.weights]
        lines.append(f"| {case.name} | {found.steps} | {' | '.join(f'{n:.0e}' for n in numbers)} | {case.differs} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def quiet() -> None:
    """Silence the other output of the two Trainers."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/parity.md")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args(arguments)
    if options.write and options.only:  # the versions below the table apply to all its lines
        parser.error("--write replaces the entire table of docs/parity.md and cannot be combined with --only")
    torch.set_num_threads(1)
    quiet()
    made = table([case for case in CASES if options.only in case.name])
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        from parity_sft import processor

        versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}; {processor()}."
        DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n\n{versions}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
