"""Local files of a multiple-choice benchmark -> tasks of lm-evaluation-harness, one per subject.

A task is named with its split (``mmlu_test``). Its files are in ``task_dir``, in a folder or a zip file; nothing is
downloaded. Each ``Subject`` has a task configuration of the harness (its docs/new_task_guide.md).

    mmlu    mmlu/data/{dev,val,test}/<subject>_<split>.csv     no header: question, A, B, C, D, answer
    ceval   ceval/{dev,val,test}/<subject>_<split>.csv         header: id, question, A, B, C, D, answer, explanation
    cmmlu   cmmlu/{dev,test}/<subject>.csv                     header: (number), Question, A, B, C, D, Answer
    others  <name>/{dev,test}/<subject>.jsonl                  question, choices, answer (letter, index or text)

Few-shot examples come from ``dev``. Names and categories of subjects are in ``mapping.json``, as in LLaMA-Factory.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean
from burnish.utils.files import check_below_roots, check_folder_below_roots, folder_until_exit
from burnish.utils.json_files import quote_value, read_object

LETTERS = "ABCDEFGHIJ"
SPLITS = ("dev", "val", "validation", "test", "train")
_COLUMNS = ("question", "A", "B", "C", "D", "answer")
_INTRODUCTIONS = {
    "en": "The following are multiple choice questions (with answers) about {subject}.\n\n",
    "zh": "以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n\n",
}
_ANSWER = {"en": "Answer:", "zh": "答案："}
_TEXT_OF_CSV = "{{question|string|trim}}\n" + "".join(f"{letter}. {{{{{letter}|string|trim}}}}\n" for letter in "ABCD")
_TEXT_OF_JSON = (
    "{{question|trim}}\n{% for choice in choices %}{{'ABCDEFGHIJ'[loop.index0]}}. {{choice|string|trim}}\n{% endfor %}"
)
_TARGET_OF_JSON = (
    "{% if answer is number %}{{'ABCDEFGHIJ'[answer]}}{% elif answer in choices %}"
    "{{'ABCDEFGHIJ'[choices.index(answer)]}}{% else %}{{(answer or '')|trim|upper}}{% endif %}"
)


@dataclass(frozen=True)
class Subject:
    """A subject of a benchmark.

    Args:
        key: name of the subject in its file names.
        category: category for averages.
        config: task configuration of the harness.
        fingerprint: hash of its files.
    """

    key: str
    category: str
    config: Mapping[str, Any]
    fingerprint: str


def local_tasks(task: str, task_dir: str | Path, lang: str, num_shots: int, draws: bool) -> list[Subject]:
    """Return all subjects of a benchmark, ordered by key.

    Args:
        task: name and split, for example ``mmlu_test``.
        task_dir: folder of the benchmarks.
        lang: "en" or "zh", language of the text around a question.
        num_shots: number of few-shot examples, at most as many as there are.
        draws: select examples at random instead of the first ones.
    Raises:
        UserError: if the benchmark or split does not exist.
    """
    name, _, split = task.rpartition("_")
    if not name or split not in SPLITS:
        what = f'"task" must be a name and a split, such as mmlu_test. Received: {task}.'
        raise UserError(what, remedy=f"Splits: {', '.join(SPLITS)}.", option="task")
    folder = _folder(name, Path(task_dir))
    files, shots = _of_split(folder, split), _of_split(folder, "dev")
    if not files:
        there = sorted({path.parent.name for path in folder.rglob("*") if path.suffix in (".csv", ".jsonl")})
        what = f'task "{name}" has no split "{split}". Available: {", ".join(there)}.'
        raise UserError(what, where=str(task_dir), option="task")
    mapping = _read_mapping(folder)
    found = []
    for key, path in sorted(files.items()):
        entry, examples = mapping.get(key, {}), shots.get(key)
        subject = entry.get("name", key.replace("_", " ")).translate(_BRACES_TO_PARENTHESES)
        config = {
            **_questions_of(path, examples, split, lang), "task": f"{name}_{key}", "output_type": "multiple_choice",
            "description": _INTRODUCTIONS[lang].format(subject=subject),
            "target_delimiter": "", "metric_list": [{"metric": "acc"}],
            "num_fewshot": min(num_shots, _count(examples)) if examples else 0,
            "fewshot_config": {"sampler": "default" if draws else "first_n"},
        }  # fmt: skip
        raw = path.read_bytes() + b"\0" + (examples.read_bytes() if examples else b"")
        found.append(Subject(key, entry.get("category", ""), config, sha256(raw).hexdigest()[:16]))
    return found


_BRACES_TO_PARENTHESES = str.maketrans("{}", "()")
"""The harness renders a description as a Jinja template without a sandbox, so names of subjects have no braces."""


def _read_mapping(folder: Path) -> dict[str, dict[str, str]]:
    """Read the name and category of each subject from ``mapping.json``. Empty if the file does not exist."""
    path = next(folder.rglob("mapping.json"), None)
    if path is None:
        return {}
    found = read_object(path)
    for key, entry in found.items():
        if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
            what = f'"{key}" must be an object with a name and a category, both text. Received: {quote_value(entry)}.'
            raise UserError(what, where=str(path), option="task_dir")
    return found


def _folder(name: str, task_dir: Path) -> Path:
    """Return the folder of a benchmark. A zip file is unpacked to a temporary folder."""
    folder = task_dir / name
    check_folder_below_roots(folder)
    check_below_roots(task_dir / f"{name}.zip")
    archives = [path for path in (task_dir / f"{name}.zip", *sorted(folder.glob("*.zip"))) if path.is_file()]
    if archives:
        unpacked = folder_until_exit("burnish-task-")
        for archive in archives:
            try:
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(unpacked)
            except (zipfile.BadZipFile, RuntimeError) as error:  # RuntimeError: encrypted, or compressed by other means
                raise UserError(f"cannot be unpacked: {error}.", where=str(archive), option="task_dir") from error
        for mapping in folder.glob("mapping.json"):
            (unpacked / "mapping.json").write_bytes(mapping.read_bytes())
        return unpacked
    if not folder.is_dir():
        near = [path.stem for path in task_dir.iterdir()] if task_dir.is_dir() else []
        raise UserError(
            f'task "{name}" was not found in "{task_dir}".{did_you_mean(name, near)}',
            remedy=f'Put its files into {folder} (burnish does not download them), or set "task_dir".',
            option="task_dir",
        )
    return folder


def _of_split(folder: Path, split: str) -> dict[str, Path]:
    """Return subject -> file for a split."""
    paths = [path for path in folder.rglob("*") if path.parent.name == split and path.suffix in (".csv", ".jsonl")]
    return {path.stem.removesuffix(f"_{split}"): path for path in paths}


def _questions_of(path: Path, examples: Path | None, split: str, lang: str) -> dict[str, Any]:
    """Return the part of the task configuration that describes how files are read."""
    files = {split: str(path), **({"dev": str(examples)} if examples else {})}
    splits = {"test_split": split, **({"fewshot_split": "dev"} if examples else {})}
    if path.suffix == ".jsonl":
        return {
            **splits, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
            "doc_to_text": _TEXT_OF_JSON + _ANSWER[lang], "doc_to_target": _TARGET_OF_JSON,
            "doc_to_choice": "{{'ABCDEFGHIJ'[:choices|length]|list}}",
        }  # fmt: skip
    known = [name.strip().lower() for name in next(iter(_rows(path)), [])]
    if has_header := {"question", "a", "b", "c", "d"} <= set(known):
        by_name = {name.lower(): name for name in _COLUMNS}
        names = [by_name.get(name) or f"column {at}" for at, name in enumerate(known)]
    elif len(known) >= len(_COLUMNS) - 1:  # the answer may be missing
        names = [*_COLUMNS, *(f"column {at}" for at in range(len(_COLUMNS), len(known)))][: len(known)]
    else:
        what = f"expected the columns {', '.join(_COLUMNS)}. Received: {len(known)} columns."
        raise UserError(what, where=str(path), option="task_dir")
    # All columns are text: otherwise pandas would convert "1" to 1.0 and "None" to a missing value.
    read = {"header": 0 if has_header else None, "column_names": names, "keep_default_na": False,
            "converters": dict.fromkeys(names, str)}  # fmt: skip
    return {
        **splits, "dataset_path": "csv", "dataset_kwargs": {"data_files": files, **read},
        "doc_to_text": _TEXT_OF_CSV + _ANSWER[lang], "doc_to_target": "{{(answer or '')|trim|upper}}",
        "doc_to_choice": list("ABCD"),
    }  # fmt: skip


def _rows(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file. Raises UserError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot be read as CSV in UTF-8: {error}.", where=str(path), option="task_dir") from error


def _count(path: Path) -> int:
    """Return the number of examples in a file."""
    if path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    rows = _rows(path)
    return len(rows) - (bool(rows) and "question" in [name.strip().lower() for name in rows[0]])
