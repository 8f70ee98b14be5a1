"""Files that a conversation at a terminal reads: records, and lists of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.utils.files import regular


def read_record(path: Path) -> Any:
    """The JSON of a file, or of its first line."""
    try:
        with regular(path) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    for part in (text, text.partition("\n")[0]):
        try:
            return json.loads(part)
        except ValueError:
            continue
    raise UserError(f"{path} is not valid JSON.")
