"""``do_predict``: the evaluation sets, answered by the trained model, or measured by its loss.

In:  a run whose model is trained, what was prepared for it. Out: ``generated_predictions.jsonl`` (prompt, answer, given
     answer) and ``predict_results.json``, LLaMA-Factory's names; with several evaluation sets one file of answers each.

Prompts of like length share a batch, so that little is padded; the file is in the order of the data. Every rank answers
its share. Examples that are no conversation and have no prompt are left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.adapters.base import ModelState
from burnish.app.checks import may_run_ahead
from burnish.app.metrics import scores
from burnish.core.loop import switch
from burnish.core.meter import Clock
from burnish.core.types import IGNORE_INDEX, Example, Run
from burnish.data.rows import Template
from burnish.data.sources import load_datasets
from burnish.data.tally import Tally
from burnish.models.generate import generate, generation_config, until_stop
from burnish.models.load import context_length
from burnish.report.console import note
from burnish.report.pace import counted
from burnish.report.results import save_metrics

ANSWERS_NAME = "generated_predictions"


@dataclass(frozen=True)
class Question:
    """What the model is asked, and what was given as the answer."""

    prompt: list[int]
    label: list[int]


def predict_all(run: Run, prepared: Any, plan: Any) -> dict[str, float]:
    """Every evaluation set. Returns the metrics, which rank 0 has written too.

    Args:
        prepared: read for ``template`` and ``tokenizer``.
    """
    options, folder = plan.options, Path(plan.options.output_dir)
    switch(run, is_training=False)
    metrics: dict[str, float] = {}
    if options.predict_with_generate:
        sets: Mapping[str, Sequence[Example]] = load_datasets(
            options, options.seed, Tally(), may_run_ahead(options)
        ).eval
        for name, examples in sets.items():
            metrics |= predict(run, prepared, options, examples, name, folder)
    else:
        for name, batches in run.eval_sets.items():
            metrics |= run.evaluate(run, batches, f"predict_{name}" if name else "predict")
        if run.engine.rank == 0:
            note("  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.endswith("_loss")))
    run.callbacks.fire("on_predict", metrics=metrics)
    if run.engine.rank == 0:
        save_metrics("predict", metrics, folder)
    return metrics


def predict(
    run: Run, prepared: Any, options: Any, examples: Sequence[Example], name: str, folder: Path
) -> dict[str, float]:
    """One set: questions, answers, scores."""
    clock = Clock()
    tokenizer, stops = prepared.tokenizer, prepared.template.stop_token_ids()
    questions = questions_of(examples, prepared.template, stops)
    if len(questions) < len(examples):
        note(
            f"{len(examples) - len(questions)} of {len(examples)} records have no prompt to answer; they are left out."
        )
    answers = answer_all(run, questions, generation_config(bare_model(run), tokenizer, stops, options), options)
    given = {"skip_special_tokens": options.skip_special_tokens}
    texts = [tokenizer.decode(ids, **given) for ids in answers]
    labels = [tokenizer.decode(question.label, **given) for question in questions]
    prefix = f"predict_{name}" if name else "predict"
    found = {f"{prefix}_{metric}": round(value, 4) for metric, value in scores(texts, labels, options).items()}
    if run.engine.rank == 0:
        path = folder / f"{ANSWERS_NAME}{f'_{name}' if name else ''}.jsonl"
        prompts = [tokenizer.decode(question.prompt, skip_special_tokens=False) for question in questions]
        write_answers(path, prompts, texts, labels)
        note(f"{counted(len(texts), 'answer')} in {path}: {', '.join(f'{k} {v:g}' for k, v in found.items())}.")
    num_batches = -(-len(questions) // options.per_device_eval_batch_size)
    return found | clock.rates(prefix, num_rows=len(questions), num_steps=num_batches)


def questions_of(examples: Sequence[Example], template: Template, stops: Sequence[int]) -> list[Question]:
    """The last answer of each conversation is asked for; of a prompt with a completion, the completion."""
    rows = template.encode(examples, Tally())
    found = []
    for example, row in zip(examples, rows, strict=True):
        if row is None or example.text is not None:
            continue
        ids = row["input_ids"]
        if example.completion is not None:
            prompt = ids[: next(i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX)]
        else:
            prompt = template.prompt(example)
        is_start = ids[: len(prompt)] == prompt
        label = ids[len(prompt) :] if is_start else template.form.encoder.plain(example.messages[-1].content)
        if prompt:
            found.append(Question(prompt, until_stop(label, stops)))
    return found


def answer_all(run: Run, questions: Sequence[Question], config: Any, options: Any) -> list[list[int]]:
    """The answers, in the order of the questions, on every rank."""
    engine, size = run.engine, options.per_device_eval_batch_size
    by_length = sorted(range(len(questions)), key=lambda index: -len(questions[index].prompt))
    answers: list[list[int]] = [[] for _ in questions]
    across = size * engine.world_size
    for start in range(0, len(by_length), across):
        together = by_length[start : start + across]
        # Every rank answers, the last ones perhaps the last question once more: gathering wants all of them.
        filled = together + together[-1:] * (across - len(together)) if engine.world_size > 1 else together
        mine = filled[engine.rank * size : (engine.rank + 1) * size]
        for index, ids in zip(together, _answers(run, questions, mine, config), strict=False):
            answers[index] = ids
        run.callbacks.fire("on_prediction_step")
    return answers


def _answers(run: Run, questions: Sequence[Question], mine: Sequence[int], config: Any) -> list[list[int]]:
    """Of all ranks, rank after rank."""
    model, engine = bare_model(run), run.engine
    prompts = [questions[index].prompt for index in mine]
    with engine.precision():
        made = generate(model, prompts, config, context_length(model.config))
    if engine.world_size == 1:
        return made
    longest = max(1, *map(len, made))
    padded = torch.tensor([ids + [IGNORE_INDEX] * (longest - len(ids)) for ids in made], device=engine.device)
    return [[token for token in ids if token != IGNORE_INDEX] for ids in engine.gather(padded).tolist()]


def bare_model(run: Run) -> Any:
    """The model as transformers or peft made it, without loss and engine around it."""
    state = run.parts["model"]
    return state.model if isinstance(state, ModelState) else run.engine.unwrap(run.model)


def write_answers(path: Path, prompts: Sequence[str], answers: Sequence[str], labels: Sequence[str]) -> None:
    """A line of JSON per question: ``prompt``, ``predict``, ``label``."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, predicted, label in zip(prompts, answers, labels, strict=True):
            line = {"prompt": prompt, "predict": predicted, "label": label}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
