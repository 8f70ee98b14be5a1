"""Images in a run: the collator of rows with images, and the rows whose images turn out to be damaged.

Models whose rows with images influence each other in every kind of batch are rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from threading import Lock
from typing import Any

from burnish.config.errors import Problem, UserError
from burnish.config.options import raise_if
from burnish.data.batches.batching import collate_padding_free, collator, sequences_of
from burnish.data.images.family import Family
from burnish.data.images.image_file import content_hash, images_of
from burnish.kernels.probe import Capabilities, unwrap_peft
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.models.images.ahead import ImagePrefetcher
from burnish.models.images.collator import ImageCollator, ImageLayout, Prepare, computes_one_by_one
from burnish.models.images.features import patch_vision_model
from burnish.models.images.on_disk import ImageDiskCache
from burnish.models.images.probe import isolates_images
from burnish.models.images.processor import ImageProcessor, Tensors
from burnish.models.images.together import must_run_together
from burnish.parallel.selection import parallel_name
from burnish.report.console import warn
from burnish.run.plan.options import RunOptions
from burnish.run.prepare import Prepared
from burnish.utils.files import cache_home

Collate = Callable[[Sequence[Row]], Batch]
RowsAhead = Callable[[Iterator[Any]], Iterator[Any]]


def has_images(prepared: Prepared) -> bool:
    """Return whether any row of the run has images."""
    return any(rows.has_images for rows in (prepared.rows, *prepared.eval_rows.values()))


def check_processes(model: Any, world_size: int, shards_weights: bool) -> Iterator[Problem]:
    """Yield problems of images with several processes.

    Args:
        model: the model that is trained.
        shards_weights: whether weights are sharded over processes.
    """
    if not must_run_together(model, world_size, shards_weights):
        return
    if ImageLayout.of(model.config).crosses:
        name = type(unwrap_peft(model)).__name__
        what = f"{name} does not support images with several processes if weights are sharded or its tower is trained."
        yield Problem(what, why=_WAITING_REASON, remedy="Use DDP and freeze_vision_tower: true.")


_WAITING_REASON = (
    "A process without images in its micro-batch would not run the vision tower, and the others would wait for it."
)


class SkipDamagedImages:
    """Prepares images, and skips the rows of those that are damaged (``on_bad_record: drop``).

    A damaged image is replaced by a white one of the same size, so that the tokens of its row stay the same, and the
    labels of the row are removed. Each file is reported once.

    Args:
        prepare: returns the tensors of an image; raises UserError if it cannot be decoded.
        blank: returns the tensors of a white image of the same size.
    """

    def __init__(self, prepare: Callable[[Any], Any], blank: Callable[[Any], Any]) -> None:
        self._prepare, self._blank, self._lock = prepare, blank, Lock()
        self.damaged: dict[str, str] = {}

    def __call__(self, image: Any) -> Any:
        try:
            return self._prepare(image)
        except UserError as error:
            self._note(image, error)
            return self._blank(image)

    def rows(self, rows: Sequence[Row], prepare: Callable[[Any], Any]) -> list[Row]:
        """Return the rows; those with a damaged image have no labels. Args: prepare: may have prepared the images in
        advance."""
        for row in rows:
            for image in images_of(row):
                prepare(image)
        is_damaged = [any(image.identity in self.damaged for image in images_of(row)) for row in rows]
        return [
            {**row, "labels": [IGNORE_INDEX] * len(row["labels"])} if damaged else row
            for row, damaged in zip(rows, is_damaged, strict=True)
        ]

    def _note(self, image: Any, error: UserError) -> None:
        with self._lock:
            is_new = image.identity not in self.damaged
            self.damaged[image.identity] = str(error.problems[0].what)
        if is_new:
            warn(
                f"{image.path}: {error.problems[0].what} Its example is excluded from the step "
                f"({len(self.damaged)} so far, on_bad_record: drop)."
            )


class RowCollator:
    """Collates rows of which some may have images. ``ahead`` starts to prepare those of coming micro-batches."""

    ahead: RowsAhead | None

    def __init__(
        self, images: ImageCollator, text: Collate, prepared: Prepare, left_out: SkipDamagedImages | None
    ) -> None:
        self.images, self.text, self.left_out = images, text, left_out
        self.ahead = prepared.rows if isinstance(prepared, ImagePrefetcher) else None

    def __call__(self, rows: Sequence[Row]) -> Batch:
        if not any("images" in row for row in rows) and not self.images.is_for_text:
            return self.text(rows)
        sequences = [sequence for row in rows for sequence in sequences_of(row)]
        if self.left_out is not None:
            sequences = self.left_out.rows(sequences, self.images.prepare)
        return self.images(sequences)


def collator_of(
    options: RunOptions, model: Any, pad_id: int, capabilities: Capabilities, family: Family
) -> tuple[RowCollator, Capabilities]:
    """Return the collator of a run with images, and the capabilities of the model for rows with images.

    Raises:
        UserError: if rows with images influence each other even in padded batches.
    """
    patch_vision_model(model)
    layout, processor = ImageLayout.of(model.config), ImageProcessor.of(model, family.processor, family.options)
    if layout.crosses:
        raise_if(_check_single_rows(options, model))
    tensors: Prepare = partial(processor.tensors_of, family.prepare)
    if options.image_cache == "disk":
        tensors = _on_disk(options, family, processor, tensors)
    left_out = _damaged_image_handler(options, family, processor, tensors)
    prepared = _make_prepare(options, left_out or tensors, getattr(family.processor, "temporal_patch_size", 1))
    # Whether or not features are cached, so that they are equal. With FSDP each process runs the tower once.
    one_by_one = computes_one_by_one(model, layout) and parallel_name(options) not in ("fsdp", "deepspeed")
    cache = prepared if isinstance(prepared, ImagePrefetcher) and not layout.needs_row else None

    def image_collator(is_padding_free: bool, shares: bool = False) -> ImageCollator:
        text = collator(options, pad_id, is_padding_free, shares)
        of_images = collate_padding_free if is_padding_free and layout.bidirectional else text
        return ImageCollator(text, of_images, layout, processor, images_of, prepared, one_by_one, cache)

    name = type(model).__name__
    if layout.crosses:
        is_padding_free = False
        note = (
            f"{name} cannot keep examples with images in the same batch independent of each other, so each batch has "
            "one example."
        )
    else:
        # The masks for Gemma separate rows that its own attention would mix.
        may_be_flat = capabilities.is_padding_free or (bool(layout.bidirectional) and options.padding_free)
        is_padding_free = may_be_flat and isolates_images(model, image_collator(is_padding_free=True))
        note = f"{name} cannot keep concatenated examples with images independent, so batches are padded."
        if not is_padding_free and not isolates_images(model, image_collator(is_padding_free=False)):
            what = f"{name} cannot keep examples with images in the same batch independent, even in a padded batch."
            raise UserError(what, remedy="Use a different model, such as Qwen2-VL.", option="model_name_or_path")
    if layout.crosses or is_padding_free != capabilities.is_padding_free:
        shares = capabilities.shares_prefixes and is_padding_free
        notes = () if is_padding_free else (note,)
        capabilities = replace(capabilities, is_padding_free=is_padding_free, shares_prefixes=shares, notes=notes)
    images = image_collator(is_padding_free, capabilities.shares_prefixes)
    return RowCollator(images, images.collate, prepared, left_out), capabilities


def _check_single_rows(options: RunOptions, model: Any) -> Iterator[Problem]:
    """Yield problems of a model that needs one row per batch because rows with images influence each other."""
    name = type(model).__name__
    what = f"{name} cannot keep examples with images in the same batch independent, even in a padded batch."
    if options.stage != "sft":
        why = f"A batch of stage {options.stage} has several sequences for each example."
        yield Problem(
            what, why=why, remedy="Set stage: sft, or use a different model, such as Qwen2-VL.", option="stage"
        )
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(options, name) != 1:
            yield Problem(what, remedy=f"Set {name}: 1.", option=name)
    for name in ("packing", "max_tokens_per_batch"):
        if getattr(options, name, None):
            yield Problem(what, remedy=f"Remove {name}.", option=name)


def _on_disk(options: RunOptions, family: Family, processor: ImageProcessor, tensors: Prepare) -> ImageDiskCache:
    """Return ``tensors`` with a cache on disk, in a folder for the settings that the tensors depend on."""
    made_by = [version("transformers"), version("torch"), family.identity, processor.identity]
    name = sha256(json.dumps(made_by, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return ImageDiskCache(tensors, content_hash, cache_home() / "preprocessed" / name, options.image_cache_mb * 2**20)


def _damaged_image_handler(
    options: RunOptions, family: Family, processor: ImageProcessor, tensors: Prepare
) -> SkipDamagedImages | None:
    """Return the object that skips rows with damaged images if this is requested; not for preference training, where
    pairs and not labels are trained."""
    if options.on_bad_record != "drop" or options.stage != "sft":
        return None

    def blank(image: Any) -> Tensors:
        from PIL import Image

        return processor.tensors(Image.new("RGB", family.given_sizes(image)[-1], "white"))

    return SkipDamagedImages(tensors, blank)


def _make_prepare(options: RunOptions, prepare: Prepare, num_frames: int) -> Prepare:
    """Return the function image -> tensors; in threads ahead of time, unless worker processes collate."""
    if options.dataloader_num_workers:
        return prepare
    threads = max(1, min(8, (os.cpu_count() or 2) - 1))
    cache_bytes = options.image_cache_mb * 2**20 if options.image_cache == "memory" else 0
    return ImagePrefetcher(prepare, images_of, threads, options.image_ahead_mb * 2**20, cache_bytes, num_frames)
