"""A fingerprint of a base model: tells it from others of the same shapes, without reading all of its bytes.

In: the model's options. Out: a short text that is the same for the same weights in any folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from burnish.models.check import weight_files
from burnish.models.options import ModelOptions
from burnish.models.source import adapter_folders, local_folder
from burnish.utils.json_files import read_object

SAMPLES = 64
"""Number of places per file that are read; a fine-tuned copy differs in every one of them."""
_SAMPLE_BYTES = 4096


def base_fingerprint(options: ModelOptions, seed: int) -> str:
    """A hash of the weight files: their sizes, their headers, and bytes from evenly spaced places.

    For a model that is trained from scratch, a hash of its config and ``seed``.
    """
    patterns = ("*.json", "*.safetensors")
    folder = local_folder(str(options.model_name_or_path), options, "model_name_or_path", patterns)
    digest = hashlib.sha256()
    if options.train_from_scratch:
        digest.update((folder / "config.json").read_bytes())
        digest.update(f"seed {seed}".encode())
    else:
        for path in weight_files(folder):
            _add_samples(digest, path)
    return digest.hexdigest()[:32]


_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "use_cache", "torch_dtype", "dtype")
"""Keys of a config that change no number; what the weights are saved in is in their headers."""


def config_fingerprint(options: ModelOptions) -> str:
    """A hash of ``config.json``: the same weights under another config are another model."""
    folder = local_folder(str(options.model_name_or_path), options, "model_name_or_path", ("*.json", "*.safetensors"))
    raw = read_object(folder / "config.json")
    kept = {name: value for name, value in raw.items() if name not in _SAYS_NOTHING and value is not None}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


def adapters_fingerprint(options: ModelOptions) -> str:
    """A hash of the adapters that the run begins with; "" where there are none."""
    digest = hashlib.sha256()
    for folder in adapter_folders(options):
        for path in sorted([*folder.glob("adapter_*.json"), *folder.glob("adapter_*.safetensors")]):
            _add_samples(digest, path)
    return digest.hexdigest()[:32] if options.adapter_name_or_path else ""


def _add_samples(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{size}".encode())
    with path.open("rb") as file:
        for place in sorted({size * part // SAMPLES for part in range(SAMPLES)}):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
