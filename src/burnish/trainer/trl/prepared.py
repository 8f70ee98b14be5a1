"""Convert datasets of the ``datasets`` library to rows of token ids, for TRL's trainers.

In: a ``Dataset`` or ``IterableDataset``, the layout of its records, and a function that encodes examples (of an
objective or template). Out: the dataset with the columns of the rows. A ``Dataset`` uses the cache of encoded rows; a
stream is encoded on the fly, in small batches. Warns of dropped or unusual records, with their numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import burnish
from burnish.config.errors import UserError, few
from burnish.data.length import num_characters
from burnish.data.options import DataOptions
from burnish.data.rows.arrow import arrow_table
from burnish.data.rows.encode import batch_spans, encode_rows
from burnish.data.sets.examples import Located
from burnish.data.sets.records import Layout
from burnish.data.sets.trl import PAIR_SIDE_COLUMN, TrlRecords, examples_of
from burnish.data.stats import SHOWN, DataStats
from burnish.loop.types import Example, Row
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.notes import logger

Columns = dict[str, list[Any]]
AT_ONCE = 100
"""Number of records of a stream that are encoded together: enough for the tokenizer's threads, few to repeat on
resume."""


@dataclass
class EncodeRecords:
    """Encodes records to rows with TRL's columns; None for records without a row.

    Args:
        encode: an objective's or a template's function.
        columns: row -> TRL's columns.
        names: names of these columns.
        fingerprint: depends on everything in ``encode`` that affects rows; None if that is not known.
        formatting: a script's function, record -> text.
    """

    layout: Layout
    encode: Callable[[Sequence[Example], DataStats], Sequence[Row | None]]
    names: tuple[str, ...]
    fingerprint: str | None
    columns: Callable[[Row], Mapping[str, Any]] = dict
    on_bad_record: str = "refuse"
    formatting: Callable[[Any], str] | None = None
    warned: set[str] = field(default_factory=set)

    def __call__(self, located: Sequence[Located], stats: DataStats) -> list[Any]:
        if self.formatting is not None:
            column = self.layout.columns["text"]
            located = [({column: self.formatting(values)}, source, n) for values, source, n in located]
        examples = examples_of(located, self.layout, stats, self.on_bad_record)
        present = [example for example in examples if example is not None]
        spans = batch_spans([num_characters(example) for example in present])
        rows = chain.from_iterable(self.encode(present[span.start : span.stop], stats) for span in spans)
        encoded = [None if example is None else next(rows) for example in examples]
        return [None if row is None else self.columns(row) for row in encoded]

    def warn(self, stats: DataStats, name: str) -> None:
        """Warn once about each kind of record that is dropped or unusual."""
        for reason, found in sorted(stats.records.items()):
            if reason not in self.warned and reason.kind != "truncated":
                self.warned.add(reason)
                numbers = sorted({number for _, number in found})
                places = f"record{'s' * (len(numbers) > 1)} {few([*map(str, numbers)], SHOWN)}"
                what = f"{len(numbers)} of {stats.seen} records of the {name} dataset were {reason} ({places})."
                logger.warning(what.replace("cutoff_len", "max_length"))


def prepare_dataset(
    dataset: Any, name: str, encode: EncodeRecords, args: TrlArguments, keep: Sequence[str] = (),
    splits_pairs: bool = False,
) -> Any:  # fmt: skip
    """The dataset with the columns of its rows.

    Args:
        dataset: the raw dataset.
        name: its name in messages.
        encode: encodes records.
        keep: columns of the dataset that are kept.
        splits_pairs: see ``TrlRecords``.

    Raises:
        UserError: if no row is left.
    """
    if not is_datasets_set(dataset):
        stream, at_once = EncodeStream(encode, name, keep, splits_pairs), TrlRecords.BLOCK if splits_pairs else AT_ONCE
        drop = column_names(dataset)
        return dataset.map(stream, batched=True, with_indices=True, batch_size=at_once, remove_columns=drop)
    datasets = sys.modules["datasets"]  # already imported by the code that created the dataset
    dataset, stats, options = dataset.with_format(None), DataStats(), None
    if encode.fingerprint is not None:
        options = DataOptions(preprocessing_num_workers=args.dataset_num_proc)
    layout = [encode.layout.format, sorted(encode.layout.columns.items())]
    known = repr([encode.fingerprint, layout, encode.on_bad_record, splits_pairs, encode.names])
    data = f"{dataset._fingerprint} {datasets.fingerprint.Hasher.hash(encode.formatting)}"
    records = TrlRecords(dataset, f"{name} dataset", splits_pairs)
    rows = encode_rows(
        records, encode, stats, name=name, options=options, places=name, data=data, fingerprint={"encoding": known},
        title=f"Tokenizing {name} dataset",
    )  # fmt: skip
    encode.warn(stats, name)
    if not len(rows):
        raise UserError(f"No examples of the {name} dataset are left to train on. Increase `max_length`.")
    identity = None  # with None, the library hashes a copy of all rows
    if encode.fingerprint is not None:
        identity = datasets.fingerprint.Hasher.hash([burnish.__version__, data, known])
    table = datasets.Dataset(datasets.table.InMemoryTable(arrow_table(rows, encode.names)), fingerprint=identity)
    if not keep:
        return table
    columns, is_whole = dataset.select_columns(list(keep)), len(rows) == len(records) and not splits_pairs
    columns = columns if is_whole else columns.select([records.place_of(at)[0] for at in rows.origins])
    return datasets.concatenate_datasets([columns, table], axis=1)


@dataclass
class EncodeStream:
    """Encodes a batch of ``IterableDataset.map``: columns and indices -> columns of rows."""

    encode: EncodeRecords
    name: str
    keep: Sequence[str]
    splits_pairs: bool

    def __call__(self, columns: Columns, indices: list[int]) -> Columns:
        records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if self.splits_pairs:
            records = [{**record, PAIR_SIDE_COLUMN: side} for side in ("chosen", "rejected") for record in records]
            indices = indices * 2
        stats = DataStats()
        located = [(values, f"{self.name} dataset", at + 1) for values, at in zip(records, indices, strict=True)]
        rows = self.encode(located, stats)
        self.encode.warn(stats, self.name)
        pairs = [(record, row) for record, row in zip(records, rows, strict=True) if row is not None]
        encoded = {name: [_as_list(row.get(name, [])) for _, row in pairs] for name in self.encode.names}
        return {**{name: [record.get(name) for record, _ in pairs] for name in self.keep}, **encoded}


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def hashable_by_class(tokenizer: Any) -> bool:
    """Whether a tokenizer's class belongs to transformers, so that its settings determine its behavior."""
    return type(tokenizer).__module__.startswith("transformers.")


def first_row(dataset: Any) -> dict[str, Any]:
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError("The dataset is empty.")
    return dict(row)


def column_names(dataset: Any) -> list[str]:
    """The names of the columns; for a streamed dataset taken from its first row if necessary."""
    names = dataset.column_names
    return list(names) if names is not None else list(first_row(dataset))


def refuse_transform(dataset: Any) -> None:
    if is_datasets_set(dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            "SFTTrainer cannot prepare a dataset that uses `Dataset.with_transform()`: the transform would be "
            "applied only once. Pass `dataset_kwargs={'skip_prepare_dataset': True}` and return token ids from the "
            "transform, or apply it with `Dataset.map()` first."
        )
