"""The kernels of a GPU, without one: Triton's interpreter runs them on a CPU, where the same formulas go by blocks; and
its compiler makes them for GPUs that are not there. ``test_gpu.py`` runs them where they belong.

Whether Triton interprets is settled when it is imported, so the tests that need it run in a process of their own, which
the first one starts. The interpreter cuts a number off where a GPU rounds it to 16 bits.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from burnish.core.patching import restore
from burnish.models import fused
from burnish.models.fused import patch_forwards
from burnish.ops import cross_entropy, elementwise
from burnish.ops.cross_entropy import TokenLoss, linear_cross_entropy, plain_cross_entropy
from burnish.ops.gpu import kernels
from burnish.ops.gpu.rotary import rotate, turned, turns_alike
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (pip install triton)"),
]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs with TRITON_INTERPRET=1, in a process of its own")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="runs without TRITON_INTERPRET=1")
MODULE = "burnish.ops.gpu.triton_kernels"
CPU = torch.device("cpu")
STRANGERS = "this Triton's interpreter makes numbers of arrays that this numpy makes none of"


def distance(a, b):
    """The greatest difference, in units of the greatest value."""
    return float((a.detach().double() - b.detach().double()).abs().max() / b.detach().double().abs().max())


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gradients(function, *inputs):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, draw(*output.shape).to(output.dtype))]


@pytest.fixture
def on_cpu(monkeypatch):
    """The interpreted kernels stand where those of a GPU would, for tensors of a CPU."""
    monkeypatch.setattr(kernels, "_KINDS", {"cpu"})
    if "0-dimensional" in kernels.obstacle(CPU):
        pytest.skip(STRANGERS)


def both(monkeypatch, function):
    """Call ``function`` with the kernels and without."""
    made = []
    for kinds in ({"cpu"}, set()):
        monkeypatch.setattr(kernels, "_KINDS", kinds)
        made.append(function())
    return zip(*made, strict=True)


@compiled
def test_what_is_interpreted_passes():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    if STRANGERS in done.stdout:
        pytest.skip(STRANGERS)
    assert " passed" in done.stdout


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_the_kernels_pass_the_trial_that_a_device_is_put_to():
    assert kernels.obstacle(CPU) == ""
    assert kernels.kernels_of(CPU).__name__ == MODULE


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 24), (3, 5, 130), (70, 64), (0, 8)])
def test_a_norm_is_the_one_that_goes_by_blocks_and_so_are_its_gradients(monkeypatch, offset, shape):
    x, weight = draw(*shape), draw(shape[-1])
    found = both(monkeypatch, lambda: gradients(lambda x, w: elementwise.rms_norm(x, w, 1e-6, offset), x, weight))
    for fast, plain in found:
        assert fast.shape == plain.shape
        assert torch.equal(fast, plain) or distance(fast, plain) < 1e-6


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 5, 333), (1, 1), (0, 4)])
def test_a_gated_product_is_the_one_that_goes_by_blocks_and_so_are_its_gradients(monkeypatch, activation, shape):
    gate, up = draw(*shape), draw(*shape) + 1
    found = both(monkeypatch, lambda: gradients(lambda g, u: elementwise.gated(g, u, activation), gate, up))
    for fast, plain in found:
        assert fast.shape == plain.shape
        assert torch.equal(fast, plain) or distance(fast, plain) < 1e-6


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_rows_that_lie_apart_are_gone_through_as_they_lie():
    x, gate, up = draw(6, 40).t(), draw(40, 12)[:, ::2], draw(6, 40).t()
    normed, weight = elementwise.rms_norm(x, torch.ones(6), 1e-6), torch.ones(6)
    assert distance(normed, F.rms_norm(x, (6,), weight, 1e-6)) < 1e-6
    assert distance(elementwise.gated(gate, up, "silu"), F.silu(gate) * up) < 1e-6


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_a_norm_under_autocast_hands_on_what_the_next_product_takes():
    x, weight = draw(9, 64), draw(64)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(lambda x, w: elementwise.rms_norm(x, w, 1e-6), x, weight)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
    assert distance(found[0], F.rms_norm(x, (64,), weight, 1e-6)) < 2**-7


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("vocabulary", [97, 5000])  # less than a program looks at together, and more
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "rules", [TokenLoss(), TokenLoss(label_smoothing=0.1), TokenLoss(softcap=5.0, label_smoothing=0.2)], ids=str
)
def test_a_loss_and_its_gradients_are_those_of_whole_logits(vocabulary, weighted, rules):
    hidden, weight, bias = draw(11, 16), draw(vocabulary, 16), draw(vocabulary)
    targets = torch.arange(11) * 8
    counts = torch.rand(11) if weighted else None

    def whole(h, w, b):
        logits = F.linear(h, w, b)
        capped = rules.softcap * torch.tanh(logits / rules.softcap) if rules.softcap else logits
        losses = F.cross_entropy(capped, targets, reduction="none", label_smoothing=rules.label_smoothing)
        return (losses if counts is None else losses * counts).sum()

    fast = gradients(lambda h, w, b: linear_cross_entropy(h, w, targets, rules, b, counts).total, hidden, weight, bias)
    for mine, theirs in zip(fast, gradients(whole, hidden.double(), weight.double(), bias.double()), strict=True):
        assert distance(mine, theirs) < 3e-6  # float32 over 5,000 numbers, in an order that is Triton's own


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("rows", "rows_of_angles"), [(3, 3), (3, 1), (1, 1)])
def test_queries_and_keys_are_turned_by_the_formula_and_so_are_their_gradients(rows, rows_of_angles):
    q, k = draw(rows, 7, 3, 24).transpose(1, 2), draw(rows, 7, 1, 24).transpose(1, 2)
    cos, sin = draw(rows_of_angles, 7, 24), draw(rows_of_angles, 7, 24) - 1
    for which in (0, 1):  # the gradients of both through one of them, and through the other
        fast = gradients(lambda q, k, at=which: rotate(q, k, cos, sin)[at] + 0 * q.sum() + 0 * k.sum(), q, k)
        plain = gradients(lambda q, k, at=which: turned((q, k)[at], cos, sin) + 0 * q.sum() + 0 * k.sum(), q, k)
        for mine, theirs in zip(fast, plain, strict=True):
            assert torch.equal(mine, theirs) or distance(mine, theirs) < 1e-6


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_turned_heads_of_a_token_lie_beside_each_other_and_in_the_format_of_the_next_product():
    q, k = draw(1, 7, 3, 24).transpose(1, 2), draw(1, 7, 1, 24).transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        turned_q, turned_k = rotate(q.bfloat16(), k.bfloat16(), draw(1, 7, 24), draw(1, 7, 24))
    assert (turned_q.dtype, turned_k.dtype) == (torch.bfloat16, torch.bfloat16)
    assert turned_q.transpose(1, 2).is_contiguous()


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_angles_that_learn_or_of_another_shape_are_left_to_the_model():
    q, k, cos = draw(1, 3, 7, 24), draw(1, 1, 7, 24), draw(1, 7, 24)
    assert rotate(q, k, cos.clone().requires_grad_(), cos) is None
    assert rotate(q, k, cos[..., :12], cos[..., :12]) is None
    assert rotate(q, k, cos[0], cos[0]) is None


@compiled
def test_the_turning_of_a_model_is_replaced_where_it_is_the_formula():
    from transformers.models.cohere import modeling_cohere
    from transformers.models.qwen3 import modeling_qwen3

    assert turns_alike(modeling_qwen3.apply_rotary_pos_emb)
    assert not turns_alike(modeling_cohere.apply_rotary_pos_emb)  # pairs of neighbours, and not of halves


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_an_evaluation_leaves_the_logits_as_they_are():
    from burnish.ops.gpu import triton_kernels

    logits = draw(5, 700)
    before, targets = logits.clone(), torch.arange(5)
    losses = triton_kernels.token_losses(logits, targets, None, 0.0, None, False)
    assert torch.equal(logits, before)
    assert distance(losses, F.cross_entropy(logits, targets, reduction="none")) < 1e-6


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_a_logit_far_above_the_others_overflows_nothing():
    logits = torch.full((2, 5000), -200.0)
    logits[0, 4999], logits[1, 3] = 3e4, 3e4
    from burnish.ops.gpu import triton_kernels

    losses = triton_kernels.token_losses(logits, torch.tensor([4999, 4]), None, 0.0, None, True)
    assert losses.tolist() == [0.0, 30200.0]
    assert logits[0].abs().max() == 0
    assert (logits[1, 3], logits[1, 4]) == (1, -1)


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rules", [TokenLoss(accuracy=True), TokenLoss(entropy=True), TokenLoss(factor="dft")], ids=str)
def test_what_the_kernel_does_not_sum_goes_without_it(monkeypatch, rules):
    monkeypatch.setattr(kernels.kernels_of(CPU), "token_losses", None)
    hidden, weight, targets = draw(5, 16), draw(97, 16), torch.arange(5)
    found = linear_cross_entropy(hidden, weight, targets, rules)
    for mine, theirs in zip(found, plain_cross_entropy(hidden @ weight.t(), targets, rules), strict=True):
        torch.testing.assert_close(mine, theirs)


@interpreted
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("family", "count"), [("llama", 8), ("qwen3", 12), ("gemma", 8), ("gpt2", 0)])
def test_a_model_gives_the_same_loss_and_gradients_through_kernels(monkeypatch, family, count):
    """Two layers: two norms and a gated layer each, Qwen3 two norms more; a norm at the end, and a rotary function."""
    ids = torch.arange(3, 33).view(2, 15)
    monkeypatch.setattr(fused, "_OF_CPU", fused._OF_GPU)

    def trained(is_fused):
        monkeypatch.setattr(kernels, "_KINDS", {"cpu"} if is_fused else set())
        model = tiny_model(family)
        assert not is_fused or len(patch_forwards(model)) == count
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss, *(weight.grad for weight in model.parameters())]

    for fast, plain in zip(trained(True), trained(False), strict=True):
        assert distance(fast, plain) < 1e-5


@interpreted
@pytest.mark.usefixtures("on_cpu")
def test_the_rotary_function_of_a_family_is_replaced_and_put_back(monkeypatch):
    from transformers.models.llama import modeling_llama

    model, own, called = tiny_model("llama"), modeling_llama.apply_rotary_pos_emb, []
    monkeypatch.setattr(fused, "_OF_CPU", fused._OF_GPU)
    monkeypatch.setattr(fused, "rotate", lambda *given: called.append(1) or rotate(*given))
    made = patch_forwards(model)
    model(input_ids=torch.arange(3, 9).view(1, 6))
    assert len(called) == 2
    assert not [patch for patch in patch_forwards(tiny_model("llama")) if patch.why is fused.ROTARY]  # it is there
    restore(made)
    assert modeling_llama.apply_rotary_pos_emb is own


@compiled
def test_on_a_device_where_they_do_not_compile_a_run_goes_without_them_and_says_why(monkeypatch):
    """Not interpreted, a kernel refuses tensors of a CPU."""
    monkeypatch.setattr(kernels, "_KINDS", {"cpu"})
    kernels.obstacle.cache_clear()
    try:
        assert kernels.kernels_of(CPU) is None
        (said,) = kernels.kernel_notes(CPU)
        assert said.startswith(
            "Norms, gated layers, rotary positions and the loss go without kernels of their own here: "
        )
        assert cross_entropy.chunk_length(1000, CPU, in_place=True) == cross_entropy.chunk_length(1000, CPU)
    finally:
        kernels.obstacle.cache_clear()


# --- compiled ---------------------------------------------------------------------------------------------------------

POINTERS = {
    "_norm_forward": {"x": "*fp32", "weight": "*fp32", "normed": "*bf16", "inverses": "*fp32"},
    "_norm_backward": {
        "grad": "*bf16", "x": "*fp32", "weight": "*fp32", "inverses": "*fp32", "grad_x": "*fp32", "sums": "*fp32"
    },
    "_gated_forward": {"gate": "*bf16", "up": "*bf16", "product": "*bf16"},
    "_gated_backward": {"grad": "*bf16", "gate": "*bf16", "up": "*bf16", "grad_gate": "*bf16", "grad_up": "*bf16"},
    "_turned": {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "into": "*bf16"},
    "_loss": {"logits": "*bf16", "targets": "*i64", "weights": "*fp32", "losses": "*fp32"},
}  # fmt: skip
NUMBERS = {"eps": "fp32", "offset": "fp32", "smoothing": "fp32", "softcap": "fp32"}  # the others are integers
CHOICES = {"WIDTH": 4096, "LEARNS": True, "ACTIVATION": "gelu", "NUMBERS": 1024, "HAS_CAP": True, "HAS_WEIGHTS": True,
           "NEEDS_SLOPE": True, "LOGITS": 4096, "IS_BACK": True, "HEADS": 32, "HALF": 64}  # fmt: skip


@compiled
@pytest.mark.parametrize("capability", [80, 90, 100])  # A100, H100 and H200, B200
@pytest.mark.parametrize("name", POINTERS)
def test_each_kernel_compiles_for_a_gpu_that_is_not_here(monkeypatch, tmp_path, name, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(MODULE), name)
    chosen = {name: CHOICES[name] for name in kernel.arg_names if name in CHOICES}
    signature = {
        name: "constexpr" if name in chosen else POINTERS[kernel.__name__].get(name, NUMBERS.get(name, "i32"))
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert made.asm["cubin"]
