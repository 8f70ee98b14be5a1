"""A run is not resumed with other files: the content of every file or set that an option names is part of the
fingerprint, or the option is declared harmless."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bad_inputs import change, make_folder, told, write
from burnish import cli
from burnish.checkpoint.comparison import MAY_CHANGE
from burnish.config.options import specs
from burnish.models.fingerprint import place_fingerprint
from burnish.run.plan.options import GROUPS, MEMBER_GROUPS, RunOptions
from burnish.run.recovery.fingerprints import HARMLESS, HARMLESS_GROUPS
from pair_runs import pairs
from small_run import make_model, records

pytestmark = pytest.mark.run
LORA = ["finetuning_type=lora", "lora_rank=4", "lora_target=all"]
DPO = ["stage=dpo", "dataset=pairs", "template=chatml"]
BEST = ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true"]


SCORE = "def score(completions, **kwargs):\n    return [1.0 * (len(str(c)) % 3) for c in completions]\n"


def other_weights(folder: str) -> Callable[[], None]:
    return lambda: shutil.copytree(f"{folder}2", folder, dirs_exist_ok=True)


def other_rows(name: str) -> Callable[[], None]:
    def harm() -> None:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))
        key = "output" if "output" in rows[0] else "chosen"
        rows[0][key] += " stone"
        write(name, rows)

    return harm


@dataclass(frozen=True)
class Place:
    """A run whose option names a file: further words of its command, what happens to the file, and the fingerprint."""

    words: list[str]
    harm: Callable[[], Any]
    named: str
    before: Callable[[], Any] = field(default=lambda: None)


def encoded(output: str) -> Callable[[], None]:
    """Encode the rows with another output into ``encoded``."""

    def encode() -> None:
        shutil.rmtree("encoded", ignore_errors=True)
        write("data/source.json", [{**row, "output": output} for row in records(12)])
        assert cli.main(["train", "run.yaml", "dataset=data/source.json", "tokenized_path=encoded", "max_steps=1",
                         "output_dir=elsewhere", "overwrite_output_dir=true"]) == 0  # fmt: skip

    return encode


DRAWN = ["stage=grpo", "template=chatml", "num_generations=2", "per_device_train_batch_size=2",
         "gradient_accumulation_steps=1", "max_completion_length=4"]  # fmt: skip


PLACES = {
    "reward_funcs": Place(
        [*DRAWN, "reward_funcs=[mine.py:score]"],
        lambda: Path("mine.py").write_text(SCORE.replace("1.0", "2.0"), encoding="utf-8"), "reward functions",
        before=lambda: Path("mine.py").write_text(SCORE, encoding="utf-8"),
    ),
    "reward_model": Place([*DRAWN, "reward_model=reward"], other_weights("reward"), "reward_model"),
    "reward_model_adapters": Place(
        [*DRAWN, "reward_model=reward", "reward_model_adapters=adapter"], other_weights("adapter"),
        "reward_model_adapters",
    ),
    "dataset": Place([], other_rows("data/rows.json"), "data"),
    "dataset_dir": Place([], lambda: write("data/dataset_info.json", {"rows": {"file_name": "held_out.json"}}), "data"),
    "eval_dataset": Place(["eval_dataset=held_out", *BEST], other_rows("data/held_out.json"), "eval_data"),
    "model_name_or_path": Place([], other_weights("model"), "base_model"),
    "adapter_name_or_path": Place([*LORA, "adapter_name_or_path=adapter"], other_weights("adapter"), "adapters"),
    "ref_model": Place([*DPO, "ref_model=reference"], other_weights("reference"), "ref_model"),
    "ref_model_adapters": Place(
        [*DPO, "ref_model=reference", "ref_model_adapters=adapter"], other_weights("adapter"), "ref_model_adapters"
    ),
    "template": Place(
        ["template=mine.jinja"],
        lambda: Path("mine.jinja").write_text(Path("mine.jinja").read_text().replace("user:", "person:")), "template",
    ),
    "new_special_tokens_config": Place(
        ["new_special_tokens_config=tokens.json", "init_special_tokens=desc_init"],
        lambda: write("tokens.json", {"<think>": "stone"}), "new_special_tokens_config",
    ),
    "peft_config": Place(
        ["finetuning_type=peft", "peft_config=peft.json"],
        lambda: change("peft.json", lora_alpha=32), "peft_config",
    ),
    "tokenized_path": Place(["tokenized_path=encoded"], encoded("stone"), "data", before=encoded("river")),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ 'user: ' if message.role == 'user' else 'assistant: ' }}{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_every_path_option_is_tested_or_declared_harmless() -> None:
    named = {name for name, spec in specs(RunOptions).items() if spec.names_place and not spec.ignored}
    of_groups = {n for g in (*GROUPS, *MEMBER_GROUPS) if g.__name__ in HARMLESS_GROUPS for n in specs(g)}
    declared = {name for names in HARMLESS.values() for name in names} | of_groups | MAY_CHANGE
    cached = {"cache_dir", "media_dir"}  # models and images are known by their content, wherever they lie
    assert named - declared - cached - PLACES.keys() == set()
    assert PLACES.keys() <= named


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with everything that the options of ``PLACES`` name."""
    folder = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        make_folder(make_model(tmp_path_factory.mktemp("model")))
        for name, seed in (("model2", 1), ("reference", 2), ("reference2", 3)):
            make_model(folder / name, seed=seed)
        for name, of in (("reward", "reference"), ("reward2", "reference2")):
            shutil.copytree(folder / of, folder / name)
            head = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.zeros(1)}
            save_file(head, folder / name / "value_head.safetensors")
        write("data/held_out.json", records(6)[::-1])
        write("data/pairs.json", pairs())
        sets = {name: {"file_name": f"{name}.json"} for name in ("rows", "held_out")}
        write("data/dataset_info.json", {**sets, "pairs": {"file_name": "pairs.json", "ranking": True}})
        write("tokens.json", {"<think>": "river"})
        write("peft.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
        Path("mine.jinja").write_text(TEMPLATE, encoding="utf-8")
        for name, seed in (("adapter", 1), ("adapter2", 2)):
            words = [*LORA, "max_steps=1", f"seed={seed}", f"output_dir={name}", "save_strategy=no"]
            assert cli.main(["train", "run.yaml", *words]) == 0
    return folder


@pytest.mark.parametrize("option", PLACES)
def test_run_with_changed_file_content_is_not_resumed(
    option: str, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    place = PLACES[option]
    place.before()
    words = ["train", "run.yaml", *place.words]
    if option == "tokenized_path":
        text = Path("run.yaml").read_text(encoding="utf-8").replace("dataset: rows\n", "")
        Path("run.yaml").write_text(text, encoding="utf-8")
    assert cli.main([*words, "max_steps=2"]) == 0
    unharmed = tmp_path / "unharmed"
    shutil.copytree(tmp_path, unharmed, ignore=shutil.ignore_patterns("unharmed", "cache"))
    place.harm()
    told(capsys)
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*"))
    assert cli.main([*words, "max_steps=4"]) == 2
    assert re.search(f"{place.named} (has changed|was )", told(capsys)[1])
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*")) == before
    monkeypatch.chdir(unharmed)
    assert cli.main([*words, "max_steps=4"]) == 0
    assert "Continuing from out/checkpoint-2" in told(capsys)[0]


def test_eval_dataset_may_change_if_it_does_not_affect_results(
    stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words = ["train", "run.yaml", "eval_dataset=held_out", "eval_strategy=steps", "eval_steps=2"]
    assert cli.main([*words, "max_steps=2"]) == 0
    other_rows("data/held_out.json")()
    told(capsys)
    assert cli.main([*words, "max_steps=2"]) == 2  # a finished run is not evaluated again
    assert "eval_data has changed" in told(capsys)[1]
    assert cli.main([*words, "max_steps=4"]) == 0
    assert "eval_data has changed since checkpoint-2." in told(capsys)[0]


def test_file_argument_of_reward_function_is_identified_by_content(tmp_path: Path) -> None:
    file, folder = tmp_path / "words.txt", str(tmp_path)
    file.write_text("river", encoding="utf-8")
    value = [{"mine.py:score": {"words": str(file), "sign": 1, "folder": folder}}]
    before = place_fingerprint(value)
    assert before[0]["mine.py:score"]["folder"] == folder
    file.write_text("stone", encoding="utf-8")
    assert place_fingerprint(value) != before
