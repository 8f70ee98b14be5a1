"""The compute dtype of a run: one decision for training, evaluation, predictions, chat and the API.

In: the options, a device and the dtype of the model's files. Out: the dtype of autocast, the dtype of weights that do
not train, and one sentence on both. On a CPU whose instructions have no products of 16 bits, a product in bfloat16 is
emulated and takes several times as long as in float32; weights of 16 bits are converted to float32 there, unless the
options ask for bfloat16.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from burnish.parallel.accelerate_launch import MixedChoices, mixed_precision
from burnish.parallel.choices import FormatChoices


def cpu_instructions() -> str:
    """The widest instructions of matrix products on this processor: AMX, AVX512-BF16, AVX512, AVX2, ...

    Limits that are set by ATEN_CPU_CAPABILITY (torch) and ONEDNN_MAX_CPU_ISA (oneDNN) are respected.
    """
    capability: str = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64", "i386", "i686"):
        return f"{capability} with BF16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else capability
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    if capability in ("DEFAULT", "NO AVX") or limit in ("SSE41", "AVX"):
        return "SSE4"
    if capability == "AVX2" or limit.startswith("AVX2"):
        return "AVX2"
    if limit in ("AVX512_CORE", "AVX512_CORE_VNNI"):
        return "AVX512"
    if torch.cpu._is_amx_tile_supported() and (limit == "ALL" or "AMX" in limit):
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else "AVX512"


def has_fast_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 itself (AVX512-BF16, AMX, Arm's BF16)."""
    return cpu_instructions().endswith(("BF16", "AMX"))


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``device`` multiplies ``dtype`` without emulation. A CPU does not multiply float16."""
    return device.type != "cpu" or dtype == torch.float32 or (dtype == torch.bfloat16 and has_fast_bfloat16())


def autocast_dtype(options: MixedChoices, device: torch.device) -> torch.dtype | None:
    """The dtype of products in the forward pass; None for the dtype of the weights.

    On a CPU, float16 is replaced by bfloat16 where the processor has it, else by float32.
    """
    asked = mixed_precision(options)
    if asked == "fp16" and device.type == "cpu":
        return torch.bfloat16 if has_fast_bfloat16() else None
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(asked)


def frozen_dtype(options: MixedChoices, device: torch.device, in_files: torch.dtype) -> torch.dtype:
    """The dtype of weights that do not train, and so of products outside of autocast.

    Args:
        in_files: the dtype of the model's files.
    """
    if options.pure_bf16:
        return torch.bfloat16
    if cast := autocast_dtype(options, device):
        return cast
    return torch.float32 if options.bf16 is False else supported_dtype(in_files, device)


def loaded_dtype(config: Any) -> torch.dtype:
    """The dtype of a model's files, from its config; float32 if the config does not name it."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def supported_dtype(in_files: torch.dtype, device: torch.device) -> torch.dtype:
    """``in_files``, or float32 if ``device`` would emulate products of that dtype."""
    is_slow = in_files in (torch.float16, torch.bfloat16) and not has_products(in_files, device)
    return torch.float32 if is_slow else in_files


def full_eval_dtype(options: FormatChoices) -> torch.dtype | None:
    """The dtype to which the weights are converted for an evaluation outside of training; None leaves them."""
    if options.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if options.fp16_full_eval else None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute_sentence(compute: torch.dtype, in_files: torch.dtype, device: torch.device) -> str:
    """One sentence on the compute dtype of a run.

    Args:
        compute: the dtype of the forward pass. in_files: the dtype of the model's files.
    """
    said = f"Compute dtype: {name_of(compute)}, on {device_in_words(device)}"
    if compute == torch.float32 and compute != in_files and not has_products(in_files, device):
        return f"{said}, which would emulate products in {name_of(in_files)}, the dtype of the files."
    return f"{said}."


def slow_products(dtype: torch.dtype) -> str:
    """A warning for a CPU that emulates the products of ``dtype``, with the cost that was measured."""
    return f"This processor ({cpu_instructions()}) emulates {name_of(dtype)} products: {_COST}"


_COST = "a training step was measured to take 5 to 11 times as long as in float32."


def device_in_words(device: torch.device) -> str:
    """The device; of a CPU with its instructions: "cpu (AVX512-BF16)"."""
    return f"{device} ({cpu_instructions()})" if device.type == "cpu" else str(device)
