"""Files that a chat reads: records, lists of tools, images."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.utils.files import open_regular_file
from burnish.utils.json_files import shorten_value


def read_record(path: Path) -> Any:
    """Return the JSON value in a file, or in its first line."""
    try:
        with open_regular_file(path) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    for part in (text, text.partition("\n")[0]):
        try:
            return json.loads(part)
        except ValueError:
            continue
    raise UserError(f"{path} is not valid JSON.")


def conversation_of(record: Any, where: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return system message, messages and tools of a training record, in the format of the API. Missing ids of tool
    calls are added.

    Raises:
        UserError: for a record that is not a conversation.
    """
    given = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(given, list):
        raise UserError(f'{where} must contain a record with "messages".')
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(given, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise UserError(f'{place} must have a "role": {", ".join(_ROLES)}.')
        made = {**message, "content": _content_of(message, place)}
        if message["role"] == "assistant" and message.get("tool_calls"):
            made["tool_calls"] = _calls_of(message["tool_calls"], len(messages), place)
            open_calls = [call["id"] for call in made["tool_calls"]]
        elif message["role"] == "tool":
            made.setdefault("tool_call_id", open_calls.pop(0) if open_calls else "")
        messages.append(made)
    is_first = bool(messages) and messages[0]["role"] == "system"
    system = text_of(messages[0]) if is_first else ""
    return system, messages[is_first:], tools_of(record.get("tools"), where)


_ROLES = ("system", "user", "assistant", "tool")


def _content_of(message: Mapping[str, Any], where: str) -> Any:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, str) and not (isinstance(content, list) and all(map(_is_part, content))):
        raise UserError(
            f'{where} must have "content": text, or a list of parts, each {{"type": "text", "text": text}} or '
            f'{{"type": "image_url", "image_url": {{"url": text}}}}. Received: {shorten_value(content)}.'
        )
    return content


def _is_part(part: Any) -> bool:
    """Return whether a part of a message has a type, and the text or the URL that it requires."""
    if not isinstance(part, dict) or "type" not in part:
        return False
    if part["type"] == "image_url":
        return isinstance(part.get("image_url"), dict) and isinstance(part["image_url"].get("url"), str)
    return isinstance(part.get("text", "" if part["type"] != "text" else None), str)


def _calls_of(calls: Any, place: int, where: str) -> list[dict[str, Any]]:
    """Return tool calls with ids, and with arguments as JSON text."""
    made = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f'{where}: each of "tool_calls" must have a function with a name.')
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        made.append({**tool_call({"name": function["name"], "arguments": text}, place, number), **_id_of(call)})
    return made


def _id_of(call: Mapping[str, Any]) -> dict[str, str]:
    return {"id": call["id"]} if isinstance(call.get("id"), str) else {}


def tool_call(call: Mapping[str, str], place: int, number: int) -> dict[str, Any]:
    """Return a tool call with an id. Args: place, number: of its message, and of the call in it."""
    return {"id": f"call{place:03}{number:02}", "type": "function", "function": dict(call)}


def tools_of(tools: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of tools in OpenAI's format, from one of tools or of functions, or from its JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else []
        except ValueError:
            raise UserError(f'{where}: "tools" is not valid JSON.') from None
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools or [], list):
        raise UserError(
            f"{where} must contain a JSON list of tools, each with a name. Received: {shorten_value(tools)}."
        )
    found = []
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where} must contain a JSON list of tools, each with a name. Received: {shorten_value(tool)}."
            )
        found.append({"type": "function", "function": function})
    return found


def read_image(path: Path) -> tuple[str, tuple[int, int]]:
    """Return the data URI of an image file, and its width and height. Raises UserError if it is not an image."""
    from burnish.data.images.image_file import BadImage, load, read_header

    try:
        found = read_header(path)
        load(found)  # the beginning of a truncated file is valid
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


def images_in(message: Mapping[str, Any]) -> list[str]:
    """Return the URLs of the images of a message."""
    parts = message["content"] if isinstance(message["content"], list) else []
    return [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
