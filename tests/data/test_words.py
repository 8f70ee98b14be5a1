"""Texts read word by word against the same texts read whole by the tokenizer: ids, and where characters fall."""

import random
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from burnish.data.tokens.by_word import piece_table, pre_tokens, ragged
from burnish.data.tokens.by_word import premises as word_premises
from burnish.data.tokens.by_word import reader as words
from burnish.data.tokens.by_word.premises import words_of
from burnish.data.tokens.by_word.reader import Words
from burnish.data.tokens.encoder import Encoder
from few import few

CORPUS = [
    "The quick brown fox doesn't jump over 12 lazy dogs; I'll say: \"no\", we've seen 2,345 of them!\n\n- one\n- two",
    "def f(x):\n    return x + 1  # don't\n\n\tif  a == b:\r\n\t\tpass",
    "the the the then there don't can't it's It'S THE end. end.\n the end",
    "日本語のテキスト、naïve café élan 😀🏽 ٣ ½ e\u0301 <tool_call>",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPLITS = {"gpt2": None, "qwen2": pre_tokens.QWEN2, "llama3": pre_tokens.LLAMA3, "qwen3.5": pre_tokens.QWEN3_5}


def byte_level(pattern=None, normalizer=None, **given):
    backend = Tokenizer(models.BPE(**given))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def sentence_piece(kind="prepend", longest=None):
    """BPE over "▁" for spaces. Args: longest: a token that is more than one word."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    unlearned = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=unlearned))
    vocabulary = learner.get_vocab()
    merges = [tuple(merge) for merge in word_premises._state(learner.model)["merges"]]
    if longest:
        vocabulary["".join(longest)] = len(vocabulary)
        merges.append(longest)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
    return backend


TOKENIZERS = {
    **{name: lambda pattern=pattern: byte_level(pattern) for name, pattern in SPLITS.items()},
    "qwen2, NFC": lambda: byte_level(pre_tokens.QWEN2, normalizers.NFC()),
    "llama3, whole words first": lambda: byte_level(pre_tokens.LLAMA3, ignore_merges=True),
    **{
        f"▁, {kind}": lambda kind=kind: sentence_piece(kind)
        for kind in ("prepend", "gemma", "first", "always", "never")
    },
}


def learned(name):
    """One of TOKENIZERS, learned once and read anew: a test may change it."""
    return Tokenizer.from_str(_learned(name))


@cache
def _learned(name):
    return TOKENIZERS[name]().to_str()


def fast(backend):
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


ASCII = "abcdeEST019 \n\t'.,!-_<>|\r\x0b\x1c\x00\x7f"
UNICODE = ASCII + "éß日本語😀🏽\u0301\u00a0\u2003\u2028ſK٣½\u200d\x85≯;"
PIECES = [*SPECIAL, "<|im_", " the", " don't", "'S", "  ", "   ", "\n\n", ".\n", " \n ", "12345", "<tool_call>", "end."]


def texts(count, alphabet, seed=0):
    drawn = random.Random(seed)
    for _ in range(count):
        of = [
            drawn.choice(PIECES) if drawn.random() < 0.3 else drawn.choice(alphabet) for _ in range(drawn.randrange(40))
        ]
        yield "".join(of)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("alphabet", [ASCII, UNICODE], ids=["ascii", "unicode"])
@pytest.mark.parametrize("number", few([100, 800], 1))
def test_a_text_read_by_words_has_the_ids_of_the_whole_text(name, alphabet, number):
    backend = learned(name)
    found = words_of(fast(backend))
    by_words = [(text, ids) for text in texts(number, alphabet) if (ids := found.ids([text])[0]) is not None]
    assert len(by_words) > number // 3
    for text, ids in by_words:
        assert list(ids) == backend.encode(text, add_special_tokens=False).ids, repr(text)


CHINESE = "今天天气很好，我们去公园。你呢？一二三：甲；乙！鿿㐀々"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_read_together_have_the_ids_of_each(name, monkeypatch):
    monkeypatch.setattr(words, "_BLOCK", 2000)  # several blocks
    backend = learned(name)
    encoder = Encoder(fast(backend))
    drawn = random.Random(4)
    long = ["".join(drawn.choices("abcXYZ", k=drawn.randrange(1, 40))) for _ in range(200)]
    given = [*texts(400, ASCII, 5), *texts(400, UNICODE + CHINESE, 6), " ".join(long), "", " ", *long]
    given += ["".join(drawn.choices([*CHINESE, " ", "a", "1", "’", "<s>"], k=30)) for _ in range(200)]
    drawn.shuffle(given)
    for _ in range(2):  # what is new, and what is known
        for text, ids in encoder.encode(given).items():
            assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_read_by_words_has_its_borders_where_the_whole_text_has_them(name):
    tokenizer = fast(learned(name))
    by_words, whole = Encoder(tokenizer), Encoder(tokenizer)
    whole.__dict__["_read_words"] = None
    listed = [*texts(300, ASCII, seed=1), *texts(300, UNICODE, seed=1)]
    drawn = random.Random(2)
    positions = [[drawn.randint(0, len(text)) for _ in range(3)] for text in listed]
    for text, *pair in zip(listed, by_words.located(listed, positions), whole.located(listed, positions), strict=True):
        assert pair[0] == pair[1], repr(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_piece_of_real_text_is_read_by_words(name):
    backend = learned(name)
    found = words_of(fast(backend))
    for text in CORPUS:
        assert list(found.ids([f"<s>{text}</s>"])[0]) == backend.encode(f"<s>{text}</s>", add_special_tokens=False).ids


def strips_spaces():
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    return backend


def unigram():
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", split=False)
    return backend


def with_prefix_space():
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


WHOLE = {
    "an added token takes the spaces behind it": strips_spaces,
    "a token is more than one word": lambda: sentence_piece(longest=("▁the", "▁")),
    "a pattern that nobody looked at": lambda: byte_level(r"\S+\s|\s+|\S+"),
    "another normalizer": lambda: byte_level(pre_tokens.QWEN2, normalizers.NFKC()),
    "chance in the merges": lambda: byte_level(dropout=0.5),
    "no BPE": unigram,
    "a space is put before a text": with_prefix_space,
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_tokenizer_that_may_look_across_spaces_reads_whole_texts(why):
    assert words_of(fast(WHOLE[why]())) is None


def test_a_token_looked_for_behind_the_normalizer_makes_a_text_whole():
    backend = byte_level(pre_tokens.QWEN2, normalizers.NFC())
    backend.add_tokens([AddedToken("K1", normalized=True)])
    found = words_of(fast(backend))
    assert found.ids(["a K1"])[0] is None
    assert found.ids(["a \u212a1"])[0] is None  # the Kelvin sign, K once normalised
    assert list(found.ids(["a K2"])[0]) == backend.encode("a K2").ids


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("number", few([100, 1500], 1))
def test_every_character_is_of_the_class_that_the_tokenizer_takes_it_for(name, number):
    backend = byte_level(SPLITS[name], normalizers.NFC() if name == "qwen2" else None)
    found = words_of(fast(backend))
    drawn = random.Random(3)
    some = drawn.sample(range(0x250, 0xD800), number) + drawn.sample(range(0xE000, 0x110000), number // 3)
    some += range(0x80, 0x250, 1 if number > 100 else 5)
    read = 0
    for character in map(chr, some):
        text = f"a{character}b {character}1{character}{character}!{character}\n'{character}s {character}"
        ids = found.ids([text])[0]
        read += ids is not None
        assert ids is None or list(ids) == backend.encode(text).ids, repr(text)
    assert read > number


LONG = "日本語のテキスト、日本語のテキスト。日本語のテキスト日本語のテキスト"


def test_a_script_without_spaces_is_read_by_pre_tokens_and_located_by_them():
    tokenizer = fast(byte_level(pre_tokens.QWEN2, normalizers.NFC()))
    by_words, whole = Encoder(tokenizer), Encoder(tokenizer)
    whole.__dict__["_read_words"] = None
    text = f"<|im_start|>assistant\n{LONG}<|im_end|>\n"
    positions = list(range(len(text) + 1))
    assert list(words_of(tokenizer).ids([text])[0]) == tokenizer.backend_tokenizer.encode(text).ids
    assert by_words.located([text], [positions]) == whole.located([text], [positions])


@pytest.mark.parametrize(("make", "text"), [(sentence_piece, LONG), (byte_level, "e\u0301" * 40)], ids=["▁", "marks"])
def test_a_long_word_that_cannot_be_parted_is_left_to_the_tokenizer(make, text):
    backend = make()
    if make is byte_level:
        backend.normalizer = normalizers.NFC()
    assert words_of(fast(backend)).ids([text])[0] is None
    assert Encoder(fast(backend)).encode([text])[text].tolist() == backend.encode(text).ids


def test_words_are_forgotten_when_they_are_too_many(monkeypatch):
    monkeypatch.setattr(pre_tokens, "ROOM", 50)
    monkeypatch.setattr(piece_table, "ROOM", 50)
    backend = byte_level()
    found: Words = words_of(fast(backend))
    for at in range(200):
        text = f"<s>number {at} of {at * 7} is {at * 13} words</s>"
        assert list(found.ids([text])[0]) == backend.encode(text).ids
    assert len(found._table) < 30


def test_pieces_are_found_again_however_many_and_however_long_they_are():
    drawn = random.Random(7)
    asked = []

    def read(pieces):
        asked.extend(pieces)
        return ragged.laid([None if piece[:1] == b"x" else list(piece[::3]) for piece in pieces])

    table = piece_table.PieceTable(read)
    pieces = [bytes(drawn.choices(b"ab\0x\xc3", k=drawn.choice([1, 2, 7, 8, 9, 14, 15, 16, 40]))) for _ in range(6000)]
    for _ in range(3):
        some = drawn.sample(pieces, 4000)
        ends = np.cumsum([len(piece) for piece in some])
        begins = np.append(0, ends[:-1])
        ids, counts = table.look_up(b"".join(some) + piece_table.PADDING, begins, ends)
        expected = [[] if piece[:1] == b"x" else list(piece[::3]) for piece in some]
        assert ids.tolist() == [number for numbers in expected for number in numbers]
        assert counts.tolist() == [-1 if p[:1] == b"x" else len(e) for p, e in zip(some, expected, strict=True)]
    assert len(table) > 2000
    assert len(asked) == len(set(asked))


def test_a_long_piece_is_read_and_not_remembered():
    table = piece_table.PieceTable(lambda pieces: ragged.laid([[len(piece)] for piece in pieces]))
    long = b"a" * (piece_table.LONGEST + 1)
    for _ in range(2):
        text = long + b"b" + long
        ends = np.array([len(long), len(long) + 1, len(text)])
        ids, _ = table.look_up(text + piece_table.PADDING, np.append(0, ends[:-1]), ends)
        assert ids.tolist() == [len(long), 1, len(long)]
    assert len(table) == 1


def test_many_new_words_are_read_in_one_call_with_a_byte_between_them_that_is_in_no_token():
    backend = byte_level(pre_tokens.QWEN2)
    lone = word_premises.lone_byte(backend.to_str())
    assert lone == b"\xf5"
    token = max(backend.get_vocab(), key=len)
    assert word_premises.lone_byte(backend.to_str().replace(f'"{token}":', f'"{token}õ":')) == b"\xf6"
    found = words_of(fast(backend), lambda: lone)
    drawn = random.Random(8)
    text = " ".join("".join(drawn.choices("theandon'.", k=6)) for _ in range(500))
    calls = Counter()
    model = found._read.__self__._model
    found._read.__self__._model = SimpleNamespace(
        ignore_merges=False, tokenize=lambda named: calls.update(n=1) or model.tokenize(named)
    )
    assert list(found.ids([text])[0]) == backend.encode(text).ids
    assert 0 < calls["n"] < 60


def test_a_word_that_no_merge_makes_is_one_token_where_the_tokenizer_looks_for_whole_words_first():
    learned = byte_level(pre_tokens.LLAMA3)
    merges = [tuple(merge) for merge in word_premises._state(learned.model)["merges"]]
    vocabulary = {**learned.get_vocab(), "Ġzqzq": 500, "qz": 501}
    backend = byte_level(pre_tokens.LLAMA3)
    for ignores in (True, False):
        backend.model = models.BPE(vocabulary, merges, ignore_merges=ignores)
        text = " ".join(
            ["", "zqzq", "a", *(f"z{a}{b}" for a in "abcdefghi" for b in "stuvwxyz"), "zqzq", "xzqzq", "qz"]
        )
        ids = backend.encode(text).ids
        assert (500 in ids) == ignores
        assert list(Encoder(fast(backend)).encode([text])[text]) == ids


def test_a_truncation_that_somebody_else_asked_for_is_not_ours():
    tokenizer = fast(byte_level())
    encoder = Encoder(tokenizer)
    expected = encoder.encode(["one two"])
    tokenizer("one two three", truncation=True, max_length=1)
    assert encoder.encode(["one two", "seven doors"])["one two"] == expected["one two"]
    assert len(encoder.encode(["seven doors"])["seven doors"]) > 1


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_with_and_without_the_switch_the_ids_are_the_same(make):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), additional_special_tokens=SPECIAL)
    by_word, by_tokenizer = Encoder(tokenizer), Encoder(tokenizer, tokenize_by_word=False)
    texts = [*CORPUS, *(f"{SPECIAL[2]}user\n{text}{SPECIAL[3]}" for text in CORPUS), "", " ", "the  the"]
    assert by_word._words() is not None
    assert by_tokenizer._words() is None
    assert by_word.encode(texts) == by_tokenizer.encode(texts)
