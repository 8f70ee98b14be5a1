"""Read records from JSON and JSON Lines files, with errors that name the line or the byte.

Files are UTF-8, with or without a byte order mark. Records are yielded in order, one at a time. No JSON library for
records is used, because the errors of libraries name neither the record nor the line.

Refused: text that is not UTF-8, broken or incomplete JSON, duplicate keys, and a list wrapped in an object. A record
that is not an object is a ``NotAnObject``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from burnish.config.conversion import DuplicateKeyError, object_without_duplicate_keys
from burnish.config.errors import Problem, UserError
from burnish.utils.json_files import shorten_value

Values: TypeAlias = Mapping[str, Any]
"""One record as read: column -> value."""

BOM = b"\xef\xbb\xbf"
_SIGNATURES_OF_OTHER_FORMATS = {
    b"\xff\xfe\0\0": ("UTF-32", "Convert it: iconv -f utf-32 -t utf-8 old > new"),
    b"\0\0\xfe\xff": ("UTF-32", "Convert it: iconv -f utf-32 -t utf-8 old > new"),
    b"\xff\xfe": ("UTF-16", "Convert it: iconv -f utf-16 -t utf-8 old > new"),
    b"\xfe\xff": ("UTF-16", "Convert it: iconv -f utf-16 -t utf-8 old > new"),
    b"\x1f\x8b": ("a gzip archive", "Unpack it: gzip -dc old > new"),
}
"""First bytes of a file -> what it is, and the remedy."""
_SHOWN = 5
"""Maximum number of broken lines named in one error."""
_RECORD_KEYS = {"messages", "conversations", "conversation", "instruction", "prompt", "question", "text", "completion"}
"""Keys that identify an object as a record, even if it also contains lists of objects."""
_TURN_KEYS = ({"role", "content"}, {"from", "value"})
"""Keys of a message. A list of messages is the column of a record, not a list of records."""


def read_json_records(path: Path) -> Iterator[Values]:
    """Yield the records of a JSON list or of JSON Lines. The format is detected from the content, not from the name."""
    if first_character(path) == "[":
        yield from _json_list(path)
    else:
        yield from _json_lines(path)


class UnreadableJson(json.JSONDecodeError):
    """Raised for syntactically complete JSON that cannot be used; it has no position in the text."""


_DECODER = json.JSONDecoder(object_pairs_hook=object_without_duplicate_keys)


def parsed_file(text: str) -> Any:
    """Like ``parse_json``, but also raises UnreadableJson for an object with a duplicate key."""
    return parse_json(text, _DECODER.decode)


def parse_json(text: str, decode: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON text.

    Raises:
        JSONDecodeError: if the text is not JSON.
        UnreadableJson: if it has a number of more than 4300 digits, or is nested about a thousand levels deep.
    """
    try:
        return decode(text)
    except json.JSONDecodeError:
        raise
    except DuplicateKeyError as error:
        raise UnreadableJson(f"it {error}".rstrip("."), text, 0) from error
    except ValueError as error:
        raise UnreadableJson("it contains a number with too many digits", text, 0) from error
    except RecursionError as error:
        raise UnreadableJson("it is nested too deeply", text, 0) from error


def _json_list(path: Path) -> Iterator[Values]:
    text = whole_text(path)
    try:
        records = parsed_file(text)
    except json.JSONDecodeError as error:
        is_placed = not isinstance(error, UnreadableJson)
        valid = count(sum(1 for _ in _element_starts(text, _DECODER)), "record")
        raise UserError(
            f"invalid JSON: {error.msg} (column {error.colno})."
            if is_placed
            else f"the JSON cannot be read: {error.msg}.",
            where=f"{path}, line {error.lineno}" if is_placed else str(path),
            why=f"The file is valid up to this position ({valid}).",
            remedy="The file ends early. Check that it was copied completely."
            if error.pos >= len(text.rstrip())
            else "",
        ) from None
    for record in records:
        yield record if isinstance(record, dict) else NotAnObject(record)


def _json_lines(path: Path) -> Iterator[Values]:
    """Yield a record per line. The error names all broken lines of the file, not only the first."""
    broken: list[Problem] = []
    number = line = 0
    is_cut = False  # whether only the last line is broken
    for line, text in enumerate(text_lines(path), start=1):
        if not text or text.isspace():
            continue
        number += 1
        try:
            record = parsed_file(text)
        except json.JSONDecodeError as error:
            if number == 1 and not isinstance(error, UnreadableJson):
                _refuse_document(path)
            is_cut = not broken and not isinstance(error, UnreadableJson)
            broken.append(broken_line(path, line, text, error))
            continue
        is_cut = False
        if not isinstance(record, dict):
            record = NotAnObject(record)
        is_document = number == 1 and path.suffix.lower() != ".jsonl"  # there, each line is a record
        if is_document and (key := _records_key(record)) and next(islice(json_places(path), 1, None), None) is None:
            raise UserError(_unwrap(path, key, record[key]))
        if not broken:
            yield record
    if broken:
        *before, last = broken[:_SHOWN]
        remedy = (
            "It is the last line. Check that the file was copied completely."
            if is_cut
            else "Each line must be one JSON object."
        )
        more = f"{count(len(broken), 'line')} in total." if len(broken) > _SHOWN else ""
        raise UserError([*before, Problem(last.what, last.where, why=more, remedy=remedy)])


def broken_line(path: Path, line: int, text: str, error: json.JSONDecodeError) -> Problem:
    where = f"{path}, line {line}"
    if isinstance(error, UnreadableJson):
        return Problem(f"the line cannot be read: {error.msg}.", where)
    return Problem(f"invalid JSON: {error.msg} (column {error.colno}). Received: {shorten_value(text, 100)}", where)


def _refuse_document(path: Path) -> None:
    """Raise UserError if the file is one JSON document over several lines, so that its first line alone is not JSON."""
    try:
        document = parse_json(whole_text(path))
    except json.JSONDecodeError:
        return
    if isinstance(document, dict) and (key := _records_key(document)):
        raise UserError(_unwrap(path, key, document[key]))
    what = f"expected a list of records. Received: {shorten_value(document, 100)}"
    raise UserError(what, where=str(path), remedy="Wrap the object in a list, [ ... ], or write one object per line.")


def _records_key(record: Values) -> str | None:
    """Return the key under which an object holds a list of records, as in {"data": [...]}, or None."""
    if _RECORD_KEYS & record.keys():
        return None
    lists = (key for key, value in record.items() if isinstance(value, list) and value)
    return next((key for key in lists if all(_may_be_record(item) for item in record[key])), None)


def _may_be_record(item: Any) -> bool:
    return isinstance(item, dict) and not any(keys <= item.keys() for keys in _TURN_KEYS)


def _unwrap(path: Path, key: str, records: list[Any]) -> Problem:
    counted = count(len(records), "record")
    return Problem(
        f'expected a list of records. Received: an object with {counted} under the key "{key}".',
        where=str(path),
        remedy=f'Extract the list: jq ".{key}" old > new',
    )


class NotAnObject(dict[str, Any]):
    """A record that is no object: an object without columns that holds what was read in its place."""

    def __init__(self, received: Any) -> None:
        super().__init__()
        self.received = received


NOT_AN_OBJECT = "expected an object with named columns."
OBJECT_EXAMPLE = 'For example: {"instruction": "...", "output": "..."}.'


def not_an_object_error(path: Path | str, number: int, record: NotAnObject) -> UserError:
    what = f"{NOT_AN_OBJECT} Received: {shorten_value(record.received)}"
    return UserError(what, where=f"{path}, record {number}", remedy=OBJECT_EXAMPLE)


def _element_starts(text: str, decoder: json.JSONDecoder) -> Iterator[int]:
    """Yield the start of each complete element of a JSON list, up to the first that ``decoder`` cannot parse."""
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield at
        at = end


def json_places(path: Path) -> Iterator[int]:
    if first_character(path) != "[":
        yield from (line for line, text in enumerate(text_lines(path), start=1) if text.strip())
        return
    text, line, counted = whole_text(path), 1, 0
    for start in _element_starts(text, json.JSONDecoder()):
        line += text.count("\n", counted, start)
        counted = start
        yield line


# --- text ------------------------------------------------------------------------------------------------------------


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without line ends. A leading byte order mark is removed."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            shown = raw.removeprefix(BOM) if number == 1 else raw
            try:
                yield shown.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                at = offset + len(raw) - len(shown) + error.start
                raise UserError(_not_utf8(path, number, at, raw, error)) from None
            offset += len(raw)


def _not_utf8(path: Path, line: int, offset: int, raw: bytes, error: UnicodeDecodeError) -> Problem:
    byte = error.object[error.start]
    where = f"{path}, line {line}"
    for begin, (received, remedy) in _SIGNATURES_OF_OTHER_FORMATS.items() if line == 1 else ():
        if raw.startswith(begin):
            return Problem(f"expected UTF-8. Received: {received}.", where, remedy=remedy)
    return Problem(
        f"the text is not UTF-8: byte 0x{byte:02x} at offset {offset}.",
        where,
        why=f'In Latin-1 that byte is "{bytes([byte]).decode("latin-1")}".' if byte >= 0xA0 else "",
        remedy="Convert the file: iconv -f latin1 -t utf-8 old > new",
    )


def whole_text(path: Path) -> str:
    return decode_text(path, path.read_bytes().removeprefix(BOM))


def decode_text(path: Path, raw: bytes) -> str:
    """Decode a part of ``path``. Raises UserError with the line number if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        deque(text_lines(path), maxlen=0)  # raises an error with the line number
        raise


def byte_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each line with its line end, which may be a lone carriage return. A leading byte order mark is removed."""
    is_first = True
    for raw in file:
        for line in raw.splitlines(keepends=True):
            yield line.removeprefix(BOM) if is_first else line
            is_first = False


def first_character(path: Path) -> str:
    """Return the first non-whitespace character of the file."""
    with path.open("rb") as file:
        start = file.read(len(BOM)).removeprefix(BOM)
        while chunk := start or file.read(4096):
            if seen := chunk.lstrip():
                return chr(seen[0])
            start = b""
    return ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
