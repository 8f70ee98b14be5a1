"""Loading, counting and saving a model and its tokenizer."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from burnish.adapters.base import ADAPTERS, ModelState, trainable_summary
from burnish.config.errors import UserError
from burnish.config.options import RawValue, build
from burnish.models.check import check_model
from burnish.models.load import (
    check_context,
    context_length,
    find_non_finite,
    load_config,
    load_model,
    meta_model,
    raise_if_not_finite,
    samples_without_sampling,
)
from burnish.models.options import ModelOptions
from burnish.models.save import save_model
from burnish.models.tokens import check_vocabulary, load_tokenizer, resize_embeddings
from burnish.parallel.single import ParallelOptions, SingleProcess, set_precision
from burnish.trainer.methods.files import write_gathered, write_model
from burnish.utils.patching import patch_summary
from small_run import make_model
from tiny_models import CONFIGS, VOCABULARY, saved_model, tiny_model, tiny_tokenizer, token_ids


def options(folder, **overrides):
    return ModelOptions(model_name_or_path=str(folder), **overrides)


def full(model):
    adapter = ADAPTERS["full"](SimpleNamespace(finetuning_type="full"), [])
    return adapter, adapter.attach(model)


def logits(model):
    with torch.no_grad():
        return model(token_ids()).logits


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*CONFIGS, "mixtral"])
def test_every_family_is_checked_loaded_trained_saved_and_reloaded(family, tmp_path):
    saved_model(tmp_path / "base", family)
    assert check_model(options(tmp_path / "base")) == []
    _, model = full(load_model(options(tmp_path / "base")))
    torch.testing.assert_close(logits(model), logits(tiny_model(family)), rtol=0, atol=0)
    model(token_ids(), labels=token_ids()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    save_model(model, tiny_tokenizer(), tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert not torch.allclose(logits(again), logits(tiny_model(family)))
    torch.testing.assert_close(logits(again), logits(model.eval()), rtol=0, atol=0)


def test_requested_dtype_is_loaded(tmp_path):
    saved_model(tmp_path)
    assert load_model(options(tmp_path)).dtype == torch.float32
    assert load_model(options(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
    norms = {
        p.dtype
        for n, p in load_model(options(tmp_path, upcast_layernorm=True), dtype=torch.bfloat16).named_parameters()
        if "norm" in n
    }
    assert norms == {torch.float32}


@pytest.mark.parametrize(("flash_attn", "expected"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("disabled", "eager")])
def test_flash_attn_names_an_implementation(flash_attn, expected, tmp_path):
    model = load_model(options(saved_model(tmp_path), flash_attn=flash_attn))
    assert model.config._attn_implementation == expected


def test_attention_accepts_transformers_names(tmp_path):
    model = load_model(options(saved_model(tmp_path), attn_implementation="eager"))
    assert model.config._attn_implementation == "eager"


def test_engine_can_provide_its_attention(tmp_path):
    model = load_model(options(saved_model(tmp_path)), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_from_scratch_is_random_with_seed_and_reads_no_weights(tmp_path):
    saved_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert check_model(options(tmp_path, train_from_scratch=True)) == []
    result = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        result.append(logits(load_model(options(tmp_path, train_from_scratch=True))))
    assert torch.equal(result[0], result[1])
    assert not torch.allclose(result[0], result[2])
    torch.manual_seed(1)
    small = load_model(options(tmp_path, train_from_scratch=True), dtype=torch.bfloat16)
    torch.manual_seed(1)
    wide = load_model(options(tmp_path, train_from_scratch=True))
    assert torch.equal(small.lm_head.weight, wide.lm_head.weight.to(torch.bfloat16))


def test_unused_tensors_are_reported(tmp_path):
    from safetensors.torch import load_file, save_file

    saved_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {f"vision.{n}.weight": torch.ones(2) for n in range(9)}, path, {"format": "pt"})
    notes = []
    load_model(options(tmp_path), notes=notes)
    assert any("9 tensors in the files are not part of LlamaForCausalLM" in note for note in notes)


def test_cache_is_disabled_in_training_and_enabled_in_saved_config(tmp_path):
    model = load_model(options(saved_model(tmp_path / "base")))
    assert model.config.use_cache is False
    save_model(model, tiny_tokenizer(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True


def test_invalid_generation_config_is_fixed_and_reported(tmp_path):
    saved_model(tmp_path / "base")
    raw = {"temperature": 0.6, "do_sample": False, "eos_token_id": 2}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(raw))
    model = load_model(options(tmp_path / "base"))
    assert patch_summary(model) == ["1 generation_config.do_sample: 1 generation config with sampling parameters"]
    assert samples_without_sampling(meta_model(load_config(options(tmp_path / "base"))))  # checked without weights
    save_model(model, tiny_tokenizer(), tmp_path / "out", stop_token_ids=[5])
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_new_special_tokens_is_an_alias_of_add_special_tokens():
    parsed, problems = build(ModelOptions, {"new_special_tokens": RawValue("<a>,<b>", "")})
    assert problems == []
    assert parsed.add_special_tokens == ["<a>", "<b>"]


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_tokenizer_pads_right_and_reads_no_weights(tmp_path):
    saved_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    notes = []
    tokenizer = load_tokenizer(options(tmp_path), notes)
    assert tokenizer.padding_side == "right"
    assert (tokenizer.eos_token, tokenizer.pad_token, notes) == ("</s>", "<pad>", [])


def test_missing_padding_token_is_chosen_and_reported(tmp_path):
    saved_model(tmp_path, tokenizer=tiny_tokenizer(pad_token=None))
    notes = []
    assert load_tokenizer(options(tmp_path), notes).pad_token == "</s>"
    assert "no padding token; </s> is used for padding" in notes[0]


def test_missing_end_token_is_found_in_vocabulary_and_reported(tmp_path):
    saved_model(tmp_path, tokenizer=tiny_tokenizer(pad_token=None, eos_token=None))
    notes = []
    tokenizer = load_tokenizer(options(tmp_path), notes)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "</s>")
    assert len(tokenizer) == VOCABULARY
    assert len(notes) == 2


def test_new_tokens_get_rows_and_old_rows_are_unchanged(tmp_path):
    overrides = options(saved_model(tmp_path), add_special_tokens=["<think>"], add_tokens=["w60000"])
    notes = []
    tokenizer = load_tokenizer(overrides, notes)
    assert len(tokenizer) == VOCABULARY + 2
    assert tokenizer.encode("w5 <think> w60000") == [9, VOCABULARY + 1, VOCABULARY]
    model = load_model(overrides)
    before = model.get_input_embeddings().weight.detach().clone()
    resize_embeddings(model, tokenizer, overrides, notes)
    after = model.get_input_embeddings().weight
    assert after.shape[0] == 2 * VOCABULARY  # the next multiple of 64
    assert torch.equal(after[:VOCABULARY], before)
    assert model.has_new_tokens
    assert any("resized from 64 to 128" in note for note in notes)


def test_tokenizer_larger_than_embedding_is_rejected_unless_resizable(tmp_path):
    saved_model(tmp_path, vocab_size=60)
    tokenizer, config = load_tokenizer(options(tmp_path)), load_config(options(tmp_path))
    (problem,) = check_vocabulary(tokenizer, config, options(tmp_path))
    assert "64 tokens and the model's embedding has 60 rows" in str(problem)
    assert "resize_vocab: true" in str(problem)
    with pytest.raises(UserError, match="64 tokens"):
        resize_embeddings(load_model(options(tmp_path)), tokenizer, options(tmp_path))
    assert list(check_vocabulary(tokenizer, config, options(tmp_path, resize_vocab=True))) == []


# --- parameter counts and context length ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_model_is_counted_without_weights(family):
    shapes = meta_model(CONFIGS[family]())
    assert trainable_summary(shapes)[1] == sum(p.numel() for p in tiny_model(family).parameters())
    assert all(parameter.is_meta for parameter in shapes.parameters())
    assert context_length(CONFIGS[family]()) == (64 if family != "bloom" else None)


def test_rope_scaling_extends_context_to_longest_row(tmp_path):
    overrides = options(saved_model(tmp_path), rope_scaling="linear")
    notes = []
    config = load_config(overrides, max_length=100, notes=notes)
    assert context_length(config) == 128
    assert "from 64 to 128 tokens (linear, factor 2)" in notes[0]
    stretched = load_model(overrides, config=config).model.rotary_emb.inv_freq
    torch.testing.assert_close(stretched, load_model(options(tmp_path)).model.rotary_emb.inv_freq / 2)
    assert "no effect" in _notes_of(overrides, 50)[0]
    saved_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="rope_scaling"):
        load_config(options(tmp_path / "gpt2", rope_scaling="yarn"), max_length=100)


def test_row_beyond_context_length_is_rejected():
    assert list(check_context(CONFIGS["llama"](), 64)) == []
    (problem,) = check_context(CONFIGS["gpt2"](), 20_000)
    assert "20,000 tokens, but the model's context length is 64" in str(problem)
    assert "rope_scaling" not in str(problem)  # GPT-2 has no rotary positions
    (problem,) = check_context(CONFIGS["llama"](), 65)
    assert "rope_scaling" in str(problem)
    assert list(check_context(CONFIGS["bloom"](), 20_000)) == []


def _notes_of(cutoff_len, max_length):
    notes = []
    load_config(cutoff_len, max_length=max_length, notes=notes)
    return notes


def test_non_finite_weights_are_named(tmp_path):
    model = tiny_model()
    assert find_non_finite(model) == []
    raise_if_not_finite(model, "m")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.lm_head.weight.data[3, 0] = float("inf")
    assert find_non_finite(model) == ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    with pytest.raises(UserError, match=r"2 of the model's weights contain NaN or infinity: .*up_proj"):
        raise_if_not_finite(model, "m")


def test_weights_with_overflowing_sum_are_finite(tmp_path):
    model = tiny_model().half()
    model.lm_head.weight.data.fill_(60_000.0)
    assert torch.isinf(model.lm_head.weight.sum())
    assert find_non_finite(model) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_weights_are_checked_for_non_finite_values(dtype):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    assert find_non_finite(model) == []
    model.weight.data = torch.tensor([1.0, float("nan")]).to(dtype)
    assert find_non_finite(model) == ["weight"]


# --- checkpointing and precision --------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("arguments", [None, {"use_reentrant": True}, {"selective": True}, {"offload": True}])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpointing_gives_the_same_gradients(kind, arguments):
    from burnish.adapters.base import FinetuningOptions
    from burnish.adapters.lora import LoraOptions
    from burnish.config.options import union

    made = union("Options", FinetuningOptions, LoraOptions)(finetuning_type=kind, lora_dropout=0.3)
    result = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = ADAPTERS[kind](made, []).attach(tiny_model()).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        if checkpointed:
            engine = SingleProcess(
                ParallelOptions(use_cpu=True, gradient_checkpointing=True, gradient_checkpointing_kwargs=arguments)
            )
            engine.prepare(model, None)
            assert all(layer.gradient_checkpointing for layer in model.model.layers)
        torch.manual_seed(1)
        model(token_ids(), labels=token_ids()).loss.backward()
        result.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert result[0].keys() == result[1].keys()
    assert result[0]
    for name, gradient in result[0].items():
        assert torch.equal(gradient, result[1][name]), name


def test_full_training_updates_all_weights_in_float32_and_keeps_ties():
    _, model = full(tiny_model("qwen2").to(torch.bfloat16))
    set_precision(model, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- saving -----------------------------------------------------------------------------------------------------------


def tensors_in(folder):
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            result |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    return result


def test_model_is_saved_in_source_dtype_and_checkpoint_in_float32(tmp_path):
    saved_model(tmp_path / "base", "qwen2")
    adapter, model = full(load_model(options(tmp_path / "base"), dtype=torch.bfloat16))
    set_precision(model, torch.float32)
    model.model.norm.weight.data += 1e-4  # too small for bfloat16
    save_model(model, tiny_tokenizer(), tmp_path / "out")
    written = tensors_in(tmp_path / "out")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in written  # tied weights are written once
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype == torch.bfloat16
    stored = ModelState(model, adapter).state_dict()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert len(stored) == len(written)
    assert torch.equal(stored["model.norm.weight"], model.model.norm.weight)
    save_model(model, tiny_tokenizer(), tmp_path / "wide", dtype=torch.float32)
    assert torch.equal(tensors_in(tmp_path / "wide")["model.norm.weight"], model.model.norm.weight)


def test_state_dict_round_trip_is_bitwise_equal():
    adapter, model = full(tiny_model("qwen2"))
    state = {name: tensor.clone() for name, tensor in adapter.state(model).items()}
    other_adapter, other = full(tiny_model("qwen2", seed=5))
    ModelState(other, other_adapter).load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_state_of_another_model_is_rejected_with_the_difference():
    adapter, model = full(tiny_model("llama"))
    state = adapter.state(tiny_model("llama", hidden_size=32))
    with pytest.raises(UserError, match="differ in shape") as caught:
        adapter.load_state(model, state)
    assert len(str(caught.value).splitlines()) <= 2
    with pytest.raises(UserError, match="lack transformer"):
        ADAPTERS["full"](None, []).load_state(tiny_model("gpt2"), state)


def test_large_model_is_saved_in_shards_with_an_index(tmp_path):
    model = tiny_model()
    save_model(model, tiny_tokenizer(), tmp_path, max_shard_size=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert check_model(options(tmp_path)) == []
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("whole", [None, lambda tensor: tensor])
@pytest.mark.parametrize("sizes", [("5GB", 20_000), (20_000, "5GB"), (20_000, 60_000)], ids=str)
def test_saved_model_replaces_one_with_other_shards(tmp_path, sizes, whole):
    models = [tiny_model(), tiny_model(seed=1)]
    for model, size in zip(models, sizes, strict=True):
        save_model(model, tiny_tokenizer(), tmp_path, max_shard_size=size, whole=whole)
    saved, expected = AutoModelForCausalLM.from_pretrained(tmp_path), models[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.state_dict().items())
    index = tmp_path / "model.safetensors.index.json"
    written = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in tmp_path.glob("model*")} == written | ({index.name} if index.exists() else set())


def test_trainer_replaces_a_sharded_model(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size=20_000)
    write_model(tiny_model(seed=1), tmp_path, None)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    tiny_model().save_pretrained(tmp_path, max_shard_size=20_000)
    write_gathered(tiny_model(seed=1), tmp_path, lambda tensor: tensor, True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_earlier_shards_are_kept_if_saving_fails(tmp_path, monkeypatch):
    save_model(tiny_model(), tiny_tokenizer(), tmp_path, max_shard_size=20_000)
    before = {path.name for path in tmp_path.iterdir()}
    model = tiny_model()
    monkeypatch.setattr(model, "save_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(model, tiny_tokenizer(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_saved_folder_has_generation_files_and_no_pickle(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    model = tiny_model(bos_token_id=7)
    model.generation_config = GenerationConfig(eos_token_id=2)
    save_model(model, tokenizer, tmp_path, stop_token_ids=[9])
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == [2, 9]
    assert (generation.pad_token_id, generation.bos_token_id) == (0, 1)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.bos_token_id == 1


def test_model_with_adapter_cannot_be_saved_as_full_model(tmp_path):
    from peft import LoraConfig

    from burnish.adapters.lora_model import add_adapter

    model = tiny_model()
    add_adapter(model, "default", LoraConfig(r=2), ["model.layers.0.mlp.up_proj"], [])
    with pytest.raises(RuntimeError, match="adapter is still in the model"):
        save_model(model, None, tmp_path)


def test_token_that_a_config_requires_is_kept_if_the_tokenizer_has_none(tmp_path):
    """Some families validate their config strictly, and a tokenizer may have no BOS token."""
    cwm = pytest.importorskip("transformers.models.cwm")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1}  # fmt: skip
    model = cwm.CwmForCausalLM(cwm.CwmConfig(**sizes))
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "llama"))
    assert tokenizer.bos_token_id is None
    save_model(model, tokenizer, tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").bos_token_id == 1
    assert AutoConfig.from_pretrained(tmp_path / "saved").pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_neox", "gpt_neox.layers.0.attention.bias"), ("gpt2", "transformer.h.0.attn.bias")],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_masks_in_published_files_are_not_taken_for_quantized_weights(family, name, dtype, tmp_path):
    """Published files of Pythia, GPT-J, GPT-Neo and older GPT-2 models contain the causal mask of each layer."""
    saved_model(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(1, 1, 16, 16, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_model(ModelOptions(model_name_or_path=str(tmp_path))) == []
    tensors["model.layers.0.weight"] = torch.ones(16, 16, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (problem,) = check_model(ModelOptions(model_name_or_path=str(tmp_path)))
    assert "integers or 8-bit floats" in str(problem)
