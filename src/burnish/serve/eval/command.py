"""``burnish eval PATH ...``: the command.

It takes one or several models and either a ``task`` of local files (with LLaMA-Factory's options task, task_dir, lang,
n_shot, batch_size, save_dir), ``task=lm_eval:NAME,...``, or ``eval_dataset``. Without these, the evaluation data of the
run that made the model are used. It writes files to ``save_dir`` and prints a table. If it is interrupted, the same
command continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from burnish import __version__
from burnish.config.errors import Problem, UserError
from burnish.config.options import build, option, raise_if
from burnish.inference.loaded_model import LoadedModel
from burnish.inference.loading import load_for_inference, slots_of
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.models.fingerprint import adapters_fingerprint, base_fingerprint, config_fingerprint
from burnish.models.patches.packed import pack
from burnish.report.console import note
from burnish.report.results import write_text_atomically
from burnish.serve.command_line import Serving, servings_of
from burnish.serve.eval.harness import EngineModel, check_harness, run_tasks
from burnish.serve.eval.local_tasks import Subject, local_tasks
from burnish.serve.eval.results import SavedAnswers, accuracies, choice_result, comparison_table, log_lines, write
from burnish.utils.files import problems_of_folder, report_full_disk
from burnish.utils.json_files import read_object
from burnish.utils.work import progress

HARNESS = "lm_eval:"


@dataclass
class EvalOptions:
    """Evaluation."""

    task: str | None = option(
        None,
        "Task and split in local files, such as mmlu_test; or tasks of lm-evaluation-harness, such as "
        "lm_eval:arc_easy,hellaswag.",
    )
    task_dir: str = option("evaluation", "Folder with the files of the tasks. Nothing is downloaded.", names_place=True)
    lang: Literal["en", "zh"] = option("en", "Language of the prompt templates.")
    n_shot: int = option(5, "Number of few-shot examples.", ge=0)
    shots: Literal["first", "random"] = option(
        "first",
        "Selection of few-shot examples: the first N (first), or a random sample determined by seed, subject "
        "and question.",
    )
    batch_size: int | None = option(
        None, "Number of questions evaluated concurrently. Default: the number of concurrent requests.", ge=1
    )
    save_dir: str | None = option(
        None,
        "Folder for the results. Default for a dataset: output_dir, or evaluation in the folder of the run. Results "
        "of a task are only printed by default.",
        names_place=True,
    )
    limit: int | None = option(None, "Evaluate only the first N questions per subject, for a quick test.", ge=1)


OWN = tuple(field.name for field in fields(EvalOptions))


def evaluate(argv: Sequence[str]) -> int:
    """Run ``burnish eval``.

    Raises:
        UserError: for errors in the user's input.
    """
    servings = servings_of(argv, OWN, with_data=True, with_loss=True)
    options, wrong = build(EvalOptions, servings[0].rest)
    raise_if([*wrong, *_problems(options, servings[0])])
    from burnish.serve.eval.dataset import FREE_SOME_SPACE, default_results_folder, evaluate_dataset

    if options.task is None:
        return evaluate_dataset(servings, options.save_dir or default_results_folder(argv, servings, "evaluation"))
    if options.task.startswith(HARNESS):
        check_harness()
        for serving in servings:
            with report_full_disk(Path(options.save_dir or ""), FREE_SOME_SPACE):
                _through_harness(serving, options, len(servings) > 1)
        return 0
    draws = options.shots == "random"
    subjects = local_tasks(options.task, options.task_dir, options.lang, options.n_shot, draws)
    check_harness()
    with report_full_disk(Path(options.save_dir or ""), FREE_SOME_SPACE):
        done = [_evaluate_model(serving, options, subjects, len(servings) > 1) for serving in servings]
    if len(servings) > 1:
        for line in comparison_table([serving.name for serving in servings], subjects, done):
            note(line)
    return 0


def _problems(options: EvalOptions, serving: Serving) -> list[Problem]:
    if options.save_dir and (problems := problems_of_folder(Path(options.save_dir), "save_dir")):
        return problems
    if options.task is None and not (serving.options.eval_dataset or serving.options.val_size):
        what = "nothing to evaluate: neither task nor eval_dataset is set, and there is no run with a validation split."
        return [
            Problem(
                what,
                remedy="Set task=mmlu_test task_dir=evaluation, task=lm_eval:arc_easy, or eval_dataset=heldout "
                "(dataset is for training).",
                option="eval_dataset",
            )
        ]
    return []


def _load_model(serving: Serving, options: EvalOptions) -> tuple[LoadedModel, Scheduler]:
    infer_options = serving.options
    if infer_options.template == "none":
        infer_options = replace(infer_options, template="fewshot", missing_control_tokens="split")
    loaded = load_for_inference(infer_options, serving.name, note, explicit=serving.provenance)
    if loaded.model is None:
        what = (
            "multiple-choice tasks need the engine in this process: a remote one returns no prompt log-probabilities."
        )
        raise UserError(what, remedy="Remove infer_backend and infer_url.")
    slots = options.batch_size or slots_of(infer_options, loaded.model, loaded.context)
    limits = SlotLimits(slots, loaded.context, exact=infer_options.infer_exact)
    pack(loaded.model)
    return loaded, Scheduler(loaded.model, limits, adapters=loaded.adapters, adapter_context=loaded.adapter_context)


def _facts(loaded: LoadedModel, options: EvalOptions, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return everything that the responses depend on."""
    infer_options = loaded.options
    settings = {
        name: value for name, value in asdict(options).items() if name not in ("save_dir", "task_dir", "batch_size")
    }
    return {
        **settings, "model": base_fingerprint(infer_options, infer_options.seed),
        "config": config_fingerprint(infer_options), "rope_scaling": infer_options.rope_scaling,
        "quantization": [infer_options.quantization_bit, infer_options.quantization_method],
        "adapters": adapters_fingerprint(infer_options.adapter_name_or_path, infer_options, "adapter_name_or_path"),
        "template": loaded.template.fingerprint, "seed": infer_options.seed, "infer_dtype": infer_options.infer_dtype,
        "context": loaded.context, "files": {subject.key: subject.fingerprint for subject in subjects},
    }  # fmt: skip


def _evaluate_model(serving: Serving, options: EvalOptions, subjects: Sequence[Subject], is_one_of: bool) -> Any:
    """Return one model's responses to all questions. Saved responses are reused."""
    loaded, loop = _load_model(serving, options)
    facts = _facts(loaded, options, subjects)
    folder = _folder_of(serving, options, is_one_of)
    answers = SavedAnswers(folder, facts)
    model = EngineModel(loop, loaded.template, loaded.form, loaded.name, loaded.options.seed, is_benchmark=True)
    start_time = time.monotonic()
    waiting = [subject for subject in subjects if subject.key not in answers.done]
    if len(waiting) < len(subjects):
        note(f"{len(subjects) - len(waiting)} subjects have already been evaluated and are skipped.")
    with progress("Evaluating", len(waiting), "subjects") as advance:
        for subject in waiting:
            (samples,) = run_tasks(model, [subject.config], None, None, options.limit, True)["samples"].values()
            answers.add(subject, [choice_result(sample) for sample in sorted(samples, key=lambda one: one["doc_id"])])
            advance(1)
    found = accuracies(subjects, answers.done) | {"seconds": round(time.monotonic() - start_time, 2), "of": facts}
    found |= {"versions": {"burnish": __version__, **{name: version(name) for name in ("torch", "transformers")}}}
    for line in log_lines(found):
        note(line)
    if folder is not None:
        write(folder, subjects, answers.done, found)
        note(f"Written: {folder}")
    return answers.done


def _folder_of(serving: Serving, options: EvalOptions, is_one_of: bool) -> Path | None:
    """Return the folder for the results of a model. With several models, each has its own subfolder."""
    return Path(options.save_dir) / (serving.name if is_one_of else "") if options.save_dir else None


def _through_harness(serving: Serving, options: EvalOptions, is_one_of: bool) -> None:
    assert options.task is not None
    loaded, loop = _load_model(serving, options)
    model = EngineModel(loop, loaded.template, loaded.form, loaded.name, loaded.options.seed)
    tasks = options.task.removeprefix(HARNESS).split(",")
    own = Path(options.task_dir) if Path(options.task_dir).is_dir() else None
    is_chat = serving.options.template != "none"
    found = run_tasks(model, tasks, own, options.n_shot if options.n_shot != EvalOptions().n_shot else None,
                      options.limit, is_chat)  # fmt: skip
    for task, values in found["results"].items():
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, float))
        note(f"{loaded.name}: {task}: {numbers}")
    if (folder := _folder_of(serving, options, is_one_of)) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "eval_results.json"
        before = read_object(path, "Move it, or set a different save_dir.") if path.is_file() else {}
        write_text_atomically(path, json.dumps(before | found, indent=2, default=str) + "\n")
