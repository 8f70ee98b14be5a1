"""Joint projection of frozen layers that share an input, with their adapters: equal to separate layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.adapters.base import ADAPTERS, FinetuningOptions
from burnish.adapters.lora import LoraOptions
from burnish.config.options import union
from burnish.kernels import lora
from burnish.kernels.lora import LoraForward, LoraTensors, computed_jointly, joint_projections, lora_linear
from burnish.models.patches.fused import patch_forwards
from burnish.utils.patching import installed_hook
from tiny_lora import add_lora_adapters
from tiny_models import tiny_model

Options = union("Options", FinetuningOptions, LoraOptions)
INPUTS = 24


def layers(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[LoraTensors]]:
    """Return an input, and layers of random widths and ranks over it, every second one with a bias."""
    generator = torch.Generator().manual_seed(seed)
    tokens, count = torch.randint(1, 40, (), generator=generator), torch.randint(2, 5, (), generator=generator)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lora_layers = []
    for index in range(int(count)):
        outputs, rank = (int(torch.randint(1, bound, (), generator=generator)) for bound in (50, 9))
        factor_dtype = torch.promote_types(dtype, torch.float32)  # the dtype of trained factors
        a, b = (
            draw(rank, INPUTS, dtype=factor_dtype).requires_grad_(),
            draw(outputs, rank, dtype=factor_dtype).requires_grad_(),
        )
        bias = draw(outputs) if index % 2 else None
        lora_layers.append(LoraTensors(draw(outputs, INPUTS), bias, a, b, scaling=0.3 + index))
    return draw(2, int(tokens), INPUTS).requires_grad_(), lora_layers


def separate_projections(x: Tensor, lora_layers: list[LoraTensors]) -> tuple[Tensor, ...]:
    return tuple(lora_linear(x, *layer) for layer in lora_layers)


def results(function, x: Tensor, lora_layers: list[LoraTensors]) -> list[Tensor]:
    """Return the outputs, and the gradients of the input and of all factors."""
    outputs = function(x, lora_layers)
    upstream = [torch.sin(torch.arange(y.numel()) + 1.0).view(y.shape).to(y.dtype) for y in outputs]
    trainable = [x, *(factor for layer in lora_layers for factor in (layer.a, layer.b))]
    return [*outputs, *torch.autograd.grad(outputs, trainable, upstream)]


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def formula(x: Tensor, lora_layers: list[LoraTensors]) -> tuple[Tensor, ...]:
    return tuple(
        F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(x, layer.a), layer.b) * layer.scaling
        for layer in lora_layers
    )


@pytest.mark.parametrize("seed", range(8))
def test_joint_layers_and_gradients_match_formula(seed):
    x, lora_layers = layers(seed)
    for ours, plain in zip(results(joint_projections, x, lora_layers), results(formula, x, lora_layers), strict=True):
        assert relative_error(ours, plain) < 1e-6


def test_joint_projections_pass_gradcheck():
    x, lora_layers = layers(1, torch.float64)
    factors = [factor for layer in lora_layers for factor in (layer.a, layer.b)]

    def joint_outputs(x, *factors):
        pairs = zip(lora_layers, factors[::2], factors[1::2], strict=True)
        return joint_projections(x, [layer._replace(a=a, b=b) for layer, a, b in pairs])

    assert torch.autograd.gradcheck(joint_outputs, (x, *factors), fast_mode=True)


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_joint_layers_are_as_accurate_as_single_ones(seed):
    x, lora_layers = layers(seed, torch.bfloat16)
    wide = x.detach().double().requires_grad_()
    exact_layers = [
        LoraTensors(w.double(), None if bias is None else bias.double(), a.double(), b.double(), *more)
        for w, bias, a, b, *more in lora_layers
    ]
    exact_results = results(formula, wide, exact_layers)
    for ours, plain, exact in zip(
        results(joint_projections, x, lora_layers),
        results(separate_projections, x, lora_layers),
        exact_results,
        strict=True,
    ):
        assert ours.dtype == plain.dtype
        assert relative_error(ours, exact) <= 1.5 * relative_error(plain, exact) + 1e-4


def test_input_without_gradient_gets_none():
    x, lora_layers = layers(3)
    sum(y.sum() for y in joint_projections(x.detach(), lora_layers)).backward()
    assert x.grad is None
    assert all(layer.b.grad.abs().sum() > 0 for layer in lora_layers)


# --- which layers are computed jointly --------------------------------------------------------------------------------


@pytest.fixture
def joint_counts(monkeypatch):
    """The number of layers in each joint projection."""
    counts = []

    def counted_projections(x, lora_layers):
        counts.append(len(lora_layers))
        return joint_projections(x, lora_layers)

    monkeypatch.setattr(lora, "joint_projections", counted_projections)
    return counts


def layer(inputs: int = INPUTS, seed: int = 0, **settings) -> nn.Module:
    torch.manual_seed(seed)
    return add_lora_adapters(nn.Linear(inputs, 5), **settings)


def test_layer_called_with_another_tensor_or_again_runs_alone(joint_counts):
    first, second, x, other = layer(), layer(seed=1), torch.randn(3, INPUTS), torch.randn(3, INPUTS)
    expected = [first(x), second(other), first(x)]
    with computed_jointly(first, second):
        result = [first(x), second(other), first(x)]
    for ours, plain in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, plain)
    assert joint_counts == [2]


def test_layers_of_other_width_or_repeated_are_not_joined(joint_counts):
    first, second, x, wide = layer(), layer(seed=1), torch.randn(3, INPUTS), torch.randn(3, 2 * INPUTS)
    other = layer(inputs=2 * INPUTS)
    with computed_jointly(first, other, second, second):
        result = first(x), other(wide), second(x)
    torch.testing.assert_close(result, (first(x), other(wide), second(x)))
    assert joint_counts == [2]


def test_aborted_forward_leaves_no_state():
    first, second = layer(), layer(seed=1)

    def stop(module, inputs, output):
        raise KeyError

    first.register_forward_hook(stop)
    with pytest.raises(KeyError), computed_jointly(first, second):
        first(torch.randn(3, INPUTS))
    assert installed_hook(first, "forward", LoraForward).joint_outputs is None


def test_layer_hooks_are_called():
    first, second, x = layer(), layer(seed=1), torch.randn(3, INPUTS)
    second.register_forward_hook(lambda module, inputs, output: output + 1)
    with computed_jointly(first, second):
        first(x)
        result = second(x)
    torch.testing.assert_close(result, second.forward(x) + 1)


NOT_JOINED = {
    "DoRA": lambda: layer(use_dora=True),
    "dropout": lambda: layer(lora_dropout=0.1),
    "bias in B": lambda: layer(lora_bias=True),
    "no adapter": lambda: nn.Linear(INPUTS, 5),
}


@pytest.mark.parametrize("kind", NOT_JOINED)
def test_layers_with_extra_operations_run_alone_and_the_others_jointly(kind, joint_counts):
    separate, x = NOT_JOINED[kind](), torch.randn(3, INPUTS)
    first, second = layer(), layer(use_rslora=True)
    with computed_jointly(first, separate, second):
        for tested_layer in (first, separate, second):
            torch.manual_seed(0)
            result = tested_layer(x)
            torch.manual_seed(0)
            torch.testing.assert_close(result, tested_layer.__class__.forward(tested_layer, x))
    assert joint_counts == [2]


@pytest.mark.parametrize("state", ["disabled", "merged", "two adapters"])
def test_disabled_and_switched_adapters_are_respected(state, joint_counts):
    lora_layers, x = (
        [add_lora_adapters(nn.Linear(INPUTS, 5), "one", "two", seed=seed) for seed in (0, 1)],
        torch.randn(3, 2, INPUTS),
    )
    for tested_layer in lora_layers:
        if state == "disabled":
            tested_layer.enable_adapters(False)
        elif state == "merged":
            tested_layer.merge()
        else:
            tested_layer.set_adapter(["one", "two"])
    expected = [tested_layer(x) for tested_layer in lora_layers]
    with computed_jointly(*lora_layers):
        result = [tested_layer(x) for tested_layer in lora_layers]
    torch.testing.assert_close(result, expected)
    assert joint_counts == []


# --- models -----------------------------------------------------------------------------------------------------------


def gradients(model, is_checkpointed=False):
    ids = torch.arange(3, 33).view(2, 15)
    model.train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def attach_adapter(family, **options):
    model = ADAPTERS["lora"](Options(**{"lora_rank": 4, **options}), ()).attach(tiny_model(family))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_adapted_model_gradients_match_peft(family, is_checkpointed, joint_counts):
    model = attach_adapter(family)
    patch_forwards(model)
    ours = gradients(model, is_checkpointed)
    assert joint_counts == (
        [3, 2] * 2 + [3, 2] * 2 if is_checkpointed else [3, 2] * 2
    )  # two layers, computed again in the backward pass
    plain = gradients(attach_adapter(family))
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=2e-6, msg=name)


def test_query_and_value_projections_are_joined(joint_counts):
    model = attach_adapter("llama", lora_target=["q_proj", "v_proj"])
    patch_forwards(model)
    gradients(model)
    assert joint_counts == [2, 2]
