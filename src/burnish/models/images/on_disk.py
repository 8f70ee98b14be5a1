"""Cache preprocessed images on disk (``image_cache: disk``) for later epochs and runs.

A file contains the tensors of one image, bit for bit. It is named by a hash of the image's content, so that a changed
image is preprocessed again, in a folder for the settings that the tensors depend on. Once the files reach the maximum
size, no more are written: with a dataset larger than the cache, evicting the oldest file would remove each file before
its next use.

Pixels have 256 levels, so a tensor has few distinct values. They are stored as a table and an index per element, in
half or a quarter of the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from burnish.models.images.processor import Tensors
from burnish.utils.files import temporary_path

_INDICES = "indices of "
_KINDS = ((256, torch.uint8), (32_768, torch.int16))
"""Maximum number of values in a table -> dtype of the indices."""


class ImageDiskCache:
    """Preprocess images, or read their tensors from files. A ``collator.Prepare``.

    Args:
        prepare: image -> tensors.
        content_of: image -> hash of everything that its tensors depend on, except the settings of the folder.
        folder: folder of the files; created if missing.
        most_bytes: maximum total size of the files.
    """

    def __init__(
        self, prepare: Callable[[Any], Tensors], content_of: Callable[[Any], str], folder: Path, most_bytes: int
    ) -> None:
        self._prepare, self._content_of, self._folder, self._lock = prepare, content_of, folder, Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._left = most_bytes - sum(entry.stat().st_size for entry in os.scandir(folder))

    def __call__(self, image: Any) -> Tensors:
        from safetensors import SafetensorError

        file = self._folder / f"{self._content_of(image)}.safetensors"
        try:
            return _read(file)
        except FileNotFoundError:
            pass
        except (SafetensorError, KeyError, OSError):  # incomplete, for example after a power loss
            file.unlink(missing_ok=True)
        tensors = self._prepare(image)
        self._write(file, tensors)
        return tensors

    def _write(self, file: Path, tensors: Tensors) -> None:
        from safetensors.torch import save

        if self._left <= 0:
            return
        content = save({name: value for key, tensor in tensors.items() for name, value in _stored_pieces(key, tensor)})
        with self._lock:
            self._left -= len(content)
            if self._left < 0:
                return
        partial = temporary_path(file)
        partial.write_bytes(content)
        partial.replace(file)


def _stored_pieces(name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
    if tensor.is_floating_point():
        values, indices = torch.unique(tensor, return_inverse=True)
        for most, kind in _KINDS:
            # -0.0 equals 0.0, so the table may not reproduce the sign
            if len(values) <= most and torch.equal(values[indices].view(torch.int32), tensor.view(torch.int32)):
                return [(name, values), (_INDICES + name, indices.to(kind))]
    return [(name, tensor.contiguous())]


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load

    found = load(file.read_bytes())
    return {
        name: tensor[found[_INDICES + name].int()] if _INDICES + name in found else tensor
        for name, tensor in found.items()
        if not name.startswith(_INDICES)
    }
