"""Missing, damaged or unsupported models are rejected early, briefly and by name.

``check_model`` reads JSON files and headers only; in each case, no weights are read.
"""

import json
import re
import socket
import time
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoConfig

from burnish.config.errors import UserError
from burnish.models import source
from burnish.models.check import check_model
from burnish.models.load import load_config, load_model
from burnish.models.options import REFERENCE_MODEL, USED_MODEL, ModelOptions
from burnish.models.quantization import quantize
from burnish.models.quantization.quantize import check_quantized_files
from burnish.models.source import adapter_folders, find_source
from burnish.models.tokens import load_tokenizer
from tiny_models import VOCABULARY, saved_model, tiny_model, tiny_tokenizer


def model_problems(name, **options):
    """Return the problems as they are printed. Each has at most four lines."""
    texts = [str(problem) for problem in check_model(ModelOptions(model_name_or_path=str(name), **options))]
    assert all(len(text.splitlines()) <= 4 for text in texts)
    return texts


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- location ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "", "  "])
def test_missing_model_name_is_rejected(name):
    (problem,) = check_model(ModelOptions(model_name_or_path=name))
    assert "model_name_or_path is not set" in str(problem)


def test_missing_folder_is_rejected_with_nearest_name_and_remedy(tmp_path, monkeypatch):
    saved_model(tmp_path / "models" / "qwen-tiny")
    (result,) = model_problems(tmp_path / "models" / "qwen-tniy")
    assert result.count("\n") == 1
    assert "qwen-tniy" in result
    assert "Set it to a folder with a model" in result
    assert f"Did you mean {tmp_path / 'models' / 'qwen-tiny'}?" in result
    (result,) = model_problems(tmp_path / "modles" / "qwen-tiny")
    assert f"Did you mean {tmp_path / 'models' / 'qwen-tiny'}?" in result
    monkeypatch.chdir(tmp_path)  # looks like a hub id, but its parent is a folder here
    (result,) = model_problems("models/qwen-tniy")
    assert "Did you mean models/qwen-tiny?" in result
    (result,) = model_problems("/hom/models/first")  # a model is not directly in the root folder
    assert "Did you mean" not in result


def test_file_is_not_a_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file" in model_problems(tmp_path / "model.safetensors")[0]


def test_uncached_hub_id_is_rejected_immediately_when_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    begin = time.perf_counter()
    (result,) = model_problems("nobody/no-such-model", cache_dir=str(tmp_path))
    assert time.perf_counter() - begin < 5
    assert result.count("\n") == 1
    assert "is not a local folder, is not in the Hub's cache, and Hub access is disabled" in result


def test_misspelled_folder_name_is_rejected_with_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-run").mkdir()
    assert 'is disabled (HF_HUB_OFFLINE). Did you mean "demo-run"?' in model_problems("demo-rum", cache_dir="cache")[0]
    assert "Did you mean" not in model_problems("nowhere", cache_dir="cache")[0]


def test_unreachable_hub_is_reported_immediately(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening, so connections are refused
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        begin = time.perf_counter()
        (result,) = model_problems("nobody/no-such-model", cache_dir=str(tmp_path))
    assert time.perf_counter() - begin < 5
    assert "cannot be reached (" in result


def test_unresponsive_hub_is_abandoned_after_time_limit(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(source, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert "cannot be reached" in model_problems("nobody/no-such-model", cache_dir=str(tmp_path))[0]


@pytest.mark.parametrize("endpoint", ["hub.example", ""])
def test_endpoint_that_is_not_a_url_is_reported(endpoint, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "cannot be reached" in model_problems("nobody/no-such-model", cache_dir=str(tmp_path))[0]


def test_server_that_does_not_speak_http_is_reported(monkeypatch, tmp_path):
    def greet():
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-other\r\n")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        thread = Thread(target=greet, daemon=True)
        thread.start()
        assert "cannot be reached" in model_problems("nobody/no-such-model", cache_dir=str(tmp_path))[0]
        thread.join()


def test_cached_model_is_found_when_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    saved_model(snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    options = ModelOptions(model_name_or_path="some/model", cache_dir=str(tmp_path))
    assert find_source("some/model", options).folder == snapshot
    assert check_model(options) == []
    assert load_model(options).config.model_type == "llama"


def test_every_missing_adapter_is_named(tmp_path):
    options = ModelOptions(adapter_name_or_path=[str(tmp_path / "one"), str(tmp_path), str(tmp_path / "two")])
    with pytest.raises(UserError) as caught:
        adapter_folders(options)
    assert len(caught.value.problems) == 2
    assert 'adapter_name_or_path "' in str(caught.value)


def test_folder_that_cannot_be_listed_has_no_suggestions(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(source.Path, "iterdir", refuse)
    assert "is not a folder." in model_problems(tmp_path / "missing")[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is disabled (HF_HUB_OFFLINE)." in model_problems("nowhere/else", cache_dir="cache")[0]


# --- config and tokenizer ---------------------------------------------------------------------------------------------


def test_invalid_config_is_reported_with_line_and_column(tmp_path):
    path = saved_model(tmp_path) / "config.json"
    path.write_text('{\n  "model_type": "llama",\n  "hidden_size": 16,,\n}')
    (result,) = model_problems(tmp_path)
    assert f"{path}, line 3, column 21: not valid JSON" in result


def test_invalid_tokenizer_file_is_reported(tmp_path):
    saved_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    (result,) = model_problems(tmp_path)
    assert "tokenizer.json, line 1" in result


def test_folder_without_config_is_not_a_model(tmp_path):
    saved_model(tmp_path / "here")
    (result,) = model_problems(tmp_path)
    assert "no config.json" in result
    assert str(tmp_path / "here") in result


def test_adapter_is_not_a_model_and_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    (result,) = model_problems(tmp_path)
    assert "this is an adapter, not a model" in result
    assert "model_name_or_path to org/base" in result


def test_unknown_architecture_is_rejected_with_nearest_one(tmp_path):
    change_json(saved_model(tmp_path) / "config.json", model_type="qwen22")
    (result,) = model_problems(tmp_path)
    assert 'does not support model_type "qwen22". Did you mean "qwen2"?' in result


@pytest.mark.parametrize("code", [["modeling.Own"], "modeling.Own", 5])
def test_unknown_architecture_with_a_damaged_auto_map_is_rejected(tmp_path, code):
    saved_model(tmp_path)
    change_json(tmp_path / "config.json", model_type="own", auto_map=code)
    assert 'does not support model_type "own"' in model_problems(tmp_path)[0]


def test_empty_quantization_config_is_rejected(tmp_path):
    saved_model(tmp_path)
    change_json(tmp_path / "config.json", quantization_config={})
    (result,) = model_problems(tmp_path)
    assert "quant_method" in result


def test_model_without_generation_is_rejected(tmp_path):
    change_json(saved_model(tmp_path) / "config.json", model_type="vit")
    assert 'of type "vit" is not a causal language model' in model_problems(tmp_path)[0]


def test_contradictory_config_is_rejected(tmp_path):
    change_json(saved_model(tmp_path) / "config.json", hidden_size="sixteen")
    assert '"hidden_size" must be a positive integer. Received: "sixteen"' in model_problems(tmp_path)[0]
    change_json(tmp_path / "config.json", hidden_size=16, num_attention_heads=0)
    assert '"num_attention_heads" must be a positive integer' in model_problems(tmp_path)[0]


def test_sizes_may_be_derived_or_differ_between_layers(tmp_path):
    config = GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global"], 2]],
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] is None
    assert model_problems(tmp_path) == []
    other = saved_model(tmp_path / "other")
    change_json(other / "config.json", intermediate_size=[24, 0])
    assert '"intermediate_size" must be a positive integer. Received: [24, 0]' in model_problems(other)[0]
    change_json(other / "config.json", intermediate_size=[24, 24])
    assert not [problem for problem in model_problems(other) if "positive integer" in problem]


def test_model_code_is_not_run_without_trust_remote_code(tmp_path):
    code = tmp_path / "modeling_own.py"
    code.write_text("raise SystemExit('this must not run')")
    auto_map = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    change_json(saved_model(tmp_path) / "config.json", model_type="own", auto_map=auto_map)
    (result,) = model_problems(tmp_path)
    assert "modeling_own.py" in result
    assert "trust_remote_code: true" in result
    assert model_problems(tmp_path, trust_remote_code=True) == []


def test_code_of_a_known_model_is_not_run_and_is_reported(tmp_path):
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('this must not run')")
    auto_map = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    change_json(saved_model(tmp_path) / "config.json", auto_map=auto_map)
    assert model_problems(tmp_path) == []
    notes = []
    config = load_config(ModelOptions(model_name_or_path=str(tmp_path)), notes=notes)
    assert config.model_type == "llama"
    assert "contains custom model code; transformers' own class for llama is used" in notes[0]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["somebody/kernel", "paged|somebody/kernel@v1:run"])
def test_hub_kernel_in_model_config_is_rejected(tmp_path, key, kernel):
    change_json(saved_model(tmp_path) / "config.json", **{key: kernel})
    options = ModelOptions(model_name_or_path=str(tmp_path))
    with pytest.raises(UserError, match="selects the attention kernel"):
        load_model(options)
    options.attn_implementation = "sdpa"
    assert load_model(options).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("named", ["other.safetensors", "a.safetensors.index.json", "adapter_model.bin", 5])
def test_other_weights_selected_by_config_are_rejected(tmp_path, named):
    """transformers would load that file, but the checks read another one."""
    change_json(saved_model(tmp_path) / "config.json", transformers_weights=named)
    assert f'"transformers_weights" selects the weights in {json.dumps(named)}' in model_problems(tmp_path)[0]
    with pytest.raises(UserError, match="transformers_weights"):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))


def test_adapter_in_the_folder_of_a_model_is_rejected(tmp_path):
    """transformers would load the model with the adapter, although only a model was requested."""
    saved_model(tmp_path)
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "contains both a model and an adapter" in model_problems(tmp_path)[0]
    with pytest.raises(UserError, match="set adapter_name_or_path"):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "T5Tokenizer", "BertTokenizer", "GPT2Tokenizer"])
def test_tokenizer_without_its_vocabulary_is_rejected(kind, tmp_path):
    saved_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    with pytest.raises(UserError, match="no tokens other than special ones"):
        load_tokenizer(ModelOptions(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("name", ["x" * 5000, "y/" * 3000, "z" * 300 + "/a", "z" * 97])
def test_name_that_is_too_long_for_a_path_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        find_source(name, ModelOptions())


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")]
)
def test_missing_attention_library_is_named(name, package, tmp_path):
    saved_model(tmp_path)
    (result,) = model_problems(tmp_path, attn_implementation=name)
    assert f"requires the library {package}" in result


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"attn_implementation": "flash_atention_2"},
            'Unknown attn_implementation "flash_atention_2". Did you mean "flash_attention_2"',
        ),
        ({"attn_implementation": "kernels-community/flash-attn2"}, "requires the library kernels"),
        ({"attn_implementation": "eager", "flash_attn": "sdpa"}, "only one of them can be set"),
    ],
)
def test_unavailable_attention_is_rejected_by_name(options, expected, tmp_path):
    saved_model(tmp_path)
    (result,) = model_problems(tmp_path, **options)
    assert expected in result


@pytest.mark.parametrize("template", [5, {"default": None}, [{"name": "default", "template": 5}]])
def test_non_text_chat_template_is_rejected(template, tmp_path):
    change_json(saved_model(tmp_path) / "tokenizer_config.json", chat_template=template)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"the chat template of its tokenizer must be a string. Received: (5|null)\."):
        load_tokenizer(ModelOptions(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**9}, {"text_config": {"num_hidden_layers": 10**9}}, {"head_dim": 10**9}],
    ids=str,
)
def test_number_in_config_that_would_exhaust_memory_is_rejected(changes, tmp_path):
    change_json(saved_model(tmp_path) / "config.json", **changes)
    assert re.search(
        r'"(num_hidden_layers|head_dim)" must be at most \d+\. Received: 1000000000\.', model_problems(tmp_path)[0]
    )


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "there is no tokenizer in this folder"), ("{}", "its tokenizer cannot be loaded")]
)
def test_missing_or_empty_tokenizer_is_rejected(content, expected, tmp_path):
    saved_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=expected) as caught:
        load_tokenizer(ModelOptions(model_name_or_path=str(tmp_path)))
    assert len(str(caught.value).splitlines()) == 2


# --- weights ----------------------------------------------------------------------------------------------------------


def test_truncated_weight_file_is_reported_with_its_size(tmp_path):
    path = saved_model(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    (result,) = model_problems(tmp_path)
    assert f"{path}: its header declares {size:,} bytes, but the file has {size // 2:,}" in result


@pytest.mark.parametrize("content", [b"", b"short", b"\x10" + b"\0" * 7 + b"not json at all!", b"\xff" * 64])
def test_non_safetensors_file_is_reported(content, tmp_path):
    path = saved_model(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    assert "not a safetensors file" in model_problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("flipped", "message"),
    [(b'"E32"', "unknown variant `E32`."), (b'"F64"', "invalid shape, data type, or offset")],
    ids=["no type", "another type"],
)
def test_invalid_safetensors_header_is_reported_by_file(flipped, message, tmp_path):
    path = saved_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', flipped, 1))
    (result,) = model_problems(tmp_path)
    assert result.startswith(f"{path}: this is not a safetensors file")
    assert message in result


def test_file_truncated_within_header_is_reported(tmp_path):
    path = saved_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "but the file has 100" in model_problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("declared", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ],
)
def test_weights_that_are_not_quantized_as_declared_are_rejected(declared, method, tmp_path):
    folder = saved_model(tmp_path / "model")
    change_json(folder / "config.json", quantization_config=declared)
    *_, result = model_problems(folder)
    assert f"declares weights that are quantized with {method}, but the files contain none" in result
    assert "Remove quantization_config" in result


def without(folder, *parts):
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not any(p in k for p in parts)}, path, {"format": "pt"})


def test_missing_tensors_are_fatal_and_some_are_named(tmp_path):
    without(saved_model(tmp_path), "layers.1.mlp")
    (result,) = model_problems(tmp_path)
    assert "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight" in result
    assert "LlamaForCausalLM" in result
    assert "random" in result
    with pytest.raises(UserError, match=r"layers\.1\.mlp"):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))


def test_config_with_more_layers_than_weights_is_rejected(tmp_path):
    change_json(saved_model(tmp_path) / "config.json", num_hidden_layers=4)
    (result,) = model_problems(tmp_path)
    assert "model.layers.2." in result
    assert "and 15 more" in result


def test_shape_mismatch_is_reported_with_both_shapes(tmp_path):
    change_json(saved_model(tmp_path) / "config.json", intermediate_size=32)
    (result,) = model_problems(tmp_path)
    assert "model.layers.0.mlp.down_proj.weight is 16x24 in the weights but 16x32 in the config, and 5 more" in result
    with pytest.raises(UserError, match="16x24 in the weights"):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))


def test_tied_weights_are_not_missing_but_absent_head_is(tmp_path):
    saved_model(tmp_path / "tied", "qwen2")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert model_problems(tmp_path / "tied") == []
    tiny_model("llama").model.save_pretrained(tmp_path / "headless")
    (result,) = model_problems(tmp_path / "headless")
    assert "have no lm_head.weight" in result
    assert "without an LM head" in result


def test_weights_without_base_model_prefix_are_accepted(tmp_path):
    saved_model(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    old = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    save_file(old, path, {"format": "pt"})
    assert model_problems(tmp_path) == []
    torch.testing.assert_close(
        load_model(ModelOptions(model_name_or_path=str(tmp_path))).state_dict(), tiny_model("gpt2").state_dict()
    )


def test_missing_expert_is_detected_despite_fused_layout(tmp_path):
    without(saved_model(tmp_path, "mixtral"), "block_sparse_moe.experts.1.w1")
    assert model_problems(tmp_path)


def test_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size=20_000)
    next(tmp_path.glob("model-00002-*")).unlink()
    assert "model-00002-of-" in model_problems(tmp_path)[0]


def test_tensor_in_two_shards_is_rejected(tmp_path):
    """transformers would load the last one, whatever the index says."""
    saved_model(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file(weights, tmp_path / names[0], {"format": "pt"})
    save_file({"lm_head.weight": weights["lm_head.weight"] + 1}, tmp_path / names[1], {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, names[0]) | {"other": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (result,) = model_problems(tmp_path)
    assert all(word in result for word in (*names, "lm_head.weight"))


def test_pickled_weights_are_rejected_without_opening(tmp_path):
    import os
    import pickle

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    saved_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    (result,) = model_problems(tmp_path)
    assert "pytorch_model.bin" in result
    assert "run arbitrary code" in result
    with pytest.raises((UserError, OSError)):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))
    assert not (tmp_path / "trapped").exists()


def test_folder_without_weights_can_be_trained_from_scratch(tmp_path):
    saved_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (result,) = model_problems(tmp_path)
    assert "there are no weights" in result
    assert "train_from_scratch: true" in result


@pytest.mark.parametrize("names", [USED_MODEL, REFERENCE_MODEL])
def test_remedies_name_the_options_of_a_model_that_is_not_trained(tmp_path, names):
    saved_model(tmp_path / "model")
    options = ModelOptions(model_name_or_path=str(tmp_path / "model"))
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: value for name, value in tensors.items() if "norm" not in name}, weights, {"format": "pt"})
    (problem,) = check_model(options, names=names)
    assert problem.remedy == "Download the model again, or check its config.json."
    weights.unlink()
    (problem,) = check_model(options, names=names)
    assert problem.remedy == f"Download them, or set {names.model} to a model with weights."
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    options.model_name_or_path = str(tmp_path / "adapter")
    (problem,) = check_model(options, names=names)
    assert problem.remedy == f"Set {names.adapters} to it, and {names.model} to base."


def test_quantized_reference_is_compatible_with_full_training(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: name)
    options = SimpleNamespace(model_name_or_path="model", finetuning_type="full", quantization_bit=4)
    config = {"quantization_config": {"quant_method": "gptq"}}
    (problem,) = check_quantized_files(options, config, REFERENCE_MODEL)
    assert problem.remedy == "Remove ref_model_quantization_bit."


def test_all_problems_are_reported_together(tmp_path):
    saved_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert len(model_problems(tmp_path, attn_implementation="flash_attention_2")) == 3


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "fp8", "weight_block_size": "x"}, {"quant_method": "compressed-tensors", "config_groups": 5}],
    ids=lambda config: config["quant_method"],
)
def test_quantization_config_that_transformers_rejects_is_one_sentence(config, tmp_path):
    change_json(saved_model(tmp_path) / "config.json", quantization_config=config)
    with pytest.raises(UserError, match=f"{tmp_path}: "):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))
