"""Metrics that compare generated responses with reference responses, for ``do_predict``.

A metric is a function ``(predictions, labels) -> {name: value}`` of two lists of texts of equal length. Packages can
register metrics through the entry-point group ``burnish.metric``:

    @METRICS.register("length")
    def length(predictions, labels): ...

BLEU-4 and ROUGE are computed as in LLaMA-Factory (src/llamafactory/train/sft/metric.py), with the same libraries, so
that scores are comparable: means over the responses, in percent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from burnish.config.checks import check, notes
from burnish.config.errors import MissingExtraError, Problem, install_command
from burnish.config.options import option
from burnish.config.registry import Member, Registry

AnswerMetric: TypeAlias = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
METRICS: Registry[AnswerMetric] = Registry("metric")


@dataclass
class MetricOptions:
    """Metrics of generated responses."""

    predict_metrics: list[str] = option(
        ["exact_match", "bleu-4", "rouge"], "Metrics of predict_with_generate.", choices=METRICS.names
    )


class MetricChoices(Protocol):
    """Options read here."""

    do_predict: bool
    predict_metrics: list[str]
    predict_with_generate: bool


@check
def check_metrics(options: MetricChoices) -> list[Problem]:
    """Return a problem for each library that a metric needs and that is not installed. The default metrics are computed
    as far as their libraries are installed."""
    if not computes_metrics(options) or options.predict_metrics == MetricOptions().predict_metrics:
        return []
    needed = {
        library: name
        for name in options.predict_metrics if name in METRICS
        for library in _missing_libraries(METRICS.get(name))
    }  # fmt: skip
    problems = [
        problem
        for library, name in needed.items()
        for problem in MissingExtraError(library, f'The metric "{name}"', "metrics", option="predict_metrics").problems
    ]
    if problems:
        first, *rest = problems
        other = f"{first.remedy}, or set predict_metrics: exact_match"
        return [replace(first, remedy=other), *rest]
    return problems


@notes
def metric_notes(options: MetricChoices) -> Iterator[str]:
    """Yield a note on the default metrics whose libraries are not installed."""
    if not computes_metrics(options):
        return
    lacking = {
        name: missing
        for name in options.predict_metrics if name in METRICS and (missing := _missing_libraries(METRICS.get(name)))
    }  # fmt: skip
    if not lacking:
        return
    needed = ", ".join(dict.fromkeys(library for libraries in lacking.values() for library in libraries))
    metrics = ", ".join(lacking)
    yield (
        f"Metrics that require libraries that are not installed ({needed}): {metrics}. Install them with: "
        f"{install_command('metrics')}"
    )


def computes_metrics(options: MetricChoices) -> bool:
    """Whether a run compares generated responses with references."""
    return options.predict_with_generate and options.do_predict


def _missing_libraries(member: Member[AnswerMetric]) -> list[str]:
    return [library for library in member.metadata.get("libraries", ()) if not find_spec(library)]


def compute_metrics(predictions: Sequence[str], labels: Sequence[str], options: MetricChoices) -> dict[str, float]:
    """Compute the metrics selected by the options whose libraries are installed."""
    results: dict[str, float] = {}
    for name in options.predict_metrics:
        if not _missing_libraries(METRICS.get(name)):
            results |= METRICS[name](predictions, labels)
    return results


@METRICS.register("exact_match")
def exact_match(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Fraction of responses that equal the reference, ignoring leading and trailing whitespace."""
    same = [p.strip() == label.strip() for p, label in zip(predictions, labels, strict=True)]
    return {"exact_match": _mean([float(is_same) for is_same in same])}


@METRICS.register("bleu-4", libraries=("nltk",))
def bleu_4(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """BLEU-4 on character n-grams (Papineni et al. 2002), in percent."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smooth = SmoothingFunction().method3
    values = [
        sentence_bleu([list(label)], list(prediction), smoothing_function=smooth) if label and prediction else 0.0
        for prediction, label in zip(predictions, labels, strict=True)
    ]
    return {"bleu-4": 100 * _mean(values)}


@METRICS.register("rouge", libraries=("jieba", "rouge_chinese"))
def rouge(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L on words (Lin 2004), F1 in percent."""
    import jieba
    from rouge_chinese import Rouge

    jieba.setLogLevel(logging.WARNING)
    scorer, names = Rouge(), ("rouge-1", "rouge-2", "rouge-l")
    rows: list[dict[str, dict[str, float]]] = []
    for prediction, label in zip(predictions, labels, strict=True):
        prediction_words, reference = (" ".join(jieba.cut(text)) for text in (prediction, label))
        is_empty = not prediction_words.split() or not reference.split()
        rows.append(
            {name: {"f": 0.0} for name in names} if is_empty else scorer.get_scores(prediction_words, reference)[0]
        )
    return {name: 100 * _mean([row[name]["f"] for row in rows]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
