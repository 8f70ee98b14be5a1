"""Images in TRL's trainers: the family of a vision model, and batches of rows with images.

In: a model, its processor or tokenizer, the datasets. Out: a ``Family``; None for datasets without images. Images for a
text-only model are refused.

The composed processor of transformers is not needed, only the image processor. If the script passes a tokenizer, the
image processor is read from the model's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.batches.batching import collate_padded, collate_padding_free
from burnish.data.images.families import family_of
from burnish.data.images.family import Checkpoint, Family
from burnish.data.images.image_file import images_of
from burnish.data.images.sources import MediaReader
from burnish.data.sets.images import KINDS
from burnish.loop.types import TOKEN_COLUMNS, Batch, Row
from burnish.models.images.ahead import cache_in_memory
from burnish.models.images.collator import ImageCollator, ImageLayout, Prepare, computes_one_by_one
from burnish.models.images.features import patch_vision_model
from burnish.models.images.probe import isolates_images
from burnish.models.images.processor import ImageProcessor, load_image_processor, video_settings_in
from burnish.models.images.together import must_run_together, run_tower_in_every_pass
from burnish.models.options import ModelOptions
from burnish.trainer.data.loaders import is_streamed_set
from burnish.utils.json_files import read_object

MEDIA_READER = MediaReader()
"""Reader of the images of a script: paths relative to the working directory, and only the limits of the processor."""
MEDIA = ("image", "images", "video", "videos")
"""Columns of images and videos."""
IMAGE_FILE = "<image file>"
"""Key of the path of an image in a column that is passed to reward functions only."""
PLACEHOLDERS_MASKED = "Image placeholders are masked in the loss (TRL trains on them)."


def family_for(model: Any, processing_class: Any, tokenizer: Any, datasets: Iterable[Any]) -> Family | None:
    """Return the family of a model if one of the datasets contains images; None for text datasets.

    Raises:
        ValueError: for a text-only model.
    """
    config = model.config
    is_text_model = getattr(config, "vision_config", None) is None
    if not any(_contains_images(dataset, first_only=is_text_model) for dataset in datasets):
        return None
    if is_text_model:
        raise ValueError(
            "The dataset appears to be vision-related (contains 'image' or 'images' keys), but the provided model does "
            "not seem to be a vision-language model. Please check your model and dataset."
        )
    name = str(getattr(config, "_name_or_path", "") or getattr(processing_class, "name_or_path", ""))
    processor = getattr(processing_class, "image_processor", None)
    if processor is None:
        processor = load_image_processor(ModelOptions(model_name_or_path=name))
    file = Path(name) / "processor_config.json"
    in_memory = {key: value for key, value in vars(processing_class).items() if isinstance(value, int | str)}
    settings = dict(read_object(file)) if file.is_file() else in_memory
    videos = video_settings_in(Path(name), settings)
    return family_of(Checkpoint(config, processor, tokenizer, settings, video_settings=videos))


def _contains_images(dataset: Any, first_only: bool) -> bool:
    """Return whether a record of a dataset has images. Later records are searched if a message of the first one is a
    list of parts, because a column of ``datasets`` has one type; not if the dataset is streamed.

    Args:
        first_only: read the first record only. Images of later records are refused when they are encoded.
    """
    dataset = with_encoded_images(dataset)
    first = next(iter(dataset), None)
    if not isinstance(first, Mapping):
        return False
    if has_images(first) or first_only or is_streamed_set(dataset) or not any(True for _ in _parts_in(first)):
        return has_images(first)
    return any(map(has_images, dataset))


def has_images(sample: Mapping[str, Any]) -> bool:
    """Return whether a row has a column of images or videos, or messages with parts that are images or videos."""
    return any(name in sample for name in MEDIA) or any(
        isinstance(part, Mapping) and part.get("type") in KINDS for part in _parts_in(sample)
    )


def _parts_in(sample: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of all messages of a row whose content is a list."""
    turns = (turn for value in sample.values() if isinstance(value, list) for turn in value)
    contents = (turn.get("content") for turn in turns if isinstance(turn, Mapping))
    return (part for content in contents if isinstance(content, list) for part in content)


def refuse_image_columns(columns: Iterable[str], name: str) -> None:
    """Raise UserError for a dataset with images that is evaluated by a trainer whose other datasets have none."""
    if found := [column for column in columns if column in MEDIA]:
        raise UserError(
            f'The {name} dataset has the column "{found[0]}", but the trainer was created with text datasets only.',
            remedy="Pass the dataset as `eval_dataset` when the trainer is created, or remove the column.",
        )


def image_columns(dataset: Any) -> list[str]:
    """Return the columns of a dataset with images, also in lists and mappings. [] for a list of records."""
    columns = getattr(dataset, "features", None) or {}
    return [name for name, kind in columns.items() if "Image(" in repr(kind)]


def with_encoded_images(dataset: Any) -> Any:
    """Return the dataset with undecoded images, because ``datasets`` would decode each image when a row is read."""
    for name in image_columns(dataset):
        dataset = dataset.cast_column(name, _undecoded_feature(dataset.features[name]))
    return dataset


def with_image_files(value: Any, place: str, is_encoded: bool) -> Any:
    """Return a value of a column with its images replaced by ``{IMAGE_FILE: path}``, which JSON can hold.

    Args:
        place: name of the column, for messages.
        is_encoded: whether the column has undecoded images of ``datasets``: ``{"bytes": ..., "path": ...}``.

    Raises:
        BadImage: if an image cannot be read.
    """
    if is_encoded and isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return None if value["bytes"] is value["path"] is None else {IMAGE_FILE: MEDIA_READER.image(value, place).path}
    if _is_pillow_image(value):
        return {IMAGE_FILE: MEDIA_READER.image(value, place).path}
    if isinstance(value, Mapping):
        return {name: with_image_files(one, place, is_encoded) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_image_files(one, place, is_encoded) for one in value]
    return value


def _is_pillow_image(value: Any) -> bool:
    return hasattr(value, "getexif") and callable(getattr(value, "save", None))


def with_loaded_images(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Replace files by Pillow images, which TRL passes to reward functions. Completions of a prompt share its images.

    Args:
        columns: values by the name of the column: of one record, or the values of all completions. Those of the images
            of prompts are paths, others have the form of ``with_image_files``.
    """
    load = cache(_loaded)
    return {name: _with_loaded(values, name in MEDIA, load) for name, values in columns.items()}


def _with_loaded(value: Any, is_path: bool, load: Callable[[str], Any]) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {IMAGE_FILE}:
            return load(value[IMAGE_FILE])
        return {name: _with_loaded(one, False, load) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_loaded(one, is_path, load) for one in value]
    return load(value) if is_path and value else value


def _loaded(path: str) -> Any:
    """Return the image in a file, which is closed."""
    from PIL import Image

    image = Image.open(path)
    image.load()
    return image


def _undecoded_feature(kind: Any) -> Any:
    """Return a feature of ``datasets`` whose images are not decoded."""
    if type(kind).__name__ == "Image":
        return type(kind)(decode=False)
    if isinstance(kind, Mapping):
        return {name: _undecoded_feature(of) for name, of in kind.items()}
    if hasattr(kind, "feature"):
        return type(kind)(_undecoded_feature(kind.feature))
    return [_undecoded_feature(kind[0])] if isinstance(kind, list) else kind


class VisionCollator:
    """Collates rows of which some have images: padded, or padding-free if the model separates rows with images.

    Args:
        text: collates rows without images.
        pad_id, multiple: of padded rows.
        is_padding_free: whether batches are padding-free.
        num_workers: number of processes that collate. Without them, prepared images are cached in memory.
        one_by_one: whether a frozen vision tower on a CPU computes each image separately. Batches then have no tensors
            of images, which an override of a script may read.
    """

    def __init__(
        self, model: Any, family: Family, text: Callable[[Sequence[Any]], Batch], pad_id: int,
        multiple: int | None = None, is_padding_free: bool = False, num_workers: int = 0, one_by_one: bool = False,
    ) -> None:  # fmt: skip
        patch_vision_model(model)
        self.text, self.family = text, family
        layout, processor = ImageLayout.of(model.config), ImageProcessor.of(model, family.processor, family.options)
        prepare: Prepare = partial(processor.tensors_of, family.prepare)
        cache = None if num_workers else cache_in_memory(prepare, images_of, family.processor)
        one_by_one = one_by_one and computes_one_by_one(model, layout)

        def collator(flat: bool) -> ImageCollator:
            padded = partial(collate_padded, pad_id=pad_id, pad_to_multiple_of=multiple)
            rows: Any = collate_padding_free if flat else padded
            features = None if layout.needs_row else cache
            return ImageCollator(text, rows, layout, processor, images_of, cache or prepare, one_by_one, features)

        flat = collator(flat=True) if is_padding_free else None
        self.images = flat if flat is not None and isolates_images(model, flat) else collator(flat=False)

    def join_processes(self, model: Any, parallel: Any) -> None:
        """Prepare for training by several processes (``together``). Args: parallel: backend of the run."""
        if must_run_together(model, parallel.world_size, parallel.shards_weights):
            run_tower_in_every_pass(model, self.images.processor)
            self.images.one_by_one = False

    def __call__(self, examples: Sequence[Any]) -> Batch:
        rows: list[Row] = [{**example} for example in examples]
        if not any(row.get("images") for row in rows) and not self.images.is_for_text:
            if any(not self.family.placeholder_ids.isdisjoint(row["input_ids"]) for row in rows):
                raise ValueError(
                    "The rows contain image placeholders, but the column `images` is missing. Keep it in the dataset."
                )
            return self.text(rows)
        return self.images([_plain(row) for row in rows])


def _plain(row: Row) -> Row:
    """Return a row with lists, without the additional columns of a script."""
    lists = {name: list(row[name]) for name in ("input_ids", "labels", *TOKEN_COLUMNS) if name in row}
    return {**lists, "images": list(row.get("images") or ())}
