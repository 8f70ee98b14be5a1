"""The material on which answers are measured: a random model, a tokenizer whose words are ids, prompts and lengths.

Imports nothing of burnish, so that every library's process can read it. A prompt is a list of ids, or the same as text
("t17 t93"), for what takes messages only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEATS, EVEN, UNEVEN = 8, 48, 32
VOCABULARY = 8192
CONTEXT = 8192
STOP = VOCABULARY - 1
_SPECIAL = {"<pad>": 0, "<unknown>": 1, "<stop>": STOP}
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Work:
    """Prompts, how long each answer is, and the settings of each: temperature, top_k, top_p; None for the likeliest."""

    prompts: list[list[int]]
    lengths: list[int]
    settings: list[dict[str, float] | None]


def model_of(is_small: bool = False):
    """A random Llama of 31 million weights, or one whose pass takes next to nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, layers = (32, 1) if is_small else (512, 8)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
        num_attention_heads=width // (16 if is_small else 64), num_key_value_heads=width // (32 if is_small else 128),
        max_position_embeddings=CONTEXT, eos_token_id=STOP, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def folder_in(place: Path, is_small: bool = False) -> Path:
    """The model and its tokenizer as files, made once."""
    folder = place / ("answers-small" if is_small else "answers")
    if not (folder / "tokenizer_config.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel(_words(), unk_token="<unknown>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model_of(is_small).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<stop>", pad_token="<pad>", unk_token="<unknown>", chat_template=_PLAIN
        ).save_pretrained(folder)
    return folder


def work() -> dict[str, Work]:
    """Answers of one length, of lengths that vary tenfold, and drawn ones with settings of their own each."""
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, STOP) for _ in range(drawn.randint(5, 90))] for _ in range(UNEVEN)]
    lengths = [int(6 * 10 ** drawn.random()) for _ in prompts]
    few, even = prompts[:SEATS], [EVEN] * SEATS
    settings = [{"temperature": 0.5 + at / 10, "top_k": 20 + at, "top_p": 0.9 - at / 50} for at in range(SEATS)]
    return {
        "even": Work(few, even, [None] * SEATS), "uneven": Work(prompts, lengths, [None] * UNEVEN),
        "drawn": Work(few, even, [*settings]),
    }  # fmt: skip


def _words() -> dict[str, int]:
    return {f"t{number}": number for number in range(VOCABULARY) if number not in _SPECIAL.values()} | _SPECIAL


def text_of(ids: Sequence[int]) -> str:
    return " ".join(f"t{number}" for number in ids)


def ids_of(text: str) -> list[int]:
    words = _words()
    return [words[word] for word in text.split()]
