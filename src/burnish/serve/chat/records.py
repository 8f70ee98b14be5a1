"""Files that a chat reads: records, lists of tools, images."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.utils.files import regular


def read_record(path: Path) -> Any:
    """Return the JSON value in a file, or in its first line."""
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


def read_image(path: Path) -> tuple[str, tuple[int, int]]:
    """Return the data URI of an image file, and its width and height. Raises UserError if it is not an image."""
    from burnish.data.images.image_file import BadImage, read_header

    try:
        found = read_header(path)
        content = path.read_bytes()
    except BadImage as error:
        raise UserError(f"{path} {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return f"data:image/*;base64,{base64.b64encode(content).decode()}", (found.width, found.height)


def user_message(text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """Return a message of the user. Args: images: data URIs of images; they stand before the text."""
    parts = [*({"type": "image_url", "image_url": {"url": url}} for url in images), {"type": "text", "text": text}]
    return {"role": "user", "content": parts if images else text}


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
