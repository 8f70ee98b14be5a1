"""A frozen dense layer and its LoRA adapter as one function, compared with two separate ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.kernels import lora
from burnish.kernels.lora import LoraForward, lora_linear
from burnish.utils.patching import installed_hook
from tiny_lora import add_lora_adapters, lora_factors

TOKENS, INPUTS, OUTPUTS, RANK = 7, 12, 10, 4
# The order of float32 summation differs.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


class AllocationCounter(TorchDispatchMode):
    """Records the operations that allocate a tensor of the given number of elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        input_pointers = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        has_size = isinstance(result, torch.Tensor) and result.numel() == self.elements and "out" not in (kwargs or {})
        if has_size and result.untyped_storage().data_ptr() not in input_pointers:
            self.found.append(str(operation))
        return result


def make_inputs(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, INPUTS, dtype=dtype, requires_grad=True)
    weight, layer_bias = torch.randn(OUTPUTS, INPUTS, dtype=dtype), torch.randn(OUTPUTS, dtype=dtype) if bias else None
    a, b = torch.randn(RANK, INPUTS, requires_grad=True), torch.randn(OUTPUTS, RANK, requires_grad=True)
    return x, weight, layer_bias, a, b


def formula(x, weight, bias, a, b, scaling, dropout=0.0):
    return F.linear(x, weight, bias) + F.linear(F.linear(F.dropout(x, dropout), a), b) * scaling


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fused_lora_linear_and_gradients_match_two_products(dropout, bias):
    result = []
    for product in (lora_linear, formula):
        x, weight, layer_bias, a, b = make_inputs(bias=bias)
        torch.manual_seed(5)
        out = product(x, weight, layer_bias, a, b, 0.7, dropout)
        out.square().sum().backward()
        result.append([out, x.grad, a.grad, b.grad])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_fused_lora_linear_passes_gradcheck():
    x, weight, bias, a, b = (tensor.detach().double() for tensor in make_inputs())
    trainable = [tensor.requires_grad_() for tensor in (x, a, b)]
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, bias, a, b, 0.7), trainable)


def test_fused_lora_linear_saves_only_input_and_low_rank_tensors():
    x, weight, bias, a, b = make_inputs()
    shared = {tensor.untyped_storage().data_ptr() for tensor in (x, weight)}
    saved = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in shared:
            saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lora_linear(x, weight, bias, a, b, 0.7)
    assert sorted(saved) == sorted([(TOKENS, RANK), (RANK, INPUTS), (OUTPUTS, RANK)])


def test_no_second_output_or_input_gradient_is_allocated():
    for elements in (TOKENS * OUTPUTS, TOKENS * INPUTS):
        counts = []
        for product in (lora_linear, formula):
            x, weight, bias, a, b = make_inputs()
            with AllocationCounter(elements) as counter:
                product(x, weight, bias, a, b, 0.7).sum().backward()
            counts.append(len(counter.found))
        assert counts[0] < counts[1]


def test_input_without_gradient_gets_none_and_factors_get_theirs():
    x, weight, bias, a, b = make_inputs()
    lora_linear(x.detach(), weight, bias, a, b, 0.7).sum().backward()
    assert x.grad is None
    assert all(factor.grad.abs().sum() > 0 for factor in (a, b))


def test_gradients_of_float32_factors_in_bfloat16_are_float32():
    x, weight, bias, a, b = make_inputs(dtype=torch.bfloat16)
    out = lora_linear(x, weight, bias, a, b, 0.7)
    out.sum().backward()
    exact = formula(x.float(), weight.float(), bias.float(), a, b, 0.7)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=0.2)  # bfloat16 has 8 bits
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert a.grad.dtype == b.grad.dtype == torch.float32


# --- which layers -----------------------------------------------------------------------------------------------------


class RoundedLinear(nn.Linear):  # a subclass that changes the computation
    def forward(self, x):
        return F.linear(x, self.weight.round(), self.bias)


def layer(base=None, *names, **settings):
    torch.manual_seed(0)
    return add_lora_adapters(nn.Linear(INPUTS, OUTPUTS) if base is None else base, *names, **settings)


def is_one_product(lora_layer):
    return (
        installed_hook(lora_layer, "forward", LoraForward).tensors(torch.zeros(1, TOKENS, INPUTS), ["one"]) is not None
    )


def layer_with_hook():
    lora_layer = layer()
    lora_layer.base_layer.register_forward_hook(lambda module, args, output: output + 1)
    return lora_layer


def layer_with_trained_base():
    lora_layer = layer()
    lora_layer.base_layer.requires_grad_(True)
    return lora_layer


UNFUSED = {
    "bias in B": lambda: layer(lora_bias=True),
    "a subclass of Linear": lambda: layer(RoundedLinear(INPUTS, OUTPUTS)),
    "a hook": layer_with_hook,
    "a trained base": layer_with_trained_base,
    "a base in another dtype": lambda: layer(nn.Linear(INPUTS, OUTPUTS).bfloat16()),
}
KINDS = [{}, {"use_rslora": True}, {"lora_dropout": 0.5}]


@pytest.mark.parametrize("settings", KINDS)
def test_frozen_dense_layer_with_plain_adapter_is_fused(settings):
    assert is_one_product(layer(**settings))


@pytest.mark.parametrize("kind", UNFUSED)
def test_other_layers_are_not_fused(kind):
    assert not is_one_product(UNFUSED[kind]())


@pytest.mark.parametrize("settings", [*KINDS, {"lora_bias": True}, {"use_dora": True}])
def test_layer_output_matches_peft(settings):
    result = []
    for is_patched in (True, False):
        lora_layer = layer(is_patched=is_patched, **settings)
        x = torch.randn(1, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(3)
        out = lora_layer(x)
        out.square().sum().backward()
        result.append([out, x.grad, *(factor.grad for factor in lora_factors(lora_layer))])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("state", ["disabled", "merged", "row by row"])
def test_switched_layer_matches_peft(state):
    outputs = []
    for is_patched in (True, False):
        lora_layer, named = layer(None, "one", "two", is_patched=is_patched), {}
        if state == "disabled":
            lora_layer.enable_adapters(False)
        elif state == "merged":
            lora_layer.merge()
        else:
            named = {"adapter_names": ["two", "__base__", "one"]}
        outputs.append(lora_layer(torch.ones(3, INPUTS), **named))
    torch.testing.assert_close(*outputs, **CLOSE)


def test_hook_on_base_layer_is_called():
    torch.testing.assert_close(
        layer_with_hook()(torch.ones(1, TOKENS, INPUTS)), layer()(torch.ones(1, TOKENS, INPUTS)) + 1
    )


def test_first_class_check_consumes_no_random_numbers():
    from peft.tuners.lora import Linear

    lora._computes_plain_lora.cache_clear()
    before = torch.get_rng_state()
    assert lora._computes_plain_lora(Linear)
    assert torch.equal(torch.get_rng_state(), before)
