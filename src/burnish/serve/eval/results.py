"""Result files of a benchmark, and the comparison of several models.

    results.json        subject -> index of the question -> letter (as in LLaMA-Factory, and for C-Eval submissions)
    results.log         averages over questions, in LLaMA-Factory's format
    eval_results.json   accuracy with standard error, counts, macro average, and everything they depend on
    answers.jsonl       one line per question, from which an interrupted command continues

No accuracy is computed for questions without a reference answer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.report.results import write_text_atomically
from burnish.serve.eval.local_tasks import LETTERS, Subject

CATEGORIES = ("STEM", "Social Sciences", "Humanities", "Other")


@dataclass(frozen=True)
class ChoiceResult:
    """Result of one question. ``is_right`` is None if there is no reference answer."""

    letter: str
    chances: tuple[float, ...]
    is_right: bool | None


def choice_result(sample: Mapping[str, Any]) -> ChoiceResult:
    """Return the result of a sample logged by the harness: the choice with the largest log-probability."""
    scores = [score for score, _ in sample["filtered_resps"]]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    letter, right_of = LETTERS[scores.index(most)], str(sample["target"])
    return ChoiceResult(letter, tuple(w / sum(weights) for w in weights), letter == right_of if right_of else None)


class SavedAnswers:
    """Saved answers (``answers.jsonl``): the finished subjects, each with all of its questions.

    Args:
        folder: folder of the file; None saves nothing.
        facts: everything that the answers depend on; a file with other facts is discarded.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        self.folder, self.facts = folder, json.loads(json.dumps(facts))
        self.done: dict[str, list[ChoiceResult]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "answers.jsonl"
            self._read()
            self._write_all()

    def add(self, subject: Subject, answers: Sequence[ChoiceResult]) -> None:
        self.done[subject.key] = list(answers)
        if self.folder is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(subject.key, answers))

    def _read(self) -> None:
        if not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        with suppress(ValueError, KeyError, IndexError):  # the last lines may be incomplete
            if json.loads(lines[0]) != {"of": self.facts}:
                return
            found: dict[str, list[ChoiceResult]] = {}
            for line in lines[1:]:
                record = json.loads(line)
                one = ChoiceResult(record["chosen"], tuple(record["chances"]), record["right"])
                found.setdefault(record["subject"], []).append(one)
                if record["index"] + 1 == record["of"]:
                    self.done[record["subject"]] = found[record["subject"]]

    def _write_all(self) -> None:
        """Rewrite the file without incomplete subjects."""
        text = json.dumps({"of": self.facts}) + "\n"
        write_text_atomically(self.path, text + "".join(_lines(key, each) for key, each in self.done.items()))


def _lines(key: str, answers: Sequence[ChoiceResult]) -> str:
    records = (
        {"subject": key, "index": at, "of": len(answers), "chosen": one.letter,
         "chances": [round(chance, 6) for chance in one.chances],
         "right": one.is_right}
        for at, one in enumerate(answers)
    )  # fmt: skip
    return "".join(json.dumps(record) + "\n" for record in records)


def accuracy(is_correct: Sequence[bool]) -> dict[str, float]:
    """Return the fraction of correct answers in percent, its standard error, and the count."""
    number = len(is_correct)
    share = sum(is_correct) / number
    return {
        "accuracy": round(100 * share, 4),
        "accuracy_stderr": round(100 * math.sqrt(share * (1 - share) / max(1, number - 1)), 4),
        "num_questions": number,
    }


def accuracies(subjects: Sequence[Subject], done: Mapping[str, Sequence[ChoiceResult]]) -> dict[str, Any]:
    """Return accuracies: over all questions, by category, averaged over subjects, and by subject."""
    right_of = {s.key: [one.is_right for one in done[s.key] if one.is_right is not None] for s in subjects}
    right_of = {key: is_correct for key, is_correct in right_of.items() if is_correct}
    if not right_of:
        return {"num_questions": sum(len(done[s.key]) for s in subjects), "num_answered": 0}
    by_category: dict[str, list[bool]] = defaultdict(list)
    for subject in subjects:
        by_category[subject.category or "Other"] += right_of.get(subject.key, [])
    found: dict[str, Any] = accuracy([right for is_correct in right_of.values() for right in is_correct])
    found["macro_accuracy"] = round(sum(100 * sum(r) / len(r) for r in right_of.values()) / len(right_of), 4)
    known = [c for c in CATEGORIES if by_category.get(c)] + [c for c in by_category if c not in CATEGORIES]
    found["categories"] = {category: accuracy(by_category[category]) for category in known if by_category[category]}
    found["subjects"] = {key: accuracy(is_correct) for key, is_correct in sorted(right_of.items())}
    return found


def log_lines(found: Mapping[str, Any]) -> list[str]:
    """Return LLaMA-Factory's log lines: the average over all questions and of each category."""
    if "accuracy" not in found:
        return [f"{found['num_questions']} questions were answered. No accuracy: the task has no reference answers."]
    rows = [("Average", found["accuracy"]), *((name, each["accuracy"]) for name, each in found["categories"].items())]
    return [f"{name:>15}: {value:.2f}" for name, value in rows]


def write(
    folder: Path, subjects: Sequence[Subject], done: Mapping[str, Sequence[ChoiceResult]], found: Mapping[str, Any]
) -> None:  # fmt: skip
    letters = {s.key: {str(at): one.letter for at, one in enumerate(done[s.key])} for s in subjects}
    write_text_atomically(folder / "results.json", json.dumps(letters, indent=2))
    write_text_atomically(folder / "results.log", "\n".join(log_lines(found)) + "\n")
    write_text_atomically(folder / "eval_results.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def comparison_table(
    names: Sequence[str], subjects: Sequence[Subject], each: Sequence[Mapping[str, Sequence[ChoiceResult]]]
) -> list[str]:
    """Return a table of models on the same questions: accuracy, and difference to the first model.

    The difference has a paired standard error (McNemar 1947): only questions that exactly one of both models answers
    correctly count.
    """
    is_correct = [
        [bool(one.is_right) for s in subjects for one in done[s.key] if one.is_right is not None] for done in each
    ]
    if not is_correct[0]:
        return []
    width = max(map(len, names))
    lines = [f"{'':{width}}  accuracy   difference"]
    for name, own in zip(names, is_correct, strict=True):
        number = len(own)
        better = sum(a and not b for a, b in zip(own, is_correct[0], strict=True))
        worse = sum(b and not a for a, b in zip(own, is_correct[0], strict=True))
        error = 100 * math.sqrt(max(better + worse - (better - worse) ** 2 / number, 0)) / number
        difference = "" if own is is_correct[0] else f"   {100 * (better - worse) / number:+.2f} ± {error:.2f}"
        lines.append(f"{name:{width}}  {100 * sum(own) / number:8.2f}{difference}")
    return lines
