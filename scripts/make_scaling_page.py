"""Write docs/scaling.md: how to start a run on several devices and machines, and which models fit.

The text is that of ``docs/scaling.in.md``; the table is computed by the functions that ``burnish explain`` uses, for
several model shapes. ``--check`` fails if the page is not up to date, and writes nothing.

    python scripts/make_scaling_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config

from burnish.adapters.base import ADAPTERS
from burnish.models.load import meta_model
from burnish.run.plan import resources
from burnish.run.plan.memory import GIB, DecoderShape
from burnish.run.plan.memory_per_device import sharing_of, terms_per_device
from burnish.run.plan.plan import RunOptions
from burnish.run.plan.resources import formats_of, memory_of, sizes_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TEXT = DOCS / "scaling.md", DOCS / "scaling.in.md"
TOKENS = 4096
FREE = 0.9
"""Share of the device memory that a run may use; the rest is for libraries and fragmentation."""

MODELS = {
    "0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "32B": Qwen2Config(
        vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
}  # fmt: skip
FULL: dict[str, dict[str, Any]] = {
    "unsharded": {},
    "`fsdp: shard_grad_op`": {"fsdp": "shard_grad_op"},
    "`fsdp: full_shard`": {"fsdp": "full_shard"},
    "`fsdp: full_shard offload`": {"fsdp": "full_shard offload"},
}
LORA: dict[str, dict[str, Any]] = {
    "unsharded": {},
    "`fsdp: full_shard`": {"fsdp": "full_shard"},
    "4 bits": {"quantization_bit": 4},
    "`fsdp: full_shard offload`": {"fsdp": "full_shard offload"},
}
"""Settings, ordered by communication, least first."""


def bytes_of(config: Any, method: str, setting: dict[str, Any], num_devices: int) -> int:
    """Return the estimated memory of one device."""
    options = RunOptions(
        finetuning_type=method, bf16=True, gradient_checkpointing=True, per_device_train_batch_size=1,
        lora_rank=16, lora_target=["all"], num_processes=num_devices, model_name_or_path="model", **setting,
    )  # fmt: skip
    with torch.device("meta"):
        sizes = sizes_of(ADAPTERS[method](options, []), meta_model(config), options)
    formats, shape = formats_of(options, config, sizes), DecoderShape.of(config)
    terms = memory_of(options, config, sizes, formats, TOKENS)
    terms = terms_per_device(terms, sharing_of(options, num_devices), shape, formats, sizes.total, sizes.trained)
    return sum(term.num_bytes for term in terms)


def cell(config: Any, method: str, num_devices: int, gigabytes: int) -> str:
    """Return the first setting that fits with its memory, else the memory of the last one."""
    settings = FULL if method == "full" else LORA
    needed = 0
    for name, setting in settings.items():
        if num_devices == 1 and "fsdp" in setting and "offload" not in name:
            continue
        needed = bytes_of(config, method, setting, num_devices)
        if needed <= gigabytes * GIB * FREE:
            return f"{name} ({needed / GIB:.3g} GiB)"
    return f"no ({needed / GIB:.3g} GiB at least)"


def table() -> str:
    lines = ["| Model | Devices | full, 24 GB | full, 80 GB | LoRA, 24 GB | LoRA, 80 GB |", "|---|---|---|---|---|---|"]
    for name, config in MODELS.items():
        config.dtype = torch.bfloat16
        for num_devices in (1, 8, 64):
            cells = [cell(config, method, num_devices, size) for method in ("full", "lora") for size in (24, 80)]
            lines.append(f"| {name} | {num_devices} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    resources.device_of = lambda options: torch.device(
        "cuda"
    )  # the table is for GPUs, even if it is generated on another device
    return TEXT.read_text(encoding="utf-8").replace("<!-- table -->", table())


def main() -> None:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/scaling.md is outdated: run scripts/make_scaling_page.py")


if __name__ == "__main__":
    main()
