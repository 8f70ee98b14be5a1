"""Trainable parameters in freeze and full training, and with PEFT's other adapter methods."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from burnish.adapters.base import (
    ADAPTERS,
    FinetuningOptions,
    ModelState,
    finetuning_notes,
    parameter_lines,
    trainable_summary,
)
from burnish.adapters.freeze import FreezeOptions, decoder_layers
from burnish.adapters.lora import LoraOptions
from burnish.adapters.peft import OftOptions, PeftOptions, check_oft, merge_folders
from burnish.config.errors import UserError
from burnish.config.options import union
from tiny_models import CONFIGS, tiny_model, token_ids

Options = union("Options", FinetuningOptions, FreezeOptions, LoraOptions, PeftOptions, OftOptions)


def trainable_names(family="llama", model=None, **options):
    """Return the names of trainable parameters."""
    adapter = ADAPTERS["freeze"](Options(finetuning_type="freeze", **options), [])
    model = adapter.attach(tiny_model(family, num_hidden_layers=4) if model is None else model)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers_of(names):
    return sorted({int(name.split(".")[2]) for name in names})


@pytest.mark.parametrize(
    ("count", "expected"), [(2, [2, 3]), (1, [3]), (-1, [0]), (-3, [0, 1, 2]), (9, [0, 1, 2, 3]), (-9, [0, 1, 2, 3])]
)
def test_trainable_layers_are_counted_from_either_end(count, expected):
    names = trainable_names(freeze_trainable_layers=count)
    assert layers_of(names) == expected
    assert all(name.startswith("model.layers.") for name in names)


@pytest.mark.parametrize(("count", "expected"), [(1, [3]), (2, [1, 3]), (4, [0, 1, 2, 3])])
def test_llama_pro_trains_last_layer_of_each_group(count, expected):
    assert layers_of(trainable_names(freeze_trainable_layers=count, use_llama_pro=True)) == expected


@pytest.mark.parametrize("count", [3, -2])
def test_unequal_layer_groups_are_rejected(count):
    with pytest.raises(UserError, match=f"4 layers into equal groups. Received: {count}"):
        trainable_names(freeze_trainable_layers=count, use_llama_pro=True)


def test_default_trains_all_modules_of_last_two_layers():
    expected = {
        n
        for n, _ in tiny_model(num_hidden_layers=4).named_parameters()
        if n.startswith(("model.layers.2", "model.layers.3"))
    }
    assert trainable_names() == expected


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["mlp"], {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}),
        (["q_proj", "input_layernorm"], {"self_attn.q_proj.weight", "input_layernorm.weight"}),
    ],
)
def test_only_named_modules_of_a_layer_are_trained(modules, expected):
    names = trainable_names(freeze_trainable_layers=1, freeze_trainable_modules=modules)
    assert {name.removeprefix("model.layers.3.") for name in names} == expected


def test_extra_modules_are_trained_with_layers():
    names = trainable_names(
        freeze_trainable_layers=1, freeze_trainable_modules=["mlp"], freeze_extra_modules=["norm", "lm_head"]
    )
    assert {"model.norm.weight", "lm_head.weight"} < names
    assert "model.embed_tokens.weight" not in names


def test_only_extra_modules_are_trained_with_zero_layers():
    assert trainable_names(freeze_trainable_layers=0, freeze_extra_modules=["lm_head"]) == {"lm_head.weight"}


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_of_each_family_are_found_and_trained(family):
    model = tiny_model(family)
    path, layers = decoder_layers(model)
    assert (len(layers), bool(path)) == (2, True)
    names = trainable_names(model=model, freeze_trainable_layers=1)
    assert names
    assert all(name.startswith(f"{path}.1.") for name in names)
    model(token_ids(), labels=token_ids()).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == names


def test_frozen_run_resumes_bitwise_equal():
    adapter = ADAPTERS["freeze"](Options(finetuning_type="freeze", freeze_trainable_layers=1), [])
    model = adapter.attach(tiny_model())
    model(token_ids(), labels=token_ids()).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    state = {name: tensor.clone() for name, tensor in ModelState(model, adapter).state_dict().items()}
    other = adapter.attach(tiny_model())
    ModelState(other, adapter).load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def problems(kind="freeze", folders=(), **options):
    adapter = ADAPTERS[kind](Options(finetuning_type=kind, **options), folders)
    return [str(problem) for problem in adapter.check(tiny_model())]


def test_missing_modules_are_rejected_together():
    result = problems(freeze_trainable_modules=["mpl", "mlp"], freeze_extra_modules=["lm_haed", "norm"])
    assert len(result) == 2
    assert 'freeze_trainable_modules "mpl"' in result[0]
    assert 'Did you mean "mlp"?' in result[0]
    assert 'freeze_extra_modules "lm_haed"' in result[1]
    assert "embed_tokens, lm_head, norm" in result[1]


def test_zero_layers_are_rejected():
    assert "freeze_trainable_layers is 0" in problems(freeze_trainable_layers=0)[0]
    assert "freeze_trainable_layers is 0" in problems(freeze_trainable_layers=0, use_llama_pro=True)[0]


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_adapter_cannot_be_continued_with_full_training(kind, tmp_path):
    (result,) = problems(kind, folders=[tmp_path])
    assert f"finetuning_type {kind} does not train adapters" in result
    assert str(tmp_path) in result


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_full_and_freeze_training_without_ref_model_raise(kind):
    adapter = ADAPTERS[kind](Options(finetuning_type=kind), [])
    with pytest.raises(UserError, match="ref_model"):
        adapter.reference(tiny_model())


def test_unknown_finetuning_type_is_rejected_with_known_ones():
    with pytest.raises(UserError, match="Available: freeze, full, lora, oft, peft"):
        ADAPTERS["loar"]


# --- the peft library -----------------------------------------------------------------------------------------------

METHODS = {
    "prompt tuning": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
    "ia3": {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "oft": {"peft_type": "OFT", "oft_block_size": 4, "target_modules": ["q_proj"]},
    "p-tuning": {"peft_type": "P_TUNING", "num_virtual_tokens": 3, "encoder_hidden_size": 8},
}


def with_peft(config, folders=()):
    adapter = ADAPTERS["peft"](Options(finetuning_type="peft", peft_config=config), folders)
    return adapter, adapter.attach(tiny_model())


def logits(model):
    with torch.no_grad():
        return model(input_ids=token_ids(), attention_mask=torch.ones_like(token_ids())).logits


@pytest.mark.parametrize("method", METHODS)
def test_peft_method_trains_saves_and_resumes(method, tmp_path):
    torch.manual_seed(3)
    adapter, model = with_peft(METHODS[method])
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(input_ids=token_ids(), attention_mask=torch.ones_like(token_ids()), labels=token_ids()).loss.backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    model.eval()
    adapter.save(model, str(tmp_path))
    assert not list(tmp_path.glob("*.bin"))
    _, loaded = with_peft(None, folders=[tmp_path])
    torch.testing.assert_close(logits(loaded.eval()), logits(model), rtol=1e-5, atol=2e-6)
    loaded(input_ids=token_ids(), attention_mask=torch.ones_like(token_ids()), labels=token_ids()).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in loaded.parameters())
    state = {name: tensor.clone() for name, tensor in adapter.state(model).items()}
    torch.manual_seed(4)
    other_adapter, other = with_peft(METHODS[method])
    other_adapter.load_state(other, state)
    assert torch.equal(logits(other.eval()), logits(model))
    assert len(state) < len(model.state_dict())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"oft_block_size": 4}, (4, 0, 14)),
        ({"oft_block_size": 0, "oft_rank": 2, "oft_target": ["q_proj"], "module_dropout": 0.5}, (None, 2, 2)),
    ],
)
def test_oft_accepts_llamafactory_options(options, expected):
    adapter = ADAPTERS["oft"](Options(finetuning_type="oft", **options), [])
    model = adapter.attach(tiny_model())
    (config,) = model.peft_config.values()
    size, rank, layers = expected
    assert size in (None, config.oft_block_size)
    assert config.r == rank or rank == 0
    assert config.module_dropout == options.get("module_dropout", 0)
    assert sum(name.endswith("oft_R.default.weight") for name, _ in model.named_parameters()) == layers


def test_missing_target_of_oft_is_rejected_with_a_suggestion():
    (result,) = problems("oft", oft_target=["q_porj"])
    assert "oft_target" in result
    assert 'Did you mean "q_proj"?' in result
    assert problems("oft", oft_target=["all-linear"]) == []


def test_frozen_parts_without_effect_on_a_peft_config_are_reported():
    config = METHODS["ia3"]
    (note,) = finetuning_notes(Options(finetuning_type="peft", peft_config=config, freeze_language_model=True))
    assert "freeze_language_model" in note
    assert finetuning_notes(Options(finetuning_type="peft", peft_config=config)) == []


def test_oft_accepts_only_one_size_option():
    (problem,) = check_oft(Options(finetuning_type="oft", oft_rank=2))
    assert "oft_block_size" in problem.what
    assert not list(check_oft(Options(finetuning_type="lora", oft_rank=2)))


def test_reference_of_peft_model_is_its_base():
    adapter, model = with_peft(METHODS["prompt tuning"])
    assert logits(model).shape[1] == token_ids().shape[1] + 3
    with adapter.reference(model):
        assert torch.equal(logits(model), logits(tiny_model()))


def test_model_already_wrapped_by_peft_is_accepted():
    import peft

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter = ADAPTERS["peft"](Options(finetuning_type="peft"), [])
    assert adapter.check(model) == []
    assert adapter.attach(model) is model
    assert len(adapter.state(model)) == 4
    assert trainable_summary(model) == model.get_nb_trainable_parameters()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "finetuning_type peft requires peft_config"),
        ({"peft_type": "PROMT_TUNING"}, 'unknown peft_type "PROMT_TUNING". Did you mean "PROMPT_TUNING"?'),
        ({"peft_type": "IA3", "nonsense": 1}, "nonsense"),
        ("nowhere.json", "is neither a file"),
    ],
)
def test_invalid_peft_config_is_rejected(config, expected):
    (result,) = problems("peft", peft_config=config)
    assert expected in result


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "PROMPT_TUNING"},  # without num_virtual_tokens
        {"peft_type": "LORA", "r": "high"},
        {"peft_type": "LORA", "target_modules": "*.q_proj"},
        {"peft_type": "LORA", "target_modules": [1]},
        {"peft_type": "VERA", "r": -1},
    ],
)
def test_peft_config_that_does_not_suit_the_model_is_rejected(config):
    with pytest.raises(UserError) as raised:
        with_peft(config)
    assert raised.value.problems[0].option == "peft_config"


FOLDERS = {
    "another method": ({"peft_type": "NOVEL"}, 'must be a method of the installed peft. Received: "NOVEL"'),
    "a number as the method": ({"peft_type": 5}, "must be a method of the installed peft. Received: 5"),
    "a list as the method": ({"peft_type": ["IA3"]}, 'Did you mean "IA3"'),
    "no method": ({}, "Received: null"),
    "no weights": (METHODS["ia3"], "has no adapter_model.safetensors"),
    "pickled weights": (METHODS["ia3"], "adapter_model.bin is a pickle file"),
    "other weights": (METHODS["prompt tuning"], "peft cannot load this adapter"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_unusable_peft_folder_is_rejected(case, tmp_path):
    config, expected = FOLDERS[case]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if case == "pickled weights":
        (tmp_path / "adapter_model.bin").write_bytes(b"not opened")
    if case == "other weights":
        save_file({"prompt_embeddings": torch.zeros(7, 3)}, tmp_path / "adapter_model.safetensors")
    else:
        adapter = ADAPTERS["peft"](Options(finetuning_type="peft"), [tmp_path])
        assert expected in str(adapter.check(tiny_model())[0])
    with pytest.raises(UserError, match=re.escape(expected)):
        with_peft(None, folders=[tmp_path])
    with pytest.raises(UserError, match=re.escape(expected)):
        merge_folders(tiny_model(), [tmp_path])


# --- printed parameters -----------------------------------------------------------------------------------------------


def test_print_param_status_lists_every_parameter():
    model = tiny_model()
    assert parameter_lines(model, Options()) == []
    lines = parameter_lines(model, Options(print_param_status=True))
    assert len(lines) == len(list(model.parameters()))
    assert lines[0] == "name: model.embed_tokens.weight, dtype: torch.float32, device: cpu, trainable: True"


def test_prompt_tuning_matches_numpy_reference():
    """Checklist row 71: the prompt, in the dtype of the embeddings, precedes the row's embeddings, with a mask of ones
    and labels of -100. The loss is that of the row's labels."""
    torch.manual_seed(3)
    _, model = with_peft(METHODS["prompt tuning"])
    model.eval()
    ids = token_ids()
    prompt = model.get_prompt(len(ids)).detach()
    table = model.get_input_embeddings().weight.detach()
    joined = np.concatenate([prompt.numpy(), table.numpy()[ids.numpy()]], axis=1)
    mask = np.concatenate([np.ones((len(ids), 3)), np.ones(ids.shape)], axis=1)
    base = tiny_model().eval()
    with torch.no_grad():
        expected = base(inputs_embeds=torch.from_numpy(joined), attention_mask=torch.from_numpy(mask)).logits
    result = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert result.logits.shape[1] == ids.shape[1] + 3
    torch.testing.assert_close(result.logits, expected)

    scores = expected.double().numpy()[:, 2:-1]  # the last position of the prompt predicts the first token
    scores = scores - scores.max(-1, keepdims=True)
    logps = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    label_logps = np.take_along_axis(logps, ids.numpy()[..., None], axis=-1)
    assert result.loss.item() == pytest.approx(-label_logps.mean(), rel=1e-5)

    result.loss.backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert trained == ["prompt_encoder.default.embedding.weight"]


def test_folder_of_an_oft_adapter_is_recognized_before_its_fields(tmp_path):
    from burnish.adapters.lora_fit import read_adapter_config
    from burnish.config.errors import UserError

    config = {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="uses the method OFT") as raised:
        read_adapter_config(tmp_path)
    assert raised.value.problems[0].remedy == "Set finetuning_type: oft."


def test_module_whose_name_begins_with_that_of_the_layers_is_outside_of_them():
    model = tiny_model(num_hidden_layers=4)
    model.model.layers_gate = nn.Linear(4, 4)
    names = trainable_names(model=model, freeze_trainable_layers=0, freeze_extra_modules=["layers_gate"])
    assert names == {"model.layers_gate.weight", "model.layers_gate.bias"}
