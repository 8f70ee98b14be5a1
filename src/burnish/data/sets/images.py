"""Insert the images and videos of a record into its messages.

Messages contain image parts (as OpenAI, TRL and Qwen write them) or ``<image>`` placeholders; a column may list the
images. A part refers to its own image or takes the next one of the column. A placeholder takes the next one of the
column. Without parts and placeholders, all images of the column are put before the first user message, as TRL does.

Videos are treated the same, with ``<video>``, parts of type ``video`` and a column of videos, each a list of frames.

Raises BadRecord for: a different number of images and placeholders; parts and placeholders in one record; images in the
responses of a pair, in a system message or with a plain-text prompt; audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from burnish.data.images.image_file import BadImage
from burnish.data.images.in_rows import with_parts
from burnish.data.images.sources import MediaReader, MissingImage
from burnish.data.images.videos import read_video
from burnish.data.sets.records import BadRecord, Layout, Record, as_text, list_columns
from burnish.data.stats import keep_reason
from burnish.loop.types import Content, ContentPart, Example, Message

MARKS = {"image": "<image>", "video": "<video>"}
KINDS = {
    "image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
}  # fmt: skip
"""Types of message parts that contain an image or a video."""
_SOURCES = ("image", "image_url", "video", "video_url", "url", "path", "base64", "bytes")
"""Keys of a part that may hold its image or video."""
ANIMATED = keep_reason("an image has several frames; only the first is used")
BEFORE_TEXT = 'no "{mark}" in the text: {kind}s are placed before the first user message'
_IN_SYSTEM_MESSAGE = ("the system message contains an image.", "Move it to the first user message.")
_AUDIO = ("audio", "input_audio", "audio_url")
_MARK = re.compile("(<image>|<video>)")


def content_of(layout: Layout, content: Any, place: str) -> Content:
    """Return the content of a message: text, or a tuple of parts if it is a list that contains images.

    A part without its own image is a ``ContentPart`` whose value is None until ``with_images`` fills it.
    """
    kinds = {_type(part) for part in content} if isinstance(content, list) else set()
    if layout.reader is None or not kinds & {*KINDS, *_AUDIO}:
        return as_text(content, place)
    if layout.reader.model_type:
        what = f'"{place}" contains {list_columns(sorted(kinds - {"text"}))}, but {layout.reader.model_type} supports '
        raise BadRecord(f"{what}text only.", reason="it contains non-text content")
    return tuple(_part(layout.reader, part, f"{place}[{number}]") for number, part in enumerate(content))


def raw_content(content: Any) -> Any:
    """Return message parts for a chat template: images without their source, and no keys whose value is null."""
    if not isinstance(content, list):
        return content
    return [
        {"type": KINDS[_type(part)]} if _type(part) in KINDS else {k: v for k, v in part.items() if v is not None}
        for part in content
    ]


def has_images(content: Any) -> bool:
    """Return whether the content of a message is a list with images or videos."""
    return isinstance(content, list) and any(_type(part) in KINDS for part in content)


def _type(part: Any) -> str:
    """Return the type of a message part, "" if it has none."""
    found = part.get("type") if isinstance(part, Mapping) else None
    return found if isinstance(found, str) else ""


def _part(reader: MediaReader, part: Any, place: str) -> ContentPart:
    kind = _type(part)
    if kind == "text":
        return ContentPart("text", as_text(part.get("text"), f"{place}.text"))
    if kind in _AUDIO:
        raise BadRecord(_NO_AUDIO)
    if kind not in KINDS:
        raise BadRecord(f'"{place}" must be a part of type "text", "image" or "video".', received=list_columns([kind]))
    source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    if source is None:
        return ContentPart(KINDS[kind], None)
    limits: dict[str, Any] = {name: part[name] for name in ("min_pixels", "max_pixels") if part.get(name) is not None}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRecord(f'"{place}.{name}" must be a positive integer.', received=str(value))
    if len(limits) == 2 and limits["min_pixels"] > limits["max_pixels"]:
        received = f"{limits['min_pixels']} and {limits['max_pixels']}"
        raise BadRecord(f'"{place}.min_pixels" must not exceed "{place}.max_pixels".', received=received)
    if KINDS[kind] == "video" and part.get("fps") is not None:
        limits["fps"] = part["fps"]
        if isinstance(limits["fps"], bool) or not isinstance(limits["fps"], int | float) or not 0 < limits["fps"] < 1e6:
            raise BadRecord(f'"{place}.fps" must be a positive number.', received=str(limits["fps"]))
    return ContentPart(KINDS[kind], _image(reader, KINDS[kind], source, place, limits))


def _image(reader: MediaReader, kind: str, source: Any, place: str, limits: Mapping[str, Any] | None = None) -> Any:
    """Return the image or video that a record names."""
    try:
        return (reader.image if kind == "image" else partial(read_video, reader))(source, place, **(limits or {}))
    except MissingImage as error:
        remedy = "Set media_dir to the folder that contains the images."
        if not reader.folders:  # a script, which has no such option
            remedy = "Use absolute paths, or paths relative to the working directory."
        if error.nearest is not None:
            remedy = f"{remedy} A file with this name was found: {error.nearest}"
        raise BadRecord(str(error), remedy, reason="an image was not found", kind="an image was not found") from None
    except BadImage as error:
        raise BadRecord(str(error), reason="an image cannot be read") from None


_NO_AUDIO = "it contains audio; burnish trains on text, images and videos."


def refuse_other_media(record: Record) -> None:
    """Raise BadRecord for a record with audio, or with images or videos in a column that is not read."""
    read = (record.layout.images, record.layout.videos)
    for column in record.layout.media:
        if record.values.get(column) and column not in read:
            if column not in ("images", "image", "videos", "video"):
                raise BadRecord(_NO_AUDIO)
            what = f'it has the column "{column}", but images and videos of this dataset are read from '
            raise BadRecord(f"{what}{list_columns(filter(None, read))}.", "Use the same columns in all records.")


def with_images(record: Record, example: Example) -> Example:
    """Return the example with the images and videos of its columns inserted into its messages."""
    reader = record.layout.reader
    assert reader is not None
    columns = {"image": record.layout.images, "video": record.layout.videos}
    values = {kind: _column_values(record, column) for kind, column in columns.items()}
    has_parts = any(_parts(message) for message in _all_messages(example))
    marks = dict.fromkeys(MARKS, 0)
    if any(value is not None for value in values.values()):
        texts = _texts(example)
        marks = {k: sum(text.count(m) for text in texts) if values[k] is not None else 0 for k, m in MARKS.items()}
    if has_parts and any(marks.values()):
        kind = next(kind for kind, count in marks.items() if count)
        what = f'it contains parts of type "{kind}" and also {marks[kind]} "{MARKS[kind]}".'
        raise BadRecord(what, "Use only one of them.")
    if not any(values.values()) and not has_parts and not any(marks.values()):
        return example
    if not example.messages:
        raise BadRecord(
            "it contains images, but its prompt is a string instead of messages.", "Write the prompt as messages."
        )
    _refuse_places(example)
    found = {
        kind: [_image(reader, kind, value, f"{columns[kind]}[{number}]") for number, value in enumerate(sources or ())]
        for kind, sources in values.items()
    }
    places = {kind: _num_empty(example, kind) for kind in MARKS} if has_parts else marks
    for kind, of_kind in found.items():
        if places[kind] != len(of_kind) and (has_parts or any(marks.values())):
            _refuse_count(kind, len(of_kind), places[kind], has_parts)
    if not has_parts and not any(marks.values()):
        record.layout.notes |= {BEFORE_TEXT.format(mark=MARKS[kind], kind=kind): None for kind in found if found[kind]}
        messages = _before_first_user(example.messages, found)
    else:
        left = {kind: iter(of_kind) for kind, of_kind in found.items()}
        messages = [_fill_placeholders(message, left, values) for message in example.messages]
    if any(image.is_animated for message in messages for image in message.images):
        record.layout.dropped_parts.append(ANIMATED)
    return replace(example, messages=tuple(messages))


def with_paths(columns: Mapping[str, Any], record: Record, example: Example) -> dict[str, Any]:
    """Return columns of a record in which those of images and videos contain the paths of the files, of each video a
    list with those of its frames."""
    found = dict(columns)
    for kind, column in (("image", record.layout.images), ("video", record.layout.videos)):
        if found.get(column) is not None:
            media = [p.value for m in example.messages for p in m.parts if p.kind == kind and p.value is not None]
            paths = [[file.path for file in one.frames] if one.frames else one.path for one in media]
            found[column] = paths if isinstance(found[column], list | tuple) or len(paths) != 1 else paths[0]
    return found


def _num_empty(example: Example, kind: str) -> int:
    return sum(part.kind == kind and part.value is None for message in _all_messages(example) for part in message.parts)


def _refuse_count(kind: str, images: int, places: int, is_part: bool) -> None:
    place = f'part{"s" * (places != 1)} of type "{kind}"' if is_part else f'"{MARKS[kind]}"'
    counts = f"{images} {kind}{'s' * (images != 1)} and {places} {place}."
    reason = f"the numbers of {kind}s and placeholders differ"
    if is_part:
        raise BadRecord(counts, f"Provide one {kind} for each part.", reason=reason)
    remedy = f'Write "{MARKS[kind]}" where each {kind} belongs, or remove {"an" if kind == "image" else "a"} {kind}.'
    raise BadRecord(counts, remedy, reason=reason, kind="marks")


def _column_values(record: Record, column: str) -> Sequence[Any] | None:
    """Return the column of images or videos as a list, or None if the record has no such column."""
    value = record.values.get(column) if column else None
    if value is None:
        return None if column not in record.values else ()
    return value if isinstance(value, list | tuple) else [value]


def _all_messages(example: Example) -> tuple[Message, ...]:
    answers = (answer for answer in (example.chosen, example.rejected) if isinstance(answer, tuple))
    return example.messages if example.chosen is None else (*example.messages, *chain.from_iterable(answers))


def _parts(message: Message) -> list[ContentPart]:
    """Return the parts of a message that are images or videos."""
    return [] if isinstance(message.content, str) else [part for part in message.content if part.kind in MARKS]


def _texts(example: Example) -> list[str]:
    texts = [text for message in _all_messages(example) for text in message.texts]
    return [*texts, *filter(None, (example.system, example.prompt))]


def system_text(message: Message) -> str:
    """Return the text of a system message. Raises BadRecord if a part is an image or a video."""
    if _parts(message):
        raise BadRecord(*_IN_SYSTEM_MESSAGE)
    return message.text


def _refuse_places(example: Example) -> None:
    """Raise BadRecord for images in responses of pairs and in system messages."""
    answers = _all_messages(example)[len(example.messages) :]
    if any(_parts(one) or _MARK.search(one.text) for one in answers):
        raise BadRecord("a response of the pair contains an image.", "Put the images into the prompt.")
    if example.system and _MARK.search(example.system):
        raise BadRecord(*_IN_SYSTEM_MESSAGE)


def _fill_placeholders(message: Message, left: Mapping[str, Iterator[Any]], values: Mapping[str, Any]) -> Message:
    """Return a message whose parts and placeholders are filled with the next images and videos of ``left``.

    Args:
        values: images and videos of the columns; without a column, placeholders are ordinary text.
    """
    if not isinstance(message.content, str):
        parts = [
            replace(part, value=next(left[part.kind])) if part.kind in MARKS and part.value is None else part
            for part in message.content
        ]
        if _parts(message) or not any(_MARK.search(part.value) for part in parts):
            return replace(message, content=tuple(parts))
    text = message.text
    kinds = {mark: kind for kind, mark in MARKS.items() if values[kind] is not None and mark in text}
    if not kinds:
        return message
    pieces = re.split(f"({'|'.join(kinds)})", text)
    parts = [
        ContentPart(kinds[piece], next(left[kinds[piece]])) if at % 2 else ContentPart("text", piece)
        for at, piece in enumerate(pieces)
        if piece
    ]
    return with_parts(message, parts)


def _before_first_user(messages: Sequence[Message], found: Mapping[str, Sequence[Any]]) -> list[Message]:
    first_user = next((at for at, message in enumerate(messages) if message.role == "user"), None)
    if first_user is None:
        raise BadRecord("it contains images but no user message.", f'Write "{MARKS["image"]}" where they belong.')
    own = [ContentPart(kind, image) for kind, of_kind in found.items() for image in of_kind]
    parts = [*own, *messages[first_user].parts]
    return [with_parts(one, parts) if at == first_user else one for at, one in enumerate(messages)]
