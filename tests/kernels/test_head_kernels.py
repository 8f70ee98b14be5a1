"""Selectable kernels for the head's loss: rejected combinations, and results equal to burnish's own implementation.

Triton's interpreter (TRITON_INTERPRET=1) runs the kernels on a CPU, as far as it goes; on a GPU see test_gpu.py.
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from burnish.kernels import head_kernels
from burnish.kernels.cross_entropy import TokenLoss
from burnish.kernels.head_kernels import BACKENDS, head_loss, head_obstacle, logits_bytes
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.lm import check_fused_loss

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def inputs(n=9, width=32, vocabulary=97):
    torch.manual_seed(0)
    hidden = torch.randn(n, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / 4).requires_grad_()
    targets = torch.randint(vocabulary, (n,))
    targets[3] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.fixture
def _installed(monkeypatch):
    monkeypatch.setattr(head_kernels, "find_spec", lambda name: name)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("backend", "device", "rules", "bias", "reason"),
    [
        ("liger", CPU, TokenLoss(), False, "on a GPU only"),
        ("liger", GPU, TokenLoss(accuracy=True), False, "without accuracy"),
        ("cut_cross_entropy", GPU, TokenLoss(entropy=True), False, "and entropy"),
        ("liger", GPU, TokenLoss(factor="dft"), False, "the model's probabilities"),
        ("cut_cross_entropy", GPU, TokenLoss(label_smoothing=0.1), False, "not support label smoothing"),
        ("cut_cross_entropy", GPU, TokenLoss(), True, "does not support the bias"),
    ],
)
def test_unsupported_kernel_reports_a_reason(backend, device, rules, bias, reason):
    assert reason in head_obstacle(backend, device, rules, bias)


@pytest.mark.usefixtures("_installed")
def test_gpu_kernels_support_their_features():
    assert not head_obstacle("liger", GPU, TokenLoss(label_smoothing=0.1, softcap=30.0), has_bias=True)
    assert not head_obstacle("cut_cross_entropy", GPU, TokenLoss(softcap=30.0))
    assert not head_obstacle("chunked", CPU, TokenLoss(0.1, 30.0, accuracy=True, entropy=True), has_bias=True)


def test_kernel_with_missing_library_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr(head_kernels, "find_spec", lambda name: None)
    options = SimpleNamespace(
        fused_loss="liger",
        use_cpu=True,
        label_smoothing_factor=0.0,
        compute_accuracy=False,
        compute_entropy=False,
        use_dft_loss=False,
        use_eaft_loss=False,
        eaft_alpha=1.0,
    )
    (problem,) = check_fused_loss(options)
    assert "fused_loss: liger" in str(problem)
    assert "library liger-kernel, which is not installed" in str(problem)


def test_ignored_target_counts_nothing_and_has_no_gradient():
    hidden, weight, targets = inputs()
    whole = head_loss("chunked", hidden, weight, targets, TokenLoss()).total
    stay = targets != IGNORE_INDEX
    some = head_loss("chunked", hidden[stay], weight, targets[stay], TokenLoss()).total
    assert torch.allclose(whole, some)
    assert not torch.autograd.grad(whole, hidden)[0][3].any()


def test_no_backend_holds_more_than_full_logits():
    for backend in BACKENDS:
        assert logits_bytes(backend, 5, 32, 97, GPU) <= 4 * 5 * 97
    chunk = logits_bytes("chunked", 10**6, 896, 151_936, GPU)
    assert logits_bytes("chunked", 10**6, 896, 151_936, CPU) < chunk < 4 * 10**6 * 151_936
    assert logits_bytes("cut_cross_entropy", 10**6, 896, 151_936, GPU) == 0


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("liger_kernel") is None,
    reason="needs liger-kernel, and TRITON_INTERPRET=1 to run its kernels on a CPU",
)


@interpreted
@pytest.mark.parametrize("weighted", [False, True], ids=["summed", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_liger_loss_and_gradients_match_chunked_ones(weighted, smoothing):
    hidden, weight, targets = inputs()
    counts = torch.rand(len(targets)) if weighted else None
    result = []
    for backend in ("chunked", "liger"):
        total = head_loss(backend, hidden, weight, targets, TokenLoss(smoothing), None, counts).total
        result.append([total, *torch.autograd.grad(total * 0.3, [hidden, weight])])
    for ours, theirs in zip(*result, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
