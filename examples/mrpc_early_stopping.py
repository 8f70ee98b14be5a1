"""Do two sentences say the same? Sentence pairs as in MRPC, padded batch by batch, until it gets no better.

    python examples/mrpc_early_stopping.py --model tiny-bert --output out

The pairs are made here from a few words, in the columns of GLUE's MRPC, so that nothing is downloaded.
"""

import argparse
import random

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
)

from burnish import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny-bert", help="a folder; python examples/tiny_bert.py makes one")
parser.add_argument("--output", default="mrpc")
options = parser.parse_args()


def pair(draw: random.Random) -> dict[str, object]:
    """A sentence, and the same in other words or denied."""
    verb, same = draw.choice(["rose", "fell", "grew", "shrank", "opened", "closed"]), draw.random() < 0.5
    who = draw.choice(["shares", "profit", "the office", "the market"])
    denial = "" if same else "not really true that "
    return {"sentence1": f"{who} {verb} on monday", "sentence2": f"it is {denial}{who} {verb}", "label": int(same)}


draw = random.Random(0)  # noqa: S311  rows, not secrets
train_set = Dataset.from_list([pair(draw) for _ in range(96)])
eval_set = Dataset.from_list([pair(draw) for _ in range(48)])
tokenizer = AutoTokenizer.from_pretrained(options.model)


def tokenize(rows):
    return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128)


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2),
    args=TrainingArguments(
        options.output,
        num_train_epochs=15,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_strategy="epoch",
        report_to="none",
    ),
    train_dataset=train_set.map(tokenize, batched=True),
    eval_dataset=eval_set.map(tokenize, batched=True),
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
print(f"Stopped after epoch {trainer.state.epoch:.0f} of 15.")
print(f"Best checkpoint: {trainer.state.best_model_checkpoint}")
print("Accuracy:", trainer.evaluate()["eval_accuracy"])
