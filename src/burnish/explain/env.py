"""``burnish env``: versions and devices for a bug report, without secrets and user data.

With ``--health`` it checks whether a burnish server responds on this machine, for container health checks.
"""

from __future__ import annotations

import http.client
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from burnish.config.extensions import Extension, extensions

_LIBRARIES = (
    "torch", "transformers", "tokenizers", "datasets", "accelerate", "peft", "safetensors", "rich", "matplotlib",
    "bitsandbytes", "deepspeed", "torchvision",
)  # fmt: skip
PORTS = (7860, 8000)
SLOWEST_S = 3.0


def environment() -> dict[str, str]:
    """Name -> version or description, in the order of printing. Imports torch to list devices."""

    from burnish import __version__
    from burnish.models.images.torchvision import broken_torchvision
    from burnish.parallel.precision import cpu_instructions

    libraries = {name: found for name in _LIBRARIES if (found := _version_of(name))}
    return {
        "burnish": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **libraries,
        **({"torchvision": f"broken: {broken.what}"} if (broken := broken_torchvision()) else {}),
        **{each.name: f"{each.version}, {_members(each)}" for each in extensions()},
        "processor": f"{os.cpu_count()} cores, {cpu_instructions()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        **_accelerators(),
    }


def _members(extension: Extension) -> str:
    """Return the entry points of an extension: ``optimizer sign; stage early, rated``."""
    names: dict[str, list[str]] = {}
    for group, name, _ in extension.members:
        names.setdefault(group.replace("_", " "), []).append(name)
    return "; ".join(f"{family} {', '.join(found)}" for family, found in names.items())


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _accelerators() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"accelerator": "none"}
    return {
        f"cuda:{index}": f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
        for index in range(torch.cuda.device_count())
        if (properties := torch.cuda.get_device_properties(index))
    }


def health() -> int:
    """Return 0 if the page or the API responds to ``/healthz`` on its port, else 1."""
    return 0 if any(map(_answers, PORTS)) else 1


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SLOWEST_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
