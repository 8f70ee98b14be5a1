"""The compute dtype of a run, for training, evaluation, prediction, chat and the API.

In: the options, a device and the dtype of the model's files. Out: the autocast dtype, the dtype of frozen weights, and
a sentence about both. CPUs without 16-bit instructions emulate bfloat16 products, which takes several times as long as
float32. There 16-bit weights are converted to float32, unless the options request bfloat16.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from burnish.parallel.accelerate_launch import mixed_precision
from burnish.parallel.options import ParallelOptions


def cpu_instructions() -> str:
    """The widest instruction set for matrix products on this processor: AMX, AVX512-BF16, AVX512, AVX2, ...

    Respects the limits in ATEN_CPU_CAPABILITY (torch) and ONEDNN_MAX_CPU_ISA (oneDNN).
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
    """Whether the processor has bfloat16 products (AVX512-BF16, AMX, Arm's BF16)."""
    return cpu_instructions().endswith(("BF16", "AMX"))


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` has products in ``dtype`` without emulation. No CPU has them for float16."""
    return device.type != "cpu" or dtype == torch.float32 or (dtype == torch.bfloat16 and has_fast_bfloat16())


def autocast_dtype(options: ParallelOptions, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of the forward pass. None: the dtype of the weights.

    On a CPU float16 is replaced with bfloat16 if the processor supports it, else with float32.
    """
    requested = mixed_precision(options)
    if requested == "fp16" and device.type == "cpu":
        return torch.bfloat16 if has_fast_bfloat16() else None
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(requested)


def frozen_dtype(options: ParallelOptions, device: torch.device, in_files: torch.dtype) -> torch.dtype:
    """The dtype of frozen weights, and so of products outside of autocast.

    Args:
        options: the options of precision.
        device: the device of the run.
        in_files: the dtype of the model's files.
    """
    if options.pure_bf16:
        return torch.bfloat16
    if cast := autocast_dtype(options, device):
        return cast
    return torch.float32 if options.bf16 is False else supported_dtype(in_files, device)


def loaded_dtype(config: Any) -> torch.dtype:
    """The dtype of a model's files, from its config. Default: float32."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def supported_dtype(in_files: torch.dtype, device: torch.device) -> torch.dtype:
    """``in_files``, or float32 if ``device`` would emulate products of that dtype."""
    is_slow = in_files in (torch.float16, torch.bfloat16) and not has_products(in_files, device)
    return torch.float32 if is_slow else in_files


def full_eval_dtype(options: ParallelOptions) -> torch.dtype | None:
    """The dtype that weights are converted to for an evaluation outside of training. None: no conversion."""
    if options.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if options.fp16_full_eval else None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute_sentence(compute: torch.dtype, in_files: torch.dtype, device: torch.device) -> str:
    """A sentence about the compute dtype of a run.

    Args:
        compute: the dtype of the forward pass.
        in_files: the dtype of the model's files.
        device: the device of the run.
    """
    sentence = f"Compute dtype: {name_of(compute)}, on {device_in_words(device)}"
    if compute == torch.float32 and compute != in_files and not has_products(in_files, device):
        return f"{sentence}, because it emulates matrix multiplication in {name_of(in_files)}, the dtype of the files."
    return f"{sentence}."


def slow_products(dtype: torch.dtype) -> str:
    """A warning for a CPU that emulates products in ``dtype``, with the measured cost."""
    return f"This processor ({cpu_instructions()}) emulates {name_of(dtype)} matrix multiplication: {_COST}"


_COST = "training steps took 5 to 11 times as long as in float32 in our measurements."


def device_in_words(device: torch.device) -> str:
    """The device; for a CPU with its instruction set: "cpu (AVX512-BF16)"."""
    return f"{device} ({cpu_instructions()})" if device.type == "cpu" else str(device)
