"""Finished responses of an interrupted run, so that the same command generates only the missing ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from burnish.inference.types import GenerationRequest
from burnish.report.results import write_text_atomically


def key_of(model: str, requests: Iterable[GenerationRequest], images: Sequence[Any]) -> str:
    """Return a hash of everything that responses depend on: model, prompts, sampling and images.

    Args:
        model: text that differs for different weights.
        requests: the request of each question.
        images: images of the questions.
    """
    hashed = sha256(f"{model}{images or ''}".encode())
    for request in requests:
        hashed.update(
            repr(
                (
                    request.ids,
                    request.max_new_tokens,
                    request.min_new_tokens,
                    request.sampling,
                    sorted(request.stop_ids),
                    request.top_logprobs,
                )
            ).encode()
        )
    return hashed.hexdigest()


class FinishedResponses:
    """Responses by the index of their question, and a file of them, one line of JSON each after a line with the key.

    The file is kept, so that the responses are not lost before the caller has written and removed them.

    Args:
        path: the file; None: the responses are in memory only.
        key: hash of what the responses depend on. A file with another key is overwritten.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.key = path, key
        self.responses: dict[int, list[int]] = {}
        self.log_probabilities: dict[int, float] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> FinishedResponses:
        if self.path is not None:
            self._read(self.path)
            records = [{"of": self.key}, *map(self._record, self.responses)]
            write_text_atomically(self.path, "".join(json.dumps(record) + "\n" for record in records))
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, index: int, ids: list[int], log_probability: float | None = None) -> None:
        """Add the response to a question, with its log-probability in nats if it is known."""
        self.responses[index] = ids
        if log_probability is not None:
            self.log_probabilities[index] = log_probability
        if self._file is not None:
            self._file.write(json.dumps(self._record(index)) + "\n")
            self._file.flush()

    def _record(self, index: int) -> dict[str, Any]:
        likelihood = self.log_probabilities.get(index)
        found = {"index": index, "ids": self.responses[index]}
        return found if likelihood is None else {**found, "logprob": likelihood}

    def _read(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and lines[0] == json.dumps({"of": self.key}):
            with suppress(ValueError):  # the last line may be incomplete
                for line in lines[1:]:
                    record = json.loads(line)
                    self.responses[record["index"]] = record["ids"]
                    if "logprob" in record:
                        self.log_probabilities[record["index"]] = record["logprob"]
