"""A data set under one or several models: its loss, and with ``predict_with_generate`` its answers.

It is the run that ``burnish train`` would do with ``do_train: false``: the same functions, files and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.app.build import train_run
from burnish.app.plan import placing, plan
from burnish.app.serving import Serving
from burnish.core.errors import Problem, UserError
from burnish.core.json_files import read_object
from burnish.core.options import Given, changed
from burnish.data.templates.choose import RECORDED
from burnish.report.console import note

if TYPE_CHECKING:
    from burnish.infer.options import AnsweringOptions

HERE = "burnish eval"


def evaluate_dataset(servings: Sequence[Serving], save_dir: str | None) -> int:
    """Each model in turn. Returns the exit status."""
    if not save_dir and not servings[0].options.output_dir:
        what = "save_dir is missing: results and answers are files."
        raise UserError(Problem(what, remedy="Name a folder: save_dir=saves/evaluation"))
    rows: list[tuple[str, dict[str, float]]] = []
    for serving in servings:
        folder = Path(save_dir or serving.options.output_dir or "") / (serving.name if len(servings) > 1 else "")
        given = {name: Given(value, HERE) for name, value in changed(serving.options).items()}
        generates = serving.options.predict_with_generate
        given |= {
            "do_train": Given(False, HERE), "do_eval": Given(not generates, HERE), "do_predict": Given(generates, HERE),
            "output_dir": Given(str(folder), HERE), "dataset": Given(None, HERE), **_recorded(serving.options),
        }  # fmt: skip
        made = plan({name: item for name, item in given.items() if item.value is not None})
        with placing(serving.provenance):
            result = train_run(made)
        rows.append((serving.name, dict(result.metrics)))
    if len(rows) > 1:
        for line in _table(rows):
            note(line)
    return 0


def _recorded(options: AnsweringOptions) -> dict[str, Given]:
    """The template that the folder records, where none is asked for."""
    if options.template is not None:
        return {}
    for folder in [*(options.adapter_name_or_path or [])[::-1], options.model_name_or_path or ""]:
        path = Path(folder) / "tokenizer_config.json"
        if path.is_file():
            recorded = read_object(path).get(RECORDED) or {}
            return {name: Given(value, str(path)) for name, value in recorded.items() if value is not None}
    return {}


def _table(rows: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    names = [name for name in rows[0][1] if not name.endswith(("_runtime", "_per_second", "epoch"))]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':{width}}  " + "  ".join(names)]
    for name, metrics in rows:
        lines.append(
            f"{name:{width}}  " + "  ".join(f"{metrics.get(key, float('nan')):{len(key)}.4f}" for key in names)
        )
    return lines
