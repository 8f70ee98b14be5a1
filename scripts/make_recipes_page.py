"""Write docs/recipes.md: the files of examples/recipes, and their estimated GPU memory.

The table is computed by the functions that ``burnish explain`` uses, for several model shapes. ``--check`` fails if the
page is not up to date, and writes nothing.

    python scripts/make_recipes_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from make_scaling_page import MODELS
from transformers import Qwen2Config

from burnish.adapters.base import ADAPTERS
from burnish.config.options import build
from burnish.models.load import meta_model
from burnish.run.plan import resources
from burnish.run.plan.config_files import read_config
from burnish.run.plan.memory import GIB
from burnish.run.plan.options import RunOptions
from burnish.run.plan.resources import formats_of, memory_of, rows_of_batch, sizes_of

ROOT = Path(__file__).parents[1]
PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "examples" / "recipes"
ORDER = ("full", "lora", "qlora", "dora", "pissa", "badam", "pretrain", "dpo", "kto", "reward")
SEQUENCES = {"dpo": 2, "rm": 2}
"""Sequences per row: both responses of a pair."""
SEVEN = Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                    num_attention_heads=28, num_key_value_heads=4)  # fmt: skip
SHAPES = {"0.5B": MODELS["0.5B"], "7B": SEVEN, "70B": MODELS["70B"]}
INTRODUCTION = """# Recipes

<!-- Made by scripts/make_recipes_page.py from examples/recipes; a test holds it against them. -->

Complete configuration files: replace the model, the dataset and `output_dir`, check the plan with `burnish explain`,
and train. A test runs each file for a few steps on the bundled model.

The table shows the memory of one GPU in GiB, estimated as in `burnish explain`, for examples of `cutoff_len` tokens and
models with the shapes of Qwen2.5 0.5B and 7B and Llama 3 70B. **The estimates were not checked on a GPU.** For several
GPUs, see [Scaling](scaling.md).

"""


def memory(settings: dict[str, Any], config: Any) -> str:
    """Return the estimate for a recipe and a model of this shape, in GiB."""
    options, problems = build(RunOptions, settings)
    assert not problems, problems
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        sizes = sizes_of(ADAPTERS[options.finetuning_type](options, []), meta_model(config), options)
    tokens = options.cutoff_len * rows_of_batch(options) * SEQUENCES.get(options.stage, 1)
    terms = memory_of(options, config, sizes, formats_of(options, config, sizes), tokens)
    gigabytes = sum(term.num_bytes for term in terms) / GIB
    return f"{gigabytes:.3g}" if gigabytes < 100 else f"{gigabytes:,.0f}"


def page() -> str:
    """Return the content of docs/recipes.md."""
    resources.device_of = lambda options: torch.device(
        "cuda"
    )  # the table is for GPUs, even if it is generated on another device
    lines = [f"| Recipe | {' | '.join(SHAPES)} |", f"|---|{'---|' * len(SHAPES)}"]
    sections = []
    for name in ORDER:
        text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        settings = read_config(RECIPES / f"{name}.yaml")
        cells = " | ".join(memory(settings, config) for config in SHAPES.values())
        lines.append(f"| [{name}](#{name}) | {cells} |")
        head, _, body = text.removeprefix("# ").partition("\n")
        sections.append(f"## {name}\n\n{head}\n\n```yaml\n# {name}.yaml\n{body}```\n")
    return INTRODUCTION + "\n".join(lines) + "\n\n" + "\n".join(sections)


def main() -> None:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/recipes.md is outdated: run scripts/make_recipes_page.py")


if __name__ == "__main__":
    main()
