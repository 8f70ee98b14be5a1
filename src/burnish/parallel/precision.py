"""The compute dtype of a run, for training, evaluation, prediction, chat and the API.

In: the options, a device and the dtype of the model's files. Out: the autocast dtype, the dtype of frozen weights, and
a sentence about both. CPUs without 16-bit instructions emulate bfloat16 products, which takes several times as long as
float32; on some CPUs with them, training is slower as well. There 16-bit weights are converted to float32 for training
and predictions, unless the options request bfloat16. Chat and API do so only where products are emulated: generation
for few requests reads all weights for each token, and 16-bit weights are half as large.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
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
        # Torch's builds for macOS have no oneDNN.
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return f"{capability} with BF16" if has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else capability
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


@cache
def is_amx_generation() -> bool:
    """Whether this is an Intel processor of a generation with AMX (Sapphire Rapids or later), which a virtual machine
    may hide. False if that is unknown."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "GenuineIntel" in processor and "avx512_fp16" in processor


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 products (AVX512-BF16, AMX, Arm's BF16)."""
    return cpu_instructions().endswith(("BF16", "AMX"))


def has_fast_bfloat16() -> bool:
    """Whether the processor has bfloat16 products that are faster than those in float32.

    AVX512-BF16 is faster on AMD and on Intel's Cooper Lake, but not on later Intel processors if AMX is not available
    (measured there with oneDNN: 73 instead of 123 GFLOP/s for square matrices of 1,024).
    """
    return has_bfloat16() and not (cpu_instructions() == "AVX512-BF16" and is_amx_generation())


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` has products in ``dtype`` without emulation. No CPU has them for float16."""
    return device.type != "cpu" or dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16())


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether training in ``dtype`` is not slower than in float32 on ``device``."""
    return has_products(dtype, device) and (device.type != "cpu" or dtype == torch.float32 or has_fast_bfloat16())


def autocast_dtype(options: ParallelOptions, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of the forward pass. None: the dtype of the weights.

    On a CPU float16 is replaced with bfloat16 if that is faster than float32, else with float32.
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
    return in_files if options.bf16 is not False and has_fast_products(in_files, device) else torch.float32


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
    files = f"matrix multiplication in {name_of(in_files)}, the dtype of the files"
    if compute == torch.float32 and compute != in_files:
        if not has_products(in_files, device):
            return f"{sentence}, because this device emulates {files}."
        if not has_fast_products(in_files, device):
            return f"{sentence}, because that is faster on this device than {files}."
    return f"{sentence}."


def slow_products(dtype: torch.dtype) -> str:
    """A warning for a CPU on which training in ``dtype`` is slower than in float32, with the measured cost."""
    if dtype == torch.bfloat16 and has_bfloat16():
        what, cost = f"({cpu_instructions()} without AMX) multiplies matrices more slowly in bfloat16", "1.5 to 1.6"
    else:
        what, cost = f"({cpu_instructions()}) emulates {name_of(dtype)} matrix multiplication", "5 to 11"
    return f"This processor {what}: training steps took {cost} times as long as in float32 in our measurements."


def device_in_words(device: torch.device) -> str:
    """The device; for a CPU with its instruction set: "cpu (AVX512-BF16)"."""
    return f"{device} ({cpu_instructions()})" if device.type == "cpu" else str(device)
