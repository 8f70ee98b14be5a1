"""Tests that need a GPU: fast paths compared with plain ones in bfloat16, and complete runs.

The file is skipped without a GPU, and some tests without a library. The tolerance is a few units of bfloat16's rounding
(2^-8) of the largest value, because the order of summation differs.
"""

import json
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from burnish.config.options import RawValue
from burnish.kernels import attention
from burnish.kernels.attention import Scores, Sequences, flat_attention
from burnish.kernels.cross_entropy import TokenLoss, linear_cross_entropy
from burnish.kernels.lora import LoraTensors, joint_projections, lora_linear
from burnish.models.patches.attention import PaddingFree, make_padding_free
from burnish.models.patches.liger import apply_liger
from burnish.run.build import train_run
from burnish.run.plan.plan import plan
from small_run import make_workspace
from tiny_shapes import tiny

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.run
ROUNDING = 4 * 2**-8
LENGTHS = [5, 1, 140, 333]


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() <= ROUNDING * b.float().abs().max())


def needs(*libraries: str):
    missing = [library for library in libraries if find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


# --- attention --------------------------------------------------------------------------------------------------------


def random_heads(queries=8, keys=2, size=64):
    torch.manual_seed(0)
    shapes = [(queries, size), (keys, size), (keys, size)]
    tensors = [torch.randn(sum(LENGTHS), *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def causal_sequences() -> Sequences:
    begins = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device="cuda")
    return Sequences.alone(begins, max(LENGTHS))


@pytest.mark.parametrize("scores", [Scores(), Scores(window=7), Scores(scale=0.5)], ids=["plain", "window", "scaled"])
def test_varlen_kernel_matches_a_call_per_sequence(scores, monkeypatch):
    result = []
    for kernel in (attention.kernel_for, lambda dtype, scores: None):
        monkeypatch.setattr(attention, "kernel_for", kernel)
        tensors = random_heads()
        mixed = flat_attention(*tensors, causal_sequences(), scores)
        upstream = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(mixed)
        result.append([mixed, *torch.autograd.grad(mixed, tensors, upstream)])
    assert all(is_close(fast, plain) for fast, plain in zip(*result, strict=True))


def test_varlen_kernel_supports_preceding_keys(monkeypatch):
    own, before = (5, 40, 9), (0, 64, 7)
    counts, widths = torch.tensor(own), torch.tensor(own) + torch.tensor(before)
    begins, key_begins = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (counts, widths))
    sequences = Sequences(begins, int(counts.max()), key_begins, int(widths.max()))
    torch.manual_seed(0)
    shapes = [(int(counts.sum()), 8, 64), (int(widths.sum()), 2, 64), (int(widths.sum()), 2, 64)]
    tensors = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    fast = flat_attention(*tensors, sequences, Scores())
    monkeypatch.setattr(attention, "kernel_for", lambda dtype, scores: None)
    assert is_close(fast, flat_attention(*tensors, sequences, Scores()))


def test_bfloat16_kernel_exists_and_does_not_synchronize():
    tensors, where = random_heads(), causal_sequences()
    assert attention.kernel_for(torch.bfloat16, Scores()) is not None
    flat_attention(*tensors, where, Scores())  # compile and allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        flat_attention(*tensors, where, Scores())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_flat_sequences_of_a_model_do_not_attend_to_each_other(family):
    model = tiny(family, torch.bfloat16, head_dim=16).cuda()
    assert make_padding_free(model) == PaddingFree(True)
    assert model.config._attn_implementation == "burnish"


@needs("flash_attn")
def test_requested_flash_attention_separates_rows_in_float32_model():
    model = tiny("llama", head_dim=16).cuda()
    model.set_attn_implementation("flash_attention_2")
    assert make_padding_free(model, own_attention=False).is_padding_free


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["summed", "weighted"])
@pytest.mark.parametrize("rules", [TokenLoss(), TokenLoss(label_smoothing=0.1, softcap=30.0)], ids=["plain", "capped"])
def test_loss_of_head_matches_float32_loss_and_gradients(rules, weighted):
    tokens, width, vocabulary = 700, 128, 5000
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width).cuda(), (torch.randn(vocabulary, width) / 8).cuda()
    targets = torch.randint(vocabulary, (tokens,)).cuda()
    counts = torch.rand(tokens).cuda() if weighted else None

    def sums(autocast):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total = linear_cross_entropy(*leaves, targets, rules, None, counts).total
        return [total.detach(), *torch.autograd.grad(total / tokens, leaves)]

    for fast, plain in zip(sums(True), sums(False), strict=True):
        assert is_close(fast, plain)


def test_chunked_head_does_not_synchronize():
    hidden = torch.randn(64, 32, device="cuda", requires_grad=True)
    weight = torch.randn(500, 32, device="cuda", requires_grad=True)
    targets = torch.randint(500, (64,), device="cuda")
    linear_cross_entropy(hidden, weight, targets).total.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, targets).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- layers -----------------------------------------------------------------------------------------------------------


@needs("liger_kernel")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_liger_layers_match_gradients_of_model_layers(family):
    # The plain model runs first, as Liger replaces the rotary embedding of all models of the family on a GPU.
    gradients = []
    for is_fast in (False, True):
        model = tiny(family, torch.bfloat16).cuda()
        ids = torch.arange(3, 43, device="cuda").view(2, 20)
        if is_fast:
            apply_liger(model, None)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(is_close(fast, plain) for plain, fast in zip(*gradients, strict=True))


def lora_results(function, dtype):
    """Return the outputs of two layers, and the gradients of their shared input and factors."""
    torch.manual_seed(0)
    x = torch.randn(700, 256).cuda().to(dtype).requires_grad_()
    layers = []
    for outputs in (512, 128):
        weight, bias = (torch.randn(outputs, 256) / 16).cuda(), torch.randn(outputs).cuda()
        a, b = (torch.randn(8, 256) / 16).cuda().requires_grad_(), torch.randn(outputs, 8).cuda().requires_grad_()
        layers.append(LoraTensors(weight.to(dtype), bias.to(dtype), a, b, scaling=0.5))
    outputs = function(x, layers)
    trainable = [x, *(factor for layer in layers for factor in (layer.a, layer.b))]
    return [*outputs, *torch.autograd.grad(sum(y.float().sin().sum() for y in outputs), trainable)]


def test_single_and_joint_adapter_layers_match_float32():
    def separate_layers(x, layers):
        return [lora_linear(x, *layer) for layer in layers]

    plain = lora_results(separate_layers, torch.float32)
    for function in (separate_layers, joint_projections):
        for fast, exact in zip(lora_results(function, torch.bfloat16), plain, strict=True):
            assert is_close(fast, exact)


# --- a run ------------------------------------------------------------------------------------------------------------

CONFIGURATIONS = {
    "plain": {},
    "lora": {"finetuning_type": "lora"},
    "compiled": {"torch_compile": True},
    "checkpointed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
    "offloaded": {"activation_offloading": True},
    "full logits": {"fused_loss": False},
    "padded": {"padding_free": False},
    "liger": {"enable_liger_kernel": True},
    "paged": {"optim": "paged_adamw_8bit"},
    "4 bits": {"finetuning_type": "lora", "quantization_bit": 4, "optim": "paged_adamw_8bit"},
}
LIBRARIES = {"liger": ("liger_kernel",), "paged": ("bitsandbytes",), "4 bits": ("bitsandbytes",)}


@pytest.mark.parametrize("way", [pytest.param(name, marks=needs(*LIBRARIES.get(name, ()))) for name in CONFIGURATIONS])
def test_first_loss_of_each_configuration_matches_float32(way, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    losses = []
    for name, overrides in {"float32": {"bf16": False}, way: {"bf16": True, **CONFIGURATIONS[way]}}.items():
        options = make_workspace(tmp_path / name, **{"max_steps": 3, "logging_steps": 1, "use_cpu": False, **overrides})
        train_run(plan({key: RawValue(value, "the test") for key, value in options.items()}))
        state = json.loads((tmp_path / name / "out" / "trainer_state.json").read_text())
        losses.append(state["log_history"][0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if way != "4 bits" else 0.2)
