"""Evaluate models on a dataset: loss, generated responses, or scores of a reward model.

This is the run that ``burnish train`` would do with ``do_train: false``: same functions, files and names.
``burnish eval PATH eval_dataset=...`` computes metrics. ``burnish predict PATH`` writes responses, by default to the
evaluation data of the run that made the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.config.errors import UserError
from burnish.config.options import RawValue, build, changed_options, option, raise_if
from burnish.data.chat.choose import RECORDED, recorded_options
from burnish.inference.loading import writes_answers
from burnish.inference.options import TRAINING_ONLY
from burnish.losses.base import OBJECTIVES
from burnish.report.console import note
from burnish.run.build import train_run
from burnish.run.plan.config_files import COMMAND_LINE
from burnish.run.plan.files import ANY_RECORDS
from burnish.run.plan.plan import locate_problems, plan
from burnish.serve.command_line import Serving, paths_of, servings_of
from burnish.utils.files import expand_user, problems_of_folder, report_full_disk
from burnish.utils.json_files import read_object

if TYPE_CHECKING:
    from burnish.run.plan.options import RunOptions

_RESULTS_FOLDER = "predictions"
UNREAD = ("predict_with_generate", "tokenized_path", "streaming", "buffer_size", *TRAINING_ONLY)
"""Options of the listed groups that ``burnish predict`` does not read."""
FREE_SOME_SPACE = "Free some space or set a different save_dir, and run the command again."


@dataclass
class PredictOptions:
    """Output of predictions."""

    save_dir: str | None = option(
        None, "Folder for the results. Default: output_dir, or predictions in the folder of the run.", names_place=True
    )


def predict_sets(argv: Sequence[str]) -> int:
    """Run ``burnish predict``: write responses to, or scores of, evaluation sets. Returns the exit status."""
    servings = servings_of(argv, [field.name for field in fields(PredictOptions)], with_data=True)
    options, wrong = build(PredictOptions, servings[0].rest)
    raise_if(wrong)
    for name in UNREAD:
        if servings[0].provenance.get(name, "").startswith(COMMAND_LINE):
            note(f'"{name}" has no effect here: burnish predict generates responses to all prompts of a dataset.')
    if any(not (serving.options.eval_dataset or serving.options.val_size) for serving in servings):
        what = "nothing to predict: eval_dataset is not set, and no run.yaml in the model's folder sets it."
        raise UserError(what, remedy="Set it, for example eval_dataset=heldout", option="eval_dataset")
    return evaluate_dataset(
        servings, options.save_dir or default_results_folder(argv, servings, _RESULTS_FOLDER), predicts=True
    )


def default_results_folder(argv: Sequence[str], servings: Sequence[Serving], name: str) -> str | None:
    """Return the default folder for results: ``name`` in the folder of the only model, or None for ``output_dir``."""
    paths, _ = paths_of(argv)
    folder = expand_user(paths[0]) if paths else Path()
    is_in_run = len(paths) == 1 and folder.is_dir() and not servings[0].options.output_dir
    return str(folder / name) if is_in_run else None


def evaluate_dataset(servings: Sequence[Serving], save_dir: str | None, predicts: bool = False) -> int:
    """Evaluate each model in turn. Returns the exit status.

    Args:
        servings: the models.
        save_dir: output folder. Default: ``output_dir`` of the options.
        predicts: write responses or scores even without ``predict_with_generate``.
    """
    if not save_dir and not servings[0].options.output_dir:
        what = "save_dir is not set, so there is no folder for the results and responses."
        raise UserError(what, remedy="Set it, for example save_dir=saves/evaluation")
    raise_if(problems_of_folder(Path(save_dir), "save_dir") if save_dir else [])
    rows: list[tuple[str, dict[str, float]]] = []
    command = "predict" if predicts else "eval"
    here = f"burnish {command}"
    for serving in servings:
        folder = Path(save_dir or separate_output_dir(serving.options)) / (serving.name if len(servings) > 1 else "")
        values = {name: RawValue(value, here) for name, value in changed_options(serving.options).items()}
        writes, stage = writes_answers(serving.options), serving.options.stage
        generates = writes and (predicts or serving.options.predict_with_generate)
        if generates and serving.uses_own_data and not OBJECTIVES[stage].has_prompts:
            what = f"predictions require prompts, but the records of stage: {stage} have none."
            remedy = "Run burnish eval to compute the loss, or set eval_dataset to a dataset with prompts."
            raise UserError(what, where=serving.name, remedy=remedy)
        # Responses need no loss of the stage, only its kind of records.
        records_of = (stage if serving.uses_own_data else ANY_RECORDS) if generates else ""
        if generates or not writes:
            stage = "sft" if writes else "rm"
        values |= {
            "stage": RawValue(stage, here), "predict_with_generate": RawValue(generates, here),
            "do_train": RawValue(False, here), "do_eval": RawValue(not generates, here),
            "do_predict": RawValue(generates or predicts, here),
            "output_dir": RawValue(str(folder), here), **_recorded_template(serving),
        }  # fmt: skip
        if not serving.options.adapter_name_or_path and serving.options.quantization_bit is None:
            values["finetuning_type"] = RawValue("full", here)  # otherwise a new adapter would be attached
        if not serving.options.val_size:
            values["dataset"] = RawValue(None, here)
        if generates:
            values["tokenized_path"] = RawValue(None, here)  # it holds the rows of another stage
        made = plan({name: item for name, item in values.items() if item.value is not None})
        made = replace(made, command=command, records_of=records_of)
        if serving.reference:
            given = {name: item.value for name, item in serving.reference.items()}
            places = {name: item.where for name, item in serving.reference.items()}
            made = replace(made, options=replace(made.options, **given), provenance={**made.provenance, **places})
        with locate_problems(serving.provenance), report_full_disk(folder, FREE_SOME_SPACE):
            result = train_run(made)
        rows.append((serving.name, dict(result.metrics)))
    if len(rows) > 1:
        for line in _table(rows):
            note(line)
    return 0


def separate_output_dir(options: RunOptions, name: str = _RESULTS_FOLDER) -> Path:
    """Return ``output_dir``, or its subfolder ``name`` if it is the folder of the model."""
    folder, models = Path(options.output_dir or ""), (options.model_name_or_path, *(options.adapter_name_or_path or ()))
    return folder / name if folder.resolve() in [Path(str(model)).resolve() for model in models] else folder


def _recorded_template(serving: Serving) -> dict[str, RawValue]:
    """Return the template recorded in the model's folder with its options, except those that were set."""
    options = serving.options
    if options.template is not None:
        return {}
    for folder in [*(options.adapter_name_or_path or [])[::-1], options.model_name_or_path or ""]:
        path = Path(folder) / "tokenizer_config.json"
        if path.is_file():
            recorded = recorded_options(read_object(path).get(RECORDED), str(path))
            unset = {name: value for name, value in recorded.items() if name not in serving.provenance}
            return {name: RawValue(value, str(path)) for name, value in unset.items() if value is not None}
    return {}


def _table(rows: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    """Return a table of models and their metrics; ``-`` for a metric that a model does not have."""
    found = dict.fromkeys(name for _, metrics in rows for name in metrics)
    names = [name for name in found if not name.endswith(("_runtime", "_per_second", "epoch"))]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':{width}}  " + "  ".join(names)]
    for name, metrics in rows:
        cells = [f"{metrics[key]:.4f}" if key in metrics else "-" for key in names]
        lines.append(
            f"{name:{width}}  " + "  ".join(f"{cell:>{len(key)}}" for key, cell in zip(names, cells, strict=True))
        )
    return lines
