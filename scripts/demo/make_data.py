"""Create the instruction datasets of the demo: training rows, held-out rows, and preference pairs.

Written are `train.jsonl` and `heldout.jsonl` (one object per line with "instruction", "input" and "output"),
`pairs.jsonl` and `pairs_heldout.jsonl` ("chosen" is the correct response, "rejected" that to another question of the
task) and `dataset_info.json`. No held-out problem is in the training rows, in any wording or order; otherwise the
script fails. The same seed gives the same bytes.

Run: python scripts/demo/make_data.py [--output FOLDER] [--seed 0]
"""

import argparse
import json
from functools import partial
from pathlib import Path
from random import Random

from tasks import TASKS, Task, is_held_out, listed_word

DATA_FOLDER = Path(__file__).parents[2] / "src" / "burnish" / "demo" / "data"
TRAIN_ROWS, HELD_OUT_ROWS = 500, 25  # per task
PAIRS = 100  # per task, from its first training rows
DRAWS = 40_000  # per task, before duplicates are dropped; enough to fill both sets if the task has enough problems
QUESTION = {"prompt": "instruction", "query": "input"}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
PAIR_COLUMNS = {**QUESTION, "chosen": "chosen", "rejected": "rejected"}

Row = dict[str, str]


def task_rows(task: Task, random: Random) -> tuple[list[Row], list[Row], set[str], set[str]]:
    """Return distinct rows of a task: training rows, held-out rows, and the keys of their problems."""
    rows: dict[bool, list[Row]] = {False: [], True: []}
    keys: dict[bool, set[str]] = {False: set(), True: set()}
    max_rows = {False: TRAIN_ROWS, True: HELD_OUT_ROWS}
    asked = set()
    for _ in range(DRAWS):
        problem = task.draw(random, partial(listed_word, random))
        question = random.choice(task.questions)
        held_out = is_held_out(problem.key)
        instruction, input_text = (text.format(**problem.fields) for text in question)
        if len(rows[held_out]) < max_rows[held_out] and (instruction, input_text) not in asked:
            asked.add((instruction, input_text))
            rows[held_out].append({"instruction": instruction, "input": input_text, "output": problem.answer})
            keys[held_out].add(problem.key)
    return rows[False], rows[True], keys[False], keys[True]


def task_pairs(rows: list[Row]) -> list[Row]:
    """Return pairs for the rows of a task. The rejected response is the next different response of the task."""
    pairs = []
    for index, row in enumerate(rows):
        wrong = next(other["output"] for other in rows[index + 1 :] + rows[:index] if other["output"] != row["output"])
        question = {name: row[name] for name in QUESTION.values()}
        pairs.append({**question, "chosen": row["output"], "rejected": wrong})
    return pairs


def make_data(seed: int) -> dict[str, list[Row]]:
    """Return shuffled training rows and pairs, and held-out rows and pairs in the order of the tasks.

    Raises:
        ValueError: if a problem is on both sides of the split.
    """
    random = Random(seed)
    train, held_out, pairs, held_out_pairs = [], [], [], []
    train_keys, held_out_keys = set(), set()
    for task in TASKS:
        task_train, task_held_out, task_train_keys, task_held_out_keys = task_rows(task, random)
        train += task_train
        held_out += task_held_out
        pairs += task_pairs(task_train[:PAIRS])
        held_out_pairs += task_pairs(task_held_out)
        train_keys |= task_train_keys
        held_out_keys |= task_held_out_keys
    if leaked := train_keys & held_out_keys:
        raise ValueError(f"Expected no problem in both sets. Received: {sorted(leaked)}. See is_held_out in tasks.py.")
    random.shuffle(train)
    Random(seed).shuffle(pairs)
    return {"train": train, "heldout": held_out, "pairs": pairs, "pairs_heldout": held_out_pairs}


def write_data(folder: Path, seed: int) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    info = {}
    for name, rows in make_data(seed).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        ranking = {"ranking": True} if name.startswith("pairs") else {}
        columns = PAIR_COLUMNS if ranking else COLUMNS
        info[f"demo_{name}"] = {"file_name": f"{name}.jsonl", "formatting": "alpaca", **ranking, "columns": columns}
        print(f"{len(rows)} rows, written to {folder / name}.jsonl")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DATA_FOLDER, help="folder of the data (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_data(arguments.output, arguments.seed)
