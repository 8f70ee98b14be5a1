"""Examples -> rows, once: encoded in batches, kept on disk, found again by what they depend on.

In: examples, a function that encodes a batch of them, and what else the rows depend on (``fingerprint``). Out:
``Rows``. What was dropped or cut on the way is kept with the rows, and counted again when they are found.

The cache is $BURNISH_CACHE or ~/.cache/burnish. An entry is a folder, written beside its place and renamed when it is
whole; of several processes that want the same rows one encodes, and the others wait for it. ``tokenized_path`` names
such a folder for good.

Refuses rows from a ``tokenized_path`` that other data or settings made, and names what differs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from errno import EACCES
from hashlib import blake2b
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any, TypeAlias

import burnish
from burnish.core.errors import Problem, UserError
from burnish.core.types import Example, FlatRow, Row
from burnish.data.examples import content_hash
from burnish.data.row_store import MANIFEST, Rows, RowWriter, open_rows, read_manifest
from burnish.data.tally import Tally

Encode: TypeAlias = "Callable[[Sequence[Example], Tally], Sequence[Row | FlatRow | None]]"
"""A batch of examples -> a row for each, None where it gives none; reasons go into the tally."""

BATCH_SIZE = 1000
"""Examples encoded together where no option says otherwise: enough for all threads of a tokenizer."""
_STARTED = time.time()


def prepare(
    examples: Sequence[Example], encode: Encode, tally: Tally, *, fingerprint: str | Mapping[str, Any],
    options: Any = None, name: str = "train", progress: Callable[[int, int], None] | None = None,
    data: str | None = None,
) -> Rows:  # fmt: skip
    """The rows of ``examples``: found if they were encoded before, encoded and kept otherwise.

    Args:
        fingerprint: what the rows depend on beside the examples: template, tokenizer, options. A mapping can say what
            differs where rows of a ``tokenized_path`` are refused.
        options: ``DataOptions``; None keeps the rows in memory.
        name: of the set, for its folder in ``tokenized_path``.
        progress: called with (examples done, examples in all) after each batch.
        data: the ``content_hash`` of the examples, where it is known.

    Raises:
        UserError: if ``tokenized_path`` holds rows that were made otherwise.
    """
    if options is None:
        writer = RowWriter()
        _encode_all(examples, encode, tally, writer, BATCH_SIZE, 1, progress)
        return writer.in_memory()
    made_from = _made_from(data or content_hash(examples), fingerprint)
    folder = _folder(options, name, made_from, examples)
    with _alone(folder):
        if _is_stale(folder, options):
            _make(folder, examples, encode, made_from, options, progress)
        _refuse_others(folder, made_from, options, has_data=bool(examples))
        tally.merge(Tally.from_json(read_manifest(folder)["tally"]))
        return open_rows(folder)


def _make(
    folder: Path, examples: Sequence[Example], encode: Encode, made_from: Mapping[str, Any], options: Any,
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Encode, and put the rows in their place when they are whole."""
    tally = Tally()
    size, workers = options.preprocessing_batch_size, _num_workers(options, len(examples))
    with replacing(folder) as partial:
        writer = RowWriter(partial)
        _encode_all(examples, encode, tally, writer, size, workers, progress)
        writer.close(made_from=made_from, tally=tally.to_json())


# --- what rows depend on, and where they are kept ---------------------------------------------------------------------


def cache_home() -> Path:
    """The folder of everything that can be made again."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")


def place_ahead(examples: Sequence[Example], fingerprint: Mapping[str, Any], options: Any) -> Path:
    """The folder of rows that are encoded while the loop runs; an old one is emptied where the options ask for it."""
    key = blake2b(
        json.dumps(_made_from(content_hash(examples), fingerprint), sort_keys=True).encode(), digest_size=16
    ).hexdigest()
    folder = cache_home() / "ahead" / key
    if options.overwrite_cache:
        with _alone(folder):
            _remove_segments(folder)
    return folder


def _remove_segments(folder: Path) -> None:
    """Of several processes the first removes what is there; segments that are younger than this process are theirs."""
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    for segment in folder.glob("segment-*"):
        if is_alone or segment.stat().st_mtime < _STARTED:
            shutil.rmtree(segment)


def _made_from(data: str, fingerprint: str | Mapping[str, Any]) -> dict[str, Any]:
    settings = {"settings": fingerprint} if isinstance(fingerprint, str) else dict(fingerprint)
    made_from = {"burnish": burnish.__version__, "data": data, **settings}
    return dict(json.loads(json.dumps(made_from, default=str)))  # as it will be read back, to be compared with that


def _folder(options: Any, name: str, made_from: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    if options.tokenized_path is None:
        # The places too: what is counted is named by file and record.
        places = "\n".join(f"{example.source}:{example.number}" for example in examples)
        key = blake2b(json.dumps([made_from, places], sort_keys=True).encode(), digest_size=16).hexdigest()
        return cache_home() / "rows" / key
    root = Path(options.tokenized_path)
    if root.is_file() or (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        raise UserError(
            Problem(
                f'tokenized_path must be a folder of rows that burnish wrote, or not exist. Received: "{root}".',
                remedy="Name another folder; the rows are encoded once and kept there.",
            )
        )
    return root / (name or "eval").replace("/", "_")


def _is_stale(folder: Path, options: Any) -> bool:
    """Whether the rows must be encoded: there are none, or they are to be overwritten.

    Of several processes one overwrites: rows that are younger than this process are another one's.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file() or (options.tokenized_path is None and not _is_whole(folder)):
        return True
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return bool(options.overwrite_cache and (is_alone or manifest.stat().st_mtime < _STARTED))


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except UserError:
        return False
    return True


def _refuse_others(folder: Path, made_from: Mapping[str, Any], options: Any, has_data: bool) -> None:
    """Raises where the rows of a ``tokenized_path`` were made from something else; without data, the rest counts."""
    if options.tokenized_path is None:
        return
    before = read_manifest(folder)["made_from"]
    keys = dict.fromkeys([*before, *made_from])
    changed = [key for key in keys if before.get(key) != made_from.get(key) and (has_data or key != "data")]
    if changed:
        differences = "; ".join(_difference(key, before.get(key), made_from.get(key)) for key in changed)
        raise UserError(
            Problem(
                f"the encoded rows were made otherwise: {differences}.",
                where=f"tokenized_path {folder}",
                remedy="Set overwrite_cache: true to encode again, or name another tokenized_path.",
            )
        )


def _difference(key: str, before: Any, now: Any) -> str:
    values = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
    if max(map(len, values)) > 60 or any(isinstance(v, str) and len(v) >= 32 for v in (before, now)):
        return f"{key} differs"
    return f"{key} was {values[0]}, is {values[1]}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the place of a folder; who comes later waits. The lock goes with the process, however that ends."""
    begin_place(folder.parent)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin_place(folder: Path) -> None:
    """Make a folder that rows can be kept in. Raises UserError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise UserError(
            Problem(
                f'encoded rows cannot be kept in "{folder}": {error.strerror}.',
                remedy="Set the environment variable BURNISH_CACHE to a folder that can be written.",
            )
        ) from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that takes its place if the block ends well, and is gone if it does not."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: nobody else writes here
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
    examples: Sequence[Example], encode: Encode, tally: Tally, writer: RowWriter, batch_size: int, num_workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    starts = range(0, len(examples), batch_size)
    for start, (rows, counted) in zip(starts, _batches(examples, encode, starts, num_workers), strict=True):
        tally.merge(counted)
        for origin, row in enumerate(rows, start=start):
            if row is not None:
                writer.add(origin, row)
        if progress is not None:
            progress(min(start + batch_size, len(examples)), len(examples))


_job: tuple[Sequence[Example], Encode, int] | None = None
"""What the encoding processes inherit: examples, encode, batch size. Sent once by fork, instead of with each batch."""


def _batches(
    examples: Sequence[Example], encode: Encode, starts: range, num_workers: int
) -> Iterator[tuple[Sequence[Row | FlatRow | None], Tally]]:
    """Rows and tally of each batch, in order."""
    global _job
    _job = (examples, encode, starts.step)
    try:
        if num_workers <= 1:
            yield from (_taken(_encode_batch(start)) for start in starts)
            return
        with without_tokenizer_threads(), ProcessPoolExecutor(num_workers, get_context("fork")) as pool:
            yield from map(_taken, pool.map(_encode_batch, starts))
    finally:
        _job = None


def _encode_batch(start: int) -> tuple[Sequence[Row | FlatRow | None], Tally] | tuple[Problem, ...]:
    """The rows of one batch, or what is wrong with it: an exception would lose its problems between processes."""
    assert _job is not None
    examples, encode, size = _job
    counted = Tally()
    try:
        return encode(examples[start : start + size], counted), counted
    except UserError as error:
        return error.problems


def _taken(
    result: tuple[Sequence[Row | FlatRow | None], Tally] | tuple[Problem, ...],
) -> tuple[Sequence[Row | FlatRow | None], Tally]:
    if isinstance(result[0], Problem):
        raise UserError(problem for problem in result if isinstance(problem, Problem))
    rows, counted = result
    assert isinstance(counted, Tally)
    return rows, counted


def _num_workers(options: Any, num_examples: int) -> int:
    """As many as asked for, if there is a core and a batch for each, and processes can be forked."""
    if "fork" not in get_all_start_methods():
        return 1
    batch_size: int = options.preprocessing_batch_size
    num_batches = -(-num_examples // batch_size)
    wanted: int = options.preprocessing_num_workers or 1
    return max(1, min(wanted, os.cpu_count() or 1, num_batches))


@contextmanager
def without_tokenizer_threads() -> Iterator[None]:
    """Each process encodes with one thread: the processes are the threads, and a forked pool of threads is dead."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
