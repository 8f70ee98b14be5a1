"""What tells one base model from another of the same shapes, without reading all of its bytes.

In: the model's options. Out: a short text that is the same for the same weights wherever they lie.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from burnish.models.check import weight_files
from burnish.models.source import local_folder

SAMPLES = 64
"""Places per file that are read; a fine-tuned copy differs in every one of them."""
_SAMPLE_BYTES = 4096


def base_fingerprint(options: Any) -> str:
    """A hash of the weight files: their sizes, their headers, and bytes from evenly spaced places.

    A model that is trained from scratch is its config and its seed.
    """
    patterns = ("*.json", "*.safetensors")
    folder = local_folder(options.model_name_or_path, options, "model_name_or_path", patterns)
    digest = hashlib.sha256()
    if options.train_from_scratch:
        digest.update((folder / "config.json").read_bytes())
        digest.update(f"seed {options.seed}".encode())
    else:
        for path in weight_files(folder):
            _add_samples(digest, path)
    return digest.hexdigest()[:32]


def _add_samples(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{size}".encode())
    with path.open("rb") as file:
        for place in sorted({size * part // SAMPLES for part in range(SAMPLES)}):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
