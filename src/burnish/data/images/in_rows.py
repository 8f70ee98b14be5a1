"""Images in tokenized text: replace the mark of each image by its token ids.

Input: the tokens of a conversation with one mark per image, and the images. Output: the tokens with each mark replaced
by the ids of the family, the position of each image, and labels without placeholders, which have no information to
learn.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from burnish.data.images.family import Family
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.loop.types import IGNORE_INDEX, IMAGE, VIDEO, ContentPart, Example, Ids, Message

if TYPE_CHECKING:
    from burnish.data.chat.labels import Segment, Turn

MARK_REPLACEMENT = "\ufffd"
"""Replacement for the characters ``IMAGE`` and ``VIDEO`` in the text of a record."""
_RESERVED = re.compile(f"[{IMAGE}{VIDEO}]")


def images_in(example: Example) -> list[ImageFile]:
    """Return the images of a conversation, in order."""
    return [image for message in example.messages for image in message.images]


def remove_marks(example: Example) -> Example:
    """Return the example without the characters ``IMAGE`` and ``VIDEO`` in its texts."""
    if not any(IMAGE in text or VIDEO in text for message in example.messages for text in message.texts):
        return example
    return replace(example, messages=tuple(map(_clean, example.messages)))


def _clean(message: Message) -> Message:
    if isinstance(message.content, str):
        return replace(message, content=_RESERVED.sub(MARK_REPLACEMENT, message.content))
    parts = (
        replace(part, value=_RESERVED.sub(MARK_REPLACEMENT, part.value)) if part.kind == "text" else part
        for part in message.content
    )
    return replace(message, content=tuple(parts))


def with_parts(message: Message, parts: Sequence[ContentPart]) -> Message:
    """Return the message with these parts, also in the form for a chat template."""
    raw = message.raw
    if raw is not None:
        raw = {**raw, "content": parts_for_chat_template(parts)}
    return Message(message.role, tuple(parts), message.train, message.weight, raw)  # faster than dataclasses.replace


def parts_for_chat_template(parts: Iterable[ContentPart]) -> list[dict[str, Any]]:
    """Return the content of a message in the form of chat templates: texts, and images without their source."""
    return [{"type": "text", "text": p.value} if p.kind == "text" else {"type": p.kind} for p in parts]


def _without_images(message: Message) -> Message:
    """Return a message with only its texts."""
    text, raw = _RESERVED.sub("", message.text), message.raw
    if raw is not None and isinstance(raw.get("content"), list):
        raw = {**raw, "content": text}
    return replace(message, content=text, raw=raw)


class Marks:
    """Replace marks by the ids of a family.

    Args:
        is_opened: whether the text before the mark of a video already contains its ``Family.opening``.
    """

    def __init__(self, family: Family, is_opened: bool = False) -> None:
        self.family, self._is_opened = family, is_opened
        self._kinds = {family.mark_id: "image", family.video_mark_id: "video"}
        self._around = frozenset(map(family.token_id, family.around))

    def _places(self, ids: Sequence[int]) -> list[int]:
        return sorted(place for mark in self._kinds if mark >= 0 for place in _all_places(ids, mark))

    def _check(self, kinds: Sequence[str], images: Sequence[ImageFile]) -> None:
        """Raise BadImage if marks (of these kinds, in order) and images differ in number or kind, or if the model
        refuses an image."""
        for image in images:
            self.family.check(image)
        given = ["video" if one.frames else "image" for one in images]
        for kind, mark in (("image", self.family.mark), ("video", self.family.video_mark)):
            written, needed = kinds.count(kind), given.count(kind)
            if written != needed:
                noun = kind if needed == 1 else f"{kind}s"
                raise BadImage(f'the template outputs "{mark}" {written} times for {needed} {noun}')
        if kinds != given:
            raise BadImage("the template outputs images and videos in a different order from that in the record")

    def _of(self, image: ImageFile, num_images: int) -> Ids:
        found = self.family.of(image, num_images)
        written = self.family.opening(image) if self._is_opened and image.frames else ""
        return found[len(self.family.text_ids(written)) :] if written else found

    def _in_row(self, images: Sequence[ImageFile]) -> list[ImageFile]:
        return [self.family.in_row(one, len(images)) for one in images]

    def expand(self, ids: Ids, images: Sequence[ImageFile], mask: Sequence[int] | None = None) -> Expanded:
        """Replace the marks of a row.

        Args:
            mask: a value per token; that of a mark is repeated.

        Raises:
            BadImage: if marks and images differ in number or kind, or if the model refuses an image.
        """
        places, images = self._places(ids), self._in_row(images)
        self._check([self._kinds[ids[place]] for place in places], images)
        return Expanded(ids, places, [self._of(one, len(images)) for one in images], images, mask)

    def turns(self, turns: Sequence[Turn], images: Sequence[ImageFile]) -> list[Turn]:
        """Replace the marks in turns that have no labels yet. Raises BadImage as ``expand``."""
        images = self._in_row(images)
        segments = list(chain(*self._with_front(turns, len(images))))
        places = [self._places(segment.ids) for segment in segments]
        self._check([self._kinds[one.ids[at]] for one, found in zip(segments, places, strict=True) for at in found],
                    images)  # fmt: skip
        left, made = iter(images), []
        for segment, found in zip(segments, places, strict=True):
            own = list(islice(left, len(found)))
            made.append(self._segment(segment, found, own, len(images)) if own else segment)
        return list(zip(made[::2], made[1::2], strict=True))

    def for_template(self, example: Example) -> Example:
        """Return the input of a template: without images if they precede its text, and with the text before each
        image."""
        images = images_in(example)
        if self.family.in_front and images:
            return replace(example, messages=tuple(map(_without_images, example.messages)))
        if self.family.in_front or not any(map(self.family.before, images)):
            return example
        return replace(example, messages=tuple(map(self._introduce_images, example.messages)))

    def _introduce_images(self, message: Message) -> Message:
        """Return a message with the text of the family before each image."""
        parts: list[ContentPart] = []
        for part in message.parts:
            prefix = self.family.before(part.value) if part.kind == "image" else ""
            parts += [ContentPart("text", prefix), part] if prefix else [part]
        return with_parts(message, parts) if message.images else message

    def front(self, num_images: int) -> Ids:
        """Return the marks that precede the text of a template."""
        return array("i", [self.family.mark_id] * (num_images * self.family.in_front))

    def _with_front(self, turns: Sequence[Turn], num_images: int) -> Sequence[Turn]:
        marks = self.front(num_images)
        if not marks:
            return turns
        (first, answer), *others = turns
        content = first.content

        def flags() -> list[bool]:
            return [False] * len(marks) + list(content())

        return [(replace(first, ids=marks + first.ids, begin=first.begin + len(marks), content=flags), answer), *others]

    def _segment(
        self, segment: Segment, places: Sequence[int], images: Sequence[ImageFile], num_images: int
    ) -> Segment:
        made = Expanded(segment.ids, places, [self._of(one, num_images) for one in images], images)
        return segment.with_images(
            made.ids, self._content(segment, made), made.new_position(segment.begin), made.images
        )

    def _content(self, segment: Segment, made: Expanded) -> Callable[[], list[bool]]:
        """Return which tokens truncation may remove: none of an image or of the control tokens around it."""

        def flags() -> list[bool]:
            old = list(segment.content())
            for place in made.places:
                for beside in (place - 1, place, place + 1):
                    if beside == place or (0 <= beside < len(old) and segment.ids[beside] in self._around):
                        old[beside] = False
            return made.repeat(old)

        return flags

    def without_placeholders(self, segment: Segment) -> Segment:
        """Return a labelled segment without placeholders in its labels."""
        if not segment.images or not segment.is_trained:
            return segment
        labels = segment.labels[:]
        for place in chain.from_iterable(range(one.begin, one.end) for one in segment.images):
            if segment.ids[place] in self.family.placeholder_ids:
                labels[place] = IGNORE_INDEX
        return replace(segment, labels=labels)


def _all_places(ids: Sequence[int], token: int) -> Iterator[int]:
    """Yield the positions of a token. ``index`` is several times as fast as a loop over all tokens."""
    place = -1
    while True:
        try:
            place = ids.index(token, place + 1)
        except ValueError:
            return
        yield place


class Expanded:
    """A row whose marks were replaced.

    Args:
        ids: ids of the row with its marks.
        places: position of each mark.
        new: the ids that replace each mark.
        images: one image per mark.
        mask: a value per token of ``ids``.
    """

    def __init__(
        self, ids: Ids, places: Sequence[int], new: Sequence[Ids], images: Sequence[ImageFile],
        mask: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.places, self._sizes = places, list(map(len, new))
        self.ids, done = array("i"), 0
        self.images: list[ImageFile] = []
        for place, of_image, image in zip(places, new, images, strict=True):
            self.ids += ids[done:place]
            self.images.append(image.at_tokens(len(self.ids), len(self.ids) + len(of_image)))
            self.ids += of_image
            done = place + 1
        self.ids += ids[done:]
        self.mask = None if mask is None else self.repeat(mask)

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """Expand a value per token with marks to a value per token; that of a mark applies to its entire image."""
        found: list[Any] = []
        done = 0
        for place, size in zip(self.places, self._sizes, strict=True):
            found += values[done:place]
            found += [values[place]] * size
            done = place + 1
        found += values[done:]
        return found

    def new_position(self, place: int) -> int:
        """Return the new position of a token of the row with marks."""
        before = bisect_right(self.places, place - 1)
        return place + sum(self._sizes[:before]) - before


def without_expansion(ids: Sequence[int], images: Sequence[ImageFile], mark: int) -> list[int]:
    """Return a row with one mark instead of the tokens of each image."""
    found: list[int] = []
    done = 0
    for image in images:
        found += [*ids[done : image.begin], mark]
        done = image.end
    return [*found, *ids[done:]]


def shift_positions(images: Iterable[ImageFile], by: int) -> list[ImageFile]:
    """Return the images with their positions shifted by ``by`` tokens."""
    return [one.at_tokens(one.begin + by, one.end + by) for one in images] if by else list(images)


def images_of_segments(segments: Iterable[Segment]) -> list[ImageFile]:
    """Return the images of concatenated segments."""
    found: list[ImageFile] = []
    at = 0
    for segment in segments:
        found += shift_positions(segment.images, at)
        at += len(segment.ids)
    return found


def images_column(images: Sequence[ImageFile]) -> list[dict[str, Any]]:
    """Return the column ``images`` of a row."""
    return [image.as_json() for image in images]
