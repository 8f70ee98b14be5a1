"""Fused elementwise parts of a layer: equal to the plain formulas, detected by structure, applied only where they
match.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mamba2Config
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from burnish.kernels.elementwise import ACTIVATIONS, gate_product, rms_norm
from burnish.models.patches import rotation
from burnish.models.patches.fused import patch_forwards
from burnish.utils.patching import PatchOptions, restore
from tiny_models import tiny_model

ROWS = 700  # more than one block at this width
WIDTH = 512


def formula_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.double())


def formula_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def outcome(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output and the gradients of all inputs for a fixed upstream gradient."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = function(*inputs)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, upstream)]


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_and_gradients_match_formula(offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, ROWS // 2, WIDTH), torch.rand(WIDTH) + 0.5
    ours = outcome(lambda x, w: rms_norm(x, w, 1e-6, offset), x, weight)
    for fused_value, plain in zip(ours, outcome(lambda x, w: formula_norm(x, w, 1e-6, offset), x, weight), strict=True):
        assert distance(fused_value, plain) < 1e-6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_product_and_gradients_match_formula(activation: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, ROWS // 2, WIDTH), torch.randn(2, ROWS // 2, WIDTH)
    ours = outcome(lambda g, u: gate_product(g, u, activation), gate, up)
    for fused_value, plain in zip(ours, outcome(lambda g, u: formula_gated(g, u, activation), gate, up), strict=True):
        assert distance(fused_value, plain) < 1e-6


def test_bfloat16_fused_ops_are_as_accurate_as_plain_ones() -> None:
    torch.manual_seed(0)
    x, up, weight = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, WIDTH).bfloat16(), torch.rand(WIDTH) + 0.5
    pairs = [
        (lambda g, u: gate_product(g, u, "silu"), lambda g, u: formula_gated(g, u, "silu"), (x, up)),
        (lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: plain_norm(x, w), (x, weight.bfloat16())),
    ]
    for ours, plain, inputs in pairs:
        truth = outcome(plain, *(value.double() for value in inputs))
        for mine, defaults, exact in zip(outcome(ours, *inputs), outcome(plain, *inputs), truth, strict=True):
            assert distance(mine, exact) <= 1.5 * distance(defaults, exact)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_rms_norm_under_autocast_returns_autocast_dtype() -> None:
    x, weight = torch.randn(5, WIDTH), torch.rand(WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        normed = rms_norm(x, weight, 1e-6)
    assert torch.equal(normed, rms_norm(x, weight, 1e-6).bfloat16())


# Two layers with two norms and a gated MLP each, and a final norm; Qwen3 also normalizes queries and keys, Gemma 2 has
# two more norms per layer. There are seven linear modules per layer, and the head. GPT-2 has no linear modules except
# the head and no RMS norms, but an activation in each layer that is composed of several operations.
@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 22), ("qwen2", 22), ("qwen3", 26), ("mistral", 22), ("gemma", 22), ("gemma2", 26), ("gpt2", 11)],
)
def test_fused_model_gives_losses_and_gradients_of_plain_model(family: str, count: int) -> None:
    plain, fused = tiny_model(family), tiny_model(family)
    assert len(patch_forwards(fused)) == count
    assert list(fused.state_dict()) == list(plain.state_dict())
    ids = torch.arange(3, 33).view(2, 15)
    for model in (plain, fused):
        model(input_ids=ids, labels=ids).loss.backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        # Each is a sum over 30 positions of values that are rounded at 1e-7.
        assert distance(mine.grad, theirs.grad) < 1e-5


def test_composed_activation_is_fused_and_more_accurate_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, x = tiny_model("gpt2"), torch.randn(ROWS, WIDTH)
    activation = model.transformer.h[0].mlp.act
    truth, defaults = outcome(activation, x.bfloat16().double()), outcome(activation, x.bfloat16())
    patch_forwards(model)
    for fused_value, plain, exact in zip(outcome(activation, x.bfloat16()), defaults, truth, strict=True):
        assert fused_value.dtype == torch.bfloat16
        assert distance(fused_value, exact) <= distance(plain, exact)


def test_frozen_norm_weights_get_no_gradient() -> None:
    weight = torch.rand(WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is None
    assert x.grad is not None


class Shifted(nn.Module):
    """Has the attributes of an RMS norm but a different formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + 1e-2


class Ungated(nn.Module):
    """Has the submodules of a gated MLP but a different formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Steeper(nn.Module):
    """Resembles the activation but has a different formula."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_similar_module_is_not_replaced() -> None:
    alone = [Shifted(), Ungated(), Steeper(), nn.LayerNorm(8), nn.Dropout(0.1)]
    patch_forwards(nn.Sequential(*alone))
    assert not any("forward" in vars(module) for module in alone)


def test_hooks_on_fused_module_are_called() -> None:
    model = tiny_model("llama")
    patch_forwards(model)
    called: list[nn.Module] = []
    for layer in model.model.layers:
        for module in (layer.mlp, layer.mlp.gate_proj, layer.input_layernorm):
            module.register_forward_hook(lambda module, *_: called.append(module))
    model(input_ids=torch.arange(3, 9).view(1, 6))
    assert len(called) == 6


def test_small_inference_batches_use_original_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = tiny_model("llama"), []

    def counted(x: Tensor, *arguments: Any) -> Tensor:
        called.append(x.shape)
        return rms_norm(x, *arguments)

    patch_forwards(model)
    monkeypatch.setattr("burnish.models.patches.fused.rms_norm", counted)
    response = torch.arange(3, 9).view(1, 6)
    with torch.no_grad():
        model(input_ids=response)
        assert not called
        many = torch.zeros(1, 2**17 // model.config.hidden_size + 1, dtype=torch.long)
        model.base_model.norm(model.base_model.embed_tokens(many))
        assert len(called) == 1
    model(input_ids=response)
    assert len(called) == 6


def test_replacements_can_be_undone() -> None:
    model = tiny_model("gpt2")
    restore(patch_forwards(model))
    assert not any("forward" in vars(module) for module in model.modules())


def test_module_check_does_not_consume_random_numbers() -> None:
    model, before = tiny_model("qwen3"), torch.get_rng_state()
    assert patch_forwards(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_patch_embedding_equals_convolution(kind: Any, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sides = (2, 7, 7)[-2 if kind is nn.Conv2d else -3 :]
    model = nn.Sequential(kind(3, 16, sides, stride=sides, bias=bias))
    patches, images = torch.randn(50, 3, *sides), torch.randn(2, 3, *(2 * side for side in sides))
    plain, whole = outcome(model, patches), model(images)
    (made,) = patch_forwards(model, device=torch.device("cpu"))
    assert made.why.kind == "patch embedding"
    assert torch.equal(model(images), whole)  # several patches per input: torch's convolution
    monkeypatch.delattr(kind, "forward")  # one patch per input does not use it
    for mine, theirs in zip(outcome(model, patches), plain, strict=True):
        assert mine.shape == theirs.shape
        assert distance(mine, theirs) < 1e-5


def test_other_convolutions_are_not_patched() -> None:
    for settings in (
        {"stride": 1},
        {"stride": 3, "padding": 1},
        {"stride": 3, "groups": 3},
        {"stride": 3, "dilation": 2},
    ):
        assert not patch_forwards(nn.Sequential(nn.Conv2d(3, 6, 3, **settings)), device=torch.device("cpu"))
    assert not patch_forwards(nn.Sequential(nn.Conv2d(3, 6, 3, stride=3, padding="valid")), device=torch.device("cpu"))


# --- rotary embeddings of a vision tower ------------------------------------------------------------------------------


class Tower(nn.Module):
    """A vision tower that calls the rotary embedding function of its Python module."""


def python_module_with(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    file = ModuleType("of_the_tower")
    vars(file)[rotation._NAME] = function
    monkeypatch.setitem(sys.modules, "of_the_tower", file)
    monkeypatch.setattr(Tower, "__module__", "of_the_tower")
    return file


def patches_and_angles(dtype: torch.dtype) -> list[Tensor]:
    """Return queries and keys (L, H, D) as views of one tensor, as in a tower, with cosines and sines (L, D)."""
    torch.manual_seed(0)
    q, k, _ = torch.randn(ROWS * 3, 3 * 4 * 80).to(dtype).view(-1, 3, 4, 80).permute(1, 0, 2, 3).unbind(0)
    return [q, k, *torch.randn(2, ROWS * 3, 80)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "video_llama_3"])
def test_rotary_positions_of_a_tower_equal_those_of_transformers(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = vars(import_module(f"transformers.models.{family}.modeling_{family}"))[rotation._NAME]
    file = python_module_with(plain, monkeypatch)
    patches = patch_forwards(Tower(), device=torch.device("cpu"))
    assert [patch.owner for patch in patches] == [file]
    assert not patch_forwards(Tower(), device=torch.device("cpu")), "patched twice"
    inputs = patches_and_angles(dtype)
    results = vars(file)[rotation._NAME](*inputs)
    for ours, theirs in zip(results, plain(*inputs), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == dtype
    restore(patches)
    assert vars(file)[rotation._NAME] is plain


def test_rotary_positions_that_need_gradients_or_have_other_sizes_use_original_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(q))
        return apply_rotary_pos_emb_vision(q, k, cos, sin)

    file = python_module_with(plain, monkeypatch)
    patches = patch_forwards(Tower(), device=torch.device("cpu"))
    calls.clear()
    rotate, (q, k, cos, sin) = vars(file)[rotation._NAME], patches_and_angles(torch.float32)
    rotate(q, k, cos, sin)
    assert not calls
    rotate(q.clone().requires_grad_(), k, cos, sin)[0].sum().backward()
    rotate(q[None], k[None], cos, sin)
    with torch.no_grad():
        rotate(q[:4], k[:4], cos[:4], sin[:4])
    assert calls == [len(q), 1, 4]
    restore(patches)


@pytest.mark.parametrize("function", [lambda q, k: (q, k), lambda q, k, cos, sin: (q * cos[:, None], k), print])
def test_other_rotary_function_is_not_replaced(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    python_module_with(function, monkeypatch)
    assert not patch_forwards(Tower(), device=torch.device("cpu"))


def test_rotary_function_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    python_module_with(apply_rotary_pos_emb_vision, monkeypatch)
    options = PatchOptions(leave_out=["rotary function"])
    assert not patch_forwards(Tower(), options, torch.device("cpu"))


def test_gated_norm_of_a_state_space_model_is_not_taken_for_a_plain_one() -> None:
    """Without its optional argument, the gate, it is an RMS norm."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Mamba2Config(
            vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=8, expand=2,
            n_groups=1, chunk_size=8, pad_token_id=0, eos_token_id=2, bos_token_id=1,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        patches = patch_forwards(model)
        assert distance(model(ids).logits, expected) < 1e-5
    patched = {type(each.owner).__name__ for each in patches}
    assert "Mamba2RMSNorm" in patched
    assert "MambaRMSNormGated" not in patched
