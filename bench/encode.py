"""Measure the rate of tokenization of conversations to token ids and labels. Runs in the environment of the library.

    python bench/encode.py burnish|trl|llamafactory MATERIAL [--rows 2000] [--records FILE]

FILE is a JSON list of alpaca or sharegpt records; without it, random conversations of ``material.py`` are used. The
tokenizer is that of MATERIAL/model.

Each library first prepares a few conversations, which imports everything and is not counted. Then it prepares a few and
all of them; the difference is the time of the others. This is repeated at least three times and for some seconds, and
the median is used, because other load may halve the speed of a core for a second or two. Nothing is cached between
repetitions. Prints the line of ``gauge.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gauge import common_arguments, peak_bytes, print_measurements
from material import conversations

FEW_RECORDS = 10
MIN_REPETITIONS, MIN_SECONDS = 3, 3.0


def burnish(folder: Path, model: Path, count: int) -> Any:
    """Return the number of rows that burnish prepares."""
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan
    from burnish.run.prepare import prepare

    options = {**common_arguments(str(folder / "out")), "model_name_or_path": model,
               "dataset": folder / "conversations.json",
             "template": "chatml", "cutoff_len": 1024, "max_samples": count, "overwrite_cache": True}  # fmt: skip
    file, flags = read_arguments([f"--{name}={value}" for name, value in options.items()])
    return len(prepare(plan(merge(file, flags, aliases()))).rows)


def trl(folder: Path, model: Path, count: int) -> Any:
    """Return the number of rows that TRL's SFTTrainer prepares."""
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    records = json.loads((folder / "conversations.json").read_text())[:count]
    rows = [prompt_and_completion(record) for record in records]
    shape = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    args = SFTConfig(max_length=1024, **common_arguments(str(folder / "out")))
    trainer = SFTTrainer(
        Qwen2ForCausalLM(shape), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    return len(trainer.train_dataset)


def prompt_and_completion(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a record to TRL's prompt-completion format: the last message is the completion; tools are part of the
    system message."""
    if "conversations" in record:
        roles = {"human": "user", "observation": "tool", "system": "system"}
        turns = [(roles.get(turn["from"], "assistant"), turn["value"]) for turn in record["conversations"]]
    else:
        question = "\n".join(filter(None, (record["instruction"], record.get("input"))))
        turns = [("user", question), ("assistant", record["output"])]
    system = "\n".join(filter(None, (record.get("system"), record.get("tools"))))
    messages = [
        {"role": role, "content": content} for role, content in ([("system", system)] if system else []) + turns
    ]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def llamafactory(folder: Path, model: Path, count: int) -> Any:
    """Return the number of rows that LLaMA-Factory prepares."""
    import without_torchaudio  # noqa: F401 - first, because LLaMA-Factory imports torchaudio without need
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    entry: dict[str, Any] = {"file_name": "conversations.json"}
    first = json.loads((folder / "conversations.json").read_text())[0]
    if "conversations" in first:
        columns = {"messages": "conversations"} | ({"tools": "tools"} if "tools" in first else {})
        entry |= {"formatting": "sharegpt", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    options = {**common_arguments(str(folder / "out")), "model_name_or_path": str(model), "stage": "sft",
               "do_train": True,
             "finetuning_type": "full", "dataset": "rows", "dataset_dir": str(folder), "template": "chatml",
             "cutoff_len": 1024, "max_samples": count, "overwrite_cache": True}  # fmt: skip
    model_args, data_args, training_args, _, _ = get_train_args(options)
    tokens = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokens["tokenizer"], data_args)
    datasets = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokens)
    return len(datasets["train_dataset"])


def seconds(prepare: Callable[[Path, Path, int], Any], folder: Path, model: Path, count: int) -> float:
    """Return the processor seconds to prepare ``count`` records."""
    gc.collect()
    gc.freeze()  # otherwise a collection of all imported objects would fall into a random measurement
    begin = time.process_time()
    num_rows = prepare(folder, model, count)
    # With --records, TRL drops records that have no trained tokens after truncation.
    assert 0 < num_rows <= count, f"Expected {count} rows. Received: {num_rows}."
    return time.process_time() - begin


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "trl", "llamafactory"))
    parser.add_argument("material", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--records", type=Path, help="JSON file with a list of alpaca or sharegpt records")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, prepare = Path(name), globals()[arguments.library]
        records = json.loads(arguments.records.read_text()) if arguments.records else conversations(arguments.rows)
        (folder / "conversations.json").write_text(json.dumps(records))
        rows = min(arguments.rows, len(records))
        seconds(prepare, folder, arguments.material / "model", FEW_RECORDS)  # imports and other work that is done once
        measured: list[float] = []
        while len(measured) < MIN_REPETITIONS or sum(measured) < MIN_SECONDS:
            few = seconds(prepare, folder, arguments.material / "model", FEW_RECORDS)
            measured.append(seconds(prepare, folder, arguments.material / "model", rows) - few)
    print_measurements(rows_per_cpu_s=(rows - FEW_RECORDS) / median(measured), peak_bytes=peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
