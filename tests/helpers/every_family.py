"""Tiny models of all causal language models of transformers that can be built from a common set of sizes."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_MAX_PARAMETERS = 8_000_000
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4), "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "dim_model_base": 16,
}  # fmt: skip
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
_TOO_SLOW_OR_OTHER = {
    "blt", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "mllama", "llama4", "git", "got_ocr2", "roc_bert",
    "phi4_multimodal", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "emu3", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
"""Multimodal models, and models that are still large with these sizes."""


def tiny_config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    sizes = {name: value for name, value in _SIZES.items() if hasattr(default, name)} | _OTHER_SIZES.get(model_type, {})
    if "qk_rope_head_dim" in sizes:
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    sizes |= {name: 0.0 for name in vars(default) if "drop" in name and isinstance(vars(default)[name], float)}
    config = kind(**sizes)
    kinds = getattr(config, "layer_types", None)
    if kinds and len(kinds) != 2:
        config = kind(**sizes, layer_types=(list(dict.fromkeys(kinds)) * 2)[:2])
    return config


def tiny_models(model_types: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (model type, model) of each family that can be built, in float32 with weights from a fixed seed."""
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if model_types is None else model_types:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""), None)
        if kind is None or model_type not in CONFIG_MAPPING or model_type in _TOO_SLOW_OR_OTHER:
            continue
        try:
            config = tiny_config(model_type)
            with torch.device("meta"):
                if sum(p.numel() for p in kind(config).parameters()) > _MAX_PARAMETERS:
                    continue
            torch.manual_seed(0)
            yield model_type, kind(config).float()
        except Exception:  # these sizes are invalid for the family
            continue
