"""Partial results of an interrupted computation; the same command then computes only the missing ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from burnish.report.results import write_text_atomically

_NAME = "burnish_partial_results"


def partial_results_of(error: BaseException) -> Path | None:
    """Return the file with the partial results of the computation that ``error`` interrupted, or None."""
    return getattr(error, _NAME, None)


class PartialResults:
    """Results by the index of their item, which are also appended to a file: one line of JSON per result, after a line
    with the key.

    The file is not deleted here; the caller deletes it after writing the complete results. An exception that leaves the
    ``with`` block carries the path of the file (``partial_results_of``).

    Args:
        path: the file; None: the results are in memory only.
        key: hash of what the results depend on. A file with another key is overwritten.
        is_optional: continue in memory if the file cannot be written, instead of raising OSError.
    """

    def __init__(self, path: Path | None, key: str, is_optional: bool = False) -> None:
        self.path, self.key = path, key
        self.results: dict[int, Mapping[str, Any]] = {}
        self._ignores_errors = suppress(OSError) if is_optional else nullcontext()
        self._file: IO[str] | None = None

    def __enter__(self) -> PartialResults:
        if self.path is not None:
            with self._ignores_errors:
                self._read(self.path)
                lines = [json.dumps({"of": self.key}), *map(self._line, self.results)]
                write_text_atomically(self.path, "".join(line + "\n" for line in lines))
                self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._file is not None and self.results:
            setattr(error, _NAME, self.path)
        if self._file is not None:
            with self._ignores_errors:
                self._file.close()

    def add(self, index: int, result: Mapping[str, Any]) -> None:
        """Add the result of an item: JSON data without the key "index"."""
        self.results[index] = result
        if self._file is not None:
            with self._ignores_errors:
                self._file.write(self._line(index) + "\n")
                self._file.flush()

    def _line(self, index: int) -> str:
        return json.dumps({"index": index, **self.results[index]})

    def _read(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        if lines and lines[0] == json.dumps({"of": self.key}):
            with suppress(ValueError):  # the last line may be incomplete
                for line in lines[1:]:
                    result = json.loads(line)
                    self.results[result.pop("index")] = result
