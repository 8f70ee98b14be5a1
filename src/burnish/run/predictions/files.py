"""Files of predictions: ``generated_predictions.jsonl`` with responses or reward scores.

With several evaluation sets there is one file per set. The names are LLaMA-Factory's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from burnish.loop.loop import Loop
from burnish.report.console import note
from burnish.report.pace import format_count
from burnish.report.results import write_text_atomically
from burnish.utils.files import as_file_name

ANSWERS_NAME = "generated_predictions"


def stem_of(name: str) -> str:
    """File name without suffix for the evaluation set ``name``; "" is the only one."""
    return f"{ANSWERS_NAME}_{as_file_name(name)}" if name else ANSWERS_NAME


def write_answers(
    path: Path, prompts: Sequence[str], answers: Sequence[str], labels: Sequence[str],
    samples: Sequence[Sequence[tuple[str, float | None]]] | None = None, images: Sequence[Sequence[str]] = (),
) -> None:  # fmt: skip
    """Write a line of JSON per question with ``prompt``, ``predict`` and ``label``, and ``images`` if it has any.

    Args:
        path: output file.
        prompts: prompt texts.
        answers: generated responses.
        labels: reference responses.
        samples: all responses to each question with their log-probabilities in nats; the first is ``predict``.
        images: paths of the images of each question.
    """
    lines = []
    for at, (prompt, predicted, label) in enumerate(zip(prompts, answers, labels, strict=True)):
        line: dict[str, Any] = {"prompt": prompt, "predict": predicted, "label": label}
        if images and images[at]:
            line["images"] = list(images[at])
        if samples is not None:
            line["samples"] = [{"text": text, "logprob": logprob} for text, logprob in samples[at]]
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_text_atomically(path, "".join(lines))


def write_scores(run: Loop, folder: Path) -> None:
    """Write the reward scores of each pair, one file per evaluation set, in the order of the data.

    LLaMA-Factory writes the same file with rounded scores. Each process scores its share; rank 0 writes.
    """
    for name, batches in run.eval_sets.items():
        gathered = run.parallel.gather_objects(list(_scores_of(run, batches)))
        if run.parallel.rank == 0:
            path = folder / f"{stem_of(name)}.jsonl"
            lines = dict(line for of_rank in gathered for line in of_rank)
            records = ({"record": number + 1, **lines[number]} for number in sorted(lines))
            write_text_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
            note(f"The scores of {format_count(len(lines), 'pair')} were saved to {path}.")


@torch.no_grad()
def _scores_of(run: Loop, batches: Any) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the index of each pair and its scores."""
    ready = run.objective.iter_eval(run.model, batches, run.parallel)
    for numbers, batch in zip(batches.micro_batches, ready, strict=True):
        with run.parallel.precision():
            scores = run.model(batch).tolist()
        for place, number in enumerate(numbers):
            yield int(number), {"chosen": scores[2 * place], "rejected": scores[2 * place + 1]}
