"""Small datasets for tests: files written from records, and the options that read them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.options import RawValue, build
from burnish.data.options import DataOptions
from burnish.data.sets.sources import DataSets, load_datasets
from burnish.data.stats import DataStats
from burnish.loop.types import Example


def alpaca_record(number: int, answer: Any = "yes") -> dict[str, Any]:
    return {"instruction": f"Is {number} a number?", "input": "", "output": answer}


def sharegpt_record(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


def openai_record(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": value} for role, value in turns]}


def write(path: Path, records: Any) -> Path:
    """Write records as JSON Lines or JSON, by the suffix. Strings and bytes are written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(records, bytes):
        path.write_bytes(records)
    elif isinstance(records, str):
        path.write_text(records, encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        path.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def data_options(**overrides: Any) -> DataOptions:
    options, problems = build(DataOptions, {name: RawValue(value) for name, value in overrides.items()})
    assert not problems, problems
    return options


def load(seed: int = 0, stats: DataStats | None = None, searches_hubs: bool = True, **options: Any) -> DataSets:
    return load_datasets(
        data_options(**options), seed, stats if stats is not None else DataStats(), searches_hubs=searches_hubs
    )


def load_records(records: Sequence[Any], **entry: Any) -> list[Example]:
    """Return the examples of records in memory, with ``entry`` as their entry in dataset_info.json."""
    return list(load(dataset="set", dataset_dir={"set": {"records": list(records), **entry}}).train)


def load_error(**options: Any) -> str:
    """Return the message of the error that loading raises."""
    with pytest.raises(UserError) as raised:
        load(**options)
    for problem in raised.value.problems:
        assert len(str(problem).split("\n")) <= 4, f"more than four lines: {problem}"
    return str(raised.value)


def role_contents(example: Example) -> list[tuple[str, str]]:
    """Return (role, content) of each message."""
    return [(message.role, message.content) for message in example.messages]
