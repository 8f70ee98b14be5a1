"""Training methods requested on the command line, checked in the model during training and as saved."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from burnish.cli import main
from burnish.models.load import context_length
from burnish.parallel import precision
from burnish.run import build
from representative import representative_slow
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains and returns the model in memory at the end, and the folder."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    overrides = make_workspace(tmp_path, save_strategy="no", max_steps=2, learning_rate=1e-2)
    models = []

    def fit(model, *more):
        models.append(model)
        return resize_embeddings(model, *more)

    resize_embeddings = build.resize_embeddings
    monkeypatch.setattr(build, "resize_embeddings", fit)

    def run(name="out", **options):
        assert main(["train", *as_arguments({**overrides, "output_dir": str(tmp_path / name), **options})]) == 0
        return models[-1], tmp_path / name

    return run


def initial_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder.parent / "model")


# --- positions and precision ------------------------------------------------------------------------------------------


def linear(config, inv_freq):
    return inv_freq / 2


def scaled_frequencies(kind):
    """Return a function that computes the frequencies of this kind of scaling with transformers."""
    return lambda config, inv_freq: ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=config.max_position_embeddings)[0]


ROPE = {"linear": linear, "yarn": scaled_frequencies("yarn"), "llama3": scaled_frequencies("llama3")}


@pytest.mark.parametrize("kind", representative_slow(ROPE, 1))
def test_rope_scaling_is_applied_to_trained_and_saved_model(train, kind):
    model, folder = train(rope_scaling=kind, cutoff_len=512)
    config = AutoConfig.from_pretrained(folder)
    assert (config.rope_parameters["rope_type"], config.max_position_embeddings) == (kind, 512)
    plain = initial_model(folder).model.rotary_emb.inv_freq
    result = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(result, ROPE[kind](config, plain))
    assert not torch.allclose(result, plain)
    again = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(again(IDS).logits, model.eval()(IDS).logits)


def test_dynamic_rope_scales_with_input_length(train):
    model, folder = train(rope_scaling="dynamic", cutoff_len=512)
    rope = model.model.rotary_emb
    plain = initial_model(folder).model.rotary_emb.inv_freq
    torch.testing.assert_close(rope.inv_freq, plain)  # the rows are short
    rope(torch.zeros(1, 1, 8), torch.arange(512)[None])
    # base * (factor * length / context - (factor - 1)) ** (d / (d - 2)) with d = 8, as transformers has it
    base = 10_000 * (2 * 512 / 256 - 1) ** (8 / 6)
    torch.testing.assert_close(rope.inv_freq, base ** (-torch.arange(0, 8, 2) / 8))
    saved = AutoConfig.from_pretrained(folder)
    assert (saved.rope_parameters["rope_type"], context_length(saved)) == ("dynamic", 512)


def formats(model, part):
    return {parameter.dtype for name, parameter in model.named_parameters() if part(name)}


def norm_dtypes(name):
    return "norm" in name


def other_dtypes(name):
    return "norm" not in name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "norms", "rest"),
    [
        ({}, torch.float32, torch.float32),
        ({"pure_bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"pure_bf16": True, "finetuning_type": "lora"}, torch.bfloat16, torch.bfloat16),
        ({"bf16": True, "finetuning_type": "lora", "upcast_layernorm": True}, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_weights_are_kept_in_requested_dtype(train, options, norms, rest):
    model, folder = train(**options)
    base = [name for name in dict(model.named_parameters()) if "lora_" not in name]
    assert formats(model, lambda name: name in base and norm_dtypes(name)) == {norms}
    assert formats(model, lambda name: name in base and other_dtypes(name)) == {rest}
    assert (folder / "train_results.json").is_file()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("is_fast", "options", "frozen"),
    [
        (True, {}, torch.bfloat16),
        (True, {"bf16": False}, torch.float32),
        (False, {}, torch.float32),
        (False, {"bf16": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_compute_dtype_is_chosen_once(train, tmp_path, monkeypatch, capfd, is_fast, options, frozen):
    monkeypatch.setattr(precision, "cpu_instructions", lambda: "AVX512-BF16" if is_fast else "AVX2")
    monkeypatch.setattr(precision, "is_amx_generation", lambda: False)
    initial_model(tmp_path / "out").bfloat16().save_pretrained(tmp_path / "model")
    model, _ = train(finetuning_type="lora", **options)
    assert formats(model, lambda name: "lora_" not in name) == {frozen}
    message = str(frozen).removeprefix("torch.")
    assert f"Compute dtype: {message}, on cpu ({'AVX512-BF16' if is_fast else 'AVX2'})" in capfd.readouterr().out


def test_float32_norms_contradict_pure_bfloat16(tmp_path, capsys):
    options = make_workspace(tmp_path, pure_bf16=True, upcast_layernorm=True)
    assert main(["explain", *as_arguments(options)]) == 2
    assert "Set bf16: true instead of pure_bf16" in "".join(capsys.readouterr())


# --- LoRA -------------------------------------------------------------------------------------------------------------

TARGETS = {
    "all": ({"lora_target": "all"}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, 2),
    "names": ({"lora_target": "q_proj,v_proj"}, {"q_proj", "v_proj"}, 2),
    "a regular expression": ({"lora_target": r"model\.layers\.1\.mlp\..*_proj"},
                             {"gate_proj", "up_proj", "down_proj"}, 1),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TARGETS)
def test_lora_target_selects_layers_that_peft_finds(train, name):
    options, layers, depth = TARGETS[name]
    model, folder = train(finetuning_type="lora", lora_rank=2, additional_target="model.norm", **options)
    stored = load_file(folder / "adapter_model.safetensors")
    a_factors = [key for key in stored if key.endswith("lora_A.weight")]
    assert {key.split(".")[-3] for key in a_factors} == layers
    assert len(a_factors) == len(layers) * depth
    assert [key for key in stored if "lora_" not in key] == ["base_model.model.model.norm.weight"]
    theirs = peft.PeftModel.from_pretrained(initial_model(folder), folder)
    torch.testing.assert_close(theirs(IDS).logits, model.eval()(IDS).logits, rtol=1e-4, atol=1e-5)
    moved = stored["base_model.model.model.norm.weight"] - initial_model(folder).model.norm.weight
    assert moved.abs().max() > 0


@pytest.mark.parametrize("name", ["norm", "mlp"])
def test_additional_target_trains_matching_modules_and_resumes(train, capsys, name):
    model, folder = train(finetuning_type="lora", lora_rank=2, lora_target="q_proj", additional_target=name)
    plain = initial_model(folder)
    theirs = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name]))
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == peft.get_peft_model_state_dict(theirs).keys()
    whole = {key for key in stored if "lora_" not in key}
    assert len(whole) == {"norm": 5, "mlp": 6}[name]
    start = initial_model(folder).state_dict()
    assert all(not torch.equal(stored[key], start[key.removeprefix("base_model.model.")]) for key in whole)
    message = {"norm": "input_layernorm", "mlp": "mlp"}[name]
    assert f"Trained in full alongside the adapter: model.layers.0.{message}" in capsys.readouterr().out
    loaded = peft.PeftModel.from_pretrained(initial_model(folder), folder)
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits, rtol=1e-4, atol=1e-5)

    _, again = train("again", finetuning_type="lora", adapter_name_or_path=str(folder))
    further = load_file(again / "adapter_model.safetensors")
    assert further.keys() == stored.keys()
    assert all(not torch.equal(further[key], stored[key]) for key in whole)


@pytest.mark.slow
def test_adapters_are_merged_in_order_as_in_peft(train):
    lora = {"finetuning_type": "lora", "learning_rate": 5e-2}
    _, first = train("first", lora_rank=2, **lora)
    _, second = train("second", adapter_name_or_path=first, create_new_adapter=True, lora_rank=3, **lora)
    both = f"{first},{second}"
    expected = initial_model(first)
    for folder in (first, second):
        expected = peft.PeftModel.from_pretrained(expected, folder).merge_and_unload()
    wanted = {name: weight.clone() for name, weight in expected.state_dict().items()}

    model, third = train("third", adapter_name_or_path=both, create_new_adapter=True, lora_rank=4, **lora)
    assert {p.shape[0] for name, p in model.named_parameters() if ".lora_A." in name} == {4}
    stored = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert stored.keys() <= wanted.keys()
    for name, weight in stored.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(wanted["model.layers.0.mlp.up_proj.weight"],
                              initial_model(first).model.layers[0].mlp.up_proj.weight, atol=1e-4)  # fmt: skip

    _, is_resuming = train("goes on", adapter_name_or_path=both, **lora)
    assert json.loads((is_resuming / "adapter_config.json").read_text())["r"] == 3
    assert third != is_resuming


@pytest.mark.parametrize("iterations", representative_slow([-1, 8], 1))
def test_pissa_trains_largest_directions_and_is_saved_as_lora(train, tmp_path, iterations):
    pissa = {"pissa_init": True, "pissa_iter": iterations, "pissa_convert": True, "lora_rank": 4}
    model, folder = train(finetuning_type="lora", learning_rate=1e-8, **pissa)
    layer = model.model.layers[0].mlp.up_proj
    whole = initial_model(folder).model.layers[0].mlp.up_proj.weight
    left, values, right = torch.linalg.svd(whole)
    principal = (left[:, :4] * values[:4]) @ right[:4]  # Meng et al. 2024, eq. 2, https://arxiv.org/abs/2404.02948
    rest = whole - principal
    if iterations == -1:
        torch.testing.assert_close(layer.base_layer.weight, rest, rtol=0, atol=1e-5)
    assert rest.norm() * 0.999 < layer.base_layer.weight.norm() < rest.norm() * 1.02
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    theirs = peft.PeftModel.from_pretrained(initial_model(folder), folder)
    torch.testing.assert_close(theirs(IDS).logits, model.eval()(IDS).logits, rtol=1e-3, atol=1e-4)


# --- freeze -----------------------------------------------------------------------------------------------------------

FREEZE = {
    "the last layer": ({"freeze_trainable_layers": 1}, lambda name: "layers.1." in name),
    "the first layer": ({"freeze_trainable_layers": -1}, lambda name: "layers.0." in name),
    "some modules": ({"freeze_trainable_layers": 1, "freeze_trainable_modules": "mlp"},
                     lambda name: "layers.1.mlp" in name),
    "modules beside the layers": ({"freeze_trainable_layers": 1, "freeze_extra_modules": "lm_head,norm"},
                                  lambda name: "layers.1." in name or name in ("lm_head.weight", "model.norm.weight")),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FREEZE)
def test_only_unfrozen_parameters_change(train, name):
    options, moves = FREEZE[name]
    _, folder = train(finetuning_type="freeze", **options)
    before, after = initial_model(folder).state_dict(), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if moves(name)}


SMALL = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0,
         "eos_token_id": 2, "bos_token_id": 1}  # fmt: skip
FAMILIES = {
    "gemma4_text": {**SMALL, "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
                    "max_position_embeddings": 256, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "mamba2": {**SMALL, "state_size": 8, "num_heads": 4, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_model_whose_layers_differ_trains_and_predicts(tmp_path, family):
    """Gemma 4 has two head sizes, and the norms of Mamba 2 have a gate."""
    options = make_workspace(tmp_path, max_steps=1, save_strategy="no", val_size=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model")
    assert main(["explain", *as_arguments(options)]) == 0
    assert main(["train", *as_arguments(options)]) == 0
    assert main(["predict", str(tmp_path / "out"), "max_new_tokens=3"]) == 0
    assert (tmp_path / "out/predictions/generated_predictions.jsonl").is_file()
