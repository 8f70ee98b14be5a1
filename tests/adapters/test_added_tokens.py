"""Tokens that were added when an adapter was trained keep their ids in every command and in later runs."""

import json
from pathlib import Path

import pytest
from test_chain import loss_of_command
from transformers import AutoTokenizer

from burnish.cli import main
from small_run import WORDS, as_arguments, make_workspace

pytestmark = pytest.mark.run

ADDED = [f"{WORDS[0]} {WORDS[0]}", WORDS[1]]


def train(folder: Path, **options) -> float:
    """Train a run and return its last ``eval_loss``."""
    workspace = make_workspace(folder.parent / "user")
    options = {"finetuning_type": "lora", "max_steps": 8, "eval_dataset": workspace["dataset"], "save_strategy": "no",
               "eval_strategy": "steps", "eval_steps": 8, "learning_rate": 1e-2, **options}  # fmt: skip
    assert main(["train", *as_arguments({**workspace, "output_dir": str(folder), **options})]) == 0
    return json.loads((folder / "all_results.json").read_text())["eval_loss"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens") / "first"
    return folder, train(folder, add_tokens=json.dumps(ADDED))


def ids_of(folder: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(ADDED)


@pytest.mark.slow
def test_evaluation_and_predictions_use_the_tokens_of_the_adapter(first, tmp_path):
    folder, eval_loss = first
    assert loss_of_command(folder) == pytest.approx(eval_loss, rel=1e-5)
    assert main(["export", str(folder), f"export_dir={tmp_path / 'exported'}"]) == 0
    prompts = []
    for model in (folder, tmp_path / "exported"):
        out = tmp_path / f"answers-{model.name}"
        data = f"eval_dataset={folder.parent / 'user' / 'data.json'}"
        options = ["max_samples=3", "template=chatml", f"output_dir={out}", "use_cpu=true", "max_new_tokens=4"]
        assert main(["predict", str(model), data, *options, "infer_dtype=float32"]) == 0
        lines = (out / "generated_predictions.jsonl").read_text().splitlines()
        prompts.append([json.loads(line) for line in lines])
    assert prompts[0] == prompts[1]


@pytest.mark.slow
def test_a_later_run_keeps_the_tokens_and_appends_its_own(first, tmp_path):
    folder, eval_loss = first
    before = ids_of(folder)
    assert train(
        tmp_path / "again", adapter_name_or_path=folder, learning_rate=1e-12, max_steps=1, eval_steps=1
    ) == pytest.approx(eval_loss, rel=1e-4)
    assert ids_of(tmp_path / "again") == before
    train(tmp_path / "more", adapter_name_or_path=folder, add_tokens='["another one"]')
    assert ids_of(tmp_path / "more") == before
    assert AutoTokenizer.from_pretrained(tmp_path / "more").convert_tokens_to_ids("another one") == max(before) + 1


def test_tokens_with_other_ids_are_reported(first, tmp_path, capsys):
    folder, _ = first
    workspace = make_workspace(tmp_path / "user")
    model = tmp_path / "user" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<in between>"])
    tokenizer.save_pretrained(model)
    options = {"finetuning_type": "lora", "resize_vocab": True, "adapter_name_or_path": str(folder),
               "output_dir": str(tmp_path / "out")}  # fmt: skip
    assert main(["train", *as_arguments({**workspace, **options})]) == 2
    assert "have other ids with the tokenizer of the model" in capsys.readouterr().err
