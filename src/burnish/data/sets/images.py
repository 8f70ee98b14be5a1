"""Insert the images of a record into its messages.

Messages contain image parts (as OpenAI, TRL and Qwen write them) or ``<image>`` placeholders; a column may list the
images. A part refers to its own image or takes the next one of the column. A placeholder takes the next one of the
column. Without parts and placeholders, all images of the column are put before the first user message, as TRL does.

Raises BadRecord for: a different number of images and placeholders; parts and placeholders in one record; images in the
responses of a pair, in a system message or with a plain-text prompt; videos and audio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from burnish.data.images.image_file import BadImage
from burnish.data.images.in_rows import with_parts
from burnish.data.images.sources import MissingImage, Sight
from burnish.data.sets.records import BadRecord, Layout, Record, as_text, listed
from burnish.data.stats import kept
from burnish.loop.types import Content, ContentPart, Example, Message

MARK = "<image>"
KINDS = {"image": "image", "image_url": "image", "input_image": "image"}
"""Types of message parts that contain an image."""
_SOURCES = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys of a part that may hold its image."""
ANIMATED = kept("an image has several frames; only the first is used")
BEFORE = 'no "<image>" in the texts: images are put before the first user message'
_OTHERS = {"video": "video", "video_url": "video", "audio": "audio", "input_audio": "audio", "audio_url": "audio"}


def content_of(layout: Layout, content: Any, place: str) -> Content:
    """Return the content of a message: text, or a tuple of parts if it is a list that contains images.

    A part without its own image is a ``ContentPart`` whose value is None until ``with_images`` fills it.
    """
    kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
    if layout.sight is None or layout.sight.model_type or not kinds & {*KINDS, *_OTHERS}:
        return as_text(content, place)
    return tuple(_part(layout.sight, part, f"{place}[{number}]") for number, part in enumerate(content))


def raw_content(content: Any) -> Any:
    """Return message parts for a chat template: images without their source, and no keys whose value is null."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "image"} if KINDS.get(part.get("type")) else {key: v for key, v in part.items() if v is not None}
        for part in content
    ]


def _part(sight: Sight, part: Any, place: str) -> ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return ContentPart("text", as_text(part.get("text"), f"{place}.text"))
    if kind in _OTHERS:
        raise BadRecord(*_other(_OTHERS[kind], place))
    if kind not in KINDS:
        raise BadRecord(f'"{place}" must be a part of type "text" or "image".', received=listed([kind]))
    source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    if source is None:
        return ContentPart("image", None)
    limits = {name: part[name] for name in ("min_pixels", "max_pixels") if part.get(name) is not None}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRecord(f'"{place}.{name}" must be a whole number of at least 1.', received=str(value))
    return ContentPart("image", _image(sight, source, place, limits))


def _image(sight: Sight, source: Any, place: str, limits: Mapping[str, int] | None = None) -> Any:
    try:
        return sight.image(source, place, **(limits or {}))
    except MissingImage as error:
        remedy = "Set media_dir to the folder of the images."
        if error.nearest is not None:
            remedy = f"Set media_dir to the folder of the images; {error.nearest} has that name."
        raise BadRecord(str(error), remedy, reason="an image was not found", kind="an image was not found") from None
    except BadImage as error:
        raise BadRecord(str(error), reason="an image cannot be read") from None


def _other(kind: str, place: str) -> tuple[str, str]:
    if kind == "video":
        return (
            f"it contains video ({place}); this model supports images only.",
            "Extract its frames and use them as images.",
        )
    return "it contains audio; burnish trains on text and images.", ""


def refuse_others(record: Record) -> None:
    """Raise BadRecord for a record with videos or audio."""
    for column in record.layout.media:
        if record.values.get(column) and column != record.layout.images:
            raise BadRecord(*_other("audio" if column.startswith("audio") else "video", f"{column}[0]"))


def with_images(record: Record, example: Example) -> Example:
    """Return the example with the images of its column inserted into its messages."""
    sight = record.layout.sight
    assert sight is not None
    column, values = record.layout.images, _column_values(record)
    empty = sum(part.value is None for message in _all(example) for part in _images(message))
    has_parts = any(any(_images(message)) for message in _all(example))
    marks = sum(text.count(MARK) for text in _texts(example)) if values is not None else 0
    if has_parts and marks:
        raise BadRecord(f'it contains parts of type "image" and also {marks} "{MARK}".', "Use only one of them.")
    if not values and not has_parts and not marks:
        return example
    if not example.messages:
        raise BadRecord(
            "it contains images, but its prompt is a string instead of messages.", "Write the prompt as messages."
        )
    _refuse_places(example)
    found = [_image(sight, value, f"{column}[{number}]") for number, value in enumerate(values or ())]
    places = empty if has_parts else marks
    if places != len(found) and (places or has_parts):
        _refuse_count(len(found), places, 'part of type "image"' if has_parts else f'"{MARK}"', has_parts)
    if not has_parts and not marks:
        record.layout.notes[BEFORE] = None
        messages = _before_first_user(example.messages, found)
    else:
        left = iter(found)
        messages = [_filled(message, left) for message in example.messages]
    if any(image.is_animated for message in messages for image in message.images):
        record.layout.dropped_parts.append(ANIMATED)
    return replace(example, messages=tuple(messages))


def _refuse_count(images: int, places: int, place: str, is_part: bool) -> None:
    counts = f"{images} image{'s' * (images != 1)} and {places} {place}{'s' * (is_part and places != 1)}."
    if is_part:
        raise BadRecord(
            counts, "Provide one image for each part.", reason="the numbers of images and placeholders differ"
        )
    remedy = f'Write "{MARK}" where each image belongs, or remove an image.'
    raise BadRecord(counts, remedy, reason="the numbers of images and placeholders differ", kind="marks")


def _column_values(record: Record) -> Sequence[Any] | None:
    """Return the column of images as a list, or None if the record has no such column."""
    value = record.values.get(record.layout.images) if record.layout.images else None
    if value is None:
        return None if record.layout.images not in record.values else ()
    return value if isinstance(value, list | tuple) else [value]


def _all(example: Example) -> Iterator[Message]:
    yield from example.messages
    for answer in (example.chosen, example.rejected):
        if isinstance(answer, tuple):
            yield from answer


def _images(message: Message) -> list[ContentPart]:
    return [part for part in message.parts if part.kind == "image"]


def _texts(example: Example) -> Iterator[str]:
    for message in _all(example):
        yield from (part.value for part in message.parts if part.kind == "text")
    yield from filter(None, (example.system, example.prompt))


def _refuse_places(example: Example) -> None:
    """Raise BadRecord for images in responses of pairs and in system messages."""
    answers = [m for answer in (example.chosen, example.rejected) if isinstance(answer, tuple) for m in answer]
    if any(_images(one) or MARK in one.text for one in answers):
        raise BadRecord("a response of the pair contains an image.", "Put the images into the prompt.")
    if example.system and MARK in example.system:
        raise BadRecord("the system message contains an image.", "Move it to the first user message.")


def _filled(message: Message, left: Iterator[Any]) -> Message:
    """Return a message whose image parts and placeholders are filled with the next images of ``left``."""
    if not isinstance(message.content, str):
        parts = [
            replace(part, value=next(left)) if part.kind == "image" and part.value is None else part
            for part in message.content
        ]
        if any(_images(message)) or not any(MARK in part.value for part in parts):
            return replace(message, content=tuple(parts))
    if MARK not in message.text:
        return message
    first, *others = message.text.split(MARK)
    parts = [ContentPart("text", first)]
    for other in others:
        parts += [ContentPart("image", next(left)), ContentPart("text", other)]
    return with_parts(message, [part for part in parts if part.value != ""])


def _before_first_user(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    first_user = next((at for at, message in enumerate(messages) if message.role == "user"), None)
    if first_user is None:
        raise BadRecord("it contains images but no user message.", f'Write "{MARK}" where they belong.')
    parts = [*(ContentPart("image", image) for image in images), *messages[first_user].parts]
    return [with_parts(one, parts) if at == first_user else one for at, one in enumerate(messages)]
