"""Test of burnish's own GPU kernels on a device, before they are used.

In: a device. Out: the module of kernels (``ops.gpu.triton_kernels``), or None and the reason why not. A kernel is
compiled on the machine that runs it, which needs a C compiler and a Triton that supports the device; so before they are
used each is compiled once and compared with the formula in plain torch, on random numbers. A device on which they do
not run computes the same without them, in more time and memory, and a run says so.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

_KINDS: set[str] = set()
"""Devices for which kernels are compiled, by torch's names; AMD's GPUs have the same name. None until they are asked
for: nobody has run them on a GPU yet."""

_TOLERANCE = 1e-4  # of the greatest value, in float32
_ROWS, _WIDTH = 33, 70


def ask_for_kernels(asked: str) -> None:
    """Let burnish's kernels run in this process from now on, where ``gpu_kernels`` is "burnish"; else not."""
    _KINDS.clear()
    if asked == "burnish":
        _KINDS.add("cuda")


def kernels_of(device: torch.device) -> ModuleType | None:
    """The kernels, where they run."""
    if device.type not in _KINDS or obstacle(device):
        return None
    from burnish.ops.gpu import triton_kernels

    return triton_kernels


@cache
def obstacle(device: torch.device) -> str:
    """The reason why kernels do not run on a GPU, as the rest of a sentence; "" where they do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from triton.errors import TritonError
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    try:
        return "" if _computes_the_formulas(device) else "they do not compute there what they are to compute"
    except (TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, OSError,
            SubprocessError) as error:  # fmt: skip
        return f"{type(error).__name__}: {str(error).strip()[:300]}"


def kernel_notes(device: torch.device) -> list[str]:
    """A note for the user where kernels could run on this kind of GPU and do not."""
    reason = obstacle(device) if device.type in _KINDS else ""
    return (
        [f"Norms, gated layers, rotary positions and the loss go without kernels of their own here: {reason}."]
        if reason
        else []
    )


def _computes_the_formulas(device: torch.device) -> bool:
    """Compare each kernel and its gradients with torch, on a few rows, in float32 and without autocast."""
    from burnish.ops.gpu import triton_kernels as kernels

    drawn = torch.Generator().manual_seed(0)
    x, up, upstream = (torch.randn(_ROWS, _WIDTH, generator=drawn).to(device) for _ in range(3))
    weight, targets = torch.rand(_WIDTH, generator=drawn).to(device), torch.arange(_ROWS, device=device)

    with torch.autocast(device.type, enabled=False), torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, up)]
        plain = (
            leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-6) * (1 + leaves[1]),
            F.silu(leaves[0]) * leaves[2],
            F.cross_entropy(leaves[0], targets, reduction="none"),
        )
        wanted = [
            plain[0], *torch.autograd.grad(plain[0], leaves[:2], upstream),
            plain[1], *torch.autograd.grad(plain[1], [leaves[0], leaves[2]], upstream),
            plain[2], *torch.autograd.grad(plain[2].sum(), leaves[:1]),
            *_turned_there_and_back(x, up),
        ]  # fmt: skip
    normed, inverses = kernels.rms_norm(x, weight, 1e-6, 1.0, torch.float32)
    logits = x.clone()
    found = [
        normed, *kernels.rms_norm_backward(upstream, x, weight, inverses, 1.0, True),
        kernels.gated(x, up, "silu"), *kernels.gated_backward(upstream, x, up, "silu"),
        kernels.token_losses(logits, targets, None, 0.0, None, True), logits,
        *(kernels.turned(x[None, None], up[None], up[None].flip(-1), x.dtype, back)[0, 0] for back in (False, True)),
    ]  # fmt: skip
    return all(_is_near(mine, theirs.detach()) for mine, theirs in zip(found, wanted, strict=True))


def _turned_there_and_back(x: Tensor, cos: Tensor) -> list[Tensor]:
    """(N, W) a head of each token, rotated as in ``ops.gpu.rotary``, and the gradient of x where that of the result is
    x; the sines are the cosines in reverse order."""
    sin, half = cos.flip(-1), x.shape[-1] // 2
    a, b = x[:, :half], x[:, half:]
    back = torch.cat((b * sin[:, half:], -a * sin[:, :half]), -1)
    return [x * cos + torch.cat((-b, a), -1) * sin, x * cos + back]


def _is_near(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
