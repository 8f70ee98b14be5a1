"""Compare the peak memory of training with BAdam and with AdamW.

    python bench/badam_memory.py [--layers 12] [--width 512]

Each run is a separate process with the same random model and takes three steps on rows of 32 tokens. Prints the peak
resident memory above that of a process that has only imported the libraries and created the model.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys


def peak_memory(kind: str, layers: int, width: int) -> float:
    """Return the peak resident memory of one run in MB."""
    command = [sys.executable, __file__, "--kind", kind, "--layers", str(layers), "--width", str(width)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def train(kind: str, layers: int, width: int) -> None:
    """Create the model and train it. Args: kind: none, adamw or badam."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from burnish.optim.builtin import create_optimizer
    from burnish.run.plan.options import RunOptions

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if kind == "none":
        return
    options = RunOptions(finetuning_type="full", use_badam=kind == "badam", badam_switch_interval=1)
    optimizer = create_optimizer(model.named_parameters(), model, options)
    ids = torch.randint(1024, (1, 32))
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=("none", "adamw", "badam"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.kind:
        train(arguments.kind, arguments.layers, arguments.width)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    model, adamw, badam = (peak_memory(kind, arguments.layers, arguments.width) for kind in ("none", "adamw", "badam"))
    print(f"model alone {model:.0f} MB; AdamW adds {adamw - model:.0f} MB, BAdam {badam - model:.0f} MB")


if __name__ == "__main__":
    main()
