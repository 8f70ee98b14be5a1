"""Convert the tokenizer of an exported folder to the fields of a GGUF file.

In:  the folder's ``tokenizer.json``. Out: tokens, their types, scores or merges, special ids, the chat template. Two
kinds are supported. Byte-level: llama.cpp reads the merges and identifies the pre-tokenizer by name. SentencePiece with
byte fallback (Llama 2, Mistral): llama.cpp joins the two adjacent tokens whose joined token has the highest score.

Refuses: a pre-tokenizer without a known name; merges that scores cannot express, since llama.cpp would produce other
ids; byte-level tokenizers without merges, which llama.cpp does not load, and those with whole words that it would
split.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from burnish.config.errors import UserError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS: Final = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    "": "gpt-2",
}
"""A tokenizer's regular expression for pre-tokenization -> llama.cpp's name of it; "" for the byte-level default."""
_WHOLE_WORDS: Final = ("llama-bpe",)
"""Pre-tokenizers with which llama.cpp keeps words of the vocabulary whole (``ignore_merges`` in llama-vocab.cpp)."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_BYTES: Final = {f"<0x{byte:02X}>" for byte in range(256)}
_ADDED_SCORE = -1000.0
"""Score of tokens that are never the result of joining; the value has no effect."""


@dataclass(frozen=True)
class TokenizerKind:
    """A tokenizer in llama.cpp's terms.

    Args:
        model: ``gpt2`` (byte-level) or ``llama`` (SentencePiece).
        pre: name of the pre-tokenizer.
        scores: scores of the tokens of a SentencePiece vocabulary.
        has_prefix: whether a space is inserted at the beginning of a text.
    """

    model: str
    pre: str
    scores: dict[str, float] | None = None
    has_prefix: bool = False


def tokenizer_kind(tokenizer_json: dict[str, Any]) -> TokenizerKind:
    """The kind of a ``tokenizer.json``.

    Raises:
        UserError: for an unsupported tokenizer.
    """
    model = tokenizer_json["model"]
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        return TokenizerKind("llama", "default", _scores(tokenizer_json), _prefix(tokenizer_json))
    pre = _split_of(tokenizer_json)
    if not model.get("merges"):
        raise UserError("the BPE tokenizer has no merges, and llama.cpp cannot load it.",
                        remedy="Export safetensors instead, or use a tokenizer with merges.")  # fmt: skip
    if model.get("ignore_merges") and pre not in _WHOLE_WORDS:
        raise _refusal(
            "the tokenizer sets ignore_merges, which llama.cpp supports for the pre-tokenizer of Llama 3 only."
        )
    return TokenizerKind("gpt2", pre)


def _refusal(what: str) -> UserError:
    return UserError(what, remedy="Set llama_cpp to a checkout of llama.cpp to use its converter.")


def _split_of(tokenizer_json: dict[str, Any]) -> str:
    found = tokenizer_json.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"]
    is_bytes = any(part.get("type") == "ByteLevel" for part in parts)
    pattern = patterns[0] if patterns else ""
    if tokenizer_json["model"].get("type") != "BPE" or not is_bytes or len(patterns) > 1 or pattern not in _SPLITS:
        raise _refusal("the tokenizer is not supported: it is neither a byte-level BPE with a known pre-tokenizer "
                       "nor a SentencePiece BPE with byte fallback.")  # fmt: skip
    return _SPLITS[pattern]


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def _prefix(tokenizer_json: dict[str, Any]) -> bool:
    """Whether a space is inserted at the beginning of a text.

    Raises:
        UserError: if the tokenizer changes or splits the text other than by replacing spaces with ``▁``.
    """
    normalizer, cut = tokenizer_json.get("normalizer") or {}, tokenizer_json.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    begins = {"type": "Prepend", "prepend": _SPACE}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    is_metaspace = cut.get("type") == "Metaspace" and cut.get("replacement") == _SPACE and cut.get("split") is False
    if all(step in (begins, spaces) for step in steps) and (is_metaspace or (not cut and spaces in steps)):
        return begins in steps or cut.get("prepend_scheme", "never") != "never"
    raise _refusal("the tokenizer normalizes or splits text in a way that llama.cpp's SentencePiece does not support.")


def _scores(tokenizer_json: dict[str, Any]) -> dict[str, float]:
    """Scores with which joining the best neighbours gives the same tokens as the merges: earlier merges have higher
    scores.

    A merge consists of two parts, while a score belongs to the resulting token. So all merges of a token must be
    adjacent, and each pair of tokens that forms a token must be a merge.
    """
    model = tokenizer_json["model"]
    added = {token["content"] for token in tokenizer_json.get("added_tokens", ())}
    pieces = set(model["vocab"]) - added
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if missing := _BYTES - pieces:
        raise _refusal(f"the tokenizer uses byte fallback, but its vocabulary has no token {min(missing)}.")
    pairs = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    unsaid = {(a, b) for a, b in pairs if a in pieces and b in pieces} - set(merges)
    if unsaid or model.get("ignore_merges") or model.get("dropout"):
        example = ': it has no merge of "{}" and "{}"'.format(*min(unsaid)) if unsaid else ""
        raise _refusal(f"the merges of the tokenizer cannot be expressed as scores{example}.")
    made = ["".join(merge) for merge in merges]
    steps = _steps(made)
    return {piece: -float(steps.get(piece, len(steps))) for piece in pieces}


def _steps(made: list[str]) -> dict[str, int]:
    """The rank of each token among the results of merges. Runs of one character (spaces) may share a rank, as in
    vocabularies that give them the same score.
    """
    last = {token: at for at, token in enumerate(made)}
    steps: dict[str, int] = {}
    step, end, group = -1, -1, ""
    for at, token in enumerate(made):
        if at > end:
            step, group = step + 1, token
        elif token != group and (set(token) != set(group) or len(set(token)) > 1):
            raise _refusal(
                f'the merges of "{group}" and "{token}" alternate in priority and cannot be represented by '
                "per-token scores."
            )
        steps.setdefault(token, step)
        end = max(end, last[token])
    return steps


# --- writing ----------------------------------------------------------------------------------------------------------


def add_tokenizer(writer: Any, folder: Path, tokenizer_json: dict[str, Any], kind: TokenizerKind, rows: int) -> None:
    """Write the fields of a folder's tokenizer, with a token for each of the embedding's ``rows``."""
    from burnish.models.tokens import tokenizer_in

    tokenizer = tokenizer_in(folder)
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    texts = [tokens.get(i, f"[PAD{i}]") for i in range(rows)]
    writer.add_tokenizer_model(kind.model)
    writer.add_tokenizer_pre(kind.pre)
    writer.add_token_list(texts)
    writer.add_token_types(_types(tokenizer, tokens, kind, rows))
    if kind.scores is None:
        merges = tokenizer_json["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    else:
        writer.add_token_scores([kind.scores.get(text, _ADDED_SCORE) for text in texts])
        writer.add_add_space_prefix(kind.has_prefix)
    for name in ("bos", "eos", "pad", *(("unk",) if kind.scores else ())):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    generation = folder / "generation_config.json"
    ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    others = [end for end in ends if end != tokenizer.eos_token_id] if isinstance(ends, list) else []
    if others:
        writer.add_eot_token_id(others[0])
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]  # a text, because BOS and EOS may be the same token
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _types(tokenizer: Any, tokens: dict[int, str], kind: TokenizerKind, rows: int) -> list[int]:
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special, added = marked | set(tokenizer.all_special_ids), set(tokenizer.get_added_vocab().values())
    is_sentencepiece = kind.scores is not None

    def type_of(number: int) -> int:
        if number not in tokens:
            return _UNUSED
        if is_sentencepiece and (number == tokenizer.unk_token_id or tokens[number] in _BYTES):
            return _UNKNOWN if number == tokenizer.unk_token_id else _BYTE
        return _CONTROL if number in special else _USER_DEFINED if number in added else _NORMAL

    return [type_of(number) for number in range(rows)]
