"""Prepare a run: tokenizer, template, and encoded rows. Reads no weights, writes only the cache of encoded rows.

All errors in the user's input are reported here or earlier. ``explain`` ends after this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from math import ceil
from random import Random
from typing import Any

from burnish.adapters.base import ADAPTERS
from burnish.config.errors import Problem, UserError, few
from burnish.config.options import raise_if
from burnish.data.batches.batching import lengths_of, splits_rows
from burnish.data.batches.budget import check_budget
from burnish.data.chat.choose import configure_tokenizer, load_template, load_template_of_model
from burnish.data.chat.rendering import start_rendering
from burnish.data.chat.rows import Template
from burnish.data.images.family import Family
from burnish.data.length import check_record_lengths
from burnish.data.origins import Origins
from burnish.data.rows.encode import encode_rows
from burnish.data.rows.row_set import ListedRows, PackedRows, RowSet, pack_rows
from burnish.data.rows.streamed import StreamedRows
from burnish.data.sets.examples import ListedExamples
from burnish.data.sets.preferences import with_references
from burnish.data.sets.sources import DataSets, load_datasets
from burnish.data.stats import DataStats
from burnish.inference.images.family import load_family
from burnish.loop.best import eval_prefix
from burnish.loop.schedule import NO_STEPS, StepPlan, check_schedule, plan_steps, schedule_notes
from burnish.loop.spikes import spike_problems
from burnish.loop.types import TOKEN_COLUMNS, Example, Row
from burnish.losses.base import OBJECTIVES, StageObjective
from burnish.models.check import check_model
from burnish.models.fingerprint import place_fingerprint
from burnish.models.load import check_context, context_length, load_config
from burnish.models.source import adapter_folders
from burnish.models.tokens import check_vocabulary, load_tokenizer, resized_meta_model
from burnish.parallel.single import set_seed
from burnish.run.plan.checks import check_best_model_metric, evaluates, may_stream, step_notes, trains
from burnish.run.plan.files import record_needs
from burnish.run.plan.memory import Formats
from burnish.run.plan.options import RunOptions
from burnish.run.plan.other_models import (
    check_other_models,
    check_reference_vocabulary,
    check_reward_model_template,
)
from burnish.run.plan.plan import Plan
from burnish.run.plan.resources import Sizes, check_disk, formats_of, sizes_of
from burnish.run.recovery.fingerprints import code_digest, fingerprints_of

SAMPLE_SIZE = 256
"""Number of rows encoded before the first step when streaming."""
_NO_LIMIT = 1 << 30  # tokens
_ONE_RESPONSE = frozenset({"pairs", "unpaired", "prompts"})
"""Kinds of records in which only the last response of a conversation is trained."""


@dataclass(frozen=True)
class Prepared:
    """Everything known before weights are read: tokenizer, template, rows, steps, sizes, notes."""

    tokenizer: Any
    template: Template
    config: Any
    objective: StageObjective
    rows: RowSet[Row | None]  # None for a streamed example without a row
    sample: RowSet[Row]  # rows that are known in advance: all of them, or a sample when streaming
    eval_rows: Mapping[str, RowSet[Row]]
    steps: StepPlan
    origins: Origins
    sizes: Sizes
    formats: Formats
    stats: DataStats
    fingerprints: Callable[[], Mapping[str, Any]]  # called only if needed, because it downloads weights from a hub
    notes: list[str] = field(default_factory=list)
    family: Family | None = None  # for a vision model


def prepare(plan: Plan) -> Prepared:
    """Encode the data and report all errors in the user's input.

    Reads no weights and writes only the cache of encoded rows.
    """
    options, stats = plan.options, DataStats()
    notes: list[str] = []
    set_seed(options.seed, options.full_determinism)
    if options.template is None and OBJECTIVES[options.stage].has_prompts:
        start_rendering()  # while the data is read
    sets = load_data(plan, stats)
    config = load_config(options, options.cutoff_len, notes)
    tokenizer = load_tokenizer(options, notes, adapter_folders(options))
    refused: list[UserError] = []
    family = load_family(options, config, tokenizer, notes, options, refused)
    has_template = bool(tokenizer.chat_template or options.template)
    load = load_template if options.do_train else load_template_of_model
    template = load(options, tokenizer, family=family)
    if OBJECTIVES[options.stage].records in _ONE_RESPONSE:
        template = template.answering_last()
    template.images_refused = next(iter(refused), None)
    notes += configure_tokenizer(template, tokenizer)
    tokenizer.chat_template = template.jinja()  # so that the saved tokenizer renders the trained text
    adapter = ADAPTERS[options.finetuning_type](options, adapter_folders(options))
    shapes = resized_meta_model(config, tokenizer, options)
    raise_if([*check_vocabulary(tokenizer, config, options), *adapter.check(shapes)])

    objective = OBJECTIVES[options.stage](options, template, tokenizer)
    rows, sample, origins = training_rows(sets, objective, config, stats, options)
    eval_rows = {name: evaluation_rows(some, name, objective, stats, options) for name, some in sets.eval.items()}
    if not len(sample) and trains(options):
        stats.merge(rows.statistics())
        enough = sufficient_cutoff_len(sets.train, objective, template) if stats.has_truncated else None
        raise UserError(nothing_to_learn(stats, options, enough))
    raise_if(unusable_sets(sets.members, stats))
    steps = NO_STEPS
    if trains(options):
        steps = plan_steps(
            options, len(rows), plan.world_size, objective.inner_steps, objective.rows_per_rank,
            objective.counts_rollouts,
        )  # fmt: skip
    sizes = sizes_of(adapter, shapes, options, steps.max_steps)
    formats = formats_of(options, config, sizes, shapes)
    notes += objective.inspect(sample, steps.rows_per_step) if trains(options) else []
    # Predictions leave prompts without room for a response unanswered.
    seen_by_loss = [] if only_generates(options) else [sample, *eval_rows.values()]
    problems = [*check_lengths(seen_by_loss, config, options), *check_schedule(options, steps.schedule_steps)]
    for name, some in eval_rows.items():
        problems += objective.inspect_columns(some, f"The evaluation dataset {name}".rstrip())
    problems += spike_problems(options, objective.inner_steps)
    problems += check_best_model_metric(options, objective.metrics, eval_rows)
    if trains(options) or evaluates(options):
        problems += check_reference_vocabulary(options, shapes.config) if objective.needs_reference else []
        problems += check_reward_model_template(options, [sample, *map(sample_of, eval_rows.values())])
    raise_if([*problems, *check_disk(options, config, sizes, formats, steps)])
    notes += text_notes(sets.members) if has_template else []
    notes += [*sets.notes, *step_notes(options, steps), *schedule_notes(options, steps.schedule_steps)]
    fingerprints = cache(partial(fingerprints_of, plan, _contents(sets, template, objective, options), steps))
    return Prepared(
        tokenizer=tokenizer, template=template, config=config, objective=objective, rows=rows, sample=sample,
        eval_rows=eval_rows, steps=steps, origins=origins, sizes=sizes, formats=formats, stats=stats,
        fingerprints=fingerprints, notes=notes, family=family,
    )  # fmt: skip


def _contents(sets: DataSets, template: Template, objective: StageObjective, options: RunOptions) -> dict[str, Any]:
    """What the rows of a run depend on, for its fingerprints."""
    # A value that checkpoints contain, not a message: rewording it would reject their resume.
    data = f"{sets.fingerprint}, shuffled among {options.buffer_size}" if options.streaming else sets.fingerprint
    contents: dict[str, Any] = {
        "data": data, "template": template.form_fingerprint, "tokenizer": template.tokenizer_fingerprint,
        "image_processor": template.image_fingerprint, **objective.contents,
    }  # fmt: skip
    if options.tokenized_path and not options.dataset:
        contents["data"] = str(place_fingerprint(options.tokenized_path))
    if options.eval_dataset and (evaluates(options) or options.do_predict):
        hashes = [f"{name} {examples.content_hash}" for name, examples in sets.eval.items()]
        contents["eval_data"] = blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest()
    return contents


def load_data(plan: Plan, stats: DataStats) -> DataSets:
    """Load the datasets, and report errors in them together with errors in the model files.

    With ``records_of``, only the evaluation examples that have a reference response are returned.
    """
    options = plan.options
    problems = check_model(options, needs_head=OBJECTIVES[options.stage].uses_lm_head)
    if trains(options):
        known = {(problem.what, problem.where) for problem in problems}
        problems += [one for one in check_other_models(options) if (one.what, one.where) not in known]
    # Every prompt gets a response.
    of_data = replace(options, on_empty_target="keep") if only_generates(options) else options
    try:
        sets = load_datasets(
            of_data, options.seed, stats, may_stream(options), searches_hubs=not problems,
            needs=record_needs(options, plan.records_of),
            adds_kl_responses=OBJECTIVES[options.stage].mismatched_responses(options) == "set",
        )  # fmt: skip
    except UserError as error:
        raise UserError([*problems, *error.problems]) from error
    raise_if(problems)
    if plan.records_of:
        sets.train = ListedExamples()
        sets.eval = {name: ListedExamples(with_references(examples)) for name, examples in sets.eval.items()}
    return sets


def only_generates(options: RunOptions) -> bool:
    """Return whether the run generates responses and does nothing else: it neither trains nor computes a loss."""
    return options.predict_with_generate and not (trains(options) or evaluates(options))


def training_rows(
    sets: DataSets, objective: StageObjective, config: Any, stats: DataStats, options: RunOptions
) -> tuple[RowSet[Row | None], RowSet[Row], Origins]:
    """Return the training rows, those known before the first step, and the origin of each."""
    if sets.train.is_streamed:
        streamed = StreamedRows(
            sets.train, partial(encode_checked, objective, options.stage), partial(refuse_long, config)
        )
        return streamed, sample_of(streamed), Origins(sets.train, streamed, None)
    plain = encode(sets.train, objective, stats, options, data=sets.fingerprint)
    rows = pack_rows(plain, options, objective.default_packing, options.cutoff_len)
    return rows, rows, Origins(sets.train, plain, rows.plan if isinstance(rows, PackedRows) else None)


def evaluation_rows(
    examples: Sequence[Example], name: str, objective: StageObjective, stats: DataStats, options: RunOptions
) -> RowSet[Row]:
    rows = encode(examples, objective, stats, options, name)
    return pack_rows(rows, options, objective.default_packing, options.cutoff_len, is_eval=True)


def check_lengths(sets: Sequence[RowSet[Row]], config: Any, options: RunOptions) -> Iterator[Problem]:
    """Yield problems of rows that exceed the model's context or the token budget of a micro-batch."""
    longest = max((length for rows in sets for length in rows.sequence_lengths), default=0)
    largest = max((length for rows in sets for length in rows.lengths), default=0)
    context, new = context_length(config), options.max_completion_length
    shortest = min((length for rows in sets for length in rows.lengths), default=0)
    if OBJECTIVES[options.stage].records == "prompts" and context and shortest + new > context:
        what = f"The shortest prompt has {shortest:,} tokens; with max_completion_length {new:,} the context of "
        what += f"{context:,} is exceeded."
        yield Problem(what, remedy="Lower max_completion_length.", option="max_completion_length")
        return
    yield from check_context(config, longest)
    yield from check_budget(options.max_tokens_per_batch, largest)


def encode(
    examples: Sequence[Example], objective: StageObjective, stats: DataStats, options: RunOptions,
    eval_name: str | None = None, data: str | None = None,
) -> RowSet[Row]:  # fmt: skip
    """Encode a dataset.

    Args:
        examples: examples of the dataset.
        objective: encodes them.
        stats: statistics that dropped examples are added to.
        options: options of the run.
        eval_name: name of an evaluation set; None for the training set.
        data: ``content_hash`` of the examples, if known.
    """
    is_eval = eval_name is not None
    answers = objective.records == "answers" and objective.has_prompts
    is_whole = is_eval and answers and only_generates(options)  # prompts of predictions are not truncated
    truncate = not splits_rows(options, objective.default_packing, is_eval)
    digest = code_digest(OBJECTIVES.get(options.stage))
    more: dict[str, Any] = {"code of the stage": digest} if digest else {}
    more |= {"whole": True} if is_whole else {}

    def encoded(batch: Sequence[Example], counted: DataStats) -> Sequence[Row | None]:
        check_record_lengths(batch)
        if is_whole:
            return objective.template.encode_arrays(batch, counted, truncate=False)
        return encode_checked(objective, options.stage, batch, counted, truncate)

    return encode_rows(
        examples,
        encoded,
        stats,
        fingerprint={"encoding": objective.fingerprint, "cutoff_len": options.cutoff_len, "cut": truncate, **more},
        options=options,
        name="train" if eval_name is None else eval_prefix(eval_name),
        data=data,
    )


def encode_checked(
    objective: StageObjective, stage: str, examples: Sequence[Example], stats: DataStats, truncate: bool = True
) -> Sequence[Row | None]:
    """Encode examples. Rows of an objective from another package are checked.

    Raises:
        ValueError: if there is not one row or None per example, or a column does not have one value per token.
    """
    rows = objective.encode(examples, stats, truncate=truncate)
    if OBJECTIVES.get(stage).is_ours:
        return rows
    if len(rows) != len(examples):
        what = f"stage {stage}: encode must return a row or None for each of {len(examples)} examples."
        raise ValueError(f"{what} Received: {len(rows)}.")
    for row in (each for each in rows if each is not None and "input_ids" in each):
        for name in TOKEN_COLUMNS.keys() & row.keys():
            if len(row[name]) != len(row["input_ids"]):
                what = f'stage {stage}: the column "{name}" of a row must have {len(row["input_ids"])} values, one per '
                raise ValueError(f"{what}token. Received: {len(row[name])}.")
    return rows


def refuse_long(config: Any, row: Row) -> None:
    """Raise UserError for a streamed row that is longer than the model's context."""
    raise_if(check_context(config, max(lengths_of(row))))


def sample_of(rows: RowSet[Any]) -> ListedRows:
    """Return rows at random positions of a dataset, the same each time, for everything that must be known before the
    first step. Rows at regular distances could all be of one kind."""
    numbers = sorted(Random(0).sample(range(len(rows)), min(SAMPLE_SIZE, len(rows))))  # noqa: S311
    some = (rows[number] for number in numbers)
    return ListedRows([row for row in some if row is not None])


def sufficient_cutoff_len(examples: Sequence[Example], objective: StageObjective, template: Template) -> int | None:
    """Return the smallest ``cutoff_len`` with which 99% of the first examples are not truncated, if any."""
    limit, template.cutoff_len = template.cutoff_len, _NO_LIMIT
    try:
        rows = objective.encode(list(islice(examples, SAMPLE_SIZE)), DataStats())
    except UserError:
        return None
    finally:
        template.cutoff_len = limit
    lengths = sorted(max(lengths_of(row)) for row in rows if row is not None)
    return lengths[ceil(0.99 * len(lengths)) - 1] if lengths else None


def nothing_to_learn(stats: DataStats, options: RunOptions, cutoff_len: int | None = None) -> Problem:
    """Return the problem that no training example is left. Args: cutoff_len: one that would be sufficient."""
    if options.tokenized_path and not options.dataset and not stats.sentences():
        return Problem(
            f'tokenized_path "{options.tokenized_path}" contains no tokenized dataset, and "dataset" is not set.',
            remedy="Set dataset to tokenize it into this folder, or set tokenized_path to that of an earlier run.",
            option="tokenized_path",
        )
    reasons = "; ".join(stats.problems()) or "The training set is empty"
    needed = "" if cutoff_len is None else f" (99% of the examples have at most {cutoff_len:,} tokens)"
    return Problem(
        "no examples are left to train on.",
        where=", ".join(map(str, options.dataset or [])),
        why=f"{reasons}.",
        remedy=" ".join(stats.remedies)
        or (f"Raise cutoff_len{needed}, or correct the data." if stats.has_truncated else "Correct the data."),
    )


def text_notes(members: Mapping[str, Sequence[Example]]) -> Iterator[str]:
    """Return a note if prompts are plain text, which has no chat template, although the model has one."""
    plain = [name for name, examples in members.items() if len(examples) and examples[0].prompt is not None]
    if not plain:
        return
    yield (
        f"{few(plain)}: the prompts are plain text, so the chat template is not applied. To apply it, use messages, or "
        "set formatting: alpaca with columns."
    )


def unusable_sets(members: Mapping[str, Sequence[Example]], stats: DataStats) -> list[Problem]:
    """Return problems of datasets without usable examples, while other datasets have some."""
    reasons = {name: stats.drop_reasons(examples) for name, examples in members.items()}
    return [
        Problem(
            "no examples are usable.",
            where=name,
            why=f"Dropped: {'; '.join(reason.removeprefix('dropped: ').rstrip('.') for reason in counted_reasons)} "
            f"({len(members[name]):,} of {len(members[name]):,}).",
            remedy=" ".join(stats.remedies) or "Correct the data, set a different template, or remove the dataset.",
        )
        for name, counted_reasons in reasons.items()
        if counted_reasons
    ]
