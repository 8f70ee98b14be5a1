"""LoRA on PEFT's modules with burnish's forward pass, compared with PEFT's forward pass, its files, and NumPy."""

import json
import math
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import FalconConfig, FalconForCausalLM, MambaConfig, MambaForCausalLM

from burnish.adapters.base import (
    ADAPTERS,
    FinetuningOptions,
    ModelState,
    trainable_summary,
)
from burnish.adapters.lora import LoraOptions, learning_rates, load_adapter
from burnish.adapters.lora_model import find_targets, linear_layers, merge_into_base, rows_through, set_active
from burnish.config.errors import UserError
from burnish.config.options import RawValue, build, union
from burnish.kernels.lora import lora_update
from burnish.models.patches.fused import ADAPTED, patch_forwards
from burnish.parallel.single import set_precision
from burnish.utils.patching import patches_of
from every_family import tiny_models
from tiny_lora import add_lora_adapters, lora_factors
from tiny_models import CONFIGS, tiny_model, token_ids

pytestmark = pytest.mark.run

Options = union("Options", FinetuningOptions, LoraOptions)
# The order of float32 summation differs.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}

# Options of burnish, and the equivalent config of peft. lora_alpha is set because burnish's default is twice the rank.
KINDS = {
    "lora": ({"lora_alpha": 8}, {"lora_alpha": 8}),
    "rslora": ({"lora_alpha": 8, "use_rslora": True}, {"lora_alpha": 8, "use_rslora": True}),
    "dora": ({"lora_alpha": 8, "use_dora": True}, {"lora_alpha": 8, "use_dora": True}),
    "pissa": (
        {"lora_alpha": 8, "pissa_init": True, "pissa_iter": -1},
        {"lora_alpha": 8, "init_lora_weights": "pissa"},
    ),
    "dropout": ({"lora_alpha": 8, "lora_dropout": 0.4}, {"lora_alpha": 8, "lora_dropout": 0.4}),
    "dora with dropout": (
        {"lora_alpha": 8, "lora_dropout": 0.4, "use_dora": True},
        {"lora_alpha": 8, "lora_dropout": 0.4, "use_dora": True},
    ),
}


def attach_lora(family="llama", folders=(), model=None, **options):
    """Return the adapter and the model, with a LoRA adapter of rank 4."""
    adapter = ADAPTERS["lora"](Options(**{"lora_rank": 4, **options}), folders)
    return adapter, adapter.attach(tiny_model(family) if model is None else model)


def attach_peft(family="llama", model=None, **config):
    """Return the model with the equivalent adapter of peft."""
    base = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    return peft.get_peft_model(tiny_model(family) if model is None else model, peft.LoraConfig(**base))


def randomize(model, seed=1):
    """Add random values to trainable parameters, which depend only on names, shapes and the seed."""
    generator = torch.Generator().manual_seed(seed)
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    for name in sorted(trained):
        trained[name].data += 0.1 * torch.randn(trained[name].shape, generator=generator)
    return model


def logits(model, **kwargs):
    with torch.no_grad():
        return model(token_ids(), **kwargs).logits


def gradients(model):
    return {
        name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.grad is not None
    }


# --- the layer compared with peft's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_same_seed_gives_peft_parameters(family, kind):
    ours, theirs = KINDS[kind]
    torch.manual_seed(7)
    _, model = attach_lora(family, **ours)
    torch.manual_seed(7)
    other = attach_peft(family, **theirs, fan_in_fan_out=family == "gpt2")
    other_names = {n.removeprefix("base_model.model."): p for n, p in other.named_parameters()}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in other_names.items() if p.requires_grad
    ]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, other_names[name], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_and_gradients_match_peft(family, kind):
    ours, theirs = KINDS[kind]
    torch.manual_seed(7)
    _, model = attach_lora(family, **ours)
    torch.manual_seed(7)
    other = attach_peft(family, **theirs, fan_in_fan_out=family == "gpt2")
    patch_forwards(model)
    assert ADAPTED in {patch.why for patch in patches_of(model)}
    for tested_model in (model, other):
        # In training mode, for dropout. GPT-2's dropout is disabled: it would draw in another order of layers.
        randomize(tested_model).train()
        for name, module in tested_model.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
                module.p = 0.0
        torch.manual_seed(3)
        tested_model(token_ids(), labels=token_ids()).loss.backward()
    burnish_gradients, peft_gradients = gradients(model), gradients(other)
    assert burnish_gradients.keys() == peft_gradients.keys()
    for name, gradient in burnish_gradients.items():
        torch.testing.assert_close(gradient, peft_gradients[name], msg=lambda text, n=name: f"{n}: {text}", **CLOSE)
    torch.testing.assert_close(logits(model.eval()), logits(other.eval()), **CLOSE)


@pytest.mark.parametrize("family", CONFIGS)
def test_new_adapter_is_identity_and_covers_all_linear_layers_but_head(family):
    before = logits(tiny_model(family))
    _, model = attach_lora(family)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    model(token_ids(), labels=token_ids()).loss.backward()
    result = gradients(model)
    assert result
    assert all(".lora_A." in name or ".lora_B." in name for name in result)
    result = {path for path, m in model.named_modules() if hasattr(m, "base_layer")}
    plain = {path: m for path, m in tiny_model(family).named_modules() if isinstance(m, nn.Linear | _conv1d())}
    (left_out,) = plain.keys() - result
    assert model.get_submodule(left_out) is model.get_output_embeddings()


def _conv1d():
    from transformers.pytorch_utils import Conv1D

    return Conv1D


# --- the product ----------------------------------------------------------------------------------------------------


def product_case(x_dtype=torch.float32, factor_dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=x_dtype, requires_grad=True)
    result = torch.randn(2, 3, 5, dtype=x_dtype, requires_grad=True)
    a = torch.randn(4, 8, dtype=factor_dtype, requires_grad=True)
    b = torch.randn(5, 4, dtype=factor_dtype, requires_grad=True)
    return result, x, a, b


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lora_product_and_gradients_match_formulas(dropout):
    result = []
    for plain in (False, True):
        inputs = product_case()
        torch.manual_seed(5)
        out = lora_update(*inputs, 0.7, dropout, plain=plain)
        out.square().sum().backward()
        result.append([out, *(tensor.grad for tensor in inputs)])
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_lora_product_passes_gradcheck():
    inputs = [tensor.detach().double().requires_grad_() for tensor in product_case()]
    assert torch.autograd.gradcheck(lambda *tensors: lora_update(*tensors, 0.7), inputs)


def test_lora_product_saves_input_once_without_dropout_copy():
    saved = {}
    for plain in (False, True):
        sizes = []
        result, x, a, b = product_case()

        def pack(tensor, sizes=sizes, x=x, a=a, b=b):
            if tensor.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (x, a, b)}:
                sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            lora_update(result, x, a, b, 0.7, 0.5, plain=plain)
        saved[plain] = sum(sizes)
    x_elements, h_bytes = 2 * 3 * 8, 2 * 3 * 4 * 4
    assert saved[False] == x_elements + h_bytes  # a mask with a byte per element, and x Aᵀ
    assert saved[True] > saved[False] + 4 * x_elements  # and a copy of x with dropout


def test_float32_factors_over_bfloat16_base_multiply_in_float32():
    result, x, a, b = product_case(x_dtype=torch.bfloat16)
    out = lora_update(result, x, a, b, 0.7)
    exact = result.float() + F.linear(F.linear(x.float(), a), b) * 0.7
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16))
    out.sum().backward()
    assert (a.grad.dtype, b.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_autocast_determines_dtype_of_lora_product():
    _, x, a, b = product_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lora_update(F.linear(x, torch.ones(5, 8)), x, a, b, 0.7)
        plain = lora_update(F.linear(x, torch.ones(5, 8)), x, a, b, 0.7, plain=True)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits
    out.sum().backward()
    assert a.grad.dtype == torch.float32


def test_training_under_autocast_gives_peft_gradients():
    result = []
    ours = attach_lora("llama", lora_alpha=8)[1]
    patch_forwards(ours)
    for model in (ours, attach_peft("llama", lora_alpha=8)):
        randomize(model).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(token_ids(), labels=token_ids()).loss.backward()
        result.append(gradients(model))
    for name, gradient in result[0].items():
        torch.testing.assert_close(
            gradient, result[1][name], rtol=0.1, atol=5e-3
        )  # the order of bfloat16 summation differs


def test_dropout_uses_global_generator_only_in_training():
    _, model = attach_lora(lora_dropout=0.5)
    randomize(model)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    evaluated = logits(model)
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    first = logits(model)
    assert not torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(first, evaluated)
    torch.set_rng_state(before)
    assert torch.equal(logits(model), first)


# --- the arithmetic, written out in numpy (checklist rows 72 to 78) --------------------------------------------------


def factors_and_scaling(layer, name):
    a, b = lora_factors(layer, name)
    return a.detach().double().numpy(), b.detach().double().numpy(), layer.scaling[name]


def numpy_case(*names, **settings):
    torch.manual_seed(0)
    layer = add_lora_adapters(nn.Linear(6, 5), *names, r=3, **settings)
    x = torch.randn(4, 6)
    w, bias = (p.detach().double().numpy() for p in layer.base_layer.parameters())
    return layer, x, x.double().numpy(), w, bias


def assert_close(tensor, array):
    np.testing.assert_allclose(tensor.detach().numpy(), array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_single_adapter_adds_scaled_product_to_base(rslora):
    layer, x, xn, w, bias = numpy_case(use_rslora=rslora)
    a, b, scaling = factors_and_scaling(layer, "one")
    assert scaling == pytest.approx(4 / math.sqrt(3) if rslora else 4 / 3)
    assert_close(layer(x), xn @ w.T + bias + scaling * (xn @ a.T @ b.T))


def test_active_adapters_are_summed_and_missing_ones_are_skipped():
    layer, x, xn, w, bias = numpy_case("one", "two")
    layer.set_adapter(["one", "nowhere", "two"])
    updates = sum(
        s * (xn @ a.T @ b.T) for a, b, s in (factors_and_scaling(layer, "one"), factors_and_scaling(layer, "two"))
    )
    assert_close(layer(x), xn @ w.T + bias + updates)


def test_each_row_of_a_mixed_batch_uses_its_adapter():
    layer, x, *_ = numpy_case("one", "two")
    holder = nn.ModuleList([layer])
    single_results = {"__base__": layer.base_layer(x)}
    for name in ("one", "two"):
        set_active(holder, [name])
        single_results[name] = layer(x)
    names = ["two", "__base__", "one", "two"]
    with rows_through(holder, names):
        mixed = layer(x)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], single_results[name][row], **CLOSE)
    torch.testing.assert_close(layer(x), single_results["two"], **CLOSE)
    with pytest.raises(UserError, match="Unknown adapters"), rows_through(holder, ["three"]):
        pass


def test_layer_gradients_match_formula():
    """The layer computes ``y = (W + s B A) x + bias``."""
    layer, x, xn, w, _ = numpy_case()
    a, b, s = factors_and_scaling(layer, "one")
    x.requires_grad_()
    weights = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    (layer(x) * weights).sum().backward()
    g = weights.double().numpy()
    assert_close(lora_factors(layer)[0].grad, s * (g @ b).T @ xn)
    assert_close(lora_factors(layer)[1].grad, s * g.T @ (xn @ a.T))
    assert_close(x.grad, g @ (w + s * b @ a))


def test_quantized_base_keeps_its_matrix_product():
    class Quantized(nn.Linear):  # stands for a 4-bit layer
        def forward(self, x):
            return F.linear(x, self.weight.round(), self.bias)

    layer, x = add_lora_adapters(Quantized(6, 5), r=3), torch.randn(4, 6)
    before = layer.base_layer.weight.clone()
    a, b, scaling = factors_and_scaling(layer, "one")
    w, xn = before.round().double().numpy(), x.double().numpy()
    assert_close(layer(x), xn @ w.T + layer.base_layer.bias.detach().numpy() + scaling * (xn @ a.T @ b.T))
    layer(x).sum().backward()
    assert torch.equal(layer.base_layer.weight, before)


@pytest.mark.parametrize("kind", ["lora", "dora", "pissa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_model_has_the_same_logits_without_adapter(family, kind):
    _, model = attach_lora(family, **KINDS[kind][0], lora_target=["all", "wte" if family == "gpt2" else "embed_tokens"])
    expected = logits(randomize(model))
    merge_into_base(model)
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    assert model.state_dict().keys() >= tiny_model(family).state_dict().keys()
    assert not any("lora_" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"additional_target": ["lm_head"]},
        {"use_dora": True},
        {"pissa_init": True},
        {"pissa_init": True, "use_dora": True},
    ],
)
def test_model_inside_reference_equals_initial_model(options):
    before = logits(tiny_model())
    adapter, model = attach_lora(lora_target=["all"], **options)
    trained = logits(randomize(model))
    requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
    with adapter.reference(model):
        if "pissa_init" in options:  # the base is the residual of the decomposition plus the initial adapter
            torch.testing.assert_close(logits(model), before, **CLOSE)
        else:
            assert torch.equal(logits(model), before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == requires_grad
    torch.testing.assert_close(logits(model), trained, **CLOSE)
    assert not torch.allclose(trained, before)


# --- files, saved by one library and loaded by the other --------------------------------------------------------------

FILES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "fully trained head": {"additional_target": ["lm_head"]},
    "embedding": {"lora_target": ["q_proj", "embed_tokens"]},
    "embedding with dora": {"lora_target": ["q_proj", "embed_tokens"], "use_dora": True},
    "one layer by regular expression": {"lora_target": [r"model\.layers\.1\..*proj"]},
}


@pytest.mark.parametrize("case", FILES)
def test_peft_loads_saved_adapter_with_same_logits(case, tmp_path):
    adapter, model = attach_lora("llama", **FILES[case])
    randomize(model)
    adapter.save(model, str(tmp_path))
    other = peft.PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    torch.testing.assert_close(logits(other), logits(model), **CLOSE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", CONFIGS)
def test_adapter_of_each_family_round_trips_through_peft(family, tmp_path):
    adapter, model = attach_lora(family)
    randomize(model)
    adapter.save(model, str(tmp_path / "ours"))
    other = peft.PeftModel.from_pretrained(tiny_model(family), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(other), logits(model), **CLOSE)
    other.save_pretrained(tmp_path / "theirs")
    _, again = attach_lora(family, folders=[tmp_path / "theirs"])
    torch.testing.assert_close(logits(again), logits(model), **CLOSE)


PEFT_FILES = {
    "lora": {},
    "dora": {"use_dora": True},
    "bias in B": {"lora_bias": True, "target_modules": ["c_attn"]},
    "another rank in one layer": {"rank_pattern": {"h.0.attn.c_attn": 2}, "alpha_pattern": {"c_fc": 3}},
    "modules to save": {"modules_to_save": ["ln_f"], "target_modules": ["c_fc"]},
    "embedding": {"target_modules": ["wte", "c_proj"]},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("case", PEFT_FILES)
def test_burnish_loads_peft_adapter_with_same_logits(case, tmp_path):
    other = randomize(attach_peft("gpt2", **{"fan_in_fan_out": True, **PEFT_FILES[case]}))
    other.save_pretrained(tmp_path)
    adapter, model = attach_lora("gpt2", folders=[tmp_path])
    torch.testing.assert_close(logits(model), logits(other), **CLOSE)
    assert trainable_summary(model)[0] == other.get_nb_trainable_parameters()[0]
    adapter.save(model, str(tmp_path / "again"))
    reloaded = peft.PeftModel.from_pretrained(tiny_model("gpt2"), str(tmp_path / "again"))
    torch.testing.assert_close(logits(reloaded), logits(other), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"pissa_iter": -1},
        {"pissa_iter": 2},
        {"pissa_iter": 2, "use_rslora": True},
        {"pissa_iter": 2, "lora_target": ["q_proj", "embed_tokens"]},
    ],
)
def test_pissa_adapter_is_saved_as_lora_of_original_base(options, tmp_path):
    adapter, model = attach_lora(pissa_init=True, **options)
    torch.testing.assert_close(logits(model), logits(tiny_model()), **CLOSE)
    randomize(model)
    adapter.save(model, str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8  # twice the rank
    other = peft.PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    torch.testing.assert_close(logits(other), logits(model), **CLOSE)


@pytest.mark.parametrize("options", [{}, {"pissa_init": True, "use_rslora": True}])
def test_adapter_checkpoint_is_loaded_by_peft(options, tmp_path):
    adapter, model = attach_lora(**options)
    randomize(model)
    save_file(adapter.state(model), tmp_path / f"{adapter.file_stem}.safetensors", {"format": "pt"})
    adapter.save_config(model, str(tmp_path))
    other = peft.PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    torch.testing.assert_close(logits(other), logits(model), **CLOSE)


def test_experts_without_adapter_are_reported():
    adapter, _ = attach_lora("mixtral")
    assert any("4 fused expert weights get no adapter" in note for note in adapter.notes)


def test_layer_output_can_be_modified_in_place():
    config = FalconConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    _, model = attach_lora(model=FalconForCausalLM(config))
    model(token_ids()).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_convolution_is_not_reported_as_expert():
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    adapter, _ = attach_lora(model=MambaForCausalLM(config))
    (note,) = [note for note in adapter.notes if "get no adapter" in note]
    assert note.startswith("1 convolutions get no adapter")


def test_different_base_model_is_reported(tmp_path):
    model = tiny_model()
    model.config.name_or_path = "org/one"
    adapter, model = attach_lora(model=model)
    adapter.save(model, str(tmp_path))
    other = tiny_model(seed=1)
    other.config.name_or_path = "org/two"
    adapter, _ = attach_lora(model=other, folders=[tmp_path])
    assert any("trained on org/one; the base model of this run is org/two" in note for note in adapter.notes)


def test_saved_tensor_names_match_peft(tmp_path):
    adapter, model = attach_lora(use_dora=True, additional_target=["lm_head"])
    adapter.save(model, str(tmp_path / "ours"))
    attach_peft(use_dora=True, modules_to_save=["lm_head"]).save_pretrained(tmp_path / "theirs")
    names = {}
    for library in ("ours", "theirs"):
        with safe_open(tmp_path / library / "adapter_model.safetensors", "pt") as file:
            names[library] = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert names["ours"] == names["theirs"]


# --- attaching ------------------------------------------------------------------------------------------------------


def saved_adapter(folder, seed, family="llama", **options):
    adapter, model = attach_lora(family, **options)
    randomize(model, seed)
    adapter.save(model, str(folder))
    return folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_rank": 8}, None),
        ({"lora_rank": 2}, None),
        ({"lora_rank": 4}, "lora_rank applies to new adapters"),
        ({"lora_rank": 2, "lora_target": ["v_proj", "q_proj"], "additional_target": ["lm_head"]}, None),
        ({"lora_rank": 2, "lora_target": ["k_proj"]}, "lora_target applies"),
        ({"lora_rank": 2, "additional_target": ["norm"]}, "additional_target applies"),
        ({"lora_rank": 2, "use_dora": True, "use_rslora": True}, "use_rslora and use_dora apply"),
        ({"lora_rank": 2, "pissa_init": True}, "pissa_init applies"),
    ],
)
def test_options_that_an_existing_adapter_does_not_follow_are_reported(options, named, tmp_path):
    saved_adapter(tmp_path, 1, lora_rank=2, lora_target=["q_proj", "v_proj"], additional_target=["lm_head"])
    adapter, _ = attach_lora(folders=[tmp_path], **options)
    assert [named in note for note in adapter.notes] == ([True] if named else [])


def test_adapters_are_merged_in_order_and_last_is_trained(tmp_path):
    first = saved_adapter(tmp_path / "first", 1)
    second = saved_adapter(tmp_path / "second", 2, lora_rank=2)
    expected = peft.PeftModel.from_pretrained(tiny_model(), str(first)).merge_and_unload()
    expected = peft.PeftModel.from_pretrained(expected, str(second))
    adapter, model = attach_lora(folders=[first, second])
    torch.testing.assert_close(logits(model), logits(expected), **CLOSE)
    assert {p.shape[0] for n, p in model.named_parameters() if ".lora_A." in n and p.requires_grad} == {2}
    assert any("first" in note for note in adapter.notes)


def test_create_new_adapter_merges_all_and_adds_one(tmp_path):
    first = saved_adapter(tmp_path / "first", 1)
    merged = peft.PeftModel.from_pretrained(tiny_model(), str(first)).merge_and_unload()
    _, model = attach_lora(folders=[first], create_new_adapter=True, lora_rank=3)
    torch.testing.assert_close(logits(model), logits(merged), **CLOSE)
    assert {p.shape[0] for n, p in model.named_parameters() if ".lora_A." in n} == {3}


def test_merging_into_base_leaves_plain_model(tmp_path):
    _, model = attach_lora(lora_target=["all"], additional_target=["lm_head"])
    randomize(model)
    before = logits(model)
    plain = merge_into_base(model)
    torch.testing.assert_close(logits(plain), before, **CLOSE)
    assert plain.state_dict().keys() == tiny_model().state_dict().keys()
    plain.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(plain).from_pretrained(tmp_path)), before, **CLOSE)


@pytest.mark.parametrize("options", [{"additional_target": ["lm_head"]}, {"lora_target": ["embed_tokens"]}])
def test_merging_separately_trained_tied_weights_unties_them(options, tmp_path):
    _, model = attach_lora("qwen2", **options)
    randomize(model)
    before = logits(model)
    merge_into_base(model)
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), before, **CLOSE)


def test_tied_modules_to_save_stay_tied():
    _, model = attach_lora("qwen2", additional_target=["embed_tokens", "lm_head"])
    copies = [m.modules_to_save["default"].weight for m in model.modules() if hasattr(m, "modules_to_save")]
    assert len(copies) == 2
    assert copies[0] is copies[1]
    randomize(model)
    before = logits(model)
    merge_into_base(model)
    assert model.config.tie_word_embeddings is True
    torch.testing.assert_close(logits(model), before, **CLOSE)


def test_shared_weight_is_saved_under_both_names(tmp_path):
    adapter, model = attach_lora("qwen2", additional_target=["embed_tokens", "lm_head"])
    randomize(model)
    save_file(adapter.state(model), tmp_path / "adapter_model.safetensors")  # raises if names share memory
    stored = load_file(tmp_path / "adapter_model.safetensors")
    first, second = (weight for name, weight in stored.items() if "lora_" not in name)
    assert torch.equal(first, second)
    assert torch.equal(first, model.get_output_embeddings().modules_to_save["default"].weight)


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "embed_tokens"]])
def test_two_adapters_coexist_in_one_model(targets, tmp_path):
    first, second = (saved_adapter(tmp_path / f"{seed}", seed, lora_target=targets) for seed in (1, 2))
    model = tiny_model()
    load_adapter(model, first, "first")
    load_adapter(model, second, "second")
    single_logits = [logits(attach_lora(folders=[folder])[1]) for folder in (first, second)]
    set_active(model, ["first"])
    torch.testing.assert_close(logits(model), single_logits[0], **CLOSE)
    with rows_through(model, ["second", "first"]):
        mixed = logits(model)
    torch.testing.assert_close(mixed[0], single_logits[1][0], **CLOSE)
    torch.testing.assert_close(mixed[1], single_logits[0][1], **CLOSE)


def test_only_adapter_is_trained_and_in_float32():
    _, model = attach_lora(model=tiny_model().to(torch.bfloat16), additional_target=["norm"])
    set_precision(model, torch.float32)
    for name, parameter in model.named_parameters():
        is_trained = "lora_" in name or "modules_to_save" in name
        assert parameter.requires_grad == is_trained
        assert parameter.dtype == (torch.float32 if is_trained else torch.bfloat16), name


def test_parameter_counts_match_peft():
    _, model = attach_lora("qwen2")
    assert trainable_summary(model) == attach_peft("qwen2").get_nb_trainable_parameters()


def test_new_tokens_train_embedding_and_head_with_adapter():
    model = tiny_model()
    model.has_new_tokens = True
    adapter, model = attach_lora(model=model)
    fully_trained = {path for path, m in model.named_modules() if hasattr(m, "modules_to_save")}
    assert fully_trained == {"model.embed_tokens", "lm_head"}
    assert len([note for note in adapter.notes if "vocabulary" in note]) == 1


def test_meta_model_accepts_adapter_for_counting():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    _, counted = attach_lora(model=model, use_dora=True, pissa_init=True)
    _, real = attach_lora(use_dora=True, pissa_init=True)
    assert trainable_summary(counted) == trainable_summary(real)
    assert all(p.is_meta for p in counted.parameters())


def test_adapters_are_merged_and_continued_on_meta_model(tmp_path):
    folders = [saved_adapter(tmp_path / "one", 1), saved_adapter(tmp_path / "two", 2, lora_rank=2)]
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    adapter, counted = attach_lora(model=model, folders=folders)
    assert trainable_summary(counted) == trainable_summary(attach_lora(folders=folders)[1])
    assert adapter.to_continue == folders[1]


def test_lora_plus_sets_learning_rate_of_b():
    _, model = attach_lora(lora_target=["q_proj", "embed_tokens"])
    options = SimpleNamespace(loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-6, learning_rate=1e-4)
    result = learning_rates(model, options)
    assert {name.split(".lora_")[1].split(".")[0] for name in result} == {"B", "embedding_B"}
    assert {value for name, value in result.items() if ".lora_B." in name} == {16 * 1e-4}
    assert result["model.embed_tokens.lora_embedding_B.default"] == 1e-6
    assert learning_rates(model, SimpleNamespace(loraplus_lr_ratio=None)) == {}


def test_lora_plus_trains_vectors_at_the_rate_of_b():
    """Magnitude vectors of DoRA, biases and norms, as in the authors' code, peft and LLaMA-Factory."""
    _, model = attach_lora(lora_target=["q_proj"], use_dora=True, additional_target=["input_layernorm", "lm_head"])
    options = SimpleNamespace(loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-6, learning_rate=1e-4)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = {name for name, p in trained.items() if p.ndim == 1}
    assert any("magnitude" in name for name in vectors)
    assert any("input_layernorm" in name for name in vectors)
    assert set(learning_rates(model, options)) == vectors | {name for name in trained if ".lora_B." in name}
    assert set(learning_rates(model, options).values()) == {16 * 1e-4}


# --- resuming -------------------------------------------------------------------------------------------------------


def train_steps(model, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for step in range(steps):
        model(token_ids(seed=step), labels=token_ids(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dropout": 0.3},
        {"use_dora": True},
        {"pissa_init": True, "pissa_iter": 4},
        {"pissa_init": True, "pissa_iter": -1, "use_dora": True},
        {"pissa_init": True, "pissa_iter": -1, "lora_target": ["q_proj", "embed_tokens"]},
        {"additional_target": ["embed_tokens", "lm_head"]},
    ],
)
def test_state_dict_round_trip_is_bitwise_equal(options):
    torch.manual_seed(11)
    adapter, model = attach_lora("qwen2", **options)
    train_steps(model, 2)
    state = {name: tensor.clone() for name, tensor in ModelState(model, adapter).state_dict().items()}
    torch.manual_seed(11)
    other_adapter, other = attach_lora("qwen2", **options)
    ModelState(other, other_adapter).load_state_dict(state)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "embed_tokens"]])
def test_pissa_state_restores_its_own_initialization(targets):
    torch.manual_seed(1)
    adapter, model = attach_lora(pissa_init=True, pissa_iter=1, lora_target=targets)
    randomize(model)
    state = {name: tensor.clone() for name, tensor in adapter.state(model).items()}
    torch.manual_seed(2)  # the fast decomposition is random, and other machines round differently
    other_adapter, other = attach_lora(pissa_init=True, pissa_iter=1, lora_target=targets)
    other_adapter.load_state(other, state)
    torch.testing.assert_close(logits(other), logits(model), **CLOSE)


def test_checkpoint_of_another_rank_is_rejected():
    state = attach_lora(lora_rank=2)[0].state(attach_lora(lora_rank=2)[1])
    adapter, model = attach_lora(lora_rank=4)
    with pytest.raises(UserError, match="has rank 2, but this run uses rank 4") as raised:
        adapter.load_state(model, state)
    assert len(raised.value.problems) == 1


# --- rejected adapters and options ------------------------------------------------------------------------------------


def problems(family="llama", folders=(), **options):
    return [str(p) for p in ADAPTERS["lora"](Options(**options), folders).check(tiny_model(family))]


def test_missing_target_is_rejected_with_existing_layers():
    (result,) = problems("gpt2", lora_target=["Wqkv"])
    assert '"Wqkv" matches no linear layer of GPT2LMHeadModel' in result
    assert "c_attn, c_proj, c_fc" in result


def test_each_unmatched_target_is_named():
    result = problems(lora_target=["q_proj", "Wqkv", "k_porj", "input_layernorm"])
    assert len(result) == 3
    assert "Wqkv" in result[0]
    assert 'Did you mean "k_proj"?' in result[1]
    assert "is of type LlamaRMSNorm" in result[2]


@pytest.mark.parametrize("pattern", ["*.q_proj", "(q_proj", "[q"])
def test_target_that_is_no_regular_expression_is_rejected(pattern):
    (result,) = problems(lora_target=["k_proj", pattern])
    assert f'"{pattern}"' in result
    assert "regular expression" in result


def test_missing_additional_target_is_rejected():
    (result,) = problems(additional_target=["lm_haed"])
    assert 'Did you mean "lm_head"?' in result


@pytest.mark.skipif(Version(peft.__version__) < Version("0.20"), reason="peft 0.19 passes no keyword arguments")
def test_attention_with_keyword_input_can_be_trained_fully():
    adapter, model = attach_lora(lora_target=["gate_proj"], additional_target=["self_attn"])
    torch.testing.assert_close(logits(model), logits(tiny_model()), **CLOSE)
    assert "model.layers.0.self_attn" in adapter.notes[0]


def test_fully_trained_layer_gets_no_adapter():
    (result,) = problems(lora_target=["q_proj"], additional_target=["self_attn"])
    assert "already trains in full" in result


def test_pissa_rank_above_number_of_singular_values_is_rejected():
    assert "singular values" in problems(pissa_init=True, lora_rank=17)[0]


@pytest.mark.parametrize(("value", "bound"), [(1.5, "less than 1"), (-0.1, "at least 0")])
def test_dropout_out_of_range_is_rejected(value, bound):
    _, (problem,) = build(Options, {"lora_dropout": RawValue(value, "run.yaml, line 3")})
    assert bound in str(problem)
    assert "run.yaml, line 3" in str(problem)


def test_adapter_of_wider_model_is_rejected(tmp_path):
    wide = tiny_model("llama", hidden_size=32)
    adapter, model = attach_lora(model=wide)
    adapter.save(model, str(tmp_path))
    (result,) = problems(folders=[tmp_path])
    assert "does not fit this LlamaForCausalLM" in result
    assert "x4 in the adapter, but" in result
    assert result.count("\n") <= 2


def test_adapter_for_other_layers_is_rejected(tmp_path):
    saved_adapter(tmp_path, 1, family="gpt2")
    (result,) = problems(folders=[tmp_path])
    assert "which LlamaForCausalLM does not have" in result


@pytest.mark.parametrize(
    ("options", "suffix"),
    [
        ({}, "up_proj.lora_A.weight"),
        ({}, "up_proj.lora_B.weight"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"lora_target": ["embed_tokens"]}, "lora_embedding_B"),
        ({"lora_target": ["up_proj"], "additional_target": ["self_attn"]}, "o_proj.weight"),
    ],
)
def test_adapter_without_one_of_its_tensors_is_rejected(options, suffix, tmp_path):
    file = saved_adapter(tmp_path, 1, **options) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(suffix))
    del tensors[name]
    save_file(tensors, file)
    (result,) = problems(folders=[tmp_path])
    assert name in result


def test_truncated_adapter_is_reported_with_its_size(tmp_path):
    weights = saved_adapter(tmp_path, 1) / "adapter_model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    (result,) = problems(folders=[tmp_path])
    assert f"{size:,} bytes, but the file has {size // 2:,}" in result
    assert "adapter_model.safetensors" in result


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias: all"),
        ({"target_parameters": ["x"]}, "target_parameters"),
    ],
)
def test_adapter_of_another_method_is_passed_to_peft(change, named, tmp_path):
    saved_adapter(tmp_path, 1)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (result,) = problems(folders=[tmp_path])
    assert named in result
    assert "finetuning_type: peft" in result


def test_full_model_given_as_adapter_is_rejected(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (result,) = problems(folders=[tmp_path])
    assert "a full model" in result


def test_corrupt_adapter_is_not_merged(tmp_path):
    _, model = attach_lora()
    before = {name: p.clone() for name, p in model.named_parameters()}
    next(p for n, p in model.named_parameters() if "lora_B" in n).data[0, 0] = float("nan")
    with pytest.raises(UserError, match="NaN or infinite weights"):
        merge_into_base(model)
    assert any(hasattr(m, "base_layer") and not m.merged for m in model.modules())
    base = next(n for n in before if "base_layer.weight" in n)
    assert torch.equal(dict(model.named_parameters())[base], before[base])


@pytest.mark.parametrize(
    ("family", "left_out"), [("deepseek_v4", "o_a_proj"), ("falcon_h1", "out_proj"), ("phimoe", "router")]
)
def test_all_leaves_out_layers_that_no_adapter_fits(family, left_out):
    """Their classes inherit from a linear layer: a grouped product, the output of a state-space model, and a router."""
    models = [model for _, model in tiny_models([family])]
    if not models:
        pytest.skip(f"{family} is not in this version of transformers")
    paths, problems = find_targets(models[0], ["all"])
    assert not problems
    assert any(path.endswith(left_out) for path in linear_layers(models[0]))
    assert not any(path.endswith(left_out) for path in paths)
    assert paths
