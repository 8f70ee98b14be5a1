"""Fingerprints of models, adapters and files: short hashes of their content, independent of their location.

Files are read as a whole, which takes about a second per GB. The digests of large ones are kept (``utils/digests.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.models.check import weight_files
from burnish.models.options import ModelOptions
from burnish.models.source import ADAPTER_PATTERNS, TOKENIZER_PATTERNS, local_folder
from burnish.utils.digests import file_digests
from burnish.utils.json_files import read_object

LARGE_BYTES = 64 * 2**20
"""Digests of files above this size are kept. Smaller ones are read again, in some hundredths of a second."""
_HEADS = ("value_head.safetensors", "value_head.bin")
_PATTERNS = ("*.json", "*.safetensors", "*.py", "value_head.bin", *TOKENIZER_PATTERNS)
"""Files that a fingerprint may read. It must not depend on what else of a model was downloaded before."""


def base_fingerprint(options: ModelOptions, seed: int) -> str:
    """A hash of the base model's weights. For a model that is trained from scratch, of its config and ``seed``."""
    folder = local_folder(str(options.model_name_or_path), options, "model_name_or_path", _PATTERNS)
    if not options.train_from_scratch:
        return _weights_digest(folder).hexdigest()[:32]
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(f"seed {seed}".encode())
    return digest.hexdigest()[:32]


def model_fingerprint(name: str, options: ModelOptions, option_name: str, reads_text: bool = False) -> str:
    """A hash of a second model, such as the reference: weights, config and code; of its tokenizer if ``reads_text``."""
    folder = local_folder(name, options, option_name, _PATTERNS)
    digest = _weights_digest(folder)
    digest.update(_config_digest(folder, options.trust_remote_code).encode())
    for path in sorted({path for pattern in TOKENIZER_PATTERNS if reads_text for path in folder.glob(pattern)}):
        if path.is_file():
            _add_content(digest, path)
    return digest.hexdigest()[:32]


def _weights_digest(folder: Path) -> hashlib._Hash:
    """The hash of the weight files, and of the head of a reward model beside them."""
    digest = hashlib.sha256()
    _add_contents(digest, [*weight_files(folder), *(folder / name for name in _HEADS if (folder / name).is_file())])
    return digest


_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "architectures", "use_cache", "torch_dtype", "dtype")
"""Keys of a config that do not affect results. The dtype of the weights is in their headers."""


def config_fingerprint(options: ModelOptions) -> str:
    """A hash of ``config.json`` and of the model's own code, because the same weights with another config are another
    model."""
    folder = local_folder(str(options.model_name_or_path), options, "model_name_or_path", _PATTERNS)
    return _config_digest(folder, options.trust_remote_code)


def _config_digest(folder: Path, runs_code: bool) -> str:
    raw = read_object(folder / "config.json")
    relevant = {name: value for name, value in raw.items() if name not in _IGNORED_CONFIG_KEYS and value is not None}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for path in sorted(folder.rglob("*.py")) if runs_code else ():
        _add_content(digest, path)
    return digest.hexdigest()[:32]


def adapters_fingerprint(names: Sequence[str] | None, options: ModelOptions, option_name: str) -> str:
    """A hash of the adapters ``names``, in order; "" without adapters."""
    digest = hashlib.sha256()
    for name in names or ():
        folder = local_folder(name, options, option_name, ADAPTER_PATTERNS)
        heads = [folder / head for head in _HEADS if (folder / head).is_file()]
        for path in sorted([*folder.glob("adapter_*.json"), *folder.glob("adapter_*.safetensors"), *heads]):
            _add_content(digest, path)
    return digest.hexdigest()[:32] if names else ""


def place_fingerprint(value: Any) -> Any:
    """``value`` with each path of a file or folder replaced with a hash of its content; in mappings, of a file."""
    if isinstance(value, Mapping):
        return {name: item if isinstance(item, str) and Path(item).is_dir() else place_fingerprint(item)
                for name, item in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [place_fingerprint(item) for item in value]
    path = Path(value) if isinstance(value, str) and value else None
    if path is None or not path.exists():
        return value
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            _add_content(digest, file)
    return digest.hexdigest()[:32]


def _add_content(digest: hashlib._Hash, path: Path) -> None:
    _add_contents(digest, [path])


def _add_contents(digest: hashlib._Hash, paths: Sequence[Path]) -> None:
    """Add the size and content of files."""
    sizes = {path: path.stat().st_size for path in paths}
    large = [path for path in paths if sizes[path] > LARGE_BYTES]
    of_large = dict(zip(large, file_digests(large), strict=True))
    for path in paths:
        digest.update(f"{sizes[path]}".encode())
        if path in of_large:
            digest.update(of_large[path])
            continue
        with path.open("rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
