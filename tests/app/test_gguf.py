"""GGUF files: transformers reads them back as the folder is; what cannot be written is refused by name."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2Config, Qwen3Config

from burnish.app.export import export
from burnish.core.errors import UserError
from burnish.core.options import Given
from small_run import make_model

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 320, "eos_token_id": 2}  # fmt: skip


def model_in(folder: Path, kind: str) -> Path:
    """A model of a shape, with the byte-level tokenizer of the small runs."""
    make_model(folder)
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaForCausalLM.from_pretrained(folder).config
        config.update({**SIZES, "head_dim": 16})
    else:
        config = (Qwen2Config if kind == "qwen2" else Qwen3Config)(**SIZES, tie_word_embeddings=kind == "qwen3")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def exported(folder: Path, model: Path, **given) -> Path:
    options = {"model_name_or_path": str(model), "export_dir": str(folder), "export_format": "gguf", **given}
    export({name: Given(value, "the command line") for name, value in options.items()})
    return next(folder.glob("*.gguf"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("gguf_type", "bound"), [("f32", 1e-3), ("q8_0", 2e-2)])
def test_transformers_reads_back_what_was_exported(tmp_path: Path, kind: str, gguf_type: str, bound: float) -> None:
    model = model_in(tmp_path / "model", kind)
    file = exported(tmp_path / "out", model, export_gguf_type=gguf_type)
    back = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 40, 41, 42, 200, 7]])
    with torch.no_grad():
        expected, found = plain(ids).logits, back(ids).logits
    assert float((expected - found).abs().max() / expected.abs().max()) < bound


def test_tokens_template_and_stops_are_in_the_file(tmp_path: Path) -> None:
    file = exported(tmp_path / "out", model_in(tmp_path / "model", "llama"))
    fields = gguf.GGUFReader(file).fields
    written = json.loads((file.parent / "tokenizer_config.json").read_text())
    template = (file.parent / "chat_template.jinja").read_text() if "chat_template" not in written else None
    assert fields["tokenizer.chat_template"].contents() == (template or written.get("chat_template"))
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert types[tokens.index("<|im_end|>")] == 3
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokens.index("<|im_end|>")


def test_a_shape_or_type_that_is_not_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", "llama")
    with pytest.raises(UserError, match=r"made by llama\.cpp alone"):
        exported(tmp_path / "out", model, export_gguf_type="q4_k_m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]})
    )
    with pytest.raises(UserError, match='a model of type "gemma"'):
        exported(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_llama_cpp_is_asked_where_it_is_named(tmp_path: Path) -> None:
    model, place = model_in(tmp_path / "model", "llama"), tmp_path / "llama.cpp"
    place.mkdir()
    real = exported(tmp_path / "first", model, export_gguf_type="f16")
    (place / "convert_hf_to_gguf.py").write_text(
        "import shutil, sys\n"
        f"assert sys.argv[sys.argv.index('--outtype') + 1] == 'f16'\nshutil.copy({str(real)!r}, sys.argv[3])\n"
    )
    (place / "llama-quantize").write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "assert sys.argv[3] == 'q4_k_m'\nshutil.copy(sys.argv[1], sys.argv[2])\n"
    )
    (place / "llama-quantize").chmod(0o755)
    file = exported(tmp_path / "out", model, export_gguf_type="q4_k_m", llama_cpp=str(place))
    assert [path.name for path in file.parent.glob("*.gguf")] == ["out-q4_k_m.gguf"]
    (place / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such shape')")
    with pytest.raises(RuntimeError, match="no such shape"):
        exported(tmp_path / "second", model, llama_cpp=str(place))
