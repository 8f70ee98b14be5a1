"""Compare burnish with TRL and transformers on one GPU, in the environment that runs this script.

    python bench/gpu.py [full] [lora] [grpo] [--only NAME] [--rows 1536] [--batch 128] [--layers 24] [--json FILE]
    python bench/gpu.py --cpu --size small --rows 24 --batch 4     try the script without a GPU

The model has the shape of Qwen2.5-0.5B and random weights. Each setting runs in its own process. The next ones import
and load while one is measured, and take the GPU in turn. The table is printed; docs/benchmarks.md is not changed. Rates
are labels per second of wall time, and the memory is the maximum that torch's allocator handed out.

LLaMA-Factory is not measured: it trains with transformers' Trainer, and its versions require other versions of
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gauge import LOCK, MARK
from material import Material, make, read_facts
from settings import Setting, training

HERE = Path(__file__).parent
AT_ONCE = 5
"""Number of processes; all but one of them import and load."""
HEAD = "| setting | labels/s | ratio | ms/step | GB | loss | generated/s |\n| --- |" + " ---: |" * 6


def full_or_lora(method: str, batch: int, facts: dict[str, Any]) -> list[Setting]:
    """Supervised fine-tuning of all weights or of an adapter, on the same rows, ``batch`` in each step."""
    pack = batch * facts["tokens"] // facts["rows"]
    pack += -pack % 8
    same: dict[str, Any] = {"finetuning_type": method, "num_train_epochs": 1, "per_device_train_batch_size": batch}
    dtype = {"dtype": "bfloat16"} if method == "lora" else {}
    lean = same | {"gradient_checkpointing": False} | dtype
    packed = lean | {"packing": True, "max_length": pack, "per_device_train_batch_size": 1}
    ours = same | {"bf16": True}
    return [
        training("TRL, default", "trl", **same),
        training("TRL, no checkpointing", "trl", **lean),
        training("TRL, packing, no checkpointing", "trl", **packed),
        training("TRL, packing, no checkpointing, Liger", "trl", use_liger_kernel=True, **packed),
        training("transformers, grouped by length", "transformers", bf16=True,
                 train_sampling_strategy="group_by_length", **same | dtype),
        training("burnish, default", "burnish", **ours),
        training("burnish, without Liger's layers", "burnish", enable_liger_kernel=False, **ours),
        training("burnish, full logits", "burnish", fused_loss=False, **ours),
        training("burnish, padded", "burnish", padding_free=False, **ours),
        training("burnish, checkpointing", "burnish", gradient_checkpointing=True, **ours),
        training("burnish, AdamW tensor by tensor", "burnish", optim="adamw_torch", **ours),
        training("burnish, compiled", "burnish", torch_compile=True, **ours),
        training("burnish, compiled, Liger's layers", "burnish", torch_compile=True, enable_liger_kernel=True, **ours),
        training("burnish, 4 bits", "burnish", quantization_bit=4, **ours),
    ][: None if method == "lora" else -1]  # fmt: skip


def grpo(batch: int, facts: dict[str, Any]) -> list[Setting]:
    """GRPO with groups of eight completions of 128 tokens."""
    same = {"stage": "grpo", "max_steps": 4, "learning_rate": 1e-6, "max_completion_length": 128, "num_generations": 8,
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}  # fmt: skip
    return [
        training("TRL, default", "trl", **same),
        training("TRL, no checkpointing", "trl", gradient_checkpointing=False, **same),
        training("burnish, default", "burnish", bf16=True, reward_funcs="[grpo.even_share]", log_completions=False,
                 **same),
    ]  # fmt: skip


def measure(setting: Setting, material: Path, lock: Path, timeout_s: float, on_cpu: bool) -> dict[str, Any]:
    """Return the measurements of one process, or ``failed`` and its last output."""
    with tempfile.TemporaryDirectory() as output:
        places = {"MATERIAL": str(material), "OUTPUT": output}
        script, *arguments = (places.get(item, item) for item in setting.command)
        is_ours = setting.library == "burnish"
        arguments.append(f"use_cpu={str(on_cpu).lower() if is_ours else on_cpu}")
        variables = {**os.environ, LOCK: str(lock), "BENCH_WARM_UP": "1" if "grpo" in str(arguments) else "5",
                     "BURNISH_CACHE": output + "/cache", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        try:
            finished = subprocess.run([sys.executable, HERE / script, *arguments], env=variables, capture_output=True,
                                      text=True, timeout=timeout_s)  # fmt: skip
            text = f"{finished.stderr}\n{finished.stdout}"
        except subprocess.TimeoutExpired as error:
            text = f"{error}\n{error.stderr!r}"
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    figures: dict[str, Any] = json.loads(lines[0].removeprefix(MARK)) if lines else {"failed": text.strip()[-1500:]}
    print(f"  {row(setting.name, figures, {})}{figures.get('failed', '')}", file=sys.stderr, flush=True)
    return figures


def row(name: str, figures: dict[str, Any], base: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "failed" in figures:
        return f"| {name} | failed |"
    speed = figures["labels"] / figures["wall_s"]
    ratio = speed / (base["labels"] / base["wall_s"]) if "labels" in base else float("nan")
    cells = [f"{speed:,.0f}", f"{ratio:.2f}", f"{1e3 * figures['wall_s'] / figures['steps']:.0f}",
             f"{figures.get('gpu_peak_bytes', 0) / 1e9:.2f}", f"{figures.get('loss', 0):.4f}"]  # fmt: skip
    if "generation_wall_s" in figures:
        cells.append(f"{figures['generated'] / figures['generation_wall_s']:,.0f}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Measure the requested parts and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="full, lora, grpo; default: all")
    parser.add_argument("--only", action="append", default=[], help="settings whose name contains this text")
    parser.add_argument("--size", default="large")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=128, help="rows per step")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one process")
    parser.add_argument("--material", type=Path, default=Path(tempfile.gettempdir()) / "burnish-gpu-material")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    arguments = parser.parse_args()
    layers = arguments.layers or (24 if arguments.size == "large" else None)
    material = Material(size=arguments.size, layers=layers, rows=arguments.rows, longest=arguments.longest)
    folder = arguments.material / material.name
    begin = time.time()
    make(material, folder)
    facts = read_facts(folder)
    print(f"{facts}; made in {time.time() - begin:.0f} s", flush=True)
    parts: dict[str, Callable[[int, dict[str, Any]], list[Setting]]] = {
        "full": partial(full_or_lora, "full"),
        "lora": partial(full_or_lora, "lora"),
        "grpo": grpo,
    }
    found: dict[str, dict[str, Any]] = {}
    for part in arguments.parts or parts:
        settings = [one for one in parts[part](arguments.batch, facts)
                    if not arguments.only or any(text in one.name for text in arguments.only)]  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
            call = partial(measure, material=folder, lock=Path(scratch) / "lock", timeout_s=arguments.timeout,
                           on_cpu=arguments.cpu)  # fmt: skip
            results = dict(zip((one.name for one in settings), pool.map(call, settings), strict=True))
        found[part] = results
        print(
            f"\n{part}, {time.time() - begin:.0f} s\n| setting | labels/s | ratio | ms/step | GB | loss | generated/s |"
        )
        print("\n".join(row(name, each, results.get("TRL, default", {})) for name, each in results.items()), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
