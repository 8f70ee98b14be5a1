"""A linear layer under autocast without cast copies of its weights: bitwise equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from burnish.kernels.cpu.cast_linear import cast_linear
from burnish.kernels.elementwise import gate_product
from burnish.kernels.recomputed import recipe_of
from burnish.models.patches.fused import patch_forwards
from tiny_models import tiny_model


def output_and_gradients(function, x, weight, bias):
    """Return the output under autocast, and the gradients of the inputs."""
    inputs = [None if value is None else value.detach().clone().requires_grad_() for value in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        projected = function(*inputs)
    upstream = torch.randn(projected.shape, generator=torch.Generator().manual_seed(1)).to(projected.dtype)
    tensors = [value for value in inputs if value is not None]
    return [projected, *torch.autograd.grad(projected, tensors, upstream)]


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 7, 64), pytest.param((300, 2048), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_and_gradients_equal_autocast_bitwise(shape, dtype, has_bias):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(1100, shape[-1]),
    )  # the larger cast copy uses the buffer pool
    bias = torch.randn(1100) if has_bias else None
    ours = output_and_gradients(lambda x, w, b: cast_linear(x, w, b, torch.bfloat16), x, weight, bias)
    for actual, plain in zip(ours, output_and_gradients(F.linear, x, weight, bias), strict=True):
        assert actual.dtype == plain.dtype
        assert torch.equal(actual, plain)


@pytest.mark.parametrize("shape", [(1, 64), (3, 7, 64), pytest.param((300, 2048), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights_equal_autocast_bitwise(shape, dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1], 1100), torch.randn(1100)
    layer = Conv1D(1100, shape[-1])

    def theirs(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    ours = output_and_gradients(
        lambda x, w, b: cast_linear(x, w, b, torch.bfloat16, is_transposed=True), x, weight, bias
    )
    for actual, plain in zip(ours, output_and_gradients(theirs, x, weight, bias), strict=True):
        assert actual.dtype == plain.dtype
        assert torch.equal(actual, plain)


def test_frozen_weights_get_no_gradient_and_save_nothing_for_it():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
        projected = cast_linear(x, weight, None, torch.bfloat16)
    projected.sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert [value is weight or value.data_ptr() == weight.data_ptr() for value in saved] == [True]


def saved_shapes_and_gradients(model, ids):
    """Return the shapes of bfloat16 tensors that a forward pass saves, and the gradients."""
    shapes = []

    def save(value):
        if value.dtype == torch.bfloat16:
            shapes.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return shapes, [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_model_keeps_no_weight_copies_and_trains_equally(family):
    ids = torch.arange(3, 33).view(2, 15)
    plain, fused = tiny_model(family), tiny_model(family)
    patch_forwards(plain)
    for module in plain.modules():
        if isinstance(module, nn.Linear | Conv1D):
            del module.forward
    patch_forwards(fused)
    weight_shapes = {tuple(sorted(weight.shape)) for weight in fused.parameters() if weight.ndim == 2}
    (plain_shapes, plain_gradients), (fused_shapes, fused_gradients) = (
        saved_shapes_and_gradients(plain, ids),
        saved_shapes_and_gradients(fused, ids),
    )
    assert any(tuple(sorted(shape)) in weight_shapes for shape in plain_shapes)
    assert not any(tuple(sorted(shape)) in weight_shapes for shape in fused_shapes)
    assert all(torch.equal(actual, theirs) for actual, theirs in zip(fused_gradients, plain_gradients, strict=True))


def test_without_autocast_or_backward_torch_linear_is_used(monkeypatch):
    monkeypatch.setattr("burnish.models.patches.fused.cast_linear", None)
    layer, x = nn.Linear(8, 6), torch.randn(5, 8)
    plain = layer(x)
    assert [patch.owner for patch in patch_forwards(layer)] == [layer]
    assert torch.equal(layer(x), plain)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_layer_that_resembles_gpt2_conv1d_runs_its_own_code():
    class Scaled(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    class Frozen(Conv1D):
        pass

    frozen = Frozen(6, 8).requires_grad_(False)
    result = [len(patch_forwards(layer)) for layer in (Scaled(6, 8), frozen, Conv1D(6, 8), Conv1D(8, 8))]
    assert result == [0, 0, 1, 1]
    layer, x = Conv1D(6, 8), torch.randn(5, 8)
    plain = layer(x)
    patch_forwards(layer)
    assert torch.equal(layer(x), plain)


# --- inputs that are recomputed ---------------------------------------------------------------------------------------


def gradients_of_gated_layer(may_recompute, saved=None):
    """Return the gradients of gate, up and weight, for a gated product that is the input of a linear layer."""
    torch.manual_seed(0)
    gate, up = (torch.randn(40, 64).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(24, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved is not None and saved.append(x), x)[1], lambda x: x):
        product = gate_product(gate, up, "silu")
        output = cast_linear(product if may_recompute else product.view_as(product), weight, None, torch.bfloat16)
    output.float().square().sum().backward()
    return gate.grad, up.grad, weight.grad


def test_product_is_recomputed_bitwise_equal_and_not_saved():
    saved = []
    result = gradients_of_gated_layer(True, saved)
    assert all(map(torch.equal, result, gradients_of_gated_layer(False)))
    pointers = {x.data_ptr() for x in saved}
    assert len(pointers) == 3  # gate, up, weight


def test_modified_product_is_saved():
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    product = gate_product(gate, up, "silu")
    assert recipe_of(product) is not None
    assert recipe_of(product * 1) is None
    with torch.no_grad():
        product.mul_(2)
    assert recipe_of(product) is None
    with torch.no_grad():
        assert recipe_of(gate_product(gate, up, "silu")) is None
