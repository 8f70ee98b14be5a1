"""Description of a dataset before it is read: location and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

SourceKind: TypeAlias = Literal["file", "hf_hub", "ms_hub", "cloud", "records"]


@dataclass(frozen=True)
class DataSource:
    """Location and description of one dataset.

    Args:
        name: name given by the user.
        kind: kind of ``location``.
        location: path, hub id, URL, or the records themselves.
        where: name of the dataset in error messages: its entry or path.
        formatting: record format, or None if not specified.
        columns: part -> column, or None if not specified.
        further_columns: name for reward functions -> column, for the names in "columns" that are no part of any format.
        tags: role names and keys, or None if not specified.
        ranking: whether the description declares preference pairs.
        subset: subset of a hub dataset.
        split: split of a hub dataset; of local files a part of train, such as ``train[:10%]``.
        folder: folder within a hub repository.
        num_samples: number of records to sample.
        is_described: it has an entry in a ``dataset_info.json``; missing keys have LLaMA-Factory's defaults.
        unused: keys of the entry that have no effect.
    """

    name: str
    kind: SourceKind
    location: Any
    where: str
    formatting: str | None = None
    columns: Mapping[str, str] | None = None
    further_columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] | None = None
    ranking: bool = False
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    is_described: bool = False
    unused: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether the records are read from files, which have no splits."""
        return self.kind in ("file", "cloud")
