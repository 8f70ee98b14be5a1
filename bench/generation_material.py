"""The material for measuring generation: a random model, a tokenizer with one word per id, prompts and lengths.

It does not import burnish, so that it can be imported in the environment of every library. A prompt is a list of ids;
``to_text`` converts it to text ("t17 t93") for interfaces that take messages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOTS, EVEN, UNEVEN = 8, 48, 32
VOCABULARY = 8192
CONTEXT = 8192
END_TOKEN = VOCABULARY - 1
_SPECIAL = {"<pad>": 0, "<unknown>": 1, "<stop>": END_TOKEN}
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Workload:
    """Prompts, with the length of each response and its settings: temperature, top_k, top_p; None for greedy
    decoding."""

    prompts: list[list[int]]
    lengths: list[int]
    settings: list[dict[str, float] | None]


def make_model(is_small: bool = False) -> Any:
    """Return a random Llama with 31 million weights, or a very small one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, layers = (32, 1) if is_small else (512, 8)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
        num_attention_heads=width // (16 if is_small else 64), num_key_value_heads=width // (32 if is_small else 128),
        max_position_embeddings=CONTEXT, eos_token_id=END_TOKEN, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def model_folder(parent: Path, is_small: bool = False) -> Path:
    """Return the folder with the model and its tokenizer, and create it unless it exists."""
    folder = parent / ("answers-small" if is_small else "answers")
    if not (folder / "tokenizer_config.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        word_level = Tokenizer(models.WordLevel(_vocabulary(), unk_token="<unknown>"))
        word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        make_model(is_small).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=word_level,
            eos_token="<stop>",
            pad_token="<pad>",
            unk_token="<unknown>",
            chat_template=_CHAT_TEMPLATE,
        ).save_pretrained(folder)
    return folder


def workloads() -> dict[str, Workload]:
    """Return the workloads: responses of the same length, of lengths that vary tenfold, and sampled ones with different
    settings."""
    generator = random.Random(0)
    prompts = [[generator.randrange(3, END_TOKEN) for _ in range(generator.randint(5, 90))] for _ in range(UNEVEN)]
    lengths = [int(6 * 10 ** generator.random()) for _ in prompts]
    few, even = prompts[:SLOTS], [EVEN] * SLOTS
    settings = [
        {"temperature": 0.5 + index / 10, "top_k": 20 + index, "top_p": 0.9 - index / 50} for index in range(SLOTS)
    ]
    return {
        "even": Workload(few, even, [None] * SLOTS), "uneven": Workload(prompts, lengths, [None] * UNEVEN),
        "sampled": Workload(few, even, [*settings]),
    }  # fmt: skip


def _vocabulary() -> dict[str, int]:
    """Return the vocabulary: word -> id."""
    return {f"t{number}": number for number in range(VOCABULARY) if number not in _SPECIAL.values()} | _SPECIAL


def to_text(ids: Sequence[int]) -> str:
    """Convert ids to text."""
    return " ".join(f"t{number}" for number in ids)


def to_ids(text: str) -> list[int]:
    """Convert text to ids."""
    vocabulary = _vocabulary()
    return [vocabulary[word] for word in text.split()]
