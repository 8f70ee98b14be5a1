"""The material of every measurement: a model with random weights, a tokenizer, conversations, and their rows of ids.

    python bench/material.py FOLDER [--family qwen2] [--size small] [--layers 8] [--rows 24] [--longest 1024]

Out come, in FOLDER: ``model`` (with a tokenizer of its own), ``conversations.json`` (alpaca records), ``rows.json``
(the same as token ids and labels, so that every trainer gets the very same tokens) and ``facts.json`` (what a report
says about them). All of it follows from ``SEED``: no download, and the same bytes wherever the versions of the
libraries are the same.

The words are made of syllables and drawn by Zipf's law; the lengths of questions and answers have log-normal
distributions like those of instruction sets: most rows are short, a few are long. Few rows are measured, so their
lengths stand at even quantiles of it instead of being drawn: whether a draw of two dozen has a long row is luck. No row
is longer than ``--longest``, so that nobody's way to cut a row changes what is learned.
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
WORDS = 32_000  # of the tokenizer
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The 30M shape, and the width and the vocabulary of Qwen2-0.5B, which has 24 layers.
SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": WORDS, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8,
              "num_attention_heads": 6, "num_key_value_heads": 2},
    "large": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4,
              "num_attention_heads": 14, "num_key_value_heads": 2},
}  # fmt: skip
SIDES = ("output", "rejected")
CONSTANT = 3.0  # the first direction of all embeddings where answers end at random: others deviate by 0.02
HEAD = 64  # width of an attention head, in both
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gpt2")


@dataclass(frozen=True)
class Material:
    """The options that are asked for.

    Args:
        layers: instead of the size's own number.
        longest, median: tokens of the longest row; words of a typical one.
        ends: tokens of a typical answer of the model, which ends at random; None: none ends but by its limit.
        pairs: a file of LLaMA-Factory's ranking format (sharegpt), from which the conversations are taken.
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


def shape(asked: Material) -> dict[str, Any]:
    """The numbers of the model's config. GPT-2 knows most of them under older names, which transformers maps."""
    found: dict[str, Any] = SIZES[asked.size] | {"max_position_embeddings": max(4096, asked.longest)}
    found |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    if asked.layers:
        found["num_hidden_layers"] = asked.layers
    if asked.family == "gpt2":
        return {**found, "n_inner": found["intermediate_size"]}
    return {**found, "head_dim": HEAD}


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
        self.weights = list(accumulate(1 / (rank + 3) for rank in range(len(self.words))))

    def text(self, median: float, spread: float, longest: int, deviate: float | None = None) -> str:
        """A sentence or more: a log-normal number of words, at ``deviate`` standard deviations or anywhere."""
        deviate = self.random.gauss() if deviate is None else deviate
        count = min(longest, max(2, round(exp(spread * deviate) * median)))
        return " ".join(self.random.choices(self.words, cum_weights=self.weights, k=count)).capitalize() + "."


def conversations(count: int, seed: int = SEED, median: int = 120) -> list[dict[str, str]]:
    """``count`` alpaca records of ``median`` words, a quarter of them asked; with another seed, others of the kind."""
    return list(islice(drawn(Writer(seed), median), count))


def drawn(writer: Writer, median: int) -> Iterator[dict[str, str]]:
    while True:
        yield conversation(writer, median)


def conversation(writer: Writer, median: int, deviates: Sequence[float | None] = (None, None)) -> dict[str, str]:
    question = writer.text(median / 4, 0.8, 2 * median, deviates[0])
    return {"instruction": question, "input": "", "output": writer.text(3 * median / 4, 0.9, 6 * median, deviates[1])}


def fitting(asked: Material, tokenizer: Any) -> list[dict[str, str]]:
    """Conversations at even quantiles of both lengths; where a row is longer than asked, another in its place."""
    writer, median = Writer(SEED), asked.median or max(4, asked.longest // 10)
    quantiles = [NormalDist().inv_cdf((place + 0.5) / asked.rows) for place in range(asked.rows)]
    questions, answers = (writer.random.sample(quantiles, asked.rows) for _ in range(2))
    found = []
    for deviates in zip(questions, answers, strict=True):
        record = conversation(writer, median, deviates)
        while len(row(record, tokenizer)["input_ids"]) > asked.longest:
            record = conversation(writer, median)
        found.append(record)
    return found


def ranked(path: Path) -> list[dict[str, str]]:
    """The records of a ranking set: all turns before the answers as one, and both answers."""
    return [
        {"instruction": "\n".join(turn["value"] for turn in record["conversations"]), "input": "",
         "output": record["chosen"]["value"], "rejected": record["rejected"]["value"]}
        for record in json.loads(path.read_text())
    ]  # fmt: skip


def fitting_pairs(asked: Material, records: Sequence[dict[str, str]], tokenizer: Any) -> list[dict[str, str]]:
    """Pairs at even quantiles of the length of those that fit."""

    def length(record: dict[str, str]) -> int:
        return max(len(row({**record, "output": record[side]}, tokenizer)["input_ids"]) for side in SIDES)

    fit = sorted((found, place) for place, record in enumerate(records) if (found := length(record)) <= asked.longest)
    chosen = [fit[(2 * at + 1) * len(fit) // (2 * asked.rows)][1] for at in range(asked.rows)]
    Random(SEED).shuffle(chosen)
    return [records[place] for place in chosen]


def make_tokenizer(folder: Path, pairs: Path | None) -> Any:
    """A byte-level BPE trained on conversations that are not among those measured, or on all of the ranking set."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    records = ranked(pairs) if pairs else conversations(800, SEED + 1)
    texts = ("\n".join([*record.values(), "user assistant system"]) for record in records)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT
    )
    fast.save_pretrained(folder)
    return fast


def make_model(asked: Material, folder: Path) -> int:
    """Write the model; the number of its weights, without tables that are only looked up."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(asked.family, **shape(asked)))
    if asked.ends:
        let_end(model, asked.ends)
    model.save_pretrained(folder)
    positions = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("wpe.weight"))
    return model.num_parameters() - positions


def let_end(model: Any, tokens: int) -> None:
    """Make the end token as likely as one in ``tokens`` after whatever text: one direction of the hidden states is the
    same for all tokens, and the head of the end token reads it."""
    import torch

    weights, end = model.get_input_embeddings().weight, model.config.eos_token_id
    with torch.no_grad():
        weights[:, 0] = CONSTANT
        ids = torch.randint(3, len(weights), (4, 64), generator=torch.Generator().manual_seed(SEED))
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, 1:].reshape(-1, weights.shape[1])
        logits = hidden @ weights.T
        wanted = logits.logsumexp(-1).mean() - log(tokens - 1)
        weights[end, 0] += (wanted - logits[:, end].mean()) / hidden[:, 0].mean()


def row(record: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """ChatML by hand: what precedes an answer is not learned, the answer and its end token are."""
    question = f"<|im_start|>user\n{record['instruction']}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
    answer = tokenizer(record["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def make(asked: Material, folder: Path) -> None:
    """Everything, unless it is there."""
    if (folder / "facts.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder / "model", asked.pairs)
    weights = make_model(asked, folder / "model")
    records = fitting_pairs(asked, ranked(asked.pairs), tokenizer) if asked.pairs else fitting(asked, tokenizer)
    rows = [row(record, tokenizer) for record in records]
    (folder / "conversations.json").write_text(json.dumps(records))
    (folder / "rows.json").write_text(json.dumps(rows))
    lengths = [len(row["input_ids"]) for row in rows]
    numbers = shape(asked)
    facts = {
        "family": asked.family, "weights": weights, "layers": numbers["num_hidden_layers"],
        "width": numbers["hidden_size"], "vocabulary": numbers["vocab_size"], "rows": len(rows),
        "tokens": sum(lengths), "labels": sum(label != -100 for row in rows for label in row["labels"]),
        "longest_row": max(lengths), "longest": asked.longest, "pairs": asked.pairs and asked.pairs.name,
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts, indent=2))


def preference_sets(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same conversations with two answers, and with a verdict: LLaMA-Factory's records, and files of them.

    Where none is given, a rejected answer is that of the next conversation, no longer than the chosen one; every other
    answer has a bad tag.
    """
    records = json.loads((folder / "conversations.json").read_text())
    pairs, verdicts = [], []
    for place, record in enumerate(records):
        own, other = record["output"], records[(place + 1) % len(records)]["output"]
        question = {name: record[name] for name in ("instruction", "input")}
        rejected = record.get("rejected") or " ".join(other.split()[: len(own.split())])
        pairs.append({**question, "chosen": own, "rejected": rejected})
        verdicts.append({**question, "output": record.get("rejected", own) if place % 2 else own,
                         "kto_tag": place % 2 == 0})  # fmt: skip
    answers = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "rows": {"file_name": "conversations.json"},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": answers},
        "verdicts": {"file_name": "verdicts.json", "columns": {"prompt": "instruction", "query": "input",
                                                               "response": "output", "kto_tag": "kto_tag"}},
    }  # fmt: skip
    for name, data in {"pairs.json": pairs, "verdicts.json": verdicts, "dataset_info.json": info}.items():
        partial = folder / f"{name}.{os.getpid()}"  # other processes read while this one writes
        partial.write_text(json.dumps(data))
        partial.rename(folder / name)
    return {"pairs": pairs, "verdicts": verdicts}


def many(count: int, folder: Path) -> Path:
    """A file of ``count`` conversations, a line each, written once; a million are a gigabyte and take minutes."""
    path = folder / f"many-{count}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in islice(drawn(Writer(SEED), 120), count))
        partial.rename(path)
    return path


def facts_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest row, 32 to 4096")
    parser.add_argument("--pairs", type=Path, help="a ranking set of LLaMA-Factory, in place of made ones")
    parser.add_argument("--ends", type=int, help="tokens of a typical answer of the model, which else never ends")
    parser.add_argument("--median", type=int, help="words of a typical row; a tenth of --longest if not given")


def asked_for(arguments: argparse.Namespace) -> Material:
    return Material(**{name: getattr(arguments, name) for name in Material.__dataclass_fields__})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_flags(parser)
    arguments = parser.parse_args()
    make(asked_for(arguments), arguments.folder)
