"""``do_predict``: generate responses to the evaluation sets, or compute their loss.

Responses are written to ``generated_predictions.jsonl`` (prompt, response, reference response), metrics to
``predict_results.json``; the names are LLaMA-Factory's. With several evaluation sets there is one file of responses per
set, in the order of the data. Examples without a prompt are skipped and counted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from burnish.data.images.image_file import images_of
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.loop.loop import Loop
from burnish.loop.meter import Clock
from burnish.loop.types import Example
from burnish.losses.base import OBJECTIVES
from burnish.models.generate import generation_config
from burnish.report.console import note
from burnish.report.pace import format_count
from burnish.report.results import save_metrics
from burnish.run.plan.checks import may_stream
from burnish.run.plan.files import record_needs
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.predictions.answers import answer_all, bare_model, fits_context
from burnish.run.predictions.files import stem_of, write_answers, write_scores
from burnish.run.predictions.questions import questions_of, with_image_marks
from burnish.run.prepare import Prepared
from burnish.run.response_metrics import compute_metrics
from burnish.utils.activity import Activity, annotate_errors


def predict_all(run: Loop, prepared: Prepared, plan: Plan) -> dict[str, float]:
    """Predict every evaluation set and return the metrics, which rank 0 also writes.

    Args:
        run: the loop, with the trained model.
        prepared: output of ``prepare``, for template and tokenizer.
    """
    options, folder = plan.options, Path(plan.options.output_dir or "")
    run.set_training_mode(False)
    metrics: dict[str, float] = {}
    if options.predict_with_generate:
        needs = record_needs(options, plan.records_of)
        with_all = replace(options, on_empty_target="keep")  # an empty response is no reference, but has a prompt
        sets: Mapping[str, Sequence[Example]] = load_datasets(
            with_all, options.seed, DataStats(), may_stream(options), needs=needs
        ).eval
        for name, examples in sets.items():
            metrics |= predict(run, prepared, options, _prompts_of(examples, needs.kind), name, folder)
    else:
        for name, batches in run.eval_sets.items():
            metrics |= run.evaluate_set(batches, f"predict_{name}" if name else "predict")
        if not OBJECTIVES[options.stage].uses_lm_head:
            write_scores(run, folder)
        if run.parallel.rank == 0:
            note("  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.endswith("_loss")))
    run.callbacks.fire("on_predict", metrics=metrics)
    if run.parallel.rank == 0:
        save_metrics("predict", metrics, folder)
    return metrics


def _prompts_of(examples: Sequence[Example], kind: str) -> list[Example]:
    """Return the examples to respond to, given the kind of their records.

    Plain text is the prompt where records are prompts. A pair that was split into two labelled responses is one prompt.
    """
    if kind == "prompts":
        return [replace(e, prompt=e.text, text=None) if e.text is not None else e for e in examples]
    if kind != "unpaired":
        return [*examples]
    found: dict[tuple[str, int], Example] = {}
    for example in examples:
        key = (example.source, example.number)
        if key not in found or example.tag:
            found[key] = example
    return [*found.values()]


def predict(
    run: Loop, prepared: Prepared, options: RunOptions, examples: Sequence[Example], name: str, folder: Path
) -> dict[str, float]:
    """Generate responses for one dataset, compute the metrics and write the file."""
    clock = Clock()
    tokenizer, stops = prepared.tokenizer, prepared.template.stop_token_ids()
    questions = questions_of(examples, prepared.template, stops)
    if len(questions) < len(examples):
        left_out = f"{len(examples) - len(questions)} of {len(examples)}"
        note(f"{left_out} records have no prompt, or one that is longer than cutoff_len; they were skipped.")
    config = generation_config(bare_model(run), tokenizer, stops, options)
    stem = stem_of(name)
    partial = folder / f"{stem}.partial.jsonl" if run.parallel.world_size == 1 else None
    likelihoods: dict[int, float] = {}
    with annotate_errors(Activity.PREDICT):
        requested = [*questions] * options.samples
        model = "" if partial is None else f"step {run.state.global_step} of {json.dumps(prepared.fingerprints())}"
        answers = answer_all(run, requested, config, options, partial, likelihoods, prepared.family, model)
    decoding = {"skip_special_tokens": options.skip_special_tokens}
    texts = [tokenizer.decode(ids, **decoding) for ids in answers]
    labels = [tokenizer.decode(question.label or [], **decoding) for question in questions]
    prefix = f"predict_{name}" if name else "predict"
    full = [at for at, question in enumerate(questions) if not fits_context(run, question, config)]
    if full:
        note(
            f"{len(full)} of {format_count(len(questions), 'prompt')} leave no room for a response within the model's "
            "context or max_length; their predictions are empty and not part of the metrics."
        )
    compared = [at for at, question in enumerate(questions) if question.label is not None and at not in full]
    predicted = [texts[first + at] for first in range(0, len(texts), len(labels) or 1) for at in compared]
    found = _scores(predicted, [labels[at] for at in compared], options) if compared or not questions else {}
    metrics = {f"{prefix}_{metric}": round(value, 4) for metric, value in found.items()}
    if run.parallel.rank == 0:
        path = folder / f"{stem}.jsonl"
        prompts = [
            tokenizer.decode(with_image_marks(one, prepared.family), skip_special_tokens=False) for one in questions
        ]
        images = [[image.path for image in images_of({"images": one.images})] for one in questions]
        sampled = [[(texts[at], likelihoods.get(at)) for at in range(first, len(texts), len(labels))]
                 for first in range(len(labels))]  # fmt: skip
        several = sampled if options.samples > 1 else None
        write_answers(path, prompts, texts[: len(labels)], labels, several, images)
        if partial is not None:
            partial.unlink(missing_ok=True)
        written = f"{format_count(len(texts), 'response')} in {path}"
        note(": ".join(filter(None, (written, ", ".join(f"{k} {v:g}" for k, v in metrics.items())))) + ".")
        if missing := sum(question.label is None for question in questions):
            verb = "has" if missing == 1 else "have"
            note(f"{missing} of {format_count(len(questions), 'record')} {verb} no reference response.")
    num_batches = -(-len(questions) // options.per_device_eval_batch_size)
    return metrics | clock.rates(prefix, num_rows=len(questions), num_steps=num_batches)


def _scores(texts: Sequence[str], labels: Sequence[str], options: RunOptions) -> dict[str, float]:
    """Return all metrics. With several responses per prompt: mean over the prompts' means, and its standard error.

    Responses to the same prompt are not independent observations, so they are averaged first.
    """
    if options.samples == 1 or not labels:
        return compute_metrics(texts, labels, options)
    number = len(labels)
    each = [compute_metrics(texts[at::number], [labels[at]] * options.samples, options) for at in range(number)]
    results: dict[str, float] = {}
    for name in each[0]:
        values = [one[name] for one in each]
        results[name] = statistics.fmean(values)
        if number > 1:
            results[f"{name}_standard_error"] = statistics.stdev(values) / math.sqrt(number)
    return results
