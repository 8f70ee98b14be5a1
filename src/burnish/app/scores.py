"""Scores of an evaluation set by a reward model: ``stage: rm`` with ``do_predict``.

In: a run whose model gives scores. Out: ``generated_predictions.jsonl``, a line per pair with the scores of both
answers and the pair's number, in the order of the data (LLaMA-Factory's file and keys, which it rounds to two digits).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from burnish.core.run import Run
from burnish.report.console import note
from burnish.report.pace import counted

SCORES_NAME = "generated_predictions"


def write_scores(run: Run, folder: Path) -> None:
    """One file per evaluation set; every process scores its share, and the first writes."""
    for name, batches in run.eval_sets.items():
        found = run.engine.gather_objects(list(_scores(run, batches)))
        if run.engine.rank == 0:
            path = folder / f"{SCORES_NAME}{f'_{name}' if name else ''}.jsonl"
            lines = dict(line for of_rank in found for line in of_rank)
            with path.open("w", encoding="utf-8") as file:
                for number in sorted(lines):
                    file.write(json.dumps({"record": number + 1, **lines[number]}) + "\n")
            note(f"Scores of {counted(len(lines), 'pair')} in {path}.")


@torch.no_grad()
def _scores(run: Run, batches: Any) -> Iterator[tuple[int, dict[str, float]]]:
    """The number of each pair, from 0, and its scores."""
    ready = run.objective.evaluated(run.model, batches, run.engine)
    for numbers, batch in zip(batches.parts, ready, strict=True):
        with run.engine.precision():
            scores = run.model(batch).tolist()
        for place, number in enumerate(numbers):
            yield int(number), {"chosen": scores[2 * place], "rejected": scores[2 * place + 1]}
