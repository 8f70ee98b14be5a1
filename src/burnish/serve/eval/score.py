"""``burnish score PATH dataset=FILE``: the scores that a reward model gives to the responses of a dataset.

Each record is a line of ``scores_<dataset>.jsonl``, in order: its fields and ``score``, or ``score_chosen`` and
``score_rejected`` for a pair. Conversations have the tokens of training, without truncation. Plain texts are tokenized
as they are. A file is written when all of its scores are known; an interrupted command continues from a hidden file.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import burnish
from burnish.config.errors import Problem, UserError
from burnish.config.options import build, option, raise_if
from burnish.data.images.sources import MediaReader
from burnish.data.sets.formats import BadRecords, bad_records
from burnish.data.sets.records import ALL_COLUMNS, BadRecord, Layout, Record, RecordNeeds
from burnish.data.sets.sources import DataOptions, load_datasets
from burnish.data.stats import DataStats, drop_reason
from burnish.inference.loaded_model import LoadedModel, UnloadedModel
from burnish.inference.loading import engine_of, load_weights, prepare_for_inference, reward_head
from burnish.inference.options import is_remote
from burnish.inference.scoring import BATCH_SIZE, ScoreEngine
from burnish.loop.types import Example
from burnish.models.fingerprint import adapters_fingerprint, base_fingerprint, config_fingerprint
from burnish.models.load import context_length
from burnish.models.reward_files import not_a_reward_model
from burnish.models.source import adapter_folders
from burnish.report.console import note
from burnish.report.pace import format_count
from burnish.report.results import write_text_atomically
from burnish.run.partial_results import PartialResults
from burnish.run.plan.config_files import COMMAND_LINE
from burnish.run.plan.files import ANY_RECORDS
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import locate_problems
from burnish.run.recovery.fingerprints import LIBRARIES, values_of
from burnish.serve.command_line import Serving, paths_of, serving_of
from burnish.serve.eval.dataset import FREE_SOME_SPACE, default_results_folder, separate_output_dir
from burnish.utils.files import as_file_name, problems_of_folder, report_full_disk
from burnish.utils.work import progress

_FOLDER = "scores"
_SIDES = ("chosen", "rejected")
_NO_RESPONSE = "the record does not end with a response"
_LAYOUT = Layout("", {})
_NEEDS = RecordNeeds(ANY_RECORDS, (ALL_COLUMNS,), reader=MediaReader(model_type="a reward model"))
_NEUTRAL: Mapping[str, Any] = {
    "val_size": 0.0, "mix_strategy": "concat", "interleave_probs": None, "streaming": False, "tokenized_path": None,
}  # fmt: skip
"""Options of datasets that have no effect on scores -> the value that is used."""
_UNREAD = (*_NEUTRAL, "eval_on_each_dataset", "on_empty_target", "cutoff_len")


@dataclass
class ScoreOptions:
    """Scores of a reward model."""

    save_dir: str | None = option(
        None, "Folder for the scores. Default: output_dir, or scores in the model's folder.", names_place=True
    )
    score_name: str = option(
        "score", "Name of the field with the score of a record. Those of a pair are NAME_chosen and NAME_rejected."
    )
    batch_size: int = option(BATCH_SIZE, "Number of responses per forward pass.", ge=1)


def score_sets(argv: Sequence[str]) -> int:
    """Run ``burnish score``. Returns the exit status.

    Raises:
        UserError: for errors in the user's input. Nothing is written before all records are checked.
    """
    if others := paths_of(argv)[0][1:]:
        what = f'burnish score takes one model. Also received: "{others[0]}".'
        raise UserError(what, remedy=f"Pass the records as an option: dataset={others[0]}")
    serving = serving_of(argv, [field.name for field in fields(ScoreOptions)])
    options, wrong = build(ScoreOptions, serving.rest)
    raise_if(wrong)
    folder = _folder(argv, serving, options)
    raise_if(_problems(serving))
    for name in _UNREAD:
        if serving.provenance.get(name, "").startswith(COMMAND_LINE):
            note(f'"{name}" has no effect here: burnish score scores every record in full.')
    with locate_problems(serving.provenance):
        stats = DataStats()
        sets = _load_sets(serving, stats)
        files = {name: folder / f"{_FOLDER}_{as_file_name(name)}.jsonl" for name in sets}
        raise_if(_collisions(sets, files, options, serving))
        unloaded = prepare_for_inference(serving.options, serving.name, may_score=True, explicit=serving.provenance)
        scored = {files[name]: _encode(examples, unloaded, serving.options, stats) for name, examples in sets.items()}
        for sentence in stats.sentences():
            note(sentence)
        loaded = load_weights(unloaded, note)
        for path, (examples, rows) in scored.items():
            partial = path.with_name(f".{path.stem}.partial.jsonl")  # not the name of another dataset's file
            with report_full_disk(folder, FREE_SOME_SPACE):
                folder.mkdir(parents=True, exist_ok=True)
                scores = _scores(loaded, rows, options.batch_size, partial)
                note(_write(path, examples, scores, options.score_name))
                partial.unlink(missing_ok=True)
    return 0


# --- options and records ----------------------------------------------------------------------------------------------


def _problems(serving: Serving) -> list[Problem]:
    options = serving.options
    if not (options.dataset or options.eval_dataset):
        what = "nothing to score: dataset is not set."
        return [Problem(what, remedy="Set it to a file or a name, for example dataset=answers.jsonl", option="dataset")]
    if is_remote(options):
        what = "scores are computed in this process: other servers do not return them."
        return [Problem(what, remedy="Remove infer_backend and infer_url.", option="infer_backend")]
    if reward_head(options, adapter_folders(options)) is None:
        return [not_a_reward_model(serving.name, "Train one with stage: rm.", "model_name_or_path")]
    return []


def _folder(argv: Sequence[str], serving: Serving, options: ScoreOptions) -> Path:
    """Return the folder for the scores. Raises UserError if none is set, or it is not writable."""
    folder = options.save_dir or default_results_folder(argv, [serving], _FOLDER)
    if folder is None and not serving.options.output_dir:
        what = "save_dir is not set, so there is no folder for the scores."
        raise UserError(what, remedy="Set it, for example save_dir=saves/scores")
    found = Path(folder) if folder else separate_output_dir(serving.options, _FOLDER)
    raise_if(problems_of_folder(found, "save_dir" if folder else "output_dir"))
    return found


def _load_sets(serving: Serving, stats: DataStats) -> Mapping[str, Sequence[Example]]:
    """Return dataset name -> examples with all fields of their records. The command line precedes the file."""
    places = serving.provenance
    given = [name for name in ("dataset", "eval_dataset") if getattr(serving.options, name)]
    read = min(given, key=lambda name: not places.get(name, "").startswith(COMMAND_LINE))
    other: dict[str, Any] = {name: None for name in given if name != read}
    sets = load_datasets(replace(serving.options, **_NEUTRAL, **other), serving.options.seed, stats, needs=_NEEDS)
    for text in sets.notes:
        note(text)
    return sets.members


def _collisions(
    sets: Mapping[str, Sequence[Example]], files: Mapping[str, Path], options: ScoreOptions, serving: Serving
) -> list[Problem]:
    """Return a problem for each file, and for each field of a record, that would be overwritten."""
    problems = []
    for path in files.values():
        if path.exists() and not serving.options.overwrite_output_dir:
            remedy = "Set a different save_dir, or set overwrite_output_dir: true to overwrite it."
            problems.append(Problem(f"{path} already exists.", remedy=remedy, option="overwrite_output_dir"))
    for examples in sets.values():
        for example in examples:
            if taken := [name for name in _names(example, options.score_name) if name in example.extra]:
                what, remedy = f'it already has the field "{taken[0]}".', "Set score_name to another name."
                problems.append(Problem(what, example.place, remedy=remedy, option="score_name"))
                break
    return problems


def _names(example: Example, name: str) -> list[str]:
    """Return the names of the scores of an example."""
    return [name] if example.chosen is None else [f"{name}_{side}" for side in _SIDES]


# --- tokens and scores ------------------------------------------------------------------------------------------------


def _encode(
    examples: Sequence[Example], unloaded: UnloadedModel, options: DataOptions, stats: DataStats
) -> tuple[list[Example], list[Sequence[int]]]:
    """Return the examples that can be scored, and the token ids of their responses: two of a pair, otherwise one.

    Args:
        examples: the records of a dataset.
        unloaded: the reward model without its weights.
        options: data options.
        stats: statistics that dropped records are added to.

    Raises:
        UserError: if records cannot be scored and are not dropped, or if none is left.
    """
    scored: list[Example] = []
    rows: list[Sequence[int]] = []
    bad: BadRecords = []
    size = options.preprocessing_batch_size
    with progress("Tokenizing", len(examples), "records") as advance:
        for start in range(0, len(examples), size):
            part = examples[start : start + size]
            for example, found in zip(part, _token_ids(part, unloaded, stats), strict=True):
                if isinstance(found, BadRecord):
                    bad.append((Record(example.extra, example.source, example.number, _LAYOUT), found))
                    stats.add(drop_reason(found.reason), example)
                else:
                    scored.append(example)
                    rows += found
            advance(len(part))
    if bad and (options.on_bad_record != "drop" or not scored):
        raise UserError(bad_records(bad, are_all=not scored))
    return scored, rows


def _token_ids(
    examples: Sequence[Example], unloaded: UnloadedModel, stats: DataStats
) -> Iterator[list[Sequence[int]] | BadRecord]:
    """Yield the token ids of the responses of each example, or why it cannot be scored."""
    sequences = [
        [example] if example.chosen is None else [example.with_answer(side) for side in _SIDES] for example in examples
    ]
    encoding = DataStats()
    encoded = iter(
        unloaded.template.encode_answers([e for some in sequences for e in some if _is_encoded(e)], encoding)
    )
    dropped: dict[tuple[str, int], str] = {}
    for reason, places in encoding.records.items():
        if reason.kind == "dropped":
            dropped |= dict.fromkeys(places, reason.removeprefix("dropped: "))
        else:
            stats.records[reason].extend(dict.fromkeys(places))  # once for both responses of a pair
    for example, some in zip(examples, sequences, strict=True):
        rows = [next(encoded) if _is_encoded(one) else _text_ids(one, unloaded.tokenizer) for one in some]
        yield _checked(rows, dropped.get((example.source, example.number), _NO_RESPONSE), unloaded)


def _is_encoded(example: Example) -> bool:
    """Return whether the template encodes an example: it ends with a response and is no plain text."""
    return example.completion is not None or example.response is not None


def _text_ids(example: Example, tokenizer: Any) -> Any:
    """Return the ids of a plain text, which may contain control tokens; None for an example of another kind."""
    return None if example.text is None else tokenizer(example.text, add_special_tokens=False)["input_ids"]


def _checked(
    rows: Sequence[Sequence[int] | None], reason: str, unloaded: UnloadedModel
) -> list[Sequence[int]] | BadRecord:
    """Return the rows of a record, or the error if one is missing for ``reason``, empty, or exceeds the context."""
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        why = reason.rstrip(".")
        return BadRecord(f"{why}.", reason=why)
    if not all(found):
        why = "the text is empty"
        return BadRecord(f"{why}.", reason=why)
    if (longest := max(map(len, found))) > unloaded.context:
        why = "the record is longer than the context"
        more = (
            f"Set infer_context to {longest} or more."
            if longest <= (context_length(unloaded.config) or longest)
            else ""
        )
        return BadRecord(f"{why}: {longest:,} of at most {unloaded.context:,} tokens.", more, reason=why, kind=why)
    return found


def _scores(loaded: LoadedModel, rows: Sequence[Sequence[int]], batch_size: int, partial: Path) -> list[float]:
    """Return the score of each row.

    Args:
        loaded: the reward model.
        rows: token ids of the responses.
        batch_size: number of rows per forward pass. Rows of similar length are batched.
        partial: file to which the scores of each batch are appended, so that the same command can continue. The caller
            removes it.

    Raises:
        UserError: if a score is not finite.
    """
    engine = engine_of(loaded)
    assert isinstance(engine, ScoreEngine)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with PartialResults(partial, _key(loaded, rows, batch_size)) as finished:
        missing = [at for at in range(len(batches)) if at not in finished.results]
        with progress("Scoring", sum(len(batches[at]) for at in missing), "responses") as advance:
            for at in missing:
                finished.add(at, {"scores": engine.scores([rows[index] for index in batches[at]], batch_size)})
                advance(len(batches[at]))
    found = {
        index: score
        for at, batch in enumerate(batches)
        for index, score in zip(batch, finished.results[at]["scores"], strict=True)
    }
    scores = [found[index] for index in range(len(rows))]
    if wrong := [score for score in scores if not math.isfinite(score)]:
        what = f"{len(wrong)} of {format_count(len(scores), 'score')} are not finite, such as {wrong[0]}."
        raise UserError(what, remedy="Set infer_dtype: float32.", option="infer_dtype")
    return scores


def _key(loaded: LoadedModel, rows: Sequence[Sequence[int]], batch_size: int) -> str:
    """Return a hash of everything that scores depend on: model, dtype, device, versions and tokens."""
    options, weight = cast(RunOptions, loaded.options), next(cast(Any, loaded.model).parameters())
    facts = {
        **values_of(options), "base_model": base_fingerprint(options, options.seed),
        "config": config_fingerprint(options), "batch_size": batch_size,
        "adapters": adapters_fingerprint(options.adapter_name_or_path, options, "adapter_name_or_path"),
        "format": [str(weight.dtype), weight.device.type],
        "versions": [burnish.__version__, *map(version, LIBRARIES)],
    }  # fmt: skip
    hashed = sha256(json.dumps(facts, sort_keys=True).encode())
    for row in rows:
        hashed.update(repr([*row]).encode())
    return hashed.hexdigest()


# --- output -----------------------------------------------------------------------------------------------------------


def _write(path: Path, examples: Sequence[Example], scores: Sequence[float], name: str) -> str:
    """Write a line of JSON per example. Returns a message with statistics."""
    remaining, lines = iter(scores), []
    margins = []
    for example in examples:
        own = {each: next(remaining) for each in _names(example, name)}
        lines.append(json.dumps({**example.extra, **own}, ensure_ascii=False, default=str) + "\n")
        if example.chosen is not None:
            chosen, rejected = own.values()
            margins.append(chosen - rejected)
    write_text_atomically(path, "".join(lines))
    found = f"mean {statistics.fmean(scores):.4f}"
    if margins:
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        found += f", accuracy of pairs {accuracy:.4f}, mean margin {statistics.fmean(margins):.4f}"
    return f"The scores of {format_count(len(examples), 'record')} were saved to {path}: {found}."
