"""Writes tiny Qwen2 models whose every number follows from its name: preference_models.py FOLDER

FOLDER/policy, FOLDER/reference (other numbers), FOLDER/adapter (a LoRA on policy, both factors non-zero),
FOLDER/policy_vhead (policy with value_head.safetensors and no dropout on it), FOLDER/scorer (a sequence classifier).
A number is  scale * N(0, 1) drawn by torch.Generator().manual_seed(crc32(salt + name)); norms are 1, biases 0.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

GOLDEN = Path(__file__).resolve().parent / "tokenizer"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def draw(name, shape, salt=""):
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape)
    scale = (
        1.0
        if "embed_tokens" in name
        else 0.25
        if "lm_head" in name
        else 0.3
        if "summary" in name or "score" in name
        else 0.15
    )
    generator = torch.Generator().manual_seed(zlib.crc32((salt + name).encode()))
    return torch.randn(shape, generator=generator) * scale


def fill(model, salt):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, salt))
    return model


def main(folder):
    folder = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    config = dict(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES,
    )

    def save(model, name):
        model.to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    save(fill(Qwen2ForCausalLM(Qwen2Config(**config)), ""), "policy")
    save(fill(Qwen2ForCausalLM(Qwen2Config(**config)), "reference/"), "reference")
    save(fill(Qwen2ForCausalLM(Qwen2Config(**config)), ""), "policy_vhead")
    path = folder / "policy_vhead" / "config.json"
    text = json.loads(path.read_text())
    text["summary_dropout_prob"] = 0.0
    path.write_text(json.dumps(text, indent=2))
    head = {"v_head.summary.weight": draw("v_head.summary.weight", (1, 32)), "v_head.summary.bias": torch.zeros(1)}
    save_file(head, folder / "policy_vhead" / "value_head.safetensors", metadata={"format": "pt"})
    save(fill(Qwen2ForSequenceClassification(Qwen2Config(num_labels=1, **config)), ""), "scorer")
    adapter = folder / "adapter"
    adapter.mkdir(parents=True, exist_ok=True)
    width = {"q_proj": (32, 32), "v_proj": (32, 16)}
    state = {}
    for layer in range(2):
        for module, (wide, out) in width.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            state[f"{name}.lora_A.weight"] = draw(f"{name}.lora_A.weight", (4, wide))
            state[f"{name}.lora_B.weight"] = draw(f"{name}.lora_B.weight", (out, 4))
    save_file(state, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": 4,
                "lora_alpha": 8,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": ["q_proj", "v_proj"],
                "inference_mode": True,
                "base_model_name_or_path": str(folder / "policy"),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
