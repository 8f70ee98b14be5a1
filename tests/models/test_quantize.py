"""Quantized base models: values of the method, LoRA by its formula, and evaluation leaves them unchanged.

Tests that need bitsandbytes are skipped if it is not installed; references are computed with numpy.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from burnish.adapters.base import trainable_summary
from burnish.adapters.lora_model import add_adapter, find_targets, merge_into_base, rows_through
from burnish.cli import main
from burnish.config.errors import UserError
from burnish.models.load import load_model
from burnish.models.patches.fused import patch_forwards
from burnish.models.quantization import quantize
from burnish.models.quantization.quantize import check_quantization, check_quantized_files, quantization_method_of
from burnish.run.plan.plan import RunOptions
from dense_weights import dense
from small_run import as_arguments, make_model, make_workspace
from tiny_lora import add_lora_adapters as adapted_layer
from tiny_lora import lora_factors

# Dettmers et al. 2023, appendix E: quantiles of a normal distribution, scaled to [-1, 1]
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=np.float32)  # fmt: skip
BLOCK = 64


@pytest.fixture
def bnb():
    return pytest.importorskip("bitsandbytes")


def wide_model(folder):
    """Save a model with its tokenizer. Its widths are multiples of the block size, 64."""
    make_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder, **options):
    return load_model(RunOptions(model_name_or_path=str(folder), finetuning_type="lora", **options))


def nf4(weight):
    """Quantize and dequantize: each block of 64, divided by its largest absolute value, to the nearest of 16 values."""
    blocks = weight.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs((blocks / scale)[..., None] - NF4).argmin(axis=-1)
    return (NF4[nearest] * scale).reshape(weight.shape)


def layer_of(bnb, inputs=64, outputs=128, compute_dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    plain = nn.Linear(inputs, outputs)
    layer = bnb.nn.Linear4bit(inputs, outputs, compute_dtype=compute_dtype, compress_statistics=False, quant_type="nf4")
    layer.load_state_dict(plain.state_dict())
    layer.to("cpu")
    quantize.keep_as_loaded(layer)
    layer.requires_grad_(False)
    return layer, plain.weight.detach().numpy()


def adapted(bnb, names=("default",), compute_dtype=torch.float32, **settings):
    """Return a LoRA layer over a 4-bit layer, with nonzero factors."""
    layer, _ = layer_of(bnb, compute_dtype=compute_dtype)
    return adapted_layer(layer, *names, lora_alpha=8, **settings).train()


def product(lora, x, *names):
    """Return ``x Wᵀ + b + Σ s x Aᵀ Bᵀ`` with the dequantized weight, computed with numpy."""
    weight, bias = dense(lora.base_layer).numpy(), lora.base_layer.bias.float().numpy()
    result = x.numpy() @ weight.T + bias
    for name in names:
        a, b = (factor.detach().numpy() for factor in lora_factors(lora, name))
        result = result + lora.scaling[name] * (x.numpy() @ a.T @ b.T)
    return result


def assert_close(tensor, expected, tolerance=1e-4):
    np.testing.assert_allclose(tensor.detach().float().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_4_bit_weights_are_nearest_of_16_values(bnb):
    layer, weight = layer_of(bnb)
    assert_close(dense(layer), nf4(weight), 1e-6)


def test_model_is_quantized_while_loading_except_head(bnb, tmp_path):
    folder = wide_model(tmp_path / "model")
    plain = load(folder).model.layers[0].mlp.up_proj.weight.detach().numpy()
    for options, tolerance in (
        ({"quantization_bit": 4, "double_quantization": False}, 1e-6),
        ({"quantization_bit": 4}, 2e-3),  # block scales have 8 bits
    ):
        model = load(folder, **options)
        layer = model.model.layers[0].mlp.up_proj
        assert type(layer).__name__ == "Linear4bit"
        assert_close(dense(layer), nf4(plain), tolerance)
        assert type(model.lm_head) is nn.Linear
    layer_8_bit = load(folder, quantization_bit=8).model.layers[0].mlp.up_proj
    step = np.abs(plain).max(axis=1, keepdims=True) / 127
    assert (np.abs(dense(layer_8_bit).numpy() - plain) <= 0.6 * step).all()
    fp4 = load(folder, quantization_bit=4, quantization_type="fp4").model.layers[0].mlp.up_proj
    assert fp4.weight.quant_state.quant_type == "fp4"


def test_dora_over_8_bits_trains_on_a_cpu(bnb, tmp_path):
    model = load(wide_model(tmp_path / "model"), quantization_bit=8)
    ids = torch.arange(8)[None]
    before = model(ids).logits
    targets = find_targets(model, ["q_proj", "up_proj"])[0]
    add_adapter(model, "default", LoraConfig(r=4, use_dora=True), targets, [])
    assert_close(model(ids).logits, before.detach().numpy(), 2e-2)
    first = model(ids).logits
    first.square().sum().backward()
    assert torch.equal(model(ids).logits, first)
    assert all(layer.lora_B["default"].weight.grad.abs().sum() > 0 for layer in map(model.get_submodule, targets))


def test_lora_over_4_bits_matches_formula_and_keeps_base(bnb):
    lora, x = adapted(bnb), torch.randn(3, 5, 64)
    before = lora.base_layer.weight.data.clone()
    assert_close(lora(x), product(lora, x, "default"))
    lora(x).square().sum().backward()
    a, b = lora_factors(lora, "default")
    assert a.grad.abs().sum() > 0
    assert b.grad.abs().sum() > 0
    with torch.no_grad():
        a.sub_(0.1 * a.grad)
    assert torch.equal(lora.base_layer.weight.data, before)


def test_lora_gradients_use_dequantized_weight(bnb):
    lora, x = adapted(bnb), torch.randn(6, 64, requires_grad=True)
    lora(x).square().sum().backward()
    own = [x.grad.clone(), *(factor.grad.clone() for factor in lora_factors(lora, "default"))]
    weight, bias = dense(lora.base_layer), lora.base_layer.bias
    leaf = x.detach().clone().requires_grad_()
    a, b = (factor.detach().clone().requires_grad_() for factor in lora_factors(lora, "default"))
    (leaf @ weight.t() + bias + 2.0 * (leaf @ a.t() @ b.t())).square().sum().backward()
    for result, expected in zip(own, (leaf.grad, a.grad, b.grad), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_disabled_adapter_gives_the_base_output(bnb):
    lora, x = adapted(bnb), torch.randn(3, 64)
    lora.enable_adapters(False)
    assert torch.equal(lora(x), lora.base_layer(x))
    assert_close(lora(x), product(lora, x))


def test_active_adapters_are_summed_and_missing_ones_skipped(bnb):
    lora, x = adapted(bnb, names=("one", "two")), torch.randn(3, 64)
    lora.set_adapter(["one", "two", "three"])
    assert_close(lora(x), product(lora, x, "one", "two"))


def test_each_row_uses_its_adapter(bnb):
    lora, x = adapted(bnb, names=("one", "two")), torch.randn(3, 2, 64)
    with rows_through(nn.ModuleList([lora]), ["two", "__base__", "one"]):
        result = lora(x)
    for row, names in zip(range(3), (("two",), (), ("one",)), strict=True):
        assert_close(result[row], product(lora, x[row], *names))


def test_factors_are_float32_and_output_has_input_dtype(bnb):
    lora = adapted(bnb, compute_dtype=torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    assert lora_factors(lora, "default")[0].dtype == torch.float32
    assert lora(x).dtype == torch.bfloat16
    assert_close(lora(x), product(lora, x.float(), "default"), 0.05)


def test_dora_over_4_bits_is_magnitude_times_direction(bnb):
    lora, x = adapted(bnb, use_dora=True), torch.randn(4, 64)
    with torch.no_grad():
        lora.lora_magnitude_vector["default"].weight.mul_(1.5)
    a, b = (factor.detach().numpy() for factor in lora_factors(lora, "default"))
    weight = dense(lora.base_layer).numpy() + 2.0 * b @ a
    length = lora.lora_magnitude_vector["default"].weight.detach().numpy()
    direction = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    expected = x.numpy() @ (length[:, None] * direction).T + lora.base_layer.bias.numpy()
    assert_close(lora(x), expected, 1e-3)


def test_merge_into_quantized_base_is_rejected_with_remedy(bnb):
    model = nn.ModuleDict({"layer": adapted(bnb)})
    with pytest.raises(UserError, match="burnish export"):
        merge_into_base(model)


def test_evaluation_does_not_change_quantized_weights(bnb, tmp_path):
    model = load(wide_model(tmp_path / "model"), quantization_bit=4)
    ids = torch.arange(3, 20)[None]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        first = model.train()(ids).logits
        model.eval()(ids)
        again = model.train()(ids).logits
    assert torch.equal(first, again)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_4_bit_parameters_are_counted_individually(bnb, tmp_path):
    folder = wide_model(tmp_path / "model")
    assert trainable_summary(load(folder, quantization_bit=4))[1] == trainable_summary(load(folder))[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_trains_and_resumes_bitwise_equal(bnb, tmp_path, monkeypatch, bits):
    from safetensors.torch import load_file

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    wide_model(tmp_path / "model")
    options = make_workspace(
        tmp_path, finetuning_type="lora", quantization_bit=bits, val_size=4, eval_strategy="steps", eval_steps=3,
        save_strategy="steps", save_steps=5, learning_rate=1e-2,
    )  # fmt: skip
    assert main(["train", *as_arguments(options)]) == 0
    whole = load_file(tmp_path / "out" / "adapter_model.safetensors")
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < losses[0]
    options |= {"output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-5")}
    assert main(["train", *as_arguments(options)]) == 0
    resumed = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# --- rejected options -------------------------------------------------------------------------------------------------


def options(**overrides):
    return RunOptions(**{"model_name_or_path": "m", "finetuning_type": "lora", **overrides})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"finetuning_type": "full"}, "finetuning_type: lora"),
        ({"finetuning_type": "freeze"}, "finetuning_type: lora"),
        ({"pissa_init": True}, "pissa_init"),
        ({"train_from_scratch": True}, "train_from_scratch"),
        ({"adapter_name_or_path": ["a", "b"]}, "burnish export"),
        ({"adapter_name_or_path": ["a"], "create_new_adapter": True}, "burnish export"),
    ],
)
def test_unsupported_quantized_training_is_rejected_with_remedy(monkeypatch, overrides, message):
    monkeypatch.setattr(quantize, "find_spec", lambda name: SimpleNamespace())
    (problem,) = check_quantization(options(quantization_bit=4, **overrides))
    assert message in str(problem)
    assert not list(check_quantization(options(**overrides)))


def test_missing_quantization_library_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    (problem,) = check_quantization(options(quantization_bit=4))
    assert "burnish[quantization]" in problem.remedy
    config = {"quantization_config": {"quant_method": "gptq"}}
    (problem,) = check_quantized_files(options(), config)
    assert "pip install gptqmodel optimum" in str(problem)


def test_prequantized_files_are_not_requantized_or_fully_trained(monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: SimpleNamespace())
    config = SimpleNamespace(quantization_config={"quant_method": "awq"})
    assert quantization_method_of(config) == "awq"
    assert not list(check_quantized_files(options(), config))
    assert "quantization_bit" in str(next(check_quantized_files(options(quantization_bit=4), config)))
    assert "finetuning_type: lora" in str(next(check_quantized_files(options(finetuning_type="full"), config)))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [(None, "cuda", "auto_trainable"), ("auto", "cuda:1", "auto_trainable"), ("autoawq", "cuda", "auto_trainable"),
     (None, "cpu", "plain"), ("auto", None, "plain"), ("gptq_torch", "cuda", "gptq_torch"), ("gemm", "cpu", "gemm")],
)  # fmt: skip
def test_packed_weights_use_kernels_with_a_backward_pass(method, backend, device, expected):
    described = {"quant_method": method, "bits": 4, "backend": backend}
    backend_name = {"gptq": "gptq_torch", "awq": "torch_awq"}[method] if expected == "plain" else expected
    for options in (described.copy(), SimpleNamespace(**described)):
        message = quantize.use_kernels_that_train(SimpleNamespace(quantization_config=options), device)
        assert (options["backend"] if isinstance(options, dict) else options.backend) == backend_name
        assert (backend_name in message) == (expected == "plain")


def test_other_models_are_unchanged():
    config = SimpleNamespace(quantization_config={"quant_method": "bitsandbytes"})
    quantize.use_kernels_that_train(config)
    assert config.quantization_config == {"quant_method": "bitsandbytes"}
    quantize.use_kernels_that_train(LlamaConfig())


class PackedLinear(nn.Module):
    """A layer like those of GPTQ's and AWQ's libraries: packed integers and no ``weight``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.in_features, self.out_features, self.bias = inputs, outputs, None
        self.register_buffer("qweight", torch.randint(-8, 8, (outputs, inputs), dtype=torch.int32))

    def forward(self, x):
        return x @ (self.qweight / 8).to(x.dtype).t()


def test_lora_supports_packed_layers_of_any_library():
    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": PackedLinear(6, 10), "norm": nn.LayerNorm(10)})
    assert find_targets(model, ["all"])[0] == ["proj"]
    packed, x = model["proj"], torch.randn(3, 6)
    add_adapter(model, "default", LoraConfig(r=2, lora_alpha=4), ["proj"], [])
    patch_forwards(model)
    torch.testing.assert_close(model["proj"](x), packed(x))
    nn.init.ones_(model["proj"].lora_B["default"].weight)
    assert not torch.allclose(model["proj"](x), packed(x))
