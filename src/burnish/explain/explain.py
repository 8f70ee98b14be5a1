"""``burnish explain``: a description of what a run will do, before it starts.

In: a plan. Out: sections of lines, and two rows with every trained token marked; ``view.py`` prints them. Everything
that ``train`` would refuse before it reads weights is refused by the same code. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from burnish.checkpoint.checkpoint import Checkpoints, output_folder
from burnish.config.secrets import MASK
from burnish.data.batches.batching import collate_prefix_sharing, packs_rows, sequences_by_name
from burnish.data.batches.loader import idle_fraction, num_tokens, order_of
from burnish.data.batches.patches import num_patches
from burnish.data.images.family import Family
from burnish.data.images.image_file import ImageFile, images_of
from burnish.data.rows.row_set import ListedRows, RowSet
from burnish.explain.images import image_in_words, image_lines
from burnish.explain.model import model_section, skips_tokens
from burnish.explain.rollouts import rollouts_section
from burnish.explain.view import Line, Sample, Section, show
from burnish.loop.schedule import FOLLOWS_METRIC, lr_factor, steps_of, warmup_steps_of
from burnish.loop.state import load_state
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.losses.base import OBJECTIVES
from burnish.parallel.precision import full_eval_dtype, loaded_dtype, name_of
from burnish.parallel.selection import device_of
from burnish.report.pace import format_count
from burnish.report.progress import counted_epochs
from burnish.rollouts.options import draws_completions
from burnish.run.callbacks import listeners_of
from burnish.run.plan.checks import evaluates, trains
from burnish.run.plan.listing import format_value
from burnish.run.plan.memory import DecoderShape, Term, shown_bytes
from burnish.run.plan.memory_per_device import peaks, sharing_of, terms_per_device
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.plan.resources import (
    available_memory,
    disk_of,
    free_disk,
    memory_of,
    patches_of_largest_batch,
    rows_of_batch,
    tokens_of_largest_batch,
)
from burnish.run.predictions.files import ANSWERS_NAME
from burnish.run.prepare import Prepared, prepare
from burnish.run.recovery.interrupt import InterruptCallback
from burnish.run.recovery.resume import start_of

SAMPLE_SIZE = 1000
"""Number of rows whose labels are counted. Lengths are counted for all rows."""


EVENTS = "Events"
"""The section that lists the callbacks of each event."""


def explain(plan: Plan, shows_all: bool = False) -> None:
    """Print what ``burnish train`` would do with the same arguments.

    Args:
        plan: the plan of the run.
        shows_all: whether to print the callbacks of each event as well.

    Raises:
        UserError: if the run would be refused.
    """
    prepared = prepare(plan)
    found = [section for section in sections(plan, prepared) if shows_all or section.title != EVENTS]
    show(found, list(samples(plan, prepared)))


def sections(plan: Plan, prepared: Prepared) -> Iterator[Section]:
    yield model_section(plan, prepared)
    yield _data(plan, prepared)
    yield from rollouts_section(plan, prepared)
    yield _steps(plan, prepared) if trains(plan.options) else _evaluation_section(plan, prepared)
    yield _events(plan)
    yield _options(plan)
    yield _resources(plan, prepared)
    notes = [*plan.notes, *prepared.notes]
    if notes:
        yield Section("Worth knowing", [Line("", text) for text in notes])


# --- data -------------------------------------------------------------------------------------------------------------


def _data(plan: Plan, prepared: Prepared) -> Section:
    options, rows, is_trained = plan.options, _inspected_rows(plan, prepared), trains(plan.options)
    kind = _kind(options, is_eval=not is_trained)
    named = options.dataset if is_trained or options.val_size else options.eval_dataset
    by = "dataset" if named is options.dataset else "eval_dataset"
    also = ", including those for evaluation" if is_trained and prepared.eval_rows else ""
    read = "read during training" if is_trained and options.streaming else f"{prepared.stats.seen:,} read{also}"
    lines = [
        Line("datasets", ", ".join(map(str, named or [])) or "none", plan.where(by)),
        Line("template", prepared.template.name, plan.where("template")),
        Line("records", read),
    ]
    if is_trained or len(prepared.rows):
        unread = "" if is_trained else " (not used by this run)"
        lines.append(Line("training set", _size_of(prepared.rows, _kind(options)) + unread))
    eval_kind = _kind(options, is_eval=True)
    lines += [Line("evaluation", f"{_size_of(found, eval_kind)} {name}") for name, found in prepared.eval_rows.items()]
    if len(rows):
        lengths = rows.lengths
        mean = sum(lengths) / len(lengths)
        is_all = rows is not prepared.sample or rows is prepared.rows
        known = f"{sum(lengths):,}; " if is_all else ""
        among = "" if is_all else f" (of a sample of {len(rows):,}; the rest is tokenized during training)"
        lines.append(Line("tokens", f"{known}mean {mean:.1f} per {kind}, maximum {max(lengths):,}{among}"))
        share = "all tokens of the completions" if draws_completions(options.stage) else _labelled_share(rows)
        lines.append(Line("trained" if is_trained else "measured", share))
        lines += image_lines(list(islice(rows, SAMPLE_SIZE)), prepared)
        if kind == "pack":
            full = f"{100 * mean / options.cutoff_len:.1f}%"
            lines.append(
                Line(
                    "packing",
                    f"packed sequences of {options.cutoff_len:,} tokens are {full} full",
                    plan.where("packing"),
                )
            )
        if (skipped := _skipped_share(rows, prepared, options)) > 0:
            why = "shared prefixes or no effect on the loss; requires dropout = 0"
            text = f"{100 * skipped:.3g}% ({why})"
            lines.append(Line("skipped tokens", text, plan.where("needed_tokens_only")))
    lines += [Line("counted", sentence) for sentence in prepared.stats.sentences()]
    return Section("Data", lines)


def _inspected_rows(plan: Plan, prepared: Prepared) -> RowSet[Row]:
    """The training rows. For a run without training, the rows of the first evaluation set."""
    return prepared.sample if trains(plan.options) else next(iter(prepared.eval_rows.values()), ListedRows(()))


def _kind(options: RunOptions, is_eval: bool = False) -> str:
    return "pack" if packs_rows(options, OBJECTIVES[options.stage].default_packing, is_eval) else "example"


def _size_of(rows: RowSet[Any], kind: str) -> str:
    """``4,000 examples``, ``2,012 packs of 4,000 examples``."""
    if kind == "example":
        return format_count(len(rows), "example")
    num_rows = len(rows) if rows.num_examples is None else sum(rows.num_examples)
    return f"{format_count(len(rows), 'pack')} of {format_count(num_rows, 'example')}"


def _labelled_share(rows: Sequence[Row]) -> str:
    """``38.2% of the tokens, 12.3 per example``."""
    looked_at = list(islice(rows, SAMPLE_SIZE))
    labels = [answer["labels"] for row in looked_at for answer in sequences_by_name(row).values()]
    tokens = sum(map(len, labels))
    trained = sum(label != IGNORE_INDEX for some in labels for label in some)
    among = "" if len(looked_at) == len(rows) else f" (counted in the first {len(looked_at):,})"
    return f"{100 * trained / tokens:.3g}% of the tokens, {trained / len(looked_at):.1f} per example{among}"


def _skipped_share(rows: Sequence[Row], prepared: Prepared, options: RunOptions) -> float:
    """Fraction of tokens that need not be computed, estimated from the first rows as micro-batches. A model that draws
    random numbers is not detected, because this would need its weights; an adapter with dropout is.
    """
    draws = options.finetuning_type == "lora" and options.lora_dropout > 0
    if draws or not skips_tokens(prepared, options):
        return 0.0
    looked_at = list(islice(rows, SAMPLE_SIZE))
    size = rows_of_batch(options)
    cut = (looked_at[begin : begin + size] for begin in range(0, len(looked_at), size))
    apart = prepared.objective.separate_sequences
    batches = [
        collate_prefix_sharing([answer for row in some for answer in _sequences_of_micro_batch(row, apart)])
        for some in cut
    ]
    computed: int = sum(batch["input_ids"].numel() for batch in batches)
    return 1 - computed / sum(map(num_tokens, batches))


def samples(plan: Plan, prepared: Prepared) -> Iterator[Sample]:
    """The first row and the one in the middle."""
    rows, marked = _inspected_rows(plan, prepared), "trained" if trains(plan.options) else "measured"
    kind = _kind(plan.options, is_eval=not trains(plan.options)).capitalize()
    for index in sorted({0, len(rows) // 2} if len(rows) else set()):
        for name, answer in sequences_by_name(rows[index]).items():
            what = prepared.objective.sequence_title(rows[index], name)
            title = f"{kind} {index + 1:,} of {len(rows):,}, {what}{marked} tokens"
            pieces = pieces_of(first_of_pack({**rows[index], **answer}), prepared.tokenizer, prepared.family)
            yield Sample(title, [(text, trained) for text, trained, _ in pieces])


def _sequences_of_micro_batch(row: Row, apart: Collection[str]) -> list[Row]:
    """The sequences of a row that share a micro-batch; a pack as a whole. ``apart``: those in a separate
    micro-batch."""
    if row.get("seq_lengths"):
        return [_with_hashes(row, images_of(row))]
    return [
        _with_hashes(answer, images_of(row, "kl_" if name == "kl" else ""))
        for name, answer in sequences_by_name(row).items()
        if name not in apart
    ]


def _with_hashes(row: Row, images: Sequence[ImageFile]) -> Row:
    """The row with the content hashes of its images in their place, so that other images are not a shared prefix."""
    if not images:
        return row
    hashes = [0] * len(row["input_ids"])
    for image in images:
        hashes[image.begin : image.end] = [hash(image.identity)] * (image.end - image.begin)
    return {**{name: value for name, value in row.items() if name != "images"}, "content_hashes": hashes}


def first_of_pack(row: Row) -> Row:
    end = (row.get("seq_lengths") or [len(row["input_ids"])])[0]
    part: Row = {"input_ids": row["input_ids"][:end], "labels": row["labels"][:end]}
    images = [one for one in row.get("images") or () if one["end"] <= end]
    return {**part, "images": images} if images else part


def pieces_of(row: Row, tokenizer: Any, family: Family | None = None) -> list[tuple[str, bool, list[int]]]:
    """Split a row's text where trained tokens begin and end: (text, whether it is trained, ids).

    Each piece is decoded as a whole, because a character may consist of several tokens. An image is a piece with a
    description.
    """
    images = images_of(row)
    image_at = [0] * len(row["input_ids"])  # 1-based index of the image that a token belongs to; 0: none
    for number, one in enumerate(images, start=1):
        image_at[one.begin : one.end] = [number] * (one.end - one.begin)
    known = zip(row["input_ids"], (label != IGNORE_INDEX for label in row["labels"]), image_at, strict=True)
    pieces = []
    for (trained, number), run in groupby(known, key=lambda token: (token[1] and not token[2], token[2])):
        ids = [int(token) for token, _, _ in run]
        description = image_in_words(images[number - 1], number, family) if number else None
        pieces.append((description or tokenizer.decode(ids, skip_special_tokens=False), trained, ids))
    return pieces


# --- steps ------------------------------------------------------------------------------------------------------------


def _steps(plan: Plan, prepared: Prepared) -> Section:
    options, steps = plan.options, prepared.steps
    kind = _kind(options)
    rows = f"effective batch size {steps.effective_batch_size:,}"
    starter = plan.where("num_processes") or ("the launcher" if plan.world_size > 1 else "")
    lines = [
        Line("per device", f"{options.per_device_train_batch_size:,}", plan.where("per_device_train_batch_size")),
        Line("accumulation", f"x {options.gradient_accumulation_steps}", plan.where("gradient_accumulation_steps")),
        Line("processes", f"x {plan.world_size} = {rows}", starter),
    ]
    if (waiting := _share_of_waiting(plan, prepared)) is not None:
        text = f"{100 * waiting:.2g}% of the time of each process (estimate: time is proportional to tokens)"
        lines.append(Line("waiting", text))
    if options.max_tokens_per_batch is not None:
        text = f"as few as possible, each of at most {options.max_tokens_per_batch:,} tokens"
        lines.append(Line("micro-batches", text, plan.where("max_tokens_per_batch")))
    if steps.rows is not None:
        last = steps.rows % steps.rows_per_step
        rest = f"; the last step has {format_count(last, kind)}" if last and not options.dataloader_drop_last else ""
        in_steps = format_count(steps.steps_per_epoch, "step")
        text = f"{format_count(steps.rows, kind)} / {steps.rows_per_step:,} = {in_steps}{rest}"
        lines.append(Line("epoch", text))
    lines += [_total(plan, prepared), _start_line(plan, prepared), _rate(plan, prepared), *_intervals(plan, prepared)]
    return Section("Steps", lines)


def _share_of_waiting(plan: Plan, prepared: Prepared) -> float | None:
    """Fraction of time that processes wait for each other in the first steps. None for a single process, or if lengths
    are not known before the run.
    """
    rows, per_step = prepared.rows, prepared.steps.rows_per_step
    if plan.world_size == 1 or prepared.sample is not rows or not len(rows):
        return None
    seed = plan.options.seed if plan.options.data_seed is None else plan.options.data_seed
    order = order_of(len(rows), seed, 0)[: SAMPLE_SIZE * per_step]
    parts = [order[start : start + per_step] for start in range(0, len(order), per_step)]
    return idle_fraction(parts, prepared.sample.lengths, plan.world_size)


def _total(plan: Plan, prepared: Prepared) -> Line:
    options, steps = plan.options, prepared.steps
    if options.max_steps > 0:
        share = f" = {counted_epochs(steps.epochs)}" if steps.epochs is not None else ""
        return Line("total", f"{format_count(steps.max_steps, 'step')}{share}", plan.where("max_steps"))
    epochs = format_count(options.num_train_epochs, "epoch")
    product = f"{steps.steps_per_epoch:,} x {epochs} = {format_count(steps.max_steps, 'step')}"
    return Line("total", product, plan.where("num_train_epochs"))


def _start_line(plan: Plan, prepared: Prepared) -> Line:
    """The start of the run: step 0 or a checkpoint. Raises UserError if ``train`` would refuse to resume."""
    start = start_of(plan, prepared.fingerprints, prepared.steps)
    there = len(Checkpoints(output_folder(plan.options)).all())
    removed = f"{format_count(there, 'checkpoint')} in output_dir {'is' if there == 1 else 'are'} removed"
    text = f"at step 0; {removed}" if there else "at step 0"
    if start.done:
        text = " ".join(start.done.split())
    elif start.checkpoint is not None:
        text = f"from {start.checkpoint}, at step {load_state(start.checkpoint).global_step:,}."
    return Line("starts", " ".join([text, *start.notes]), plan.where("resume_from_checkpoint"))


def _rate(plan: Plan, prepared: Prepared) -> Line:
    """Peak learning rate, warmup, and a plot of the schedule."""
    options, total = plan.options, prepared.steps.schedule_steps
    warmup = warmup_steps_of(options, total)
    rise = f" after {format_count(warmup, 'step')} of warmup" if warmup else ""
    curve = "".join(
        _BARS[min(int(value * len(_BARS)), len(_BARS) - 1)] for value in schedule_factors(options, total, _WIDTH)
    )
    text = f"{options.learning_rate:g}{rise}, {options.lr_scheduler_type}  {curve}"
    return Line("learning rate", text.rstrip(), plan.where("learning_rate"))


_BARS, _WIDTH = "▁▂▃▄▅▆▇█", 24


def schedule_factors(options: RunOptions, max_steps: int, points: int) -> list[float]:
    """The learning rate at evenly spaced steps, as fractions of its peak. Empty for a schedule that follows a
    metric."""
    if options.lr_scheduler_type in FOLLOWS_METRIC:
        return []
    factor = lr_factor(options, max_steps, options.learning_rate)
    return [factor(round(place * (max_steps - 1) / (points - 1))) for place in range(points)]


def _intervals(plan: Plan, prepared: Prepared) -> Iterator[Line]:
    """Intervals of logging, evaluation and saving in steps, and how often each happens."""
    options, total = plan.options, prepared.steps.max_steps
    every = {
        "log": (options.logging_strategy, options.logging_steps, "logging"),
        "evaluate": (options.eval_strategy, options.eval_steps, "eval"),
        "save": (options.save_strategy, options.save_steps, "save"),
    }
    for verb, (strategy, interval, name) in every.items():
        where = plan.where(f"{name}_steps") if strategy == "steps" else plan.where(f"{name}_strategy")
        also_first = verb == "log" and options.logging_first_step and total > 1
        if strategy == "steps":
            steps = steps_of(interval, total, options.logging_steps)
            how_often = "every step" if steps == 1 else f"every {steps:,} steps"
            count = math.ceil(total / steps) + (also_first and steps > 1)  # the last step is always included
            yield Line(verb, f"{how_often}, {'once' if count == 1 else f'{count:,} times'}", where)
        else:
            how_often = {"no": "never", "epoch": "after every epoch", "best": "at each best evaluation"}[strategy]
            if also_first:
                how_often = f"after the first step{'' if strategy == 'no' else f' and {how_often}'}"
            yield Line(verb, how_often, where)


def _evaluation_section(plan: Plan, prepared: Prepared) -> Section:
    """Evaluations, predictions and output files of a run without training."""
    options, where = plan.options, plan.where("per_device_eval_batch_size")
    across = options.per_device_eval_batch_size * plan.world_size
    lines = []
    for name, rows in prepared.eval_rows.items():
        batches = format_count(math.ceil(len(rows) / across), "batch", "batches")
        lines.append(Line("batches", f"{batches} of {across:,} {_kind(options, is_eval=True)}s {name}".rstrip(), where))
    if options.max_tokens_per_batch is not None:
        text = f"split where they exceed {options.max_tokens_per_batch:,} tokens"
        lines.append(Line("micro-batches", text, plan.where("max_tokens_per_batch")))
    if evaluates(options):
        lines.append(Line("evaluates", "the loss: eval_results.json", plan.where("do_eval")))
    if dtype := full_eval_dtype(options):
        where = plan.where("bf16_full_eval" if options.bf16_full_eval else "fp16_full_eval")
        lines.append(Line("weights", f"converted to {name_of(dtype)}", where))
    if options.do_predict:
        does = f"responses in {ANSWERS_NAME}.jsonl" if options.predict_with_generate else "the loss"
        lines.append(Line("predicts", f"{does}: predict_results.json", plan.where("do_predict")))
    return Section("Evaluation", lines)


def _events(plan: Plan) -> Section:
    found = listeners_of(plan.options, [InterruptCallback()])
    return Section(EVENTS, [Line(event, ", ".join(names)) for event, names in found.items()])


# --- options and resources --------------------------------------------------------------------------------------------


_DERIVED = "derived from other options"


def _options(plan: Plan) -> Section:
    """Every option that differs from its default."""
    lines = [
        Line(
            spec.name,
            f"{MASK if spec.is_secret else format_value(value)} (default {format_value(spec.default)})",
            where or _DERIVED,
        )
        for spec, value, where in plan.non_default_options()
    ]
    return Section("Options that differ from their defaults", lines)


def memory_terms_of(plan: Plan, prepared: Prepared) -> list[Term]:
    """Memory of the run on each device, as a list of terms."""
    options, sizes, formats = plan.options, prepared.sizes, prepared.formats
    tokens = tokens_of_largest_batch(_inspected_rows(plan, prepared), options)
    shape, trained = DecoderShape.of(prepared.config.get_text_config()), sizes.active if trains(options) else 0
    looked_at = islice(_inspected_rows(plan, prepared), SAMPLE_SIZE) if prepared.family is not None else ()
    patches = [num_patches(row, prepared.family) for row in looked_at if prepared.family is not None]
    of_batch = patches_of_largest_batch(patches, options)
    terms = memory_of(options, prepared.config, sizes, formats, tokens, of_batch)
    return terms_per_device(terms, sharing_of(options, plan.world_size), shape, formats, sizes.total, trained)


def _resources(plan: Plan, prepared: Prepared) -> Section:
    options, sizes, formats = plan.options, prepared.sizes, prepared.formats
    terms, trained = memory_terms_of(plan, prepared), sizes.active if trains(options) else 0
    total, free = sum(term.num_bytes for term in terms), available_memory(options)
    lines = [Line(term.name, f"{shown_bytes(term.num_bytes):<10} {term.reason}") for term in terms]
    where = (
        device_of(options) if plan.world_size == 1 else f"{device_of(options)} (per device, {plan.world_size} devices)"
    )
    lines.append(Line("total", f"{shown_bytes(total):<10} estimated; {shown_bytes(free)} free on {where}"))
    if plan.world_size > 1 and trained:
        sharing, loaded = sharing_of(options, plan.world_size), loaded_dtype(prepared.config).itemsize
        at_times = peaks(sharing, sizes.total, trained, formats, loaded)
        lines += [Line(term.name, f"{shown_bytes(term.num_bytes):<10} {term.reason}") for term in at_times]
    if needed := disk_of(options, prepared.config, sizes, formats, prepared.steps):
        there = f"in {options.output_dir}; {shown_bytes(free_disk(output_folder(options)))} free"
        lines.append(Line("disk", f"{shown_bytes(needed):<10} {there}", plan.where("output_dir")))
    return Section("Memory and disk (estimated)", lines)
