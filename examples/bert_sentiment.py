"""Sentiment of four sentences with BERT: the demo of many walk-throughs, with its import line changed.

    python examples/bert_sentiment.py --model tiny-bert --output out

Everything else is as people write it for transformers' Trainer, older argument names included: each of those says once
what it is called today.
"""

import argparse

import numpy as np
import torch
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from transformers import BertForSequenceClassification, BertTokenizerFast

from burnish import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny-bert", help="a folder; python examples/tiny_bert.py makes one")
parser.add_argument("--output", default="bert-sentiment")
options = parser.parse_args()

texts = ["I love this movie!", "I hate this movie!", "This film was great.", "The plot was terrible."]
labels = [1, 0, 1, 0]
train_texts, val_texts, train_labels, val_labels = train_test_split(texts, labels, test_size=0.2, random_state=42)

tokenizer = BertTokenizerFast.from_pretrained(options.model)
train_encodings = tokenizer(train_texts, truncation=True, padding=True, max_length=128)
val_encodings = tokenizer(val_texts, truncation=True, padding=True, max_length=128)


class SentimentDataset(torch.utils.data.Dataset):
    def __init__(self, encodings, labels):
        self.encodings = encodings
        self.labels = labels

    def __getitem__(self, index):
        item = {key: torch.tensor(value[index]) for key, value in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[index])
        return item

    def __len__(self):
        return len(self.labels)


def compute_metrics(prediction):
    predicted = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": accuracy_score(prediction.label_ids, predicted)}


model = BertForSequenceClassification.from_pretrained(options.model, num_labels=2)
training_args = TrainingArguments(
    output_dir=options.output,
    num_train_epochs=3,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    learning_rate=1e-3,
    warmup_steps=0,
    weight_decay=0.01,
    logging_dir=f"{options.output}/logs",
    logging_steps=1,
    evaluation_strategy="epoch",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=SentimentDataset(train_encodings, train_labels),
    eval_dataset=SentimentDataset(val_encodings, val_labels),
    compute_metrics=compute_metrics,
)
trainer.train()
print("Accuracy:", trainer.evaluate()["eval_accuracy"])

model.save_pretrained(f"{options.output}/model")
tokenizer.save_pretrained(f"{options.output}/model")

loaded = BertForSequenceClassification.from_pretrained(f"{options.output}/model")
loaded_tokenizer = BertTokenizerFast.from_pretrained(f"{options.output}/model")
new_texts = ["I really enjoyed this film.", "What a waste of time."]
inputs = loaded_tokenizer(new_texts, truncation=True, padding=True, max_length=128, return_tensors="pt")
with torch.no_grad():
    predicted = loaded(**inputs).logits.argmax(dim=1)
for text, label in zip(new_texts, predicted.tolist(), strict=True):
    print(f"Text: {text} -- Predicted Label: {label}")
