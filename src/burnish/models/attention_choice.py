"""The attention implementation selected by LLaMA-Factory's ``flash_attn`` or transformers' ``attn_implementation``.

In: the options. Out: transformers' name of it, or None, which leaves the choice to the model and to burnish. Refuses,
before a model is loaded: an unknown name, a missing library of ``attn_implementation``, two different options.
``flash_attn`` is a preference, as in LLaMA-Factory: if it is not available, a note says so, and the default is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from burnish.config.checks import notes
from burnish.config.errors import Problem, did_you_mean
from burnish.models.options import ModelOptions

_NAMES = {
    "auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3",
    "fa4": "flash_attention_4",
}  # fmt: skip
"""flash_attn -> transformers' name."""

_FLASH_LIBRARIES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
}
"""Name -> its module and its package. If the package is missing, transformers downloads a kernel from the hub."""

_OTHER_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
_KERNEL = re.compile(r"[^/:@]+/[^/:@]+(@[^/:]+)?(:[^/:]+)?")
"""owner/name of a kernel on the hub, optionally with a revision and a function name."""


def requested_attention(options: ModelOptions) -> str | None:
    """transformers' name of the selected attention. None: the model's default."""
    name: str | None = options.attn_implementation or _NAMES[options.flash_attn]
    return None if _missing(options) else name


def _missing(options: ModelOptions) -> str:
    """What the attention that ``flash_attn`` prefers needs and this machine lacks, as words. Empty if nothing."""
    name = _NAMES[options.flash_attn]
    if options.attn_implementation or not is_flash(name):
        return ""
    import torch

    if not torch.cuda.is_available():
        return "a GPU"
    return "" if _is_available(str(name)) else f"the library {_FLASH_LIBRARIES[str(name)][1]}"


@notes
def attention_notes(options: ModelOptions) -> list[str]:
    """Return a note on a preferred attention that is not available."""
    missing = _missing(options)
    what = f"flash_attn: {options.flash_attn} has no effect without {missing}: the model's default attention is used"
    return [f"{what}, which gives the same result."] if missing else []


def is_flash(name: str | None) -> bool:
    """Whether this attention runs on GPUs and in 16 bits only."""
    return name is not None and (name in _FLASH_LIBRARIES or _KERNEL.fullmatch(name) is not None)


def attention_problems(options: ModelOptions) -> Iterator[Problem]:
    """Problems of the selected attention: unknown or not installed."""
    name, usual = options.attn_implementation, _NAMES[options.flash_attn]
    if name and usual not in (None, name):
        yield Problem(
            f"attn_implementation is {name} and flash_attn is {options.flash_attn}; only one of them can be set.",
            remedy="Remove one of them.",
            option=("attn_implementation", "flash_attn"),
        )
    if name is None or name in _OTHER_IMPLEMENTATIONS:
        return
    if not is_flash(name):
        known = [*_OTHER_IMPLEMENTATIONS, *_FLASH_LIBRARIES]
        yield Problem(
            f'Unknown attn_implementation "{name}".{did_you_mean(name, known)}',
            remedy=f"Available: {', '.join(known)}, and kernels on the Hub, such as kernels-community/flash-attn2.",
            option="attn_implementation",
        )
    elif not _is_available(name):
        package = _FLASH_LIBRARIES.get(name, ("", "kernels"))[1]
        other = " (or kernels)" if package != "kernels" else ""
        yield Problem(
            f"attn_implementation: {name} requires the library {package}, which is not installed.",
            remedy=f"Install {package}{other}, or remove the option: sdpa gives the same result.",
            option="attn_implementation",
        )


def _is_available(name: str) -> bool:
    module = _FLASH_LIBRARIES.get(name, ("", ""))[0]
    if module and find_spec(module.split(".")[0]) is not None:
        return True
    from transformers.utils import is_kernels_available

    return bool(is_kernels_available())  # also checks the version of the library
