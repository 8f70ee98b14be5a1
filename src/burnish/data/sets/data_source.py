"""A data set before it is read: the place of its records, and what is said of their layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

SourceKind: TypeAlias = Literal["file", "hf_hub", "ms_hub", "cloud", "records"]


@dataclass(frozen=True)
class DataSource:
    """One data set: the place of its records, and their description.

    Args:
        name: as the user gave it.
        kind: the kind of ``location``.
        location: a path, a hub id, an address, or the records themselves.
        where: its name in errors: the entry, or the path.
        formatting, columns, tags: the layout as described; None where nothing is given.
        ranking: whether the description says that it holds pairs of answers.
        is_described: it has an entry in a ``dataset_info.json``; missing keys have LLaMA-Factory's defaults.
    """

    name: str
    kind: SourceKind
    location: Any
    where: str
    formatting: str | None = None
    columns: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None
    ranking: bool = False
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    is_described: bool = False
