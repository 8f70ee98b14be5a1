"""Two-layer language models by family, with random weights and without dropout."""

import torch

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
BLOOM = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}

FAMILIES = {
    "llama": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 4},
    "mistral": {**SIZES, "sliding_window": 4},
    "phi3": SIZES,
    "phi": SIZES,
    "gpt2": {**GPT, "n_positions": 256},
    "gpt_neox": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "cohere": SIZES,
    "granite": {**SIZES, "logits_scaling": 4.0},
    "mixtral": {**SIZES, **EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {**SIZES, **EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    "stablelm": SIZES,
    "gptj": {**GPT, "n_positions": 256, "rotary_dim": 4},
    "bloom": BLOOM,
    "falcon": BLOOM,
    "mamba": {**BLOOM, "state_size": 4},
}


def tiny(family="llama", dtype=torch.float32, seed=0, **changes):
    """Return a model of the family in training mode, with ``changes`` to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


KEEPS_APART = [
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "phi", "gpt2", "gpt_neox", "opt", "cohere",
    "granite", "mixtral", "qwen3_moe", "gpt_oss",
]  # fmt: skip  # fmt: skip
"""Families in which packed sequences do not attend to each other."""
