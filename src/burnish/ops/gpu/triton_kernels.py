"""The elementwise parts of a step on a GPU, one kernel each: norms, gated layers, rotary positions, and the loss over
its logits.

In:  tensors on a GPU. Out: the results of ``ops.elementwise`` and ``ops.cross_entropy``, by the same formulas: sums and
their terms in float32, each result rounded once. A formula written with one torch operation after another reads and
writes its tensors at each step, and the GPU waits for its memory; here every number is read once or twice and each
result written once.

``ops.gpu.kernels`` tests on which device these can run, before they are used. Written for Triton
(Tillet et al. 2019, https://doi.org/10.1145/3315508.3329973), which comes with torch for NVIDIA and AMD GPUs; its
interpreter (TRITON_INTERPRET=1) runs the same kernels on a CPU, for tests.
"""

# N rows (all leading dimensions, flattened), H hidden size, V vocabulary

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 2**14
"""Largest row of a norm, all of whose numbers are in the registers of one program."""

_NUMBERS = 1024  # numbers per program of an elementwise kernel
_LOGITS = 4096  # logits of a row that are loaded together
_PROGRAMS_EACH = 4  # programs per multiprocessor that sum up a gradient


# --- norms ------------------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _norm_forward(x, weight, normed, inverses, width, eps, offset, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_inside = columns < width
    some = tl.load(x + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32) + offset
    inverse = 1.0 / tl.sqrt(tl.sum(some * some, 0) / width + eps)
    y = (some * inverse * scale).to(normed.dtype.element_ty)
    tl.store(normed + row * width + columns, y, mask=is_inside)
    tl.store(inverses + row, inverse)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    grad, x, weight, inverses, grad_x, sums, rows, height, width, offset, WIDTH: tl.constexpr, LEARNS: tl.constexpr
):
    """Gradients of a norm. Each program computes ``height`` rows, and sums their parts of the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    first = program * height
    columns = tl.arange(0, WIDTH)
    is_inside = columns < width
    scale = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32) + offset
    of_scale = tl.zeros((WIDTH,), tl.float32)
    for number in range(tl.minimum(height, rows - first)):
        place = (first + number) * width + columns
        inverse = tl.load(inverses + first + number)
        y = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
        of_scale += g * y
        m = g * scale
        of_x = inverse * (m - y * (tl.sum(m * y, 0) / width))
        tl.store(grad_x + place, of_x.to(grad_x.dtype.element_ty), mask=is_inside)
    if LEARNS:
        tl.store(sums + program * width + columns, of_scale, mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``ops.elementwise.rms_norm``.

    Args:
        x: (..., H), H at most ``WIDEST``. weight: (H,).
    Returns:
        (..., H) in ``dtype``, and (N,) one over the root mean square of each row, in float32.
    """
    x, width = x.contiguous(), x.shape[-1]
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverses = torch.empty(x.numel() // width, dtype=torch.float32, device=x.device)
    if len(inverses):
        with _on(x):
            _norm_forward[(len(inverses),)](x, weight, normed, inverses, width, eps, offset, **_for_rows(width))
    return normed, inverses


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor, offset: float, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``rms_norm`` by x (..., H) and weight (H,), each in the dtype of its tensor.

    Args:
        learns: whether the weight's gradient is needed.
    """
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = len(inverses)
    height = max(1, -(-rows // _programs(x.device)))
    programs = -(-rows // height)
    grad_x = torch.empty_like(x)
    sums = torch.empty(programs if learns else 0, width, dtype=torch.float32, device=x.device)
    if rows:
        with _on(x):
            _norm_backward[(programs,)](
                grad, x, weight, inverses, grad_x, sums, rows, height, width, offset, LEARNS=learns, **_for_rows(width)
            )
    return grad_x, sums.sum(0).to(weight.dtype) if learns else None


# --- gated layers -----------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation at x, and its derivative there; x in float32."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        value, slope = x * share, share * (1 + x * (1 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
        value, slope = x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x³): https://arxiv.org/abs/1606.08415
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def _gated_forward(gate, up, product, count, ACTIVATION: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = places < count
    value, _ = _activated(tl.load(gate + places, mask=is_inside, other=0.0).to(tl.float32), ACTIVATION)
    value *= tl.load(up + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(product + places, value.to(product.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward(  # type: ignore[no-untyped-def]
    grad, gate, up, grad_gate, grad_up, count, ACTIVATION: tl.constexpr, NUMBERS: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = places < count
    value, slope = _activated(tl.load(gate + places, mask=is_inside, other=0.0).to(tl.float32), ACTIVATION)
    some = tl.load(grad + places, mask=is_inside, other=0.0).to(tl.float32)
    by = tl.load(up + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(grad_up + places, (some * value).to(grad_up.dtype.element_ty), mask=is_inside)
    tl.store(grad_gate + places, (some * by * slope).to(grad_gate.dtype.element_ty), mask=is_inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``ops.elementwise.gated`` of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    if count := gate.numel():
        with _on(gate):
            _gated_forward[(triton.cdiv(count, _NUMBERS),)](
                gate, up, product, count, ACTIVATION=activation, NUMBERS=_NUMBERS
            )
    return product


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of ``gated`` by gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if count := gate.numel():
        with _on(gate):
            _gated_backward[(triton.cdiv(count, _NUMBERS),)](
                grad, gate, up, grad_gate, grad_up, count, ACTIVATION=activation, NUMBERS=_NUMBERS
            )
    return grad_gate, grad_up


# --- rotary positions -------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    x, cos, sin, into, of_row, of_head, of_token, of_angles, tokens, heads, half,
    IS_BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token. Args: of_row, of_head, of_token: strides of x; of_angles: of rows of cos, sin."""
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_inside = (head < heads) & (column < half)
    first = x + row * of_row + token * of_token + head.to(tl.int64) * of_head + column
    a = tl.load(first, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=is_inside, other=0.0).to(tl.float32)
    angle = row * of_angles + token * (2 * half) + column
    is_angle = column < half
    cos_a = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=is_angle, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=is_angle, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + half, mask=is_angle, other=0.0).to(tl.float32)
    if IS_BACK:
        of_a, of_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        of_a, of_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    there = into + place * (heads * 2 * half) + head * (2 * half) + column
    tl.store(there, of_a.to(into.dtype.element_ty), mask=is_inside)
    tl.store(there + half, of_b.to(into.dtype.element_ty), mask=is_inside)


def turned(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_back: bool) -> Tensor:
    """``ops.gpu.rotary.turned`` or, with ``is_back``, its backward pass, where x is the gradient of the result.

    Args:
        x: (B, H, T, D). cos, sin: (B or 1, T, D).
    Returns:
        (B, H, T, D) in ``dtype``; in memory the heads of a token are adjacent.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, tokens, size = x.shape
    into = torch.empty(rows, tokens, heads, size, dtype=dtype, device=x.device)
    if into.numel():
        with _on(x):
            _turned[(rows * tokens,)](
                x, cos, sin, into, x.stride(0), x.stride(1), x.stride(2), cos.stride(0) if len(cos) > 1 else 0,
                tokens, heads, size // 2, IS_BACK=is_back,
                HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(size // 2),
            )  # fmt: skip
    return into.transpose(1, 2)


# --- the loss over its logits -----------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _capped(logits, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap * tanh(logit / softcap) in float32; tanh(u) = 2 sigmoid(2 u) - 1."""
    logits = logits.to(tl.float32)
    if HAS_CAP:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _loss(  # type: ignore[no-untyped-def]
    logits, targets, weights, losses, stride, vocabulary, smoothing, softcap,
    HAS_CAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, NEEDS_SLOPE: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """The loss of one row: first the logarithm of the sum of exponentials, computed online
    (https://arxiv.org/abs/1805.02867, algorithm 3), then the derivative, which overwrites the logits."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    target = tl.load(targets + row)
    at_target = _capped(tl.load(here + target), softcap, HAS_CAP)  # before the logits are overwritten
    greatest = -float("inf")
    exponentials = 0.0
    total = 0.0
    for start in range(0, vocabulary, LOGITS):
        columns = start + tl.arange(0, LOGITS)
        is_inside = columns < vocabulary
        some = _capped(tl.load(here + columns, mask=is_inside, other=0.0), softcap, HAS_CAP)
        total += tl.sum(tl.where(is_inside, some, 0.0), 0)
        some = tl.where(is_inside, some, -float("inf"))
        higher = tl.maximum(greatest, tl.max(some, 0))
        exponentials = exponentials * tl.exp(greatest - higher) + tl.sum(tl.exp(some - higher), 0)
        greatest = higher
    log_sum = greatest + tl.log(exponentials)
    loss = (1 - smoothing) * (log_sum - at_target) + smoothing * (log_sum - total / vocabulary)
    tl.store(losses + row, loss)
    if NEEDS_SLOPE:
        weight = 1.0
        if HAS_WEIGHTS:
            weight = tl.load(weights + row)
        for start in range(0, vocabulary, LOGITS):
            columns = start + tl.arange(0, LOGITS)
            is_inside = columns < vocabulary
            some = _capped(tl.load(here + columns, mask=is_inside, other=0.0), softcap, HAS_CAP)
            slope = tl.exp(some - log_sum) - smoothing / vocabulary
            slope = tl.where(columns == target, slope - (1 - smoothing), slope)
            if HAS_CAP:
                slope *= 1 - (some / softcap) * (some / softcap)
            tl.store(here + columns, (slope * weight).to(logits.dtype.element_ty), mask=is_inside)


def token_losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float, softcap: float | None, needs_slope: bool
) -> Tensor:
    """The loss of each token, as ``ops.cross_entropy`` defines it.

    Args:
        logits: (N, V), each row contiguous; with ``needs_slope`` they become the derivative of the losses, times
            ``weights``, by the logits.
        targets: (N,) token ids. weights: (N,) float32; None is 1.
    Returns:
        (N,) float32, not multiplied with ``weights``.
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        with _on(logits):
            _loss[(rows,)](
                logits, targets, losses if weights is None else weights.contiguous(), losses, logits.stride(0),
                vocabulary, smoothing, softcap or 1.0, HAS_CAP=bool(softcap), HAS_WEIGHTS=weights is not None,
                NEEDS_SLOPE=needs_slope, LOGITS=_LOGITS, num_warps=8,
            )  # fmt: skip
    return losses


# --- launching kernels ------------------------------------------------------------------------------------------------


def _for_rows(width: int) -> dict[str, int]:
    """Launch options for a program per row of a norm: the width as a power of two, and threads in proportion."""
    numbers = triton.next_power_of_2(width)
    most = 16 if torch.version.hip else 32  # 1,024 threads, in warps of 64 on a GPU of AMD
    return {"WIDTH": numbers, "num_warps": min(most, max(1, numbers // 256))}


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which a kernel runs."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_EACH
    return _PROGRAMS_EACH * int(torch.cuda.get_device_properties(device).multi_processor_count)
