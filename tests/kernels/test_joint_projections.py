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
    """An input, and layers of some widths and ranks over it, every other one with a bias."""
    generator = torch.Generator().manual_seed(seed)
    tokens, count = torch.randint(1, 40, (), generator=generator), torch.randint(2, 5, (), generator=generator)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    made = []
    for index in range(int(count)):
        outputs, rank = (int(torch.randint(1, most, (), generator=generator)) for most in (50, 9))
        wide = torch.promote_types(dtype, torch.float32)  # factors that train
        a, b = draw(rank, INPUTS, dtype=wide).requires_grad_(), draw(outputs, rank, dtype=wide).requires_grad_()
        bias = draw(outputs) if index % 2 else None
        made.append(LoraTensors(draw(outputs, INPUTS), bias, a, b, scaling=0.3 + index))
    return draw(2, int(tokens), INPUTS).requires_grad_(), made


def one_after_the_other(x: Tensor, made: list[LoraTensors]) -> tuple[Tensor, ...]:
    return tuple(lora_linear(x, *layer) for layer in made)


def outcome(function, x: Tensor, made: list[LoraTensors]) -> list[Tensor]:
    """The outputs and the gradients of the input and of all factors."""
    outputs = function(x, made)
    upstream = [torch.sin(torch.arange(y.numel()) + 1.0).view(y.shape).to(y.dtype) for y in outputs]
    moving = [x, *(factor for layer in made for factor in (layer.a, layer.b))]
    return [*outputs, *torch.autograd.grad(outputs, moving, upstream)]


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def written_out(x: Tensor, made: list[LoraTensors]) -> tuple[Tensor, ...]:
    return tuple(
        F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(x, layer.a), layer.b) * layer.scaling
        for layer in made
    )


@pytest.mark.parametrize("seed", range(8))
def test_joint_layers_and_gradients_match_formula(seed):
    x, made = layers(seed)
    for ours, plain in zip(outcome(joint_projections, x, made), outcome(written_out, x, made), strict=True):
        assert distance(ours, plain) < 1e-6


def test_joint_projections_pass_gradcheck():
    x, made = layers(1, torch.float64)
    factors = [factor for layer in made for factor in (layer.a, layer.b)]

    def answers(x, *factors):
        pairs = zip(made, factors[::2], factors[1::2], strict=True)
        return joint_projections(x, [layer._replace(a=a, b=b) for layer, a, b in pairs])

    assert torch.autograd.gradcheck(answers, (x, *factors), fast_mode=True)


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_joint_layers_are_as_accurate_as_single_ones(seed):
    x, made = layers(seed, torch.bfloat16)
    wide = x.detach().double().requires_grad_()
    exact = [
        LoraTensors(w.double(), None if bias is None else bias.double(), a.double(), b.double(), *more)
        for w, bias, a, b, *more in made
    ]
    truth = outcome(written_out, wide, exact)
    for ours, plain, true in zip(
        outcome(joint_projections, x, made), outcome(one_after_the_other, x, made), truth, strict=True
    ):
        assert ours.dtype == plain.dtype
        assert distance(ours, true) <= 1.5 * distance(plain, true) + 1e-4


def test_input_without_gradient_gets_none():
    x, made = layers(3)
    sum(y.sum() for y in joint_projections(x.detach(), made)).backward()
    assert x.grad is None
    assert all(layer.b.grad.abs().sum() > 0 for layer in made)


# --- who is asked with whom -------------------------------------------------------------------------------------------


@pytest.fixture
def joint_counts(monkeypatch):
    """The number of layers that answered together, each time."""
    counts = []

    def counted(x, made):
        counts.append(len(made))
        return joint_projections(x, made)

    monkeypatch.setattr(lora, "joint_projections", counted)
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


ALONE = {
    "DoRA": lambda: layer(use_dora=True),
    "dropout": lambda: layer(lora_dropout=0.1),
    "a bias in B": lambda: layer(lora_bias=True),
    "no adapter": lambda: nn.Linear(INPUTS, 5),
}


@pytest.mark.parametrize("kind", ALONE)
def test_layers_with_extra_operations_run_alone_and_the_others_jointly(kind, joint_counts):
    odd, x = ALONE[kind](), torch.randn(3, INPUTS)
    first, second = layer(), layer(use_rslora=True)
    with computed_jointly(first, odd, second):
        for each in (first, odd, second):
            torch.manual_seed(0)
            result = each(x)
            torch.manual_seed(0)
            torch.testing.assert_close(result, each.__class__.forward(each, x))
    assert joint_counts == [2]


@pytest.mark.parametrize("state", ["disabled", "merged", "two adapters"])
def test_disabled_and_switched_adapters_are_respected(state, joint_counts):
    made, x = (
        [add_lora_adapters(nn.Linear(INPUTS, 5), "one", "two", seed=seed) for seed in (0, 1)],
        torch.randn(3, 2, INPUTS),
    )
    for each in made:
        if state == "disabled":
            each.enable_adapters(False)
        elif state == "merged":
            each.merge()
        else:
            each.set_adapter(["one", "two"])
    expected = [each(x) for each in made]
    with computed_jointly(*made):
        result = [each(x) for each in made]
    torch.testing.assert_close(result, expected)
    assert joint_counts == []


# --- whole models -----------------------------------------------------------------------------------------------------


def gradients(model, is_checkpointed=False):
    ids = torch.arange(3, 33).view(2, 15)
    model.train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def attached(family, **options):
    model = ADAPTERS["lora"](Options(**{"lora_rank": 4, **options}), ()).attach(tiny_model(family))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_adapted_model_gradients_match_peft(family, is_checkpointed, joint_counts):
    model = attached(family)
    patch_forwards(model)
    ours = gradients(model, is_checkpointed)
    assert joint_counts == (
        [3, 2] * 2 + [3, 2] * 2 if is_checkpointed else [3, 2] * 2
    )  # two layers; again when recomputed
    plain = gradients(attached(family))
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=2e-6, msg=name)


def test_query_and_value_projections_are_joined(joint_counts):
    model = attached("llama", lora_target=["q_proj", "v_proj"])
    patch_forwards(model)
    gradients(model)
    assert joint_counts == [2, 2]
