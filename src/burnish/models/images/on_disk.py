"""Preprocessed images are kept in files (``image_cache: disk``), for later epochs and runs.

In:  what prepares an image. Out: the same, which reads the tensors of an image from its file where there is one, to the
     bit. A file is named by the content of the image, so that a changed image is prepared anew, and is in a folder for
     the settings that tensors depend on. Once the files reach their maximum size, no more are written: with a data set
     that is larger than the cache, removing the oldest would remove each before its next use.

Pixels come from 256 levels, so the values of floating point are few. They are stored as a table and the place of each
value in it, in a half or a quarter of the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor

from burnish.models.images.processor import Tensors

_PLACES = "places of "
_KINDS = ((256, torch.uint8), (32_768, torch.int16))
"""Most values of a table -> the type of places in it."""


class OnDisk:
    """Prepares images; a ``Prepare``.

    Args:
        prepare: image -> tensors.
        content_of: image -> a hash of all that its tensors depend on besides the settings of the folder.
        folder: of the files; it is made.
        most_bytes: that its files may take.
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
        except (SafetensorError, KeyError, OSError):  # cut off, when a machine went down
            file.unlink(missing_ok=True)
        tensors = self._prepare(image)
        self._write(file, tensors)
        return tensors

    def _write(self, file: Path, tensors: Tensors) -> None:
        from safetensors.torch import save

        if self._left <= 0:
            return
        content = save({name: value for key, tensor in tensors.items() for name, value in _stored(key, tensor)})
        with self._lock:
            self._left -= len(content)
            if self._left < 0:
                return
        partial = file.with_name(f"{file.name}.{os.getpid()}.{get_ident()}")
        partial.write_bytes(content)
        partial.replace(file)


def _stored(name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
    if tensor.is_floating_point():
        values, places = torch.unique(tensor, return_inverse=True)
        for most, kind in _KINDS:
            # -0.0 equals 0.0, and would come back as the one or the other
            if len(values) <= most and torch.equal(values[places].view(torch.int32), tensor.view(torch.int32)):
                return [(name, values), (_PLACES + name, places.to(kind))]
    return [(name, tensor.contiguous())]


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load

    found = load(file.read_bytes())
    return {
        name: tensor[found[_PLACES + name].int()] if _PLACES + name in found else tensor
        for name, tensor in found.items()
        if not name.startswith(_PLACES)
    }
