"""A folder with a tiny model, its tokenizer and a small dataset."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["red", "green", "blue", "stone", "river", "lamp", "seven", "nine", "north", "south"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WALK_THROUGH = """--stage sft --do_train True --model_name_or_path models/Qwen2-0.5B --preprocessing_num_workers 16
--finetuning_type full --template qwen --flash_attn auto --dataset_dir data --dataset alpaca_zh --cutoff_len 1024
--learning_rate 5e-05 --num_train_epochs 3.0 --max_samples 1000 --per_device_train_batch_size 2
--gradient_accumulation_steps 8 --lr_scheduler_type cosine --max_grad_norm 1.0 --logging_steps 5 --save_steps 100
--warmup_steps 0 --optim adamw_torch --packing False --report_to none --use_badam True
--output_dir saves/Qwen2-0.5B/full/train_test --fp16 True --plot_loss True --ddp_timeout 180000000
--include_num_input_tokens_seen True --badam_mode layer --badam_switch_mode ascending --badam_switch_interval 50
--badam_update_ratio 0.05 --val_size 0.1 --eval_strategy steps --eval_steps 100 --per_device_eval_batch_size 2"""
"""Arguments from a tutorial of LLaMA-Factory."""


def make_model(
    folder: Path, dropout: float = 0.0, seed: int = 0, end: str = "<|im_end|>", dtype: str = "float32", **changes
) -> Path:  # fmt: skip
    """Save a Llama with about ten thousand weights, and a byte-level tokenizer with ChatML tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"user assistant system {' '.join(WORDS)}"] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
    config = LlamaConfig(
        **{**shape, **changes}, attention_dropout=dropout, eos_token_id=fast.eos_token_id, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def records(count: int = 24) -> list[dict[str, str]]:
    return [
        {"instruction": f"Repeat: {WORDS[i % 10]}", "input": "" if i % 3 else "twice",
         "output": " ".join([WORDS[i % 10]] * (1 + i % 4))}
        for i in range(count)
    ]  # fmt: skip


def make_workspace(folder: Path, count: int = 24, dropout: float = 0.0, **options) -> dict:
    """Write a model and a dataset to ``folder``, and return the options of a run on them."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_model(folder / "model", dropout)
    (folder / "data.json").write_text(json.dumps(records(count)))
    return {
        "model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.json"), "stage": "sft",
        "finetuning_type": "full", "cutoff_len": 128, "output_dir": str(folder / "out"), "learning_rate": 1e-3,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 2,
        "lr_scheduler_type": "cosine", "use_cpu": True, "plot_loss": False, **options,
    }  # fmt: skip


def as_arguments(options: dict) -> list[str]:
    """Return the options as command-line arguments."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
