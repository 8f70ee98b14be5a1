"""User-defined names, tags and notes of runs. They are stored in the state folder of the web UI, so that folders of
other programs are not changed.

In: ``labels.json``. Out: id of a run -> ``{"name", "tags", "notes"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from burnish.serve.http.errors import APIError
from burnish.serve.page.home import Home

FILE = "labels.json"
LONGEST = {"name": 120, "notes": 8000}
MOST_TAGS, LONGEST_TAG = 12, 40
Label = dict[str, Any]


def labels(home: Home) -> dict[str, Label]:
    found = home.read(FILE)
    if not isinstance(found, dict):
        return {}
    return {id: _label(one) for id, one in found.items() if isinstance(one, dict)}


def _label(one: Mapping[str, Any]) -> Label:
    name, tags, notes = (one.get(part) for part in ("name", "tags", "notes"))
    return {
        "name": name if isinstance(name, str) else "",
        "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
        "notes": notes if isinstance(notes, str) else "",
    }


def save_label(home: Home, id: str, fields: Mapping[str, Any]) -> Label:
    """Update some fields of a label.

    Raises:
        APIError: 422 with the name of the field.
    """
    for part, most in LONGEST.items():
        if not isinstance(fields.get(part, ""), str) or len(fields.get(part, "")) > most:
            raise APIError(422, "invalid_value", f'"{part}" must be a string of at most {most} characters.', param=part)
    tags = fields.get("tags", [])
    is_text = isinstance(tags, list) and all(isinstance(tag, str) and 0 < len(tag) <= LONGEST_TAG for tag in tags)
    if not is_text or len(tags) > MOST_TAGS:
        message = f'"tags" must be a list of at most {MOST_TAGS} strings of at most {LONGEST_TAG} characters.'
        raise APIError(422, "invalid_value", message, param="tags")
    known = labels(home)
    new = _label({**known.get(id, {}), **{part: fields[part] for part in ("name", "tags", "notes") if part in fields}})
    new["name"] = new["name"].strip()
    known[id] = new
    home.write(FILE, json.dumps({key: one for key, one in known.items() if any(one.values())}, ensure_ascii=False))
    return new
