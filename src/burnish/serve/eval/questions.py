"""Files of a multiple-choice task -> questions.

In:  ``task_dir`` and a task's name, ``mmlu_test``: a folder or a zip file below it, never fetched. Out: subjects, each
     with its examples (of ``dev``) and its questions (of the split asked for).

    mmlu    mmlu/data/{dev,val,test}/<subject>_<split>.csv     no header: question, A, B, C, D, answer
    ceval   ceval/{dev,val,test}/<subject>_<split>.csv         header: id, question, A, B, C, D, answer, explanation
    cmmlu   cmmlu/{dev,test}/<subject>.csv                     header: (number), Question, A, B, C, D, Answer
    others  <name>/{dev,test}/<subject>.jsonl                  question, choices, answer (letter, index or text)

Refuses: a task that is not there, a file without the columns of its task. An answer that is missing is None.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.config.errors import UserError, did_you_mean

LETTERS = "ABCDEFGHIJ"
SPLITS = ("dev", "val", "validation", "test", "train")


@dataclass(frozen=True)
class ChoiceQuestion:
    """One question. ``answer`` is the letter of the right choice; None where it is not told."""

    text: str
    choices: tuple[str, ...]
    answer: str | None = None


@dataclass(frozen=True)
class Subject:
    """A subject of a task.

    Args:
        key: as the files are called.
        name: as prompts say it.
        category: of the averages.
        examples: for the shots, in the order of their file.
        fingerprint: of both files.
    """

    key: str
    name: str
    category: str
    examples: tuple[ChoiceQuestion, ...]
    questions: tuple[ChoiceQuestion, ...]
    fingerprint: str


def read_task(task: str, task_dir: str | Path) -> list[Subject]:
    """All subjects of a task, in the order of their keys.

    Args:
        task: its name and the split, ``mmlu_test``.
    Raises:
        UserError: where it is not there or cannot be read.
    """
    name, _, split = task.rpartition("_")
    if not name or split not in SPLITS:
        what = f'"task" is a name and a split, such as mmlu_test. Received: {task}.'
        raise UserError(what, remedy=f"Splits: {', '.join(SPLITS)}.")
    files = _files(name, Path(task_dir))
    mapping = _mapping(files)
    asked = _of_split(files, split)
    if not asked:
        there = sorted({path.parent.name for path in files if path.suffix in (".csv", ".jsonl")})
        raise UserError(f'task "{name}" has no split "{split}". It has: {", ".join(there)}.', where=str(task_dir))
    shots = _of_split(files, "dev")
    found = []
    for key, path in sorted(asked.items()):
        said = mapping.get(key, {})
        raw = [files[path], files[shots[key]] if key in shots else b""]
        found.append(
            Subject(
                key, said.get("name", key.replace("_", " ")), said.get("category", ""),
                tuple(_questions(shots[key], raw[1])) if key in shots else (), tuple(_questions(path, raw[0])),
                sha256(raw[0] + b"\0" + raw[1]).hexdigest()[:16],
            )
        )  # fmt: skip
    return found


def _files(name: str, task_dir: Path) -> dict[PurePosixPath, bytes]:
    """Path within the task -> bytes, from a folder or a zip file."""
    folder = task_dir / name
    if folder.is_dir():
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".zip")
        files = {PurePosixPath(path.relative_to(folder).as_posix()): path.read_bytes() for path in paths}
        archives = sorted(folder.glob("*.zip"))
    else:
        files, archives = {}, [task_dir / f"{name}.zip"] if (task_dir / f"{name}.zip").is_file() else []
    for archive in archives:
        with zipfile.ZipFile(archive) as zipped:
            files |= {PurePosixPath(n): zipped.read(n) for n in zipped.namelist() if not n.endswith("/")}
    if not files:
        near = [path.stem for path in task_dir.iterdir()] if task_dir.is_dir() else []
        raise UserError(
            f'there is no task "{name}" in "{task_dir}".{did_you_mean(name, near)}',
            remedy=f'Put its files into {folder}; burnish fetches none. "task_dir" names another place.',
        )
    return files


def _of_split(files: Mapping[PurePosixPath, bytes], split: str) -> dict[str, PurePosixPath]:
    """Subject -> its file of a split."""
    paths = [path for path in files if path.parent.name == split and path.suffix in (".csv", ".jsonl")]
    return {path.stem.removesuffix(f"_{split}"): path for path in paths}


def _mapping(files: Mapping[PurePosixPath, bytes]) -> dict[str, dict[str, str]]:
    path = next((path for path in files if path.name == "mapping.json"), None)
    if path is None:
        return {}
    try:
        found = json.loads(files[path])
    except ValueError as error:
        raise UserError(f"mapping.json is not JSON: {error}.") from error
    return found if isinstance(found, dict) else {}


def _questions(path: PurePosixPath, raw: bytes) -> Iterator[ChoiceQuestion]:
    try:
        text = raw.decode("utf-8-sig")
        if path.suffix == ".jsonl":
            yield from (_of_record(json.loads(line)) for line in text.splitlines() if line.strip())
            return
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
        yield from (_of_row(row) for row in _plain_rows(rows))
    except (UnicodeDecodeError, ValueError, KeyError, IndexError, TypeError, csv.Error) as error:
        raise UserError(f"not the columns of a task: {type(error).__name__}: {error}.", where=str(path)) from error


def _plain_rows(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Question, A, B, C, D, answer; of a file with a header, those columns of it."""
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if not {"question", "a", "b", "c", "d"} <= set(header):
        yield from (list(row) for row in rows)
        return
    places = [header.index(name) for name in ("question", "a", "b", "c", "d")]
    answer = header.index("answer") if "answer" in header else None
    for row in rows[1:]:
        has_answer = answer is not None and answer < len(row)
        yield [*(row[place] for place in places), row[answer] if answer is not None and has_answer else ""]


def _of_row(row: Sequence[str]) -> ChoiceQuestion:
    if len(row) < 5:
        raise ValueError(f"a row has {len(row)} columns")
    answer = row[5].strip().upper() if len(row) > 5 else ""
    return ChoiceQuestion(
        row[0].strip(), tuple(cell.strip() for cell in row[1:5]), answer if answer in set("ABCD") else None
    )


def _of_record(record: Mapping[str, Any]) -> ChoiceQuestion:
    choices = tuple(str(choice) for choice in record["choices"])
    answer = record.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        letter: str | None = LETTERS[answer]
    elif isinstance(answer, str) and answer in choices:
        letter = LETTERS[choices.index(answer)]
    else:
        letter = str(answer).strip().upper() if answer not in (None, "") else None
    if letter is not None and letter not in LETTERS[: len(choices)]:
        raise ValueError(f"an answer is none of the choices: {answer!r}")
    return ChoiceQuestion(str(record["question"]).strip(), choices, letter)
