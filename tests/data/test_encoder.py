"""Tokenization of texts, independent of settings on the tokenizer, with and without offsets."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from burnish.config.errors import UserError
from burnish.data.tokens.encoder import Encoder
from tiny_models import tiny_tokenizer

CORPUS = ["The quick brown fox doesn't jump over 12 lazy dogs", "one two three\n\nseven doors", "naïve café 日本語 😀"]


def make_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<|im_end|>"])


def test_truncation_set_by_others_is_not_applied():
    tokenizer = make_tokenizer()
    encoder = Encoder(tokenizer)
    expected = encoder.encode(["one two"])
    tokenizer("one two three", truncation=True, max_length=1)
    assert encoder.encode(["one two", "seven doors"])["one two"] == expected["one two"]
    assert len(encoder.encode(["seven doors"])["seven doors"]) > 1


def test_located_texts_match_tokenizer_ids_and_offsets():
    tokenizer = make_tokenizer()
    for text in CORPUS:
        plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        positions = range(len(text) + 1)
        ((ids, borders),) = Encoder(tokenizer).encode_with_boundaries([text], [positions])
        assert list(ids) == plain["input_ids"] == list(Encoder(tokenizer).encode([text])[text])
        for position, (ended, started) in zip(positions, borders, strict=True):
            assert ended == sum(end <= position for _, end in plain["offset_mapping"])
            assert started == sum(start < position for start, _ in plain["offset_mapping"])


class PanicException(BaseException):
    """The exception that pyo3 raises for a panic in Rust."""


@pytest.mark.parametrize("kind", [PanicException, Exception])
@pytest.mark.parametrize("call", ["encode", "plain", "located"])
def test_error_in_the_tokenizer_library_is_one_sentence(call, kind, monkeypatch):
    encoder = Encoder(tiny_tokenizer())

    def fails(*args, **kwargs):
        raise kind("index out of bounds")

    backend = SimpleNamespace(encode_batch=fails, encode_batch_fast=fails)
    monkeypatch.setattr(encoder, "_backend", lambda: backend)
    monkeypatch.setattr(encoder.tokenizer, "encode", fails, raising=False)
    calls = {"encode": lambda: encoder.encode(["w1"]), "plain": lambda: encoder.plain("w1"),
             "located": lambda: encoder.encode_with_boundaries(["w1"], [[1]])}  # fmt: skip
    with pytest.raises(UserError, match="its tokenizer cannot encode text: index out of bounds"):
        calls[call]()


def test_identity_of_a_slow_tokenizer_covers_its_files_and_settings(tmp_path):
    from transformers import CTRLTokenizer

    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps({"<unk>": 0, "a@@": 1, "b": 2, "ab": 3, "b</w>": 4}), encoding="utf-8")

    def identity(merges: str, **settings: bool) -> str:
        path = tmp_path / "merges.txt"
        path.write_text(f"#version: 0.2\n{merges}\n\n", encoding="utf-8")
        return Encoder(CTRLTokenizer(str(vocab), str(path), **settings)).identity

    assert identity("a b</w>") == identity("a b</w>")
    assert len({identity("a b</w>"), identity("b a</w>"), identity("a b</w>", split_special_tokens=True)}) == 3
