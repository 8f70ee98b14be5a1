"""``do_predict``: generate responses to the evaluation sets, or compute their loss.

Responses are written to ``generated_predictions.jsonl`` (prompt, response, reference response), metrics to
``predict_results.json``; the names are LLaMA-Factory's. With several evaluation sets there is one file of responses per
set, in the order of the data.

Generation uses slots, which are refilled as soon as they are free. An interrupted run continues with the missing
responses. Each rank generates its share. Examples without a prompt are skipped and counted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from burnish.adapters.base import ModelState
from burnish.config.errors import UserError
from burnish.data.chat.rows import Template
from burnish.data.images.family import Family
from burnish.data.images.image_file import images_of
from burnish.data.images.in_rows import without_expansion
from burnish.data.images.sources import Sight
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.inference.batch import Finished, generate_all
from burnish.inference.images.reading import ImageReader
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, Sampling
from burnish.loop.loop import Loop
from burnish.loop.meter import Clock
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Example
from burnish.losses.base import OBJECTIVES
from burnish.models.generate import generate, generation_config, until_stop
from burnish.models.load import context_length
from burnish.report.console import note
from burnish.report.pace import counted
from burnish.report.results import save_metrics
from burnish.run.plan.checks import may_stream, record_needs
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.prepare import Prepared
from burnish.run.response_metrics import scores
from burnish.utils.activity import Activity, doing
from burnish.utils.work import work

ANSWERS_NAME = "generated_predictions"


@dataclass(frozen=True)
class Question:
    """A prompt, and its reference response."""

    prompt: list[int]
    label: list[int]
    images: Sequence[Any] = ()


def predict_all(run: Loop, prepared: Prepared, plan: Plan) -> dict[str, float]:
    """Predict every evaluation set and return the metrics, which rank 0 also writes.

    Args:
        run: the loop, with the trained model.
        prepared: output of ``prepare``, for template and tokenizer.
        plan: the plan.
    """
    options, folder = plan.options, Path(plan.options.output_dir or "")
    run.set_training_mode(False)
    metrics: dict[str, float] = {}
    if options.predict_with_generate:
        needs = None if prepared.family is None else record_needs(options)  # tells where images are
        sets: Mapping[str, Sequence[Example]] = load_datasets(
            options, options.seed, DataStats(), may_stream(options), needs=needs
        ).eval
        for name, examples in sets.items():
            metrics |= predict(run, prepared, options, examples, name, folder)
    else:
        for name, batches in run.eval_sets.items():
            metrics |= run.evaluate_set(batches, f"predict_{name}" if name else "predict")
        if not OBJECTIVES[options.stage].uses_lm_head:
            run.set_training_mode(False)
            write_scores(run, folder)
        if run.parallel.rank == 0:
            note("  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.endswith("_loss")))
    run.callbacks.fire("on_predict", metrics=metrics)
    if run.parallel.rank == 0:
        save_metrics("predict", metrics, folder)
    return metrics


def predict(
    run: Loop, prepared: Prepared, options: RunOptions, examples: Sequence[Example], name: str, folder: Path
) -> dict[str, float]:
    """Generate responses for one dataset, compute the metrics and write the file."""
    clock = Clock()
    tokenizer, stops = prepared.tokenizer, prepared.template.stop_token_ids()
    questions = questions_of(examples, prepared.template, stops)
    if len(questions) < len(examples):
        note(f"{len(examples) - len(questions)} of {len(examples)} records have no prompt; they were skipped.")
    config = generation_config(bare_model(run), tokenizer, stops, options)
    stem = _stem(name)
    partial = folder / f"{stem}.partial.jsonl" if run.parallel.world_size == 1 else None
    likelihoods: dict[int, float] = {}
    with doing(Activity.PREDICT):
        requested = [*questions] * options.samples
        answers = answer_all(run, requested, config, options, partial, likelihoods, prepared.family)
    decoding = {"skip_special_tokens": options.skip_special_tokens}
    texts = [tokenizer.decode(ids, **decoding) for ids in answers]
    labels = [tokenizer.decode(question.label, **decoding) for question in questions]
    prefix = f"predict_{name}" if name else "predict"
    metrics = {f"{prefix}_{metric}": round(value, 4) for metric, value in _scores(texts, labels, options).items()}
    if run.parallel.rank == 0:
        path = folder / f"{stem}.jsonl"
        prompts = [tokenizer.decode(_marked(one, prepared.family), skip_special_tokens=False) for one in questions]
        images = [[image.path for image in images_of({"images": one.images})] for one in questions]
        sampled = [[(texts[at], likelihoods.get(at)) for at in range(first, len(texts), len(labels))]
                 for first in range(len(labels))]  # fmt: skip
        several = sampled if options.samples > 1 else None
        write_answers(path, prompts, texts[: len(labels)], labels, several, images)
        note(f"{counted(len(texts), 'response')} in {path}: {', '.join(f'{k} {v:g}' for k, v in metrics.items())}.")
    num_batches = -(-len(questions) // options.per_device_eval_batch_size)
    return metrics | clock.rates(prefix, num_rows=len(questions), num_steps=num_batches)


def _marked(question: Question, family: Family | None) -> Sequence[int]:
    """The prompt with one mark for each image in place of all tokens that stand for it."""
    if family is None or not question.images:
        return question.prompt
    return without_expansion(question.prompt, images_of({"images": question.images}), family.mark_id)


def _stem(name: str) -> str:
    return f"{ANSWERS_NAME}_{name}" if name else ANSWERS_NAME


def _scores(texts: Sequence[str], labels: Sequence[str], options: RunOptions) -> dict[str, float]:
    """Return all metrics. With several responses per prompt: mean over the prompts' means, and its standard error.

    Responses to the same prompt are not independent observations, so they are averaged first.
    """
    if options.samples == 1 or not labels:
        return scores(texts, labels, options)
    number = len(labels)
    each = [scores(texts[at::number], [labels[at]] * options.samples, options) for at in range(number)]
    results: dict[str, float] = {}
    for name in each[0]:
        values = [one[name] for one in each]
        results[name] = statistics.fmean(values)
        if number > 1:
            results[f"{name}_standard_error"] = statistics.stdev(values) / math.sqrt(number)
    return results


def questions_of(examples: Sequence[Example], template: Template, stops: Sequence[int]) -> list[Question]:
    """Return the prompts for the last response of each conversation, or for the completion of each prompt."""
    rows = template.encode(examples, DataStats())
    questions = []
    for example, row in zip(examples, rows, strict=True):
        if row is None or example.text is not None:
            continue
        ids = list(row["input_ids"])
        if example.completion is not None:
            prompt = ids[: next(i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX)]
            images = row.get("images", ())
        else:
            requested = template.prompt_row(example)
            prompt, images = list(requested["input_ids"]), requested.get("images", ())
        is_start = ids[: len(prompt)] == prompt
        label = ids[len(prompt) :] if is_start else template.form.encoder.plain(example.messages[-1].text)
        if prompt:
            questions.append(Question(prompt, until_stop(label, stops), images))
    return questions


def answer_all(
    run: Loop, questions: Sequence[Question], config: Any, options: RunOptions, partial: Path | None = None,
    likelihoods: dict[int, float] | None = None, family: Family | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return the responses in the order of the questions, on every rank.

    They are generated by the inference engine (``inference/``). Beam search, static caches and other settings of a
    model's ``generation_config`` that it does not support use ``generate``.

    Args:
        run: the loop.
        questions: prompts.
        config: generation config.
        options: options of the run.
        partial: file to which finished responses are appended, so that the same command can continue.
        likelihoods: filled with the log-probability of each response in nats, if there are several per prompt.
        family: model family, if prompts may have images.
    """
    has_images = any(question.images for question in questions)
    if not is_plain(config):
        if has_images:
            what = "prompts with images support neither num_beams nor the decoding methods of the generation_config."
            raise UserError(what, remedy="Set num_beams: 1.", option="num_beams")
        return _through_generate(run, questions, config, options)
    parallel, context = run.parallel, context_length(bare_model(run).config) or LONGEST
    top = 0 if options.samples > 1 else None
    requests = [
        replace(_ask(at, question, config, options.seed), top_logprobs=top) for at, question in enumerate(questions)
    ]
    answers: dict[int, list[int]] = {at: [] for at in range(parallel.rank, len(requests), parallel.world_size)}
    likely: dict[int, float] = {}
    with ExitStack() as stack:
        kept = None
        if partial:
            images = [list(question.images) for question in questions if question.images]
            kept = stack.enter_context(Partial(partial, _key_of(run, requests, images)))
            likely |= kept.likelihoods
        done = kept.answers if kept else {}
        open_ = [
            at for at in answers
            if requests[at].max_new_tokens > 0 and len(requests[at].ids) < context and at not in done
        ]  # fmt: skip
        answers |= {at: ids for at, ids in done.items() if at in answers}
        stack.enter_context(parallel.generating(run.model))  # the number of questions differs between ranks
        advance = stack.enter_context(work("Answering", len(open_), "prompts"))

        def finish(at: int, finished: Finished) -> None:
            advance(1)
            answers[at] = finished.ids
            if finished.logprobs:
                likely[at] = math.fsum(one.logprob for one in finished.logprobs)
            if kept:
                kept.add(at, finished.ids, likely.get(at))

        _generate(run, {at: requests[at] for at in open_}, questions, options, finish, family if has_images else None)
    if likelihoods is not None and options.samples > 1:
        for part in parallel.gather_objects(likely):
            likelihoods |= part
    return _of_all_ranks(run, answers, len(questions))


def _generate(
    run: Loop, requests: Mapping[int, GenerationRequest], questions: Sequence[Question], options: RunOptions,
    finish: Callable[[int, Finished], None], family: Family | None,
) -> None:  # fmt: skip
    """Answer ``requests`` (question -> request) with the inference engine; each response is passed to ``finish``.

    Args:
        run: the loop.
        requests: question -> request.
        questions: prompts, for their images.
        options: options of the run.
        finish: called with the question's index and its response.
        family: model family, if prompts have images.
    """
    model, parallel, places = bare_model(run), run.parallel, [*requests]
    slots = options.infer_seats or options.per_device_eval_batch_size
    limits = SlotLimits(slots, context_length(model.config) or LONGEST, exact=options.infer_exact)
    scheduler = Scheduler(model, limits, precision=parallel.precision)

    def done(number: int, finished: Finished) -> None:
        finish(places[number], finished)
        if (number + 1) % slots == 0:
            run.callbacks.fire("on_prediction_step")

    if family is None:
        generate_all(scheduler, [*requests.values()], done)
        return
    reader = ImageReader(model, family, Sight())

    def with_images(number: int, request: GenerationRequest) -> GenerationRequest:
        row = {"input_ids": request.ids, "images": list(questions[places[number]].images)}
        return replace(request, **reader.of(row))

    generate_all(scheduler, [*requests.values()], done, with_images)


LONGEST = 1 << 20
_PLAIN = {
    "eos_token_id", "pad_token_id", "bos_token_id", "do_sample", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "max_new_tokens", "max_length", "use_cache", "transformers_version", "_from_model_config",
    "num_beams", "min_new_tokens",
}  # fmt: skip
_NEUTRAL = {"typical_p": 1.0, "encoder_repetition_penalty": 1.0, "length_penalty": 1.0}


def is_plain(config: Any) -> bool:
    """Return whether a ``GenerationConfig`` uses only features that the inference engine supports."""
    requested = {name for name, value in config.to_diff_dict().items() if value and value != _NEUTRAL.get(name)}
    return (config.num_beams or 1) == 1 and requested <= _PLAIN


def _ask(number: int, question: Question, config: Any, seed: int) -> GenerationRequest:
    sampling = Sampling(
        temperature=(config.temperature or 1.0) if config.do_sample else 0.0,
        top_k=config.top_k or 0, top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0, repetition_penalty=config.repetition_penalty or 1.0, seed=seed,
    )  # fmt: skip
    available = config.max_new_tokens or config.max_length - len(question.prompt)
    return GenerationRequest(
        question.prompt, available, sampling=sampling, stop_ids=frozenset(config.eos_token_id), index=number,
        min_new_tokens=config.min_new_tokens or 0,
    )  # fmt: skip


def _key_of(run: Loop, requests: Iterable[GenerationRequest], images: Sequence[Any]) -> str:
    """Return a hash of everything that responses depend on: prompts, sampling, images and the step of the model."""
    hashed = sha256(f"{run.state.global_step}{images or ''}".encode())
    for request in requests:
        hashed.update(
            repr(
                (request.ids, request.max_new_tokens, request.sampling, sorted(request.stop_ids), request.top_logprobs)
            ).encode()
        )
    return hashed.hexdigest()


class Partial:
    """Finished responses in a file, one line of JSON each. The first line has the key.

    Args:
        path: the file.
        key: hash of what the responses depend on. A file with another key is overwritten.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.answers: dict[int, list[int]] = {}
        self.likelihoods: dict[int, float] = {}

    def __enter__(self) -> Partial:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        if lines and lines[0] == json.dumps({"of": self.key}):
            with suppress(ValueError):  # the last line may be incomplete
                for line in lines[1:]:
                    record = json.loads(line)
                    self.answers[record["index"]] = record["ids"]
                    if "logprob" in record:
                        self.likelihoods[record["index"]] = record["logprob"]
        self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace")
        self._write({"of": self.key})
        for index, ids in self.answers.items():
            self.add(index, ids, self.likelihoods.get(index))
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if error[0] is None:
            self.path.unlink()

    def add(self, index: int, ids: Sequence[int], likelihood: float | None = None) -> None:
        self._write({"index": index, "ids": list(ids), **({} if likelihood is None else {"logprob": likelihood})})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _of_all_ranks(run: Loop, answers: Mapping[int, list[int]], number: int) -> list[list[int]]:
    """Gather the responses of all ranks in the order of the questions. Question i belongs to rank i % world_size."""
    parallel = run.parallel
    if parallel.world_size == 1:
        return [answers[at] for at in range(number)]
    rows = [answers.get(at, []) for at in range(parallel.rank, parallel.rank + number, parallel.world_size)]
    rows = rows[: -(-number // parallel.world_size)]
    gathered = _gathered(parallel, rows)
    return [gathered[at % parallel.world_size * len(rows) + at // parallel.world_size] for at in range(number)]


def _through_generate(run: Loop, questions: Sequence[Question], config: Any, options: RunOptions) -> list[list[int]]:
    """Generate in batches of prompts of similar length with ``generate``."""
    parallel, size = run.parallel, options.per_device_eval_batch_size
    by_length = sorted(range(len(questions)), key=lambda index: -len(questions[index].prompt))
    answers: list[list[int]] = [[] for _ in questions]
    across = size * parallel.world_size
    for start in range(0, len(by_length), across):
        together = by_length[start : start + across]
        # Gathering needs all ranks, so those without a question repeat the last one.
        filled = together + together[-1:] * (across - len(together)) if parallel.world_size > 1 else together
        own_indices = filled[parallel.rank * size : (parallel.rank + 1) * size]
        for index, ids in zip(together, _answers(run, questions, own_indices, config), strict=False):
            answers[index] = ids
        run.callbacks.fire("on_prediction_step")
    return answers


def _answers(run: Loop, questions: Sequence[Question], indices: Sequence[int], config: Any) -> list[list[int]]:
    """Return the responses of all ranks, in rank order."""
    model, parallel = bare_model(run), run.parallel
    prompts = [questions[index].prompt for index in indices]
    with parallel.precision(), parallel.generating(run.model):
        generated = generate(model, prompts, config, context_length(model.config))
    return generated if parallel.world_size == 1 else _gathered(parallel, generated)


def _gathered(parallel: Parallel, rows: Sequence[list[int]]) -> list[list[int]]:
    """Gather rows of all ranks, in rank order. Every rank must have the same number of rows."""
    longest = max(1, *map(len, rows))
    padded = torch.tensor([ids + [IGNORE_INDEX] * (longest - len(ids)) for ids in rows], device=parallel.device)
    return [[token for token in ids if token != IGNORE_INDEX] for ids in parallel.gather(padded).tolist()]


def bare_model(run: Loop) -> Any:
    """Return the transformers or PEFT model without the loss and the wrapper of the backend."""
    state = run.parts["model"].held
    return state.model if isinstance(state, ModelState) else run.parallel.unwrap(run.model)


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
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for at, (prompt, predicted, label) in enumerate(zip(prompts, answers, labels, strict=True)):
            line: dict[str, Any] = {"prompt": prompt, "predict": predicted, "label": label}
            if images and images[at]:
                line["images"] = list(images[at])
            if samples is not None:
                line["samples"] = [{"text": text, "logprob": logprob} for text, logprob in samples[at]]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_scores(run: Loop, folder: Path) -> None:
    """Write the reward scores of each pair, one file per evaluation set, in the order of the data.

    LLaMA-Factory writes the same file with rounded scores. Each process scores its share; rank 0 writes.
    """
    for name, batches in run.eval_sets.items():
        gathered = run.parallel.gather_objects(list(_scores_of(run, batches)))
        if run.parallel.rank == 0:
            path = folder / f"{_stem(name)}.jsonl"
            lines = dict(line for of_rank in gathered for line in of_rank)
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for number in sorted(lines):
                    file.write(json.dumps({"record": number + 1, **lines[number]}) + "\n")
            note(f"Scores of {counted(len(lines), 'pair')} in {path}.")


@torch.no_grad()
def _scores_of(run: Loop, batches: Any) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the index of each pair and its scores."""
    ready = run.objective.iter_eval(run.model, batches, run.parallel)
    for numbers, batch in zip(batches.parts, ready, strict=True):
        with run.parallel.precision():
            scores = run.model(batch).tolist()
        for place, number in enumerate(numbers):
            yield int(number), {"chosen": scores[2 * place], "rejected": scores[2 * place + 1]}
