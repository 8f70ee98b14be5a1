"""The rate at which conversations become token ids and labels. Runs in the environment of the library it is given.

    python bench/encode.py burnish|trl|llamafactory MATERIAL [--rows 2000] [--records FILE]

FILE is a JSON list of alpaca or sharegpt records of your own, with as many rows as it has at most; without it the
conversations are drawn from the words of ``material.py``. The tokenizer is the one in MATERIAL/model.

Each library prepares a few conversations, then again a few and all of them, in one process and without a cache. What
the first time takes is left out: libraries are imported then. The difference of the other two is what the rest takes.
It is measured at least three times and for some seconds, and the median counts: a core that others use too runs at half
its speed for a second or two, and a library that is done in a fifth of a second meets that, or does not. Nothing is
kept from one time to the next. Out: the line of ``gauge.py``.
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

from gauge import common, peak_bytes, say
from material import conversations

FEW = 10
LEAST_TIMES, LEAST_S = 3, 3.0  # of what is measured


def burnish(folder: Path, model: Path, count: int) -> Any:
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan
    from burnish.run.prepare import prepare

    given = {**common(str(folder / "out")), "model_name_or_path": model, "dataset": folder / "conversations.json",
             "template": "chatml", "cutoff_len": 1024, "max_samples": count, "overwrite_cache": True}  # fmt: skip
    file, flags = read_arguments([f"--{name}={value}" for name, value in given.items()])
    return len(prepare(plan(merge(file, flags, aliases()))).rows)


def trl(folder: Path, model: Path, count: int) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    records = json.loads((folder / "conversations.json").read_text())[:count]
    rows = [prompt_and_completion(record) for record in records]
    shape = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    args = SFTConfig(max_length=1024, **common(str(folder / "out")))
    trainer = SFTTrainer(
        Qwen2ForCausalLM(shape), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    return len(trainer.train_dataset)


def prompt_and_completion(record: dict[str, Any]) -> dict[str, Any]:
    """A record as TRL learns answers from: the last message, given the others; tools are a system message."""
    if "conversations" in record:
        roles = {"human": "user", "observation": "tool", "system": "system"}
        said = [(roles.get(turn["from"], "assistant"), turn["value"]) for turn in record["conversations"]]
    else:
        question = "\n".join(filter(None, (record["instruction"], record.get("input"))))
        said = [("user", question), ("assistant", record["output"])]
    system = "\n".join(filter(None, (record.get("system"), record.get("tools"))))
    messages = [{"role": role, "content": content} for role, content in ([("system", system)] if system else []) + said]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def llamafactory(folder: Path, model: Path, count: int) -> Any:
    import without_media  # noqa: F401 - first, because LLaMA-Factory imports torchaudio where it needs none
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    entry: dict[str, Any] = {"file_name": "conversations.json"}
    first = json.loads((folder / "conversations.json").read_text())[0]
    if "conversations" in first:
        columns = {"messages": "conversations"} | ({"tools": "tools"} if "tools" in first else {})
        entry |= {"formatting": "sharegpt", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    given = {**common(str(folder / "out")), "model_name_or_path": str(model), "stage": "sft", "do_train": True,
             "finetuning_type": "full", "dataset": "rows", "dataset_dir": str(folder), "template": "chatml",
             "cutoff_len": 1024, "max_samples": count, "overwrite_cache": True}  # fmt: skip
    model_args, data_args, training_args, _, _ = get_train_args(given)
    tokens = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokens["tokenizer"], data_args)
    found = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokens)
    return len(found["train_dataset"])


def seconds(prepare: Callable[[Path, Path, int], Any], folder: Path, model: Path, count: int) -> float:
    gc.collect()
    gc.freeze()  # else a collection of all that was imported falls into one measurement or another by chance
    begin = time.process_time()
    made = prepare(folder, model, count)
    # Of records of one's own TRL drops those in which its cut leaves nothing to learn.
    assert 0 < made <= count, f"Expected {count} rows. Received: {made}."
    return time.process_time() - begin


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "trl", "llamafactory"))
    parser.add_argument("material", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--records", type=Path, help="a JSON list of alpaca or sharegpt records of your own")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder, prepare = Path(name), globals()[arguments.library]
        given = json.loads(arguments.records.read_text()) if arguments.records else conversations(arguments.rows)
        (folder / "conversations.json").write_text(json.dumps(given))
        rows = min(arguments.rows, len(given))
        seconds(prepare, folder, arguments.material / "model", FEW)  # imports, and whatever else is done once
        taken: list[float] = []
        while len(taken) < LEAST_TIMES or sum(taken) < LEAST_S:
            few = seconds(prepare, folder, arguments.material / "model", FEW)
            taken.append(seconds(prepare, folder, arguments.material / "model", rows) - few)
    say(rows_per_cpu_s=(rows - FEW) / median(taken), peak_bytes=peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
