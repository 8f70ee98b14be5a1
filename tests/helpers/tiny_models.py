"""Tiny causal language models, one per architecture family that burnish supports."""

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_COMMON, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 8}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_LLAMA),
    "qwen2": lambda: Qwen2Config(**_LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_LLAMA),
    "gemma": lambda: GemmaConfig(**_LLAMA),
    "gemma2": lambda: Gemma2Config(**_LLAMA),
    "mistral": lambda: MistralConfig(**_LLAMA),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON, intermediate_size=24, max_position_embeddings=64),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
    "phi": lambda: PhiConfig(**_COMMON, intermediate_size=24, max_position_embeddings=64),
}


def mixtral_config() -> MixtralConfig:
    """Return the config of a mixture of experts, whose saved tensors differ from those in memory."""
    return MixtralConfig(**_LLAMA, num_local_experts=2, num_experts_per_tok=1)


def tiny_model(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """Return a model of the family with random weights, in evaluation mode."""
    config = CONFIGS[family]() if family in CONFIGS else mixtral_config()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def token_ids(rows: int = 2, length: int = 6, seed: int = 0) -> torch.Tensor:
    """Return (rows, length) random token ids."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer(**special):
    """Return a word-level tokenizer with the vocabulary of the tiny models. ``special`` overrides special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special_tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{k: v for k, v in special_tokens.items() if v is not None}
    )


def saved_model(folder, family: str = "llama", tokenizer=None, **changes):
    """Save a tiny model and tokenizer to a folder, and return it."""
    tiny_model(family, **changes).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
