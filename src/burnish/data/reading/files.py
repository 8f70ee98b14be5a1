"""Read records from the files of a dataset: one reader per file type.

The input is a file of a supported type, or a folder of files of one type. Records (column -> value) are yielded in file
order, one at a time. Unknown file types, Python loading scripts, folders of mixed types and broken files are refused
with an error that names the file and line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from burnish.config.errors import Problem, UserError, first_line
from burnish.config.options import raise_if
from burnish.data.reading.json_files import (
    BOM,
    NotAnObject,
    Values,
    byte_lines,
    count,
    decode_text,
    json_places,
    not_an_object_error,
    read_json_records,
    text_lines,
)
from burnish.utils.files import check_below_roots, special_file_kind
from burnish.utils.json_files import read_object

_CSV_FIELD = 2**31 - 1
_IGNORED_FILE_PREFIXES = (".", "LICENSE", "README", "dataset_info", "dataset_dict")
"""Name prefixes of files in a dataset folder that contain no data."""


def read_records(path: Path, refuses_others: bool = True) -> Iterator[Values]:
    """Yield the records of one file, in order.

    Args:
        path: the file.
        refuses_others: refuse records that are not objects. Otherwise each is a ``NotAnObject``.

    Raises:
        UserError: if the content does not match the file type; names the line or the byte.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(unknown_type(path))
    return _objects(path, reader(path)) if refuses_others else reader(path)


def _objects(path: Path, records: Iterator[Values]) -> Iterator[Values]:
    for number, values in enumerate(records, start=1):
        if isinstance(values, NotAnObject):
            raise not_an_object_error(path, number, values)
        yield values


def line_of(path: Path, number: int) -> int | None:
    """Return the line on which record ``number`` (from 1) begins, or None for a format without lines.

    The file is read again, so that line numbers cost nothing unless an error is reported.
    """
    locate = _LOCATORS.get(path.suffix.lower())
    if locate is None or not path.is_file():
        return None
    return next(islice(locate(path), number - 1, None), None)


def data_files(path: Path, is_download: bool = False) -> list[Path]:
    """Return the files of a dataset: ``path`` itself, or the files of that folder in the order of their names.

    Subfolders, hidden files and descriptions (README, LICENSE, dataset_info.json) are skipped.

    Args:
        path: file or folder.
        is_download: the files were downloaded by burnish, so they may be outside the allowed folders.
    Raises:
        UserError: if there are no files, their types differ or are not supported, or access to them is not allowed.
    """
    files = _files_of(path)
    for file in () if is_download else files:
        check_below_roots(file)
    return files


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [_checked_data_file(path)]
    if (path / "state.json").is_file() and any(path.glob("*.arrow")):  # written by datasets' save_to_disk
        return _saved_files(path)
    inside = sorted(
        file for file in path.iterdir() if file.is_file() and not file.name.startswith(_IGNORED_FILE_PREFIXES)
    )
    if not inside:
        folders = ", ".join(sorted(f.name for f in path.iterdir() if f.is_dir()))
        remedy = f"Use one of its subfolders: {folders}." if folders else f"Supported types: {_types()}."
        raise UserError(f'the folder "{path}" contains no data files.', remedy=remedy)
    files = [_checked_data_file(file) for file in inside]
    suffixes = [file.suffix.lower() for file in files]
    if len({READERS[suffix] for suffix in suffixes}) > 1:
        listed = ", ".join(f"{suffix} ({suffixes.count(suffix)})" for suffix in sorted(set(suffixes)))
        what = f'expected all files in the folder "{path}" to have the same type. Received: {listed}.'
        raise UserError(what, remedy="Use a separate folder for each type, or the path of one file.")
    return files


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a dataset saved by the datasets library, without the cache files that its ``map`` adds."""
    listed = read_object(folder / "state.json", needs=[("_data_files", list)])["_data_files"]
    files = [folder / Path(str(each.get("filename"))).name for each in listed if isinstance(each, dict)]
    raise_if([missing_file(file) for file in files if not file.is_file()])
    return files


def missing_file(path: Path, where: str = "") -> Problem:
    """Return the problem that ``path`` does not exist, with its absolute path and files of similar names."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return Problem(f'"{path.name}" does not exist: there is no folder "{folder}".', where=where)
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith(_IGNORED_FILE_PREFIXES))
    near = get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:5]
    remedy = f"The folder contains: {', '.join(near)}." if near else "The folder is empty."
    return Problem(f'the file "{path.absolute()}" does not exist.', where=where, remedy=remedy)


def unknown_type(path: Path) -> Problem:
    """Return the problem that the type of ``path`` is not supported."""
    if path.suffix == ".py":
        return loading_script(path)
    kind = f'file type "{path.suffix}"' if path.suffix else "file without an extension"
    return Problem(f"unsupported {kind}: {path}.", remedy=f"Supported types: {_types()}.")


def loading_script(path: Path | str, where: str = "") -> Problem:
    """Return the problem that ``path`` is code, which would have to be executed to get its records."""
    return Problem(
        f'"{path}" is a Python loading script. burnish does not run code from datasets.',
        where,
        remedy=f"Run the script yourself and save its records as one of {_types()}.",
    )


def _checked_data_file(path: Path) -> Path:
    if kind := special_file_kind(path):
        raise UserError(f'Expected a regular file. "{path}" is {kind}.', remedy="Copy its records to a file.")
    if path.suffix.lower() not in READERS:
        raise UserError(unknown_type(path))
    return path


def _types() -> str:
    return ", ".join(READERS)


# --- other types ------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> Iterator[Values]:
    """Yield a record per line, in the column "text". Empty lines are records too, as in the text loader of datasets."""
    _refuse_json(path)
    with path.open("rb") as file:
        yield from ({"text": decode_text(path, line).rstrip("\r\n")} for line in byte_lines(file))


_CSV_COLUMNS = {"instruction", "output", "prompt", "response", "completion", "messages", "question", "answer"}


def csv_header(path: Path) -> list[str]:
    """Return the columns of a text file whose first line looks like the header of a CSV file, else an empty list."""
    if path.suffix.lower() != ".txt":
        return []
    with path.open("rb") as file:
        first = next(byte_lines(islice(file, 1)), b"")
    names = [name.strip().strip('"') for name in first.decode("utf-8", "replace").split(",")]
    is_header = len(names) > 1 and all(name.isidentifier() for name in names)
    return names if is_header and _CSV_COLUMNS & {name.lower() for name in names} else []


def _refuse_json(path: Path) -> None:
    """Raise UserError if the first lines of a text file are JSON: its braces and keys would be trained as text."""
    with path.open("rb") as file:
        lines = [line.strip() for line in (line.removeprefix(BOM) for line in islice(file, 10)) if line.strip()]
    if not lines:
        return
    is_json = _begins_json(lines)
    if is_json or 2 * sum(map(_is_record, lines)) > len(lines):
        name = path.with_suffix(".json" if is_json else ".jsonl").name
        raise UserError(
            "this .txt file contains JSON, which would be used as plain text.",
            where=str(path),
            remedy=f"Rename it to {name} to read its records.",
        )


def _is_record(line: bytes) -> bool:
    """Return whether a line is a JSON object, or a list that contains more than numbers."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, str | list | dict) for v in value))


def _begins_json(lines: Sequence[bytes]) -> bool:
    """Return whether stripped lines begin a list of objects, or an object over several lines."""
    begin = b"".join(lines[:2])
    return (begin[:1] == b"[" and begin[1:].lstrip()[:1] == b"{") or (lines[0] == b"{" and begin[1:2] in (b'"', b"}"))


def read_csv(path: Path) -> Iterator[Values]:
    """Yield a record per row below the header. Values are not converted: "007" remains "007"."""
    rows = _csv_rows(path)
    _, header = next(rows, (0, []))
    yield from (dict(zip(header, row, strict=True)) for _, row in rows)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and values of the header and of each non-blank row. A quoted value may contain line breaks."""
    csv.field_size_limit(_CSV_FIELD)  # the default, 128 KiB, is less than a long document; the setting is global
    num_columns = 0
    with path.open("rb") as file:
        reader = csv.reader((decode_text(path, line) for line in byte_lines(file)), strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise UserError(f"invalid CSV: {error}.", where=f"{path}, line {line}") from None
            if row is None:
                return
            if row:
                if not num_columns and (twice := next((name for name in row if name and row.count(name) > 1), "")):
                    raise UserError(f'duplicate column "{twice}" in the header.', where=f"{path}, line {line}")
                num_columns = num_columns or len(row)
                if len(row) != num_columns:
                    what = f"the row has {count(len(row), 'value')}, but the header has {count(num_columns, 'column')}."
                    remedy = 'Quote values that contain commas or line breaks: "a, b".'
                    raise UserError(what, where=f"{path}, line {line}", remedy=remedy)
                yield line, row


def read_parquet(path: Path) -> Iterator[Values]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    return _rows_of(path, "Parquet", lambda: pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000))


def read_arrow(path: Path) -> Iterator[Values]:
    """Yield the rows of an Arrow file."""
    return _rows_of(path, "Arrow", lambda: arrow_table(path).to_batches())


def _rows_of(path: Path, kind: str, batches: Callable[[], Iterable[Any]]) -> Iterator[Values]:
    import pyarrow.lib  # type: ignore[import-untyped, unused-ignore]

    try:
        for batch in batches():
            batch.validate(full=True)  # pyarrow would follow offsets that point outside the file
            yield from batch.to_pylist()
    except (pyarrow.lib.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(_invalid_file(path, kind, error)) from None


def arrow_table(path: Path) -> Any:
    """Return an Arrow file as a memory-mapped table; it may have the stream format (datasets) or the file format.

    Raises:
        UserError: if the file has neither format.
    """
    import pyarrow.ipc  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.lib

    source = pyarrow.memory_map(str(path))  # the table keeps it open
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.lib.ArrowInvalid:
        try:
            return pyarrow.ipc.open_file(source).read_all()
        except pyarrow.lib.ArrowInvalid as error:
            raise UserError(_invalid_file(path, "Arrow", error)) from None


def _invalid_file(path: Path, kind: str, error: Exception) -> Problem:
    first = first_line(error, 200).rstrip(".")
    return Problem(
        f"invalid or incomplete {kind} file: {first}.",
        where=str(path),
        remedy="Check that the file was copied completely.",
    )


READERS: dict[str, Callable[[Path], Iterator[Values]]] = {
    ".json": read_json_records, ".jsonl": read_json_records, ".csv": read_csv, ".parquet": read_parquet,
    ".arrow": read_arrow, ".txt": read_text,
}  # fmt: skip
"""File suffix -> reader."""

_LOCATORS: dict[str, Callable[[Path], Iterator[int]]] = {
    ".json": json_places,
    ".jsonl": json_places,
    ".csv": lambda path: (line for line, _ in islice(_csv_rows(path), 1, None)),
    ".txt": lambda path: (line for line, text in enumerate(text_lines(path), start=1) for _ in text.split("\r")),
}
