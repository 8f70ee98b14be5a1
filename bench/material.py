"""What every measurement is made on: a model with random weights, a tokenizer, conversations, and their rows of ids.

    python bench/material.py FOLDER [--rows 96]

Out come, in FOLDER: ``model`` (a 30M Qwen2 shape, with a tokenizer of its own), ``conversations.json`` (alpaca records)
and ``rows.json`` (the same as token ids and labels, so that every trainer gets the very same tokens). All of it follows
from ``SEED``: no download, and the same bytes wherever the versions of the libraries are the same.

The words are made of syllables and drawn by Zipf's law; the lengths of questions and answers are drawn from log-normal
distributions like those of instruction sets: most rows are short, a few fill the context.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

SEED = 17
VOCABULARY = 32_000
LONGEST = 1024  # tokens of a row
TEMPLATE = "chatml"
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def words(random: Random) -> list[str]:
    """Some thousand words of one to three syllables, in the order of how often they are used."""
    onsets = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "ch", "sh", "tr", "st"]
    syllables = [onset + vowel for onset, vowel in product(onsets, ["a", "e", "i", "o", "u", "ai", "ou"])]
    found = {"".join(random.choices(syllables, k=random.choice((1, 2, 2, 3)))) for _ in range(12_000)}
    listed = sorted(found)
    random.shuffle(listed)
    return listed


class Writer:
    """Draws text from the words."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.words = words(Random(SEED))
        self.weights = [1 / (rank + 3) for rank in range(len(self.words))]

    def text(self, median: float, spread: float, longest: int) -> str:
        """A sentence or more: a log-normal number of words."""
        count = min(longest, max(2, round(self.random.lognormvariate(0, spread) * median)))
        return " ".join(self.random.choices(self.words, self.weights, k=count)).capitalize() + "."


def conversations(count: int, seed: int = SEED) -> list[dict[str, str]]:
    """``count`` alpaca records; with a seed of their own, others of the same kind."""
    writer = Writer(seed)
    return [
        {"instruction": writer.text(30, 0.8, 250), "input": "", "output": writer.text(90, 0.9, 700)}
        for _ in range(count)
    ]


def make_tokenizer(folder: Path) -> Any:
    """A byte-level BPE trained on conversations that are not among those measured."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = ("\n".join([c["instruction"], c["output"], "user assistant system"]) for c in conversations(800, SEED + 1))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT
    )
    fast.save_pretrained(folder)
    return fast


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)


def rows(records: list[dict[str, str]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """ChatML by hand: what precedes an answer is not learned, the answer and its end token are."""
    found = []
    for record in records:
        question = f"<|im_start|>user\n{record['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
        answer = tokenizer(record["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        row = {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        found.append({name: ids[:LONGEST] for name, ids in row.items()})
    return found


def make(folder: Path, count: int) -> None:
    """Everything, unless it is there."""
    made = folder / f"rows-{count}"
    if made.exists():
        return
    tokenizer = make_tokenizer(folder / "model")
    make_model(folder / "model")
    records = conversations(count)
    (folder / "conversations.json").write_text(json.dumps(records))
    (folder / "rows.json").write_text(json.dumps(rows(records, tokenizer)))
    made.touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make(arguments.folder, arguments.rows)
