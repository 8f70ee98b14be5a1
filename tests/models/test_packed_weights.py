"""Linear layers with packed weights give the same results as with plain ones."""

import pytest
import torch
from torch import nn

from burnish.kernels.cpu.packed_linear import has_kernels
from burnish.models.patches import packed
from burnish.models.patches.packed import pack, packed_weights
from burnish.utils.patching import patches_of, restore

needs_bfloat16 = pytest.mark.skipif(not has_kernels(torch.bfloat16), reason="the processor has no such kernel")


def layers(dtype=torch.float32, is_trained=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 32, bias=False)).to(dtype)
    return model.requires_grad_(is_trained)


def autocast(dtype):
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


@pytest.mark.parametrize("count", [1, 2, 17, 200])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_packed_float32_weights_give_the_same_product(count, shape):
    model, x = layers(), torch.randn(*shape, count, 48)
    with torch.no_grad():
        plain = model(x)
        with packed_weights(model):
            assert len(patches_of(model)) == 2
            torch.testing.assert_close(model(x), plain, atol=1e-6, rtol=1e-5)
        assert torch.equal(model(x), plain)
    assert not patches_of(model)


@needs_bfloat16
@pytest.mark.parametrize("count", [1, 2, 17, 200])
@pytest.mark.parametrize(("of_weights", "is_trained"), [(torch.float32, True), (torch.bfloat16, False)])
def test_packed_bfloat16_weights_give_the_same_bits(count, of_weights, is_trained):
    model, x = layers(of_weights, is_trained), torch.randn(count, 48)
    with torch.no_grad(), autocast(torch.bfloat16):
        plain = model(x)
        with packed_weights(model):
            result = model(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, plain)


def test_weights_are_packed_again_after_a_change():
    model, x = layers(), torch.randn(3, 48)
    with torch.no_grad():
        with packed_weights(model):
            before = model(x)
        model[1].weight.mul_(2)
        with packed_weights(model):
            torch.testing.assert_close(model(x), 2 * before)


def test_an_error_restores_the_layers():
    model = layers()
    with pytest.raises(KeyError), packed_weights(model):
        raise KeyError
    assert not patches_of(model)


def test_frozen_weights_are_packed_only_if_there_is_memory_for_a_copy(monkeypatch):
    model = layers(is_trained=False)
    model[1].requires_grad_(True)
    for most, count in ((10**6, 2), (48 * 80 * 4 * 8 - 1, 1)):
        monkeypatch.setattr(packed, "total_memory", lambda device, most=most: most)
        made = pack(model)
        assert len(made) == count
        restore(made)
    if has_kernels(torch.bfloat16):
        with autocast(torch.bfloat16):  # the packed copy replaces the one that autocast would cache
            assert len(pack(model)) == 2


def test_other_layers_and_processors_keep_their_own_products(monkeypatch):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert pack(nn.Sequential(Scaled(4, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4).double())) == []
    monkeypatch.setattr(packed, "has_kernels", lambda dtype: False)
    assert pack(layers()) == []


def test_one_row_in_float32_uses_the_plain_weights():
    model, x = layers(), torch.randn(1, 48)
    with torch.no_grad():
        plain = model(x)
        with packed_weights(model):
            assert torch.equal(model(x), plain)


def test_gradients_and_switched_off_autocast_use_the_plain_weights():
    model, x = layers(), torch.randn(3, 48)
    with torch.no_grad():
        plain = model(x)
    with torch.autocast("cpu", torch.bfloat16), packed_weights(model), torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            assert torch.equal(model(x), plain)
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
