"""Columns of a file of records, and what they may be: for a form that asks which is which.

In: a path. Out: the columns with their first values, the formats with the parts that each reads, and a guess.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

from burnish.core.errors import UserError
from burnish.data.reading.files import data_files, read_records
from burnish.data.reading.json_files import shortened
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.formats import FORMATS
from burnish.data.sets.layouts import is_preference, layout_of, proposed_columns

SHOWN = 3


def columns_of_file(path: Path) -> dict[str, Any]:
    """``{"columns": [[name, values]], "formats": [[name, parts]], "known", "proposed"}``; ``known`` is the format that
    is recognised without a word, or "".

    Raises:
        UserError: for a file that cannot be read.
    """
    first = list(islice(chain.from_iterable(map(read_records, data_files(path))), SHOWN))
    names = list(dict.fromkeys(name for values in first for name in values))
    source = DataSource(str(path), "file", str(path), str(path))
    try:
        known = layout_of(source, first, str(path)).format
    except UserError:
        known = "preference" if any(map(is_preference, first)) else ""
    return {
        "columns": [[name, [shortened(values[name]) for values in first if name in values]] for name in names],
        "formats": [[one.name, list(one.traits["columns"] | one.traits.get("optional", {}))] for one in FORMATS],
        "known": known, "proposed": proposed_columns(names),
    }  # fmt: skip
