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
# float32 sums in another order: a few units in the last place of gradients near 100
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


class Sizes(TorchDispatchMode):
    """The operations that made a tensor of so many elements anew."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        options = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        is_such = isinstance(made, torch.Tensor) and made.numel() == self.elements and "out" not in (kwargs or {})
        if is_such and made.untyped_storage().data_ptr() not in options:
            self.found.append(str(operation))
        return made


def case(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, INPUTS, dtype=dtype, requires_grad=True)
    weight, of_bias = torch.randn(OUTPUTS, INPUTS, dtype=dtype), torch.randn(OUTPUTS, dtype=dtype) if bias else None
    a, b = torch.randn(RANK, INPUTS, requires_grad=True), torch.randn(OUTPUTS, RANK, requires_grad=True)
    return x, weight, of_bias, a, b


def written_out(x, weight, bias, a, b, scaling, dropout=0.0):
    return F.linear(x, weight, bias) + F.linear(F.linear(F.dropout(x, dropout), a), b) * scaling


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fused_lora_linear_and_gradients_match_two_products(dropout, bias):
    result = []
    for product in (lora_linear, written_out):
        x, weight, of_bias, a, b = case(bias=bias)
        torch.manual_seed(5)
        out = product(x, weight, of_bias, a, b, 0.7, dropout)
        out.square().sum().backward()
        result.append([out, x.grad, a.grad, b.grad])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_fused_lora_linear_passes_gradcheck():
    x, weight, bias, a, b = (tensor.detach().double() for tensor in case())
    moving = [tensor.requires_grad_() for tensor in (x, a, b)]
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, bias, a, b, 0.7), moving)


def test_fused_lora_linear_saves_only_input_and_low_rank_tensors():
    x, weight, bias, a, b = case()
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
        for product in (lora_linear, written_out):
            x, weight, bias, a, b = case()
            with Sizes(elements) as sizes:
                product(x, weight, bias, a, b, 0.7).sum().backward()
            counts.append(len(sizes.found))
        assert counts[0] < counts[1]


def test_input_without_gradient_gets_none_and_factors_get_theirs():
    x, weight, bias, a, b = case()
    lora_linear(x.detach(), weight, bias, a, b, 0.7).sum().backward()
    assert x.grad is None
    assert all(factor.grad.abs().sum() > 0 for factor in (a, b))


def test_gradients_of_float32_factors_in_bfloat16_are_float32():
    x, weight, bias, a, b = case(dtype=torch.bfloat16)
    out = lora_linear(x, weight, bias, a, b, 0.7)
    out.sum().backward()
    exact = written_out(x.float(), weight.float(), bias.float(), a, b, 0.7)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=0.2)  # bfloat16 has 8 bits
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert a.grad.dtype == b.grad.dtype == torch.float32


# --- which layers -----------------------------------------------------------------------------------------------------


class Rounded(nn.Linear):  # stands for a layer with a product of its own
    def forward(self, x):
        return F.linear(x, self.weight.round(), self.bias)


def layer(base=None, *names, **settings):
    torch.manual_seed(0)
    return add_lora_adapters(nn.Linear(INPUTS, OUTPUTS) if base is None else base, *names, **settings)


def is_one_product(made):
    return installed_hook(made, "forward", LoraForward).tensors(torch.zeros(1, TOKENS, INPUTS), ["one"]) is not None


def hooked():
    made = layer()
    made.base_layer.register_forward_hook(lambda module, args, output: output + 1)
    return made


def trained():
    made = layer()
    made.base_layer.requires_grad_(True)
    return made


PLAIN = {
    "a bias in B": lambda: layer(lora_bias=True),
    "a product of its own": lambda: layer(Rounded(INPUTS, OUTPUTS)),
    "a hook": hooked,
    "a base that trains": trained,
    "a base in another format": lambda: layer(nn.Linear(INPUTS, OUTPUTS).bfloat16()),
}
KINDS = [{}, {"use_rslora": True}, {"lora_dropout": 0.5}]


@pytest.mark.parametrize("settings", KINDS)
def test_frozen_dense_layer_with_plain_adapter_is_fused(settings):
    assert is_one_product(layer(**settings))


@pytest.mark.parametrize("kind", PLAIN)
def test_other_layers_are_not_fused(kind):
    assert not is_one_product(PLAIN[kind]())


@pytest.mark.parametrize("settings", [*KINDS, {"lora_bias": True}, {"use_dora": True}])
def test_layer_output_matches_peft(settings):
    result = []
    for is_patched in (True, False):
        made = layer(is_patched=is_patched, **settings)
        x = torch.randn(1, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(3)
        out = made(x)
        out.square().sum().backward()
        result.append([out, x.grad, *(factor.grad for factor in lora_factors(made))])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("state", ["disabled", "merged", "row by row"])
def test_switched_layer_matches_peft(state):
    answers = []
    for is_patched in (True, False):
        made, named = layer(None, "one", "two", is_patched=is_patched), {}
        if state == "disabled":
            made.enable_adapters(False)
        elif state == "merged":
            made.merge()
        else:
            named = {"adapter_names": ["two", "__base__", "one"]}
        answers.append(made(torch.ones(3, INPUTS), **named))
    torch.testing.assert_close(*answers, **CLOSE)


def test_hook_on_base_layer_is_called():
    torch.testing.assert_close(hooked()(torch.ones(1, TOKENS, INPUTS)), layer()(torch.ones(1, TOKENS, INPUTS)) + 1)


def test_first_class_check_consumes_no_random_numbers():
    from peft.tuners.lora import Linear

    lora._computes_plain_lora.cache_clear()
    before = torch.get_rng_state()
    assert lora._computes_plain_lora(Linear)
    assert torch.equal(torch.get_rng_state(), before)
