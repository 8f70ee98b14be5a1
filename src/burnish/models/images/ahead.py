"""Decode and preprocess images in threads before the step that needs them.

``rows`` yields the rows of coming micro-batches while their images are prepared. Pillow and numpy release the
interpreter lock while they decode and resize. The size of the queue is limited in bytes. A prepared image is cached;
the least recently used images are removed first. If a frozen vision tower has computed the features of an image, they
replace its pixels in the cache, and neither is computed again in later epochs.

The tensors and the features of an image depend on that image only, so neither threads nor the cache change results.

Qwen's and GLM's patches cover several frames, and contain each pixel of an image once per frame. Here they are stored
once, which halves the memory of waiting and cached images.
"""

# P patches of an image, F frames that a patch covers, S side of a patch

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import Tensor

from burnish.config.options import option
from burnish.loop.types import Row
from burnish.models.images.collator import ImagesOf, Prepare
from burnish.models.images.features import EncodedImage, bytes_of
from burnish.models.images.processor import Tensors


@dataclass
class ImageCacheOptions:
    """Decoding of images."""

    image_cache: str = option(
        "memory",
        "Where preprocessed images are cached: in memory (memory), in files for later epochs and runs (disk), or "
        "not at all (none). On a CPU, memory keeps the features of a frozen vision tower instead.",
        choices=("memory", "disk", "none"),
    )
    image_cache_mb: int = option(2048, "Maximum size of the cache of preprocessed images.", unit="MiB", ge=0)
    image_ahead_mb: int = option(512, "Maximum memory for prefetched images.", unit="MiB", ge=1)


_BYTES_PER_TOKEN = 20_000
"""Estimated bytes per placeholder before the first image is prepared: 18,816 for Qwen2.5-VL."""


class ImagePrefetcher:
    """Prepares images in advance; a ``Prepare``.

    Args:
        prepare: image -> tensors.
        images_of: returns the images of a row.
        ahead_bytes: maximum size of tensors that wait for their use.
        kept_bytes: maximum size of the cache.
        num_frames: F; 1 for models without such patches.
    """

    def __init__(
        self, prepare: Prepare, images_of: ImagesOf, num_threads: int, ahead_bytes: int, kept_bytes: int,
        num_frames: int = 1,
    ) -> None:  # fmt: skip
        self._prepare, self._images_of, self._num_frames = prepare, images_of, num_frames
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")
        self._ahead_bytes, self._kept_bytes = ahead_bytes, kept_bytes
        self._in_progress: dict[str, Future[Tensors]] = {}
        self._kept: OrderedDict[str, Tensors] = OrderedDict()
        self._size_of_kept = 0
        self._lock = Lock()  # batches may be collated in another thread than the one that trains
        self._model: int | None = None
        self._per_token: float = _BYTES_PER_TOKEN

    def __call__(self, image: Any) -> Tensors:
        """Return the tensors of an image. Raises the error of its preparation."""
        identity = image.identity
        with self._lock:
            if identity in self._kept:
                self._kept.move_to_end(identity)
                return self._expand(self._kept[identity])
        self._begin(image)
        tensors = self._in_progress.pop(identity).result()
        self._per_token = size_of(tensors) / max(1, image.end - image.begin)
        with self._lock:
            self._keep(identity, tensors)
        return self._expand(tensors)

    def keep_output(self, image: Any, output: Any, model: int) -> None:
        """Replace the pixels of an image in the cache by its features.

        If a second model computes features as well, such as a reference model with weights of its own, only pixels
        are cached from then on.
        """
        with self._lock:
            if self._model is None:
                self._model = model
            if self._model != model:
                self._model = _SEVERAL_ROWS
                for identity in [name for name, tensors in self._kept.items() if isinstance(tensors, EncodedImage)]:
                    self._size_of_kept -= size_of(self._kept.pop(identity))
                return
            pixels = self._kept.get(image.identity)
            if pixels is None or isinstance(pixels, EncodedImage):
                return
            rest = {name: tensor for name, tensor in pixels.items() if name == "image_grid_thw"}  # for positions
            self._size_of_kept -= size_of(self._kept.pop(image.identity))
            self._keep(image.identity, EncodedImage(rest, output, model))

    def prepare_again(self, image: Any) -> Tensors:
        """Return the tensors of an image with its pixels, although its features are cached."""
        return self._prepare(image)

    def pixels(self, image: Any) -> Tensors:
        """Return the tensors of an image with its pixels."""
        tensors = self(image)
        return self.prepare_again(image) if isinstance(tensors, EncodedImage) else tensors

    def rows(self, groups: Iterator[Sequence[Row | None]]) -> Iterator[Sequence[Row | None]]:
        """Yield the rows of micro-batches and start to prepare the images of the following ones."""
        waiting: deque[tuple[Sequence[Row | None], float]] = deque()
        begun = 0.0
        for rows in groups:
            expected = sum(self._begin(image) for row in rows if row for image in self._images_of(row))
            waiting.append((rows, expected))
            begun += expected
            while len(waiting) > 1 and (begun > self._ahead_bytes or len(waiting) > _MAX_WAITING):
                done, size = waiting.popleft()
                begun -= size
                yield done
        while waiting:
            yield waiting.popleft()[0]

    def _begin(self, image: Any) -> float:
        """Start to prepare an image unless it is cached. Returns the bytes that it will need."""
        identity: str = image.identity
        with self._lock:
            if identity in self._kept:
                return 0
        if identity not in self._in_progress:
            self._in_progress[identity] = self._threads.submit(self._compact, image)
        num_tokens: int = image.end - image.begin
        return self._per_token * max(1, num_tokens)

    def _compact(self, image: Any) -> Tensors:
        """Prepare an image; patches (P, 3 F S S) become (P, 3, 1, S S) if all frames are equal."""
        tensors = self._prepare(image)
        if self._num_frames == 1 or "image_grid_thw" not in tensors:
            return tensors
        patches = tensors["pixel_values"]
        frames = patches.view(len(patches), 3, self._num_frames, -1)
        first = frames[:, :, :1]
        are_equal = bool((frames[:, :, 1:] == first).all())
        return {**tensors, "pixel_values": first.clone()} if are_equal else tensors

    def _expand(self, tensors: Tensors) -> Tensors:
        """Undo ``_compact``."""
        patches = tensors.get("pixel_values")
        if self._num_frames == 1 or patches is None or patches.ndim != 4 or "image_grid_thw" not in tensors:
            return tensors
        return {**tensors, "pixel_values": patches.expand(-1, -1, self._num_frames, -1).flatten(1)}

    def _keep(self, identity: str, tensors: Tensors) -> None:
        self._kept[identity] = tensors
        self._size_of_kept += size_of(tensors)
        while self._size_of_kept > self._kept_bytes and self._kept:
            self._size_of_kept -= size_of(self._kept.popitem(last=False)[1])


def cache_in_memory(prepare: Prepare, images_of: ImagesOf, processor: Any) -> ImagePrefetcher:
    """Return ``prepare`` with the default cache in memory. Args: processor: of transformers."""
    defaults = ImageCacheOptions()
    return ImagePrefetcher(
        prepare, images_of, 1, 0, defaults.image_cache_mb * 2**20, getattr(processor, "temporal_patch_size", 1)
    )


_MAX_WAITING = 64
"""Maximum number of waiting micro-batches, so that text rows are not read far ahead."""


_SEVERAL_ROWS = -1
"""In place of the id of the model whose features are cached: several models compute features, and none are cached."""


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in bytes, with cached features."""
    features = bytes_of(tensors.output) if isinstance(tensors, EncodedImage) else 0
    return features + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
