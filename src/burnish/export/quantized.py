"""Quantized export: rows for calibration, the resulting folder, and a model card with the loss of quality.

    rows      of ``export_quantization_dataset``, or of the training set, encoded with the training's template
    quantize  the folder in full precision (``models/quantization/export.py``)
    card      perplexity before and after, on rows not used for calibration, nor for training if some were held out

Refuses: no dataset for calibration, or one with a single row.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from burnish.config.errors import UserError
from burnish.config.options import raise_if
from burnish.data.chat.choose import load_template
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Row
from burnish.models.quantization.export import QuantizationJob, check_quantized_export, group_of, quantize
from burnish.models.tokens import resized_meta_model
from burnish.report.card import CARD_NAME, is_hub_name, serving_lines, with_metadata_header
from burnish.run.plan.options import RunOptions

HELD_OUT = 64
"""Maximum number of rows for measuring perplexity."""
MAX_PERPLEXITY_INCREASE = 0.05
"""Relative increase of perplexity above which it is reported as a loss of quality."""


@dataclass(frozen=True)
class Calibration:
    """Rows for calibration (``rows``) and evaluation (``held_out``), and the number of inputs that share a scale
    (``group``)."""

    rows: Sequence[Row]
    held_out: Sequence[Row]
    group: int


def calibration(options: RunOptions, config: Any, tokenizer: Any) -> Calibration:
    """Check the options and encode the rows, before weights are read.

    Raises:
        UserError: for errors in the user's input.
    """
    shapes = resized_meta_model(config, tokenizer, options)
    raise_if(check_quantized_export(options, shapes))
    named = options.export_quantization_dataset
    if not (named or options.dataset):
        what = '"export_quantization_bit" requires calibration data, but no dataset is set.'
        raise UserError(
            what,
            remedy="Set export_quantization_dataset, for example to the training dataset: data/train.json",
            option="export_quantization_bit",
        )
    reading = replace(options, cutoff_len=options.export_quantization_maxlen, streaming=False, tokenized_path=None)
    if named:
        reading = replace(reading, dataset=[named], val_size=0, interleave_probs=None, mix_strategy="concat")
    sets = load_datasets(reading, options.seed, DataStats())
    template = load_template(reading, tokenizer)

    def encoded(examples: Sequence[Example], count: int) -> list[Row]:
        order = random.Random(options.seed).sample(range(len(examples)), len(examples))  # noqa: S311
        found = (template.encode([examples[place]], DataStats())[0] for place in order)
        rows = []
        for row in found:
            rows += [row] if row is not None else []
            if len(rows) == count:
                break
        return rows

    rows = encoded(sets.train, options.export_quantization_nsamples + HELD_OUT)
    others = encoded(next(iter(sets.eval.values())), HELD_OUT) if sets.eval else []
    if not others:  # hold out a tenth of the same dataset
        held_out = max(1, min(HELD_OUT, len(rows) // 10))
        rows, others = rows[:-held_out], rows[-held_out:]
    if not rows:
        what = "no calibration examples are left: the dataset is too small, or its examples have no trainable tokens."
        raise UserError(what, where=named or ", ".join(map(str, options.dataset or [])))
    return Calibration(rows[: options.export_quantization_nsamples], others, group_of(shapes))


def quantize_into(folder: Path, source: Path, tokenizer: Any, using: Calibration, options: RunOptions) -> list[str]:
    """Quantize ``source``, a full model, into ``folder``. Returns notes for the user.

    Args:
        folder: the destination.
        source: a temporary folder; temporary files are written next to it.
        tokenizer: the exported tokenizer.
        using: the rows of ``calibration``.
        options: the options of the run.
    """
    source = source.resolve()
    made = source.parent / "quantized"
    device = "cpu" if options.export_device == "cpu" else "cuda"
    job = QuantizationJob(
        str(source), str(made), options.export_quantization_method, options.export_quantization_bit or 4, using.group,
        [row["input_ids"] for row in using.rows], using.held_out, f"{options.export_size}GB",
        options.trust_remote_code, device,
    )  # fmt: skip
    before, after = quantize(job, source.parent)
    (made / "quant_log.csv").unlink(missing_ok=True)  # durations and losses of each layer
    tokenizer.save_pretrained(made)
    shutil.copyfile(source / "generation_config.json", made / "generation_config.json")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for path in made.iterdir():
        shutil.move(path, folder / path.name)
    sentence = _summary(job, before, after)
    (folder / CARD_NAME).write_text(card(folder.resolve().name, sentence, options), encoding="utf-8")
    worse = after / before - 1
    return [
        sentence,
        *(
            [f"Perplexity increased by {worse:.0%}. Use more bits or other calibration data."]
            * (not worse <= MAX_PERPLEXITY_INCREASE)  # also if it is NaN
        ),
    ]


def _summary(job: QuantizationJob, before: float, after: float) -> str:
    group = f"group size {job.group}" if job.group > 0 else "one scale per output channel"
    tokens = sum(label != -100 for row in job.held_out for label in row["labels"][1:])
    return (
        f"{job.method.upper()}, {job.bits} bits, {group}, calibrated with {len(job.rows)} examples. Perplexity on "
        f"{len(job.held_out)} other examples ({tokens} trained tokens): {before:.4g} before, {after:.4g} after."
    )


def card(name: str, sentence: str, options: RunOptions) -> str:
    """The model card of a quantized folder."""
    base = str(options.model_name_or_path)
    is_plain = is_hub_name(base) and not options.adapter_name_or_path
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", base_model=base if is_plain else None,
        base_model_relation="quantized" if is_plain else None, tags=["burnish", options.export_quantization_method],
    )  # fmt: skip
    lines = [
        f"# {name}",
        "",
        sentence,
        "",
        "In the terminal, and as a server:",
        "",
        "```sh",
        *serving_lines(name),
        "```",
    ]
    needs = "Loading it with transformers or burnish requires gptqmodel and, for GPTQ, optimum."
    return with_metadata_header(metadata, "\n".join([*lines, "", needs]))
