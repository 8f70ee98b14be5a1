"""Each file of examples/recipes trains the bundled model for two steps, and the page that shows them is up to date."""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import burnish
from burnish import cli

pytestmark = [pytest.mark.run, pytest.mark.slow]
ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
MODEL = Path(burnish.__file__).parent / "demo" / "model"
SMALL = {"model_name_or_path": MODEL, "max_steps": 2, "cutoff_len": 128, "per_device_train_batch_size": 2,
         "gradient_accumulation_steps": 1, "bf16": "false", "report_to": "none", "overwrite_cache": "true"}  # fmt: skip


def test_there_are_ten_recipes():
    assert len(RECIPES) == 10


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_the_bundled_model(recipe: Path, tmp_path: Path, monkeypatch) -> None:
    if "quantization_bit" in recipe.read_text() and not find_spec("bitsandbytes"):
        pytest.skip("needs bitsandbytes")
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"After {n}?", "output": str(n + 1)} for n in range(64)]
    pairs = [{"prompt": f"After {n}?", "chosen": str(n + 1), "rejected": str(n)} for n in range(64)]
    for name, records in {"my_data": rows, "my_pairs": pairs}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "my_texts.txt").write_text("A text of some words.\n" * 200)
    assert not cli.main(["train", str(recipe), *(f"{name}={value}" for name, value in SMALL.items())])
    output = tmp_path / "saves" / recipe.stem
    assert (output / "model.safetensors").is_file() or (output / "adapter_model.safetensors").is_file()


def test_recipes_page_shows_files_and_memory(monkeypatch) -> None:
    """To update: python scripts/make_recipes_page.py"""
    from burnish.run.plan import resources

    monkeypatch.setattr(resources, "device_of", resources.device_of)  # the script replaces it
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == import_module("make_recipes_page").page()
