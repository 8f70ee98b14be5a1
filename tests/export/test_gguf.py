"""GGUF files: transformers reads them back as exported; unsupported models are rejected by name."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    Qwen2Config,
    Qwen3Config,
)
from transformers.tokenization_utils_base import generate_merges

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.export.export import export
from burnish.utils.work import set_watcher
from recording import RecordingProgress
from small_run import CHAT_TEMPLATE, WORDS, make_model

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 320, "eos_token_id": 2}  # fmt: skip


def save_model(folder: Path, kind: str) -> Path:
    """Save a model of a type, with the byte-level tokenizer of the small runs. Returns the folder."""
    make_model(folder)
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaForCausalLM.from_pretrained(folder).config
        config.update({**SIZES, "head_dim": 16})
    else:
        config = (Qwen2Config if kind == "qwen2" else Qwen3Config)(**SIZES, tie_word_embeddings=kind == "qwen3")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def export_gguf(folder: Path, model: Path, **overrides) -> Path:
    """Export a model and return the GGUF file."""
    options = {"model_name_or_path": str(model), "export_dir": str(folder), "export_format": "gguf", **overrides}
    export({name: RawValue(value, "the command line") for name, value in options.items()})
    return next(folder.glob("*.gguf"), folder)


@pytest.fixture
def reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.export.export.merged_model", None)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("gguf_type", "bound"), [("f32", 1e-3), ("q8_0", 2e-2)])
def test_transformers_reads_exported_gguf_back(tmp_path: Path, kind: str, gguf_type: str, bound: float) -> None:
    model = save_model(tmp_path / "model", kind)
    file = export_gguf(tmp_path / "out", model, export_gguf_type=gguf_type)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 40, 41, 42, 200, 7]])
    with torch.no_grad():
        expected, result = original(ids).logits, loaded(ids).logits
    assert float((expected - result).abs().max() / expected.abs().max()) < bound


def test_gguf_file_contains_tokens_template_and_stop_tokens(tmp_path: Path) -> None:
    file = export_gguf(tmp_path / "out", save_model(tmp_path / "model", "llama"))
    fields = gguf.GGUFReader(file).fields
    config = json.loads((file.parent / "tokenizer_config.json").read_text())
    template = (file.parent / "chat_template.jinja").read_text() if "chat_template" not in config else None
    assert fields["tokenizer.chat_template"].contents() == (template or config.get("chat_template"))
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert types[tokens.index("<|im_end|>")] == 3
    assert types[tokens.index("<|im_start|>")] == 3  # a special token that is neither BOS, EOS nor padding
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokens.index("<|im_end|>")
    # llama.cpp would read user-defined tokens from the text of a prompt
    assert tokens[-1] == "[PAD319]"
    assert types[-1] == 5


def test_token_that_is_bos_and_eos_is_added_only_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(model)
    fields = gguf.GGUFReader(export_gguf(tmp_path / "out", model)).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False


def test_gguf_export_prints_its_file_and_reports_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_watcher(recorder := RecordingProgress())
    try:
        file = export_gguf(tmp_path / "out", save_model(tmp_path / "model", "llama"))
    finally:
        set_watcher(None)
    out = capsys.readouterr().out
    assert f"{file} (0 MiB): tokens, chat template and EOS token match those of the exported model." in out
    assert f"llama-server -m {file}" in out
    assert ("Writing the GGUF file", 21, "weights") in recorder.calls


def test_gguf_type_without_gguf_format_has_no_effect_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model_name_or_path": str(save_model(tmp_path / "model", "llama")), "export_dir": str(tmp_path / "out")}
    export({n: RawValue(v, "the command line") for n, v in {**options, "export_gguf_type": "q8_0"}.items()})
    assert '"export_gguf_type" has no effect without "export_format".' in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_unsupported_architecture_or_type_is_rejected_before_writing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    with pytest.raises(UserError, match=r"requires the quantizer of llama\.cpp"):
        export_gguf(tmp_path / "out", model, export_gguf_type="q4_k_m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]})
    )
    with pytest.raises(UserError, match='a model of type "gemma"'):
        export_gguf(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": []}, "the BPE tokenizer has no merges, and llama.cpp cannot load it"),
        ({"ignore_merges": True}, "ignore_merges"),
    ],
)
@pytest.mark.usefixtures("reads_no_weights")
def test_tokenizer_unsupported_by_llama_cpp_is_rejected(tmp_path: Path, changes, message: str) -> None:
    model = save_model(tmp_path / "model", "llama")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": {**tokenizer["model"], **changes}}))
    with pytest.raises(UserError, match=message):
        export_gguf(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ([], "f16", "does not contain convert_hf_to_gguf.py"),
        (["convert_hf_to_gguf.py"], "q4_k_m", "does not contain llama-quantize"),
    ],
)
@pytest.mark.usefixtures("reads_no_weights")
def test_missing_program_of_llama_cpp_is_reported_before_weights_are_read(
    tmp_path: Path, files: list[str], kind: str, message: str
) -> None:
    model = save_model(tmp_path / "model", "llama")
    (tmp_path / "llama.cpp").mkdir()
    for name in files:
        (tmp_path / "llama.cpp" / name).touch()
    with pytest.raises(UserError, match=message):
        export_gguf(tmp_path / "out", model, export_gguf_type=kind, llama_cpp=str(tmp_path / "llama.cpp"))


@pytest.mark.usefixtures("reads_no_weights")
def test_missing_gguf_library_is_reported_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="requires the library 'gguf'"):
        export_gguf(tmp_path / "out", model)


@pytest.mark.usefixtures("reads_no_weights")
def test_activation_that_llama_cpp_does_not_compute_is_rejected(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen2")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(UserError, match="silu"):
        export_gguf(tmp_path / "out", model)


def test_modelfile_names_the_gguf_file(tmp_path: Path) -> None:
    file = export_gguf(tmp_path / "out", save_model(tmp_path / "model", "llama"))
    assert (file.parent / "Modelfile").read_text().startswith(f"FROM ./{file.name}\n")


@pytest.mark.run
def test_llama_cpp_verifies_export_if_its_path_is_given(tmp_path: Path) -> None:
    model, llama_cpp = save_model(tmp_path / "model", "llama"), tmp_path / "llama.cpp"
    llama_cpp.mkdir()
    converted = export_gguf(tmp_path / "first", model, export_gguf_type="f16")
    (llama_cpp / "convert_hf_to_gguf.py").write_text(
        "import shutil, sys\n"
        f"assert sys.argv[sys.argv.index('--outtype') + 1] == 'f16'\nshutil.copy({str(converted)!r}, sys.argv[3])\n"
    )
    (llama_cpp / "llama-quantize").write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "assert sys.argv[3] == 'q4_k_m'\nshutil.copy(sys.argv[1], sys.argv[2])\n"
    )
    (llama_cpp / "llama-quantize").chmod(0o755)
    file = export_gguf(tmp_path / "out", model, export_gguf_type="q4_k_m", llama_cpp=str(llama_cpp))
    assert [path.name for path in file.parent.glob("*.gguf")] == ["out-q4_k_m.gguf"]
    (llama_cpp / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such shape')")
    with pytest.raises(RuntimeError, match="no such shape"):
        export_gguf(tmp_path / "second", model, llama_cpp=str(llama_cpp))


# --- SentencePiece ----------------------------------------------------------------------------------------------------

TEXTS = ("red stone", "  héllo\n\n wörld ", "🦙 lamp\t東京", "red    lamp, seven\r\nnine", "<s> red</s>", "")


def save_sentencepiece_model(folder: Path, pieces: list[str], legacy: bool = True, **changes) -> Path:
    """Save a Llama with a SentencePiece vocabulary: special tokens, bytes, ``pieces`` in order of score, letters."""
    letters = sorted({letter for text in (*TEXTS, *pieces) for letter in text if letter in "▁" or letter.isalpha()})
    letters = ["▁", *(letter for letter in letters if letter.isascii())]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    vocabulary = {name: at for at, name in enumerate(names)}
    scores = {piece: -float(at) for at, piece in enumerate(pieces)}
    merges = changes.pop("merges", None) or generate_merges(vocabulary, scores)
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=legacy, chat_template=CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer) + 5}, bos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def trained_pieces(count: int = 60) -> list[str]:
    """Return pieces of a trained BPE vocabulary, with the pieces that they are merged from."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([" ".join(WORDS)] * 5, trainers.BpeTrainer(vocab_size=count, show_progress=False))
    ranked = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return [*(piece for piece, _ in ranked if len(piece) > 1), "▁▁", "▁▁▁▁"]


def tokenize_as_llama_cpp(text: str, fields: dict) -> list[int]:
    """Merge the adjacent parts with the highest score, the leftmost first; write unknown parts as bytes."""
    tokens, scores = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores"))
    ids = {token: at for at, token in enumerate(tokens)}
    parts = list((" " * fields["tokenizer.ggml.add_space_prefix"].contents() + text).replace(" ", "▁"))
    while True:
        result = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not result:
            break
        at = min(result)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_vocabulary_gives_same_ids(tmp_path: Path, legacy: bool) -> None:
    model = save_sentencepiece_model(tmp_path / "model", trained_pieces(), legacy)
    file = export_gguf(tmp_path / "out", model, export_gguf_type="f32")
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    folder = AutoTokenizer.from_pretrained(file.parent)
    loaded = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == folder(text)["input_ids"]
    for text in (text for text in TEXTS[:-1] if text[0] not in " <"):
        ids = folder(text, add_special_tokens=False)["input_ids"]
        assert tokenize_as_llama_cpp(text, fields) == ids
        assert folder.decode(ids) == text


def set_legacy(model: Path, legacy: bool, **changes) -> Path:
    """Set ``legacy``, which older versions of transformers saved. It determines the handling of spaces."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "legacy": legacy, **changes}))
    return model


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("template", ["default", "llama2", "alpaca", "vicuna"])
def test_exported_template_keeps_the_spacing_of_training(
    tmp_path: Path, template: str, legacy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = set_legacy(save_sentencepiece_model(tmp_path / "model", trained_pieces()), legacy)
    export_gguf(tmp_path / "out", model, export_format="safetensors", template=template)
    assert "Chat template checked: " in capsys.readouterr().out
    folder = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert folder.legacy is legacy
    assert folder("<s>red")["input_ids"] == AutoTokenizer.from_pretrained(model)("<s>red")["input_ids"]


def test_prepended_spaces_of_a_normalizer_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_sentencepiece_model(tmp_path / "model", trained_pieces())
    set_legacy(model, True, tokenizer_class="PreTrainedTokenizerFast")
    file = model / "tokenizer.json"
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    changed = {"normalizer": {"type": "Sequence", "normalizers": spaces}, "pre_tokenizer": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    export_gguf(tmp_path / "out", model, export_format="safetensors", template="alpaca")
    assert "equals the training text except for spaces" in capsys.readouterr().out


def test_each_sentencepiece_token_has_its_type(tmp_path: Path) -> None:
    file = export_gguf(tmp_path / "out", save_sentencepiece_model(tmp_path / "model", trained_pieces()))
    fields = gguf.GGUFReader(file).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    result = {name: types[tokens.index(name)] for name in ("<unk>", "<s>", "<0x0A>", "<|im_end|>", "▁red")}
    assert result == {"<unk>": 2, "<s>": 3, "<0x0A>": 6, "<|im_end|>": 3, "▁red": 1}
    assert types[-1] == 5
    assert fields["tokenizer.ggml.unknown_token_id"].contents() == 0


@pytest.mark.parametrize(
     ("pieces", "merges", "message"),
    [
        (["re", "ed", "red"], [("r", "e"), ("e", "d"), ("re", "d")], 'no merge of "r" and "ed"'),
        (["re", "ed", "red", "ee"],
         [("r", "e"), ("e", "d"), ("re", "d"), ("e", "e"), ("r", "ed")], '"red" and "ee" alternate in priority'),
    ],
)  # fmt: skip
def test_merges_without_equivalent_scores_are_rejected(tmp_path: Path, pieces, merges, message: str) -> None:
    model = save_sentencepiece_model(tmp_path / "model", pieces, merges=merges)
    with pytest.raises(UserError, match=message):
        export_gguf(tmp_path / "out", model)


def test_gguf_file_has_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, files = save_model(tmp_path / "model", "llama"), []
    write = gguf.GGUFWriter.write_tensors_to_file

    def write_and_list_files(writer: gguf.GGUFWriter) -> None:
        write(writer)
        files.extend(path.name for path in (tmp_path / "out").glob("*.gguf"))

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", write_and_list_files)
    assert export_gguf(tmp_path / "out", model, export_gguf_type="q8_0").name == "out-q8_0.gguf"
    assert files == [".incomplete-out-q8_0.gguf"]
    assert [path.name for path in (tmp_path / "out").glob("*.gguf")] == ["out-q8_0.gguf"]
