"""Create the material of the measurements: a model with random weights, a tokenizer, conversations, and their token
ids.

    python bench/material.py FOLDER [--family qwen2] [--size small] [--layers 8] [--rows 24] [--longest 1024]

Written to FOLDER: ``model`` (with its tokenizer), ``conversations.json`` (alpaca records), ``rows.json`` (their token
ids and labels, so that every trainer gets the same tokens) and ``facts.json`` (sizes for the reports). Everything is
derived from ``SEED``: nothing is downloaded, and the same versions of the libraries produce the same files.

Words consist of random syllables with frequencies that follow Zipf's law. The lengths of prompts and responses follow
log-normal distributions, as in instruction datasets: most rows are short, a few are long. Because there are few rows,
their lengths are taken at even quantiles of the distribution instead of at random. No row is longer than ``--longest``,
so that truncation does not change the trained tokens.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice, product
from math import exp, log
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

SEED = 17
WORDS = 32_000  # vocabulary size of the tokenizer
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The 30M shape, and a shape with the width and the vocabulary of Qwen2-0.5B, which has 24 layers.
SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": WORDS, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8,
              "num_attention_heads": 6, "num_key_value_heads": 2},
    "large": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4,
              "num_attention_heads": 14, "num_key_value_heads": 2},
}  # fmt: skip
SIDES = ("output", "rejected")
CONSTANT = 3.0  # first component of all embeddings if responses end at random; the others have a deviation of 0.02
HEAD = 64  # width of an attention head, in both sizes
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gpt2")


@dataclass(frozen=True)
class Material:
    """Options of the material.

    Args:
        layers: number of layers; None for that of ``size``.
        longest: tokens of the longest row.
        median: words of a typical row.
        ends: tokens of a typical response of the model, whose length is random; None for responses that end only at the
            limit.
        pairs: file in LLaMA-Factory's ranking format (sharegpt), from which the conversations are taken.
    """

    family: str = "qwen2"
    size: str = "small"
    layers: int | None = None
    rows: int = 24
    longest: int = 1024
    median: int | None = None
    ends: int | None = None
    pairs: Path | None = None

    @property
    def name(self) -> str:
        parts = {**asdict(self), "pairs": self.pairs and self.pairs.stem}
        return "-".join(str(value) for value in parts.values() if value is not None)


def shape(material: Material) -> dict[str, Any]:
    """Return the arguments of the model's config. GPT-2 has other names for most of them, which transformers maps."""
    config: dict[str, Any] = SIZES[material.size] | {"max_position_embeddings": max(4096, material.longest)}
    config |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    if material.layers:
        config["num_hidden_layers"] = material.layers
    if material.family == "gpt2":
        return {**config, "n_inner": config["intermediate_size"]}
    return {**config, "head_dim": HEAD}


def make_vocabulary(random: Random) -> list[str]:
    """Return a few thousand words of one to three syllables, ordered by frequency."""
    onsets = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "ch", "sh", "tr", "st"]
    syllables = [onset + vowel for onset, vowel in product(onsets, ["a", "e", "i", "o", "u", "ai", "ou"])]
    unique = {"".join(random.choices(syllables, k=random.choice((1, 2, 2, 3)))) for _ in range(12_000)}
    ordered = sorted(unique)
    random.shuffle(ordered)
    return ordered


class Writer:
    """Generates random text."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.words = make_vocabulary(Random(SEED))
        self.weights = list(accumulate(1 / (rank + 3) for rank in range(len(self.words))))

    def text(self, median: float, spread: float, longest: int, deviate: float | None = None) -> str:
        """Return a sentence with a log-normal number of words: ``deviate`` standard deviations from the median, or at
        random."""
        deviate = self.random.gauss() if deviate is None else deviate
        count = min(longest, max(2, round(exp(spread * deviate) * median)))
        return " ".join(self.random.choices(self.words, cum_weights=self.weights, k=count)).capitalize() + "."


def conversations(count: int, seed: int = SEED, median: int = 120) -> list[dict[str, str]]:
    """Return ``count`` alpaca records of ``median`` words, of which a quarter belong to the prompt."""
    return list(islice(generate_conversations(Writer(seed), median), count))


def generate_conversations(writer: Writer, median: int) -> Iterator[dict[str, str]]:
    """Yield random conversations without end."""
    while True:
        yield conversation(writer, median)


def conversation(writer: Writer, median: int, deviates: Sequence[float | None] = (None, None)) -> dict[str, str]:
    """Return an alpaca record. Args: deviates: lengths of prompt and response in standard deviations; None for
    random."""
    question = writer.text(median / 4, 0.8, 2 * median, deviates[0])
    return {"instruction": question, "input": "", "output": writer.text(3 * median / 4, 0.9, 6 * median, deviates[1])}


def sample_conversations(material: Material, tokenizer: Any) -> list[dict[str, str]]:
    """Return conversations at even quantiles of both lengths. Rows that are too long are replaced."""
    writer, median = Writer(SEED), material.median or max(4, material.longest // 10)
    quantiles = [NormalDist().inv_cdf((index + 0.5) / material.rows) for index in range(material.rows)]
    questions, responses = (writer.random.sample(quantiles, material.rows) for _ in range(2))
    records = []
    for deviates in zip(questions, responses, strict=True):
        record = conversation(writer, median, deviates)
        while len(row(record, tokenizer)["input_ids"]) > material.longest:
            record = conversation(writer, median)
        records.append(record)
    return records


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Return the records of a ranking file, with all turns of the prompt joined, and both responses."""
    return [
        {"instruction": "\n".join(turn["value"] for turn in record["conversations"]), "input": "",
         "output": record["chosen"]["value"], "rejected": record["rejected"]["value"]}
        for record in json.loads(path.read_text())
    ]  # fmt: skip


def sample_pairs(material: Material, records: Sequence[dict[str, str]], tokenizer: Any) -> list[dict[str, str]]:
    """Return pairs at even quantiles of the length, among those that are short enough."""

    def length(record: dict[str, str]) -> int:
        return max(len(row({**record, "output": record[side]}, tokenizer)["input_ids"]) for side in SIDES)

    fit = sorted((size, index) for index, record in enumerate(records) if (size := length(record)) <= material.longest)
    chosen = [fit[(2 * position + 1) * len(fit) // (2 * material.rows)][1] for position in range(material.rows)]
    Random(SEED).shuffle(chosen)
    return [records[index] for index in chosen]


def make_tokenizer(folder: Path, pairs: Path | None) -> Any:
    """Train a byte-level BPE tokenizer on other conversations than those measured, or on all records of the ranking
    file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    records = read_pairs(pairs) if pairs else conversations(800, SEED + 1)
    texts = ("\n".join([*record.values(), "user assistant system"]) for record in records)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT
    )
    fast.save_pretrained(folder)
    return fast


def make_model(material: Material, folder: Path) -> int:
    """Write the model and return its number of weights, without position embeddings."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(material.family, **shape(material)))
    if material.ends:
        set_end_probability(model, material.ends)
    model.save_pretrained(folder)
    positions = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("wpe.weight"))
    return int(model.num_parameters() - positions)


def set_end_probability(model: Any, tokens: int) -> None:
    """Give the end token a probability of one in ``tokens`` after any text: one direction of the hidden states is made
    the same for all tokens, and the head of the end token reads it."""
    import torch

    weights, end = model.get_input_embeddings().weight, model.config.eos_token_id
    with torch.no_grad():
        weights[:, 0] = CONSTANT
        ids = torch.randint(3, len(weights), (4, 64), generator=torch.Generator().manual_seed(SEED))
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, 1:].reshape(-1, weights.shape[1])
        logits = hidden @ weights.T
        target = logits.logsumexp(-1).mean() - log(tokens - 1)
        weights[end, 0] += (target - logits[:, end].mean()) / hidden[:, 0].mean()


def row(record: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """Return token ids and labels in ChatML format. Only the response and its end token are trained."""
    question = f"<|im_start|>user\n{record['instruction']}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
    response = tokenizer(record["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return {"input_ids": prompt + response, "labels": [-100] * len(prompt) + response}


def make(material: Material, folder: Path) -> None:
    """Create all files, unless they exist."""
    if (folder / "facts.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder / "model", material.pairs)
    weights = make_model(material, folder / "model")
    records = (
        sample_pairs(material, read_pairs(material.pairs), tokenizer)
        if material.pairs
        else sample_conversations(material, tokenizer)
    )
    rows = [row(record, tokenizer) for record in records]
    (folder / "conversations.json").write_text(json.dumps(records))
    (folder / "rows.json").write_text(json.dumps(rows))
    lengths = [len(row["input_ids"]) for row in rows]
    numbers = shape(material)
    facts = {
        "family": material.family, "weights": weights, "layers": numbers["num_hidden_layers"],
        "width": numbers["hidden_size"], "vocabulary": numbers["vocab_size"], "rows": len(rows),
        "tokens": sum(lengths), "labels": sum(label != -100 for row in rows for label in row["labels"]),
        "longest_row": max(lengths), "longest": material.longest, "pairs": material.pairs and material.pairs.name,
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts, indent=2))


def make_preference_datasets(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write and return the conversations as preference datasets of LLaMA-Factory: pairs, and labelled examples.

    Without a ranking file, the rejected response is that of the next conversation, no longer than the chosen one; every
    second example has a negative label.
    """
    records = json.loads((folder / "conversations.json").read_text())
    pairs, examples = [], []
    for index, record in enumerate(records):
        response, other = record["output"], records[(index + 1) % len(records)]["output"]
        question = {name: record[name] for name in ("instruction", "input")}
        rejected = record.get("rejected") or " ".join(other.split()[: len(response.split())])
        pairs.append({**question, "chosen": response, "rejected": rejected})
        examples.append({**question, "output": record.get("rejected", response) if index % 2 else response,
                         "kto_tag": index % 2 == 0})  # fmt: skip
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "rows": {"file_name": "conversations.json"},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
        "examples": {"file_name": "examples.json", "columns": {"prompt": "instruction", "query": "input",
                                                               "response": "output", "kto_tag": "kto_tag"}},
    }  # fmt: skip
    for name, data in {"pairs.json": pairs, "examples.json": examples, "dataset_info.json": info}.items():
        partial = folder / f"{name}.{os.getpid()}"  # other processes may read at the same time
        partial.write_text(json.dumps(data))
        partial.rename(folder / name)
    return {"pairs": pairs, "examples": examples}


def make_large_dataset(count: int, folder: Path) -> Path:
    """Write a JSON Lines file of ``count`` conversations unless it exists, and return its path. A million take a
    gigabyte and minutes."""
    path = folder / f"many-{count}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            file.writelines(
                json.dumps(record) + "\n" for record in islice(generate_conversations(Writer(SEED), 120), count)
            )
        partial.rename(path)
    return path


def read_facts(folder: Path) -> dict[str, Any]:
    """Read facts.json."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``Material`` to a parser."""
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--layers", type=int, help="number of layers; default: that of --size")
    parser.add_argument("--rows", type=int, default=24, help="number of rows")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest row, 32 to 4096")
    parser.add_argument("--pairs", type=Path, help="ranking file of LLaMA-Factory, instead of random text")
    parser.add_argument("--ends", type=int, help="tokens of a typical response of the model; default: it never ends")
    parser.add_argument("--median", type=int, help="words of a typical row; default: a tenth of --longest")


def material_from(arguments: argparse.Namespace) -> Material:
    """Return the material that the parsed arguments describe."""
    return Material(**{name: getattr(arguments, name) for name in Material.__dataclass_fields__})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_arguments(parser)
    arguments = parser.parse_args()
    make(material_from(arguments), arguments.folder)
