"""Load the datasets of a run: from names in the options to examples for training and evaluation.

The order of operations is LLaMA-Factory's (src/llamafactory/data/loader.py): load, ``num_samples``, ``max_samples``,
convert, merge, split. Dropped records are counted in the statistics.

Problems of all datasets are reported together: unknown names (``dataset_info.py``), unreadable files (``files.py``),
unknown layouts (``layouts.py``), invalid records (``formats.py``), empty datasets and datasets of empty responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from burnish.config.errors import MissingExtraError, Problem, UserError, first_line
from burnish.config.options import raise_if
from burnish.data.options import DataOptions, check_data
from burnish.data.reading.files import csv_header, data_files, read_records
from burnish.data.reading.json_files import NotAnObject, Values, not_an_object_error
from burnish.data.reading.record_index import DatasetTable, Table, open_table
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.dataset_info import INFO_NAME, ONLINE, REMOTE, find_sources
from burnish.data.sets.examples import Examples, ListedExamples, Located, StreamedExamples, StreamedSet
from burnish.data.sets.formats import convert_records
from burnish.data.sets.layouts import layout_of, missing_columns
from burnish.data.sets.mixing import merged_order, sample_rows, split_rows
from burnish.data.sets.preferences import unpair, with_other_answers
from burnish.data.sets.records import ALL_COLUMNS, Layout, RecordNeeds
from burnish.data.stats import DataStats
from burnish.loop.types import Example
from burnish.utils.collection import without_garbage_collection
from burnish.utils.files import check_below_roots
from burnish.utils.work import progress, track

__all__ = ["DataOptions", "DataSets", "check_data", "load_datasets"]

NUM_DETECTION_RECORDS = 20
"""Number of first records used to detect and check the layout."""
SAMPLE_SIZE = 1000
"""Number of first records searched for a column when streaming."""


@dataclass
class DataSets:
    """The examples of a run.

    Args:
        train: training examples.
        eval: name -> evaluation examples; "" for a single dataset.
        notes: messages about automatic choices and likely mistakes.
        members: dataset name -> its examples before mixing and splitting, without streamed datasets.
    """

    train: Examples = field(default_factory=ListedExamples)
    eval: dict[str, Examples] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    members: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of content and order of the training examples. It does not depend on file names."""
        return self.train.content_hash


@without_garbage_collection()
def load_datasets(
    options: DataOptions, seed: int, stats: DataStats, may_stream: bool = False, searches_hubs: bool = True,
    needs: RecordNeeds | None = None, adds_kl_responses: bool = True,
) -> DataSets:  # fmt: skip
    """Load the training and evaluation examples that the options name.

    Args:
        options: data options.
        seed: seed for ``num_samples``, interleaving and the split.
        stats: statistics that dropped records are added to.
        may_stream: with ``streaming``, keep training records in their files (``StreamedExamples``).
        searches_hubs: false skips datasets that are not on this machine, since an unreachable hub takes a minute to
            fail.
        needs: requirements of the stage. Default: single responses.
        adds_kl_responses: give labelled training examples the response of an earlier record (KTO's KL term).

    Raises:
        UserError: with the problems of all datasets.
    """
    raise_if(check_data(options))
    needs = needs or RecordNeeds()
    loading = _Loading(options, seed, stats, searches_hubs, needs)
    is_streamed = may_stream and options.streaming
    train = loading.load_by_name("dataset", is_streamed)
    others = loading.load_by_name("eval_dataset")
    raise_if(loading.problems)

    adds_kl_responses = adds_kl_responses and needs.kind == "unpaired"
    merge = partial(_stream_sets, adds_kl_responses=adds_kl_responses) if is_streamed else _merge
    members = {} if is_streamed else train
    sets = DataSets(merge(list(train.values()), options, seed), notes=loading.notes, members={**others, **members})
    if options.val_size and train:
        trained, held_out = split_rows(len(sets.train), options.val_size, seed)
        whole = sets.train
        sets.eval[""] = whole.select(held_out).load_in_memory(stats)
        sets.train = whole.select(trained)
        sets.notes += [] if is_streamed else _repetition_notes(sets.train, sets.eval[""])
    elif options.eval_on_each_dataset:
        sets.eval.update(others)
    elif others:
        sets.eval[""] = _merge(list(others.values()), options, seed)
    on_empty_target = None if needs.kind in ("prompts", "any") else options.on_empty_target
    sets.train = sets.train.drop_unanswered(on_empty_target, stats)
    if not (is_streamed and options.val_size):  # held-out streamed examples were checked when they were loaded
        sets.eval = {name: examples.drop_unanswered(on_empty_target, stats) for name, examples in sets.eval.items()}
    if needs.kind == "unpaired":
        if adds_kl_responses and not is_streamed:
            sets.train = ListedExamples(with_other_answers(sets.train))
        sets.eval = {name: ListedExamples(with_other_answers(examples)) for name, examples in sets.eval.items()}
    return sets


def _repetition_notes(train: Sequence[Example], held_out: Sequence[Example]) -> Iterator[str]:
    """Return a note if examples that are held out for evaluation are also in the training set."""
    trained = {(example.source, example.number, example.tag) for example in train}
    number = sum((example.source, example.number, example.tag) in trained for example in held_out)
    if not number:
        return
    yield (
        f"{number} of {len(held_out)} examples that val_size holds out are also in the training set, because examples "
        "are repeated (mix_strategy or num_samples). Set eval_dataset for an independent evaluation."
    )


def _merge(sets: Sequence[Sequence[Example]], options: DataOptions, seed: int) -> ListedExamples:
    order = merged_order([len(examples) for examples in sets], options.mix_strategy, options.interleave_probs, seed)
    return ListedExamples([sets[index][row] for index, row in order])


def _stream_sets(
    sets: Sequence[ListedExamples | StreamedSet], options: DataOptions, seed: int, adds_kl_responses: bool
) -> StreamedExamples:
    import numpy

    order = merged_order([len(examples) for examples in sets], options.mix_strategy, options.interleave_probs, seed)
    flat = numpy.fromiter(chain.from_iterable(order), dtype=numpy.int64)
    return StreamedExamples(
        sets, flat.reshape(-1, 2), options.on_bad_record, options.on_empty_target, adds_kl_responses=adds_kl_responses
    )


class _Loading:
    """Loads datasets one by one and collects their problems."""

    def __init__(
        self, options: DataOptions, seed: int, stats: DataStats, searches_hubs: bool, needs: RecordNeeds
    ) -> None:
        import numpy

        self.options = options
        self.stats = stats
        self.searches_hubs = searches_hubs
        self.needs = needs
        self.generator = numpy.random.RandomState(seed)
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def load_by_name(self, option: str, is_streamed: bool = False) -> dict[str, Any]:
        """Return dataset name -> examples, in the order of the option. A path is named by its file.

        Args:
            option: "dataset" or "eval_dataset".
            is_streamed: keep records in their files (``StreamedSet``) where random access is possible.
        """
        found: dict[str, ListedExamples | StreamedSet] = {}
        names = getattr(self.options, option) or []
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            self.notes.append(f'The dataset "{name}" is listed {names.count(name)} times; its examples are repeated.')
        for source in self._sources(names, option):
            is_path = source.kind == "file" and not source.is_described
            name = Path(source.name).stem if is_path else source.name
            try:
                tables = _tables(source, self.options) if is_streamed else []
                examples = self._streamed_set(source, tables) if tables else self._examples(source)
                found[_unused_name(name, found)] = examples
            except UserError as error:
                self.problems += error.problems
        return found

    def _sources(self, names: Sequence[str], option_name: str) -> list[DataSource]:
        options = self.options
        if not names or (not self.searches_hubs and str(options.dataset_dir).startswith(REMOTE)):
            return []
        bare = {"formatting": options.formatting, "columns": options.columns, "tags": options.tags}
        try:
            found = find_sources(names, options.dataset_dir, partial(_remote_info, options), bare, option_name)
        except UserError as error:
            self.problems += error.problems
            return []
        for source in found:
            used = [f"columns.{name}" for name in source.further_columns] if ALL_COLUMNS in self.needs.columns else []
            if unused := [key for key in source.unused if key not in used]:
                self.notes.append(f"{source.where}: these keys have no effect: {', '.join(unused)}.")
        return [source for source in found if self.searches_hubs or source.kind in ("file", "records")]

    def _examples(self, source: DataSource) -> ListedExamples:
        records = self._selected_records(source)
        first = list(islice(records, NUM_DETECTION_RECORDS))
        if not first:
            raise UserError("the dataset contains no records.", where=_name_in_errors(source))
        peeked = self._objects(first)
        layout = layout_of(source, peeked, _name_in_errors(source), self._needs(source))
        with progress(f"Reading {source.name}"):
            examples = convert_records(chain(first, records), layout, self.stats, self.options.on_bad_record)
        if layout.awaited:
            raise UserError(missing_columns(layout, layout.awaited, peeked, _name_in_errors(source)))
        self._add_notes(source, layout)
        return ListedExamples(self._with_kto_labels(examples, source) if self.needs.kind == "unpaired" else examples)

    @staticmethod
    def _objects(located: Sequence[Located]) -> list[Values]:
        """Return the values of the records that are objects. Raises UserError if there are none."""
        found = [values for values, _, _ in located if not isinstance(values, NotAnObject)]
        if found:
            return found
        values, source, number = located[0]
        assert isinstance(values, NotAnObject)
        raise not_an_object_error(source, number, values)

    def _needs(self, source: DataSource) -> RecordNeeds:
        """Return the requirements for the records of a source, with the folders in which its images may be."""
        reader = self.needs.reader
        if reader is None:
            return self.needs
        beside = [path.parent for path in data_files(source.location)[:1]] if source.kind == "file" else []
        dataset_dir = self.options.dataset_dir
        local = (
            [Path(dataset_dir)] if isinstance(dataset_dir, str) and not dataset_dir.startswith((ONLINE, REMOTE)) else []
        )
        folders = tuple(dict.fromkeys((*reader.folders, *beside, *local)))
        return replace(self.needs, reader=replace(reader, folders=folders))

    def _with_kto_labels(self, examples: list[Example], source: DataSource) -> list[Example]:
        """Return labelled responses: as given, or one desirable and one undesirable example per pair."""
        if not any(example.chosen is not None for example in examples):
            return examples
        self.notes.append(
            f"{_name_in_errors(source)}: each pair becomes a desirable (chosen) and an undesirable (rejected) example."
        )
        return list(unpair(examples))

    def _streamed_set(self, source: DataSource, files: Sequence[Table]) -> ListedExamples | StreamedSet:
        chosen = _rows_of_split(source, sum(map(len, files)))
        if not chosen:
            return self._examples(source)  # raises an error
        if source.num_samples is not None:
            chosen = [chosen[at] for at in sample_rows(len(chosen), source.num_samples, self.generator)]
        found = StreamedSet(files, chosen[: self.options.max_samples], Layout("", {}))
        first = self._objects([found.locate(index) for index in range(min(NUM_DETECTION_RECORDS, len(found)))])
        layout = layout_of(source, first, _name_in_errors(source), self._needs(source))
        if self.needs.kind == "unpaired" and "chosen" in layout.columns:  # a record becomes two examples
            return self._examples(source)
        never = layout.awaited.difference(*(found.locate(index)[0] for index in range(min(SAMPLE_SIZE, len(found)))))
        layout.notes |= {f'none of the first {SAMPLE_SIZE:,} records has the column "{name}"': None for name in never}
        self._add_notes(source, layout)
        return replace(found, layout=layout)

    def _add_notes(self, source: DataSource, layout: Layout) -> None:
        """Add warnings about the format of a dataset."""
        self.notes += [f"{_name_in_errors(source)}: {note}." for note in layout.notes]
        for path in data_files(source.location) if source.kind == "file" and layout.format == "text" else ():
            if columns := csv_header(path):
                what = f"the first line looks like the header of a CSV file ({', '.join(columns)}), but a .txt file is "
                what += f"used as plain text. Rename it to {path.with_suffix('.csv').name} to read its columns."
                self.notes.append(f"{path}: {what}")

    def _selected_records(self, source: DataSource) -> Iterator[Located]:
        """Yield the records of a source after ``split``, ``num_samples`` and ``max_samples``."""
        records: Iterable[Located] = _records(source, self.options)
        if source.is_local and source.split != "train":
            there = list(records)
            records = [there[row] for row in _rows_of_split(source, len(there))]
        if source.num_samples is not None:
            there = list(records)
            records = (
                [there[row] for row in sample_rows(len(there), source.num_samples, self.generator)] if there else []
            )
        return islice(records, self.options.max_samples)


def _rows_of_split(source: DataSource, total: int) -> Sequence[int]:
    """Return the rows of local files that ``split`` selects, such as ``train[:10%]``, as in ``datasets.load_dataset``.

    Raises:
        UserError: for another split than ``train``: a file has no other.
    """
    if not source.is_local or source.split == "train":
        return range(total)
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute({"train": total})
    except (AssertionError, ValueError):
        what = f'the "split" of a local file must be train, or a part of it. Received: "{source.split}".'
        raise UserError(what, source.where, remedy='Set "split": "train[:90%]", for example.') from None
    return [row for part in parts for row in range(part.from_, part.to)]


def _unused_name(name: str, taken: Iterable[str]) -> str:
    """Return ``name``, with a number appended if it is in ``taken``."""
    candidates = chain([name], (f"{name}_{number}" for number in range(2, 10**6)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _name_in_errors(source: DataSource) -> str:
    """Return the name of a dataset in errors about its columns: its file, and its entry if it has one."""
    if source.kind != "file":
        return source.where
    return f"{source.location} ({source.where})" if source.is_described else str(source.location)


# --- kinds of sources -------------------------------------------------------------------------------------------------


def _records(source: DataSource, options: DataOptions) -> Iterator[Located]:
    if source.kind == "file":
        for path in data_files(source.location):
            records = read_records(path, refuses_others=False)
            yield from ((values, str(path), number) for number, values in enumerate(records, start=1))
        return
    label = source.name if source.kind == "records" else str(source.location)
    found = source.location if source.kind == "records" else _REMOTE[source.kind](source, options)
    for number, values in enumerate(found, start=1):
        yield values if isinstance(values, Mapping) else NotAnObject(values), label, number


def _tables(source: DataSource, options: DataOptions) -> Sequence[Table]:
    """Return the files of a source for random access; empty if its records are in memory."""
    if source.kind == "file":
        files = data_files(source.location)
        return [open_table(path) for path in track(files, f"Indexing {source.name}", "files")]
    if source.kind in ("hf_hub", "ms_hub"):
        return [DatasetTable(Path(source.location), _REMOTE[source.kind](source, options))]
    if source.kind == "cloud":
        raise UserError(
            f'"streaming" requires local files or a dataset on the Hub, but "{source.location}" is in cloud storage.',
            where=source.where,
            remedy="Copy the file to this machine and set file_name to it, or remove streaming.",
        )
    return []


def _hugging_face(source: DataSource, options: DataOptions) -> Iterable[Values]:
    """Load a dataset of the Hugging Face Hub, or of its cache."""
    import datasets

    try:
        loaded: Iterable[Values] = datasets.load_dataset(
            source.location, name=source.subset, data_dir=source.folder, split=source.split,
            cache_dir=_of_hub(options, "cache_dir"), token=_of_hub(options, "hf_hub_token"),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(_unreachable(source, error)) from error
    return loaded


def _modelscope(source: DataSource, options: DataOptions) -> Iterable[Values]:
    """Load a dataset of ModelScope, or of its cache."""
    try:
        from modelscope import MsDataset
    except ImportError:
        raise MissingExtraError("modelscope", f'the ModelScope dataset "{source.location}"', "modelscope") from None
    try:
        loaded = MsDataset.load(
            source.location, subset_name=source.subset, data_dir=source.folder, split=source.split,
            cache_dir=_of_hub(options, "cache_dir"), token=_of_hub(options, "ms_hub_token"),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(_unreachable(source, error)) from error
    records: Iterable[Values] = loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded
    return records


def _of_hub(options: DataOptions, name: str) -> str | None:
    """Return the value of a hub option, or None for a Python caller that passes data options only."""
    value: str | None = getattr(options, name, None)
    return value


def _unreachable(source: DataSource, error: Exception) -> Problem:
    hub = {"hf_hub": " from the Hugging Face Hub", "ms_hub": " from ModelScope"}.get(source.kind, "")
    return Problem(
        f'cannot load the dataset "{source.location}"{hub}: {first_line(error, 200)}',
        where=source.where,
        remedy="Check the name and the network connection. Offline, only datasets downloaded earlier are available.",
    )


def _remote_info(options: DataOptions, repository: str) -> Path:
    """Download the dataset_info.json of a Hugging Face Hub repository and return its local path."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(
            hf_hub_download(
                repository, INFO_NAME, repo_type="dataset",
                cache_dir=_of_hub(options, "cache_dir"), token=_of_hub(options, "hf_hub_token"),
            )
        )  # fmt: skip
    except (OSError, ValueError) as error:
        what = f'cannot load "{INFO_NAME}" from the Hub repository "{repository}": {first_line(error, 200)}'
        raise UserError(what, where="dataset_dir", remedy="Check the name and the network connection.") from error


def _cloud(source: DataSource, options: DataOptions) -> Iterator[Values]:
    """Yield the records of files in cloud storage (s3://bucket/folder/file.jsonl), read from a local copy."""
    import fsspec  # type: ignore[import-untyped]

    address = str(source.location)
    for part in address.split("::"):  # fsspec chains stores: simplecache::file:///folder/file.jsonl
        protocol, _, path = part.rpartition("://")
        if protocol in ("", "file", "local"):
            check_below_roots(Path(path))
    with TemporaryDirectory() as folder:
        try:
            store, path = fsspec.core.url_to_fs(address)
            store.get(path, folder, recursive=True)
        except ImportError as error:
            library = getattr(error.__cause__, "name", None) or "fsspec"  # the library for this kind of store
            raise MissingExtraError(library, f'the dataset "{address}"') from None
        except (OSError, ValueError) as error:
            raise UserError(_unreachable(source, error)) from error
        try:
            for file in data_files(Path(folder) / Path(path).name, is_download=True):
                yield from read_records(file, refuses_others=False)
        except UserError as error:
            raise UserError(replace(p, where=p.where.replace(folder, address)) for p in error.problems) from None


_REMOTE: Mapping[str, Callable[[DataSource, Any], Iterable[Values]]] = {
    "hf_hub": _hugging_face, "ms_hub": _modelscope, "cloud": _cloud,
}  # fmt: skip
