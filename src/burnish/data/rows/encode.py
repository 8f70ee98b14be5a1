"""Encode examples into rows, in batches, with a cache on disk.

The cache key is a hash of everything that the rows depend on: the examples, template, tokenizer and options. The cache
is in $BURNISH_CACHE or ~/.cache/burnish. An entry is a folder written under a temporary name and renamed when it
is complete. If several processes need the same rows, one encodes and the others wait. Statistics of dropped and
truncated examples are stored with the rows.

``tokenized_path`` keeps such a folder at a location that the user chooses. Rows of a ``tokenized_path`` that were made
from other data or settings are refused with an error that lists the differences.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EACCES
from hashlib import blake2b
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any, TypeAlias

import burnish
from burnish.config.bounds import LONG_RECORD
from burnish.config.errors import Problem, UserError
from burnish.data.length import num_characters
from burnish.data.options import DataOptions
from burnish.data.rows.store import MANIFEST, Rows, RowWriter, open_rows, read_rows_manifest
from burnish.data.sets.examples import content_hash
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Row
from burnish.utils.collection import without_garbage_collection
from burnish.utils.files import as_file_name, cache_home, check_folder_below_roots, open_lock, report_full_disk
from burnish.utils.work import progress

Encode: TypeAlias = "Callable[[Sequence[Any], DataStats], Sequence[Row | None]]"
"""Encodes a batch of examples. Returns a row per example, or None for an example without a row, and adds reasons to the
stats."""
Encoded: TypeAlias = "tuple[Sequence[Row | None], DataStats]"
"""A row per example (None for an example without a row), and statistics of what was dropped or truncated."""

BATCH_SIZE = 1000
"""Default number of examples encoded together: enough for all threads of a tokenizer."""
BATCH_CHARACTERS = 8_000_000
"""Maximum number of characters encoded together, unless a single example has more: it bounds the tokenizer's memory."""
_PROCESS_START = time.time()
CACHE_REMEDY = "Set the environment variable BURNISH_CACHE to a writable folder."


def encode_rows(
    examples: Sequence[Any], encode: Encode, stats: DataStats, *, fingerprint: str | Mapping[str, Any],
    options: DataOptions | None = None, name: str = "train", data: str | None = None, places: str | None = None,
    title: str | None = None,
) -> Rows:  # fmt: skip
    """Return the rows of ``examples``, from the cache if they were encoded before.

    Args:
        examples: examples to encode.
        encode: function that encodes a batch of examples.
        stats: statistics that dropped and truncated examples are added to.
        fingerprint: everything that the rows depend on besides the examples: template, tokenizer, options. With a
            mapping, the error about a ``tokenized_path`` made with other settings can name the differences.
        options: data options; None keeps the rows in memory.
        name: name of the dataset, used as its folder in ``tokenized_path``.
        data: ``content_hash`` of the examples, if known.
        places: identifies their files and record numbers, if known.
        title: title of the progress bar. Default: derived from the examples.

    Raises:
        UserError: if ``tokenized_path`` holds rows that were made from other data or settings.
    """
    if options is None:
        writer = RowWriter()
        _encode_all(examples, encode, stats, writer, BATCH_SIZE, 1, title)
        return writer.in_memory()
    made_from = _encoding_inputs(data or content_hash(examples), fingerprint)
    if places is None:  # part of the key, since the statistics name records by file and number
        places = "\n".join(f"{example.source}:{example.number}" for example in examples)
    folder = _folder(options, name, made_from, places)
    with folder_lock(folder, "Set a different tokenized_path." if options.tokenized_path else CACHE_REMEDY):
        if _is_stale(folder, options):
            _encode_into(folder, examples, encode, made_from, options, title)
        _refuse_others(folder, made_from, options, has_data=bool(examples))
        stats.merge(DataStats.from_json(read_rows_manifest(folder)["stats"]))
        return open_rows(folder, is_cache=options.tokenized_path is None)


def _encode_into(
    folder: Path, examples: Sequence[Any], encode: Encode, made_from: Mapping[str, Any], options: DataOptions,
    title: str | None,
) -> None:  # fmt: skip
    """Encode into a temporary folder, and rename it to ``folder`` when it is complete."""
    stats = DataStats()
    size, workers = options.preprocessing_batch_size, _num_workers(options, len(examples))
    with atomic_replace(folder) as partial:
        writer = RowWriter(partial)
        _encode_all(examples, encode, stats, writer, size, workers, title)
        writer.close(made_from=made_from, stats=stats.to_json())


# --- cache keys and folders -------------------------------------------------------------------------------------------


_ENCODING = 2
"""Version of the encoding: increased by a change of the code after which the same data and settings give other rows."""


def _key(data: Any) -> str:
    return blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


def _encoding_inputs(data: str, fingerprint: str | Mapping[str, Any]) -> dict[str, Any]:
    settings = {"settings": fingerprint} if isinstance(fingerprint, str) else dict(fingerprint)
    made_from = {"burnish": burnish.__version__, "encoding": _ENCODING, "data": data, **settings}
    return dict(json.loads(json.dumps(made_from, default=str)))  # the form in which it is read back and compared


def _folder(options: DataOptions, name: str, made_from: Mapping[str, Any], places: str) -> Path:
    if options.tokenized_path is None:
        return cache_home() / "rows" / _key([made_from, places])
    root = Path(options.tokenized_path)
    if root.is_file() or (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        what = f'Expected tokenized_path to be a folder written by burnish or a new folder. Received: "{root}".'
        raise UserError(
            what, remedy="Set it to a new folder, where the tokenized dataset is saved.", option="tokenized_path"
        )
    check_folder_below_roots(root)
    return root / as_file_name(name)


def _is_stale(folder: Path, options: DataOptions) -> bool:
    """Return whether the rows must be encoded: there are none, or ``overwrite_cache`` is set.

    With several processes, only one of them overwrites: rows newer than this process were written by another one.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file() or (options.tokenized_path is None and not is_whole(folder)):
        return True
    is_mine = (os.environ.get("WORLD_SIZE") or "1") == "1" or manifest.stat().st_mtime < _PROCESS_START
    return options.overwrite_cache and is_mine


def is_whole(folder: Path) -> bool:
    try:
        open_rows(folder)
    except UserError:
        return False
    return True


def _refuse_others(folder: Path, made_from: Mapping[str, Any], options: DataOptions, has_data: bool) -> None:
    """Raise UserError if ``tokenized_path`` was made from other settings, or, for a run with data, from other data."""
    if options.tokenized_path is None:
        return
    before = read_rows_manifest(folder)["made_from"]
    keys = dict.fromkeys([*before, *made_from])
    changed = [key for key in keys if before.get(key) != made_from.get(key) and (has_data or key != "data")]
    if changed:
        differences = "; ".join(_difference(key, before.get(key), made_from.get(key)) for key in changed)
        raise UserError(
            f"the tokenized dataset was created with other settings: {differences}.",
            where=f"tokenized_path {folder}",
            remedy="Set overwrite_cache: true to tokenize again, or set a different tokenized_path.",
        )


def _difference(key: str, before: Any, now: Any) -> str:
    values = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
    if max(map(len, values)) > 60 or any(isinstance(v, str) and len(v) >= 32 for v in (before, now)):
        return f"{key} differs"
    return f"{key} changed from {values[0]} to {values[1]}"


@contextmanager
def folder_lock(folder: Path, remedy: str = CACHE_REMEDY) -> Iterator[None]:
    """Hold an exclusive lock for a folder; other processes wait. The lock is released when the process ends."""
    create_row_folder(folder.parent, remedy)
    is_full = report_full_disk(folder.parent, f"Free some space. {remedy}")
    with is_full, open_lock(folder.parent / f".{folder.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create_row_folder(folder: Path, remedy: str = CACHE_REMEDY) -> None:
    """Create a folder for rows. Raises UserError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise UserError(f'cannot write tokenized data to "{folder}": {error.strerror}.', remedy=remedy) from error


@contextmanager
def atomic_replace(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` if the ``with`` block succeeds, and is removed if it fails."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process; the lock keeps other processes out
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- encoding ---------------------------------------------------------------------------------------------------------


def _encode_all(
    examples: Sequence[Any], encode: Encode, stats: DataStats, writer: RowWriter, batch_size: int, num_workers: int,
    title: str | None,
) -> None:  # fmt: skip
    # With a title, the examples are records of a script, which are read when they are encoded.
    sizes = array("q", map(num_characters, examples)) if title is None else array("q", [0]) * len(examples)
    spans = batch_spans(sizes, batch_size)
    with without_garbage_collection(), progress(title or _title(examples, sizes), len(examples), "records") as advance:
        for span, (rows, counted) in zip(spans, _batches(examples, encode, spans, num_workers), strict=True):
            stats.merge(counted)
            for origin, row in zip(span, rows, strict=True):
                if row is not None:
                    writer.add(origin, row)
            advance(len(rows))


def batch_spans(sizes: Sequence[int], batch_size: int = BATCH_SIZE) -> list[range]:
    """Divide examples into batches of at most ``batch_size`` examples and ``BATCH_CHARACTERS`` characters.

    Args:
        sizes: number of characters of each example.
    """
    spans, begin, total = [], 0, 0
    for at, size in enumerate(sizes):
        if at > begin and (at - begin == batch_size or total + size > BATCH_CHARACTERS):
            spans.append(range(begin, at))
            begin, total = at, 0
        total += size
    return [*spans, range(begin, len(sizes))] if sizes else []


def _title(examples: Sequence[Example], sizes: Sequence[int]) -> str:
    """Return the title of the progress bar. It names the longest record if that one is very long."""
    longest = max(sizes, default=0)
    if longest < LONG_RECORD:
        return "Tokenizing"
    place = examples[sizes.index(longest)].place
    return f"Tokenizing (longest: {place}, {longest / 1e6:.1f} million characters)"


def _batches(examples: Sequence[Any], encode: Encode, spans: Sequence[range], num_workers: int) -> Iterator[Encoded]:
    """Yield rows and stats of each batch, in order."""

    def encoded(span: range) -> Encoded | tuple[Problem, ...]:
        """Encode one batch, or return its problems, since an exception would lose them between processes."""
        counted = DataStats()
        try:
            return encode(examples[span.start : span.stop], counted), counted
        except UserError as error:
            return error.problems

    for result in map(encoded, spans) if num_workers <= 1 else _in_processes(encoded, spans, num_workers):
        if isinstance(result[0], Problem):
            raise UserError(problem for problem in result if isinstance(problem, Problem))
        yield result  # type: ignore[misc]


def _in_processes(encoded: Callable[[range], Any], spans: Sequence[range], num_workers: int) -> Iterator[Any]:
    """Yield ``encoded(span)`` for each span, in order, computed by forked processes that inherit the examples.

    Process k encodes the batches whose number is k modulo ``num_workers``. It blocks until its last result was read.
    """
    context = get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_workers)]
    processes = [
        context.Process(target=_send_all, args=(encoded, spans[k::num_workers], pipes, k), daemon=True)
        for k in range(num_workers)
    ]
    try:
        with without_tokenizer_threads():
            for process in processes:
                process.start()
        for _, sender in pipes:
            sender.close()
        for number in range(len(spans)):
            yield pipes[number % num_workers][0].recv()
    except EOFError:
        what = "a tokenization process ended unexpectedly. Its error is printed above, or it ran out of memory."
        raise UserError(what, remedy="Set preprocessing_num_workers to 1.") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _send_all(encoded: Callable[[range], Any], spans: Sequence[range], pipes: Sequence[Any], mine: int) -> None:
    """Body of an encoding process. It closes the other processes' pipe ends, so that a dead process is noticed."""
    for number, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if number != mine:
            sender.close()
    for span in spans:
        pipes[mine][1].send(encoded(span))


def _num_workers(options: DataOptions, num_examples: int) -> int:
    """Return the number of encoding processes: as configured, but at most one per core or batch, and 1 without fork and
    on macOS, whose system libraries may crash after a fork."""
    if "fork" not in get_all_start_methods() or sys.platform == "darwin":
        return 1
    batch_size: int = options.preprocessing_batch_size
    num_batches = -(-num_examples // batch_size)
    num_workers: int = options.preprocessing_num_workers or 1
    return max(1, min(num_workers, os.cpu_count() or 1, num_batches))


@contextmanager
def without_tokenizer_threads() -> Iterator[None]:
    """Disable the tokenizer's threads in the ``with`` block: the processes are parallel already, and threads do not
    survive a fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
