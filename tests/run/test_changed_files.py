"""Changed files prevent a resume: the content of every file or dataset that an option names is part of the
fingerprint, or the option is declared harmless.
"""

import hashlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bad_inputs import change, make_folder, read_output, write
from burnish import cli
from burnish.checkpoint.comparison import MAY_CHANGE
from burnish.config.options import specs
from burnish.models.fingerprint import config_fingerprint, model_fingerprint, place_fingerprint
from burnish.models.options import ModelOptions
from burnish.optim.builtin import OPTIMIZERS
from burnish.run.plan.options import GROUPS, MEMBER_GROUPS, RunOptions
from burnish.run.recovery.fingerprints import UNTRACKED_GROUPS, UNTRACKED_OPTIONS, plugin_code
from burnish.utils import digests
from burnish.utils.digests import file_digests
from burnish.utils.source_files import source_digest
from pair_runs import pairs
from representative import representative_slow
from small_run import make_model, records

pytestmark = pytest.mark.run
LORA = ["finetuning_type=lora", "lora_rank=4", "lora_target=all"]
DPO = ["stage=dpo", "dataset=pairs", "template=chatml"]
BEST = ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true"]


SCORE = "def score(completions, **kwargs):\n    return [1.0 * (len(str(c)) % 3) for c in completions]\n"


def other_weights(folder: str) -> Callable[[], None]:
    return lambda: shutil.copytree(f"{folder}2", folder, dirs_exist_ok=True)


def other_rows(name: str) -> Callable[[], None]:
    def change_file() -> None:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))
        key = "output" if "output" in rows[0] else "chosen"
        rows[0][key] += " stone"
        write(name, rows)

    return change_file


@dataclass(frozen=True)
class FileOption:
    """A run with an option that names a file.

    Args:
        argv: additional command-line arguments.
        change_file: changes the file.
        named: the part of the fingerprint that changes.
        before: prepares the file.
    """

    argv: list[str]
    change_file: Callable[[], Any]
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


ROLLOUT = ["stage=grpo", "template=chatml", "num_generations=2", "per_device_train_batch_size=2",
         "gradient_accumulation_steps=1", "max_completion_length=4"]  # fmt: skip


FILE_OPTIONS = {
    "reward_funcs": FileOption(
        [*ROLLOUT, "reward_funcs=[mine.py:score]"],
        lambda: Path("mine.py").write_text(SCORE.replace("1.0", "2.0"), encoding="utf-8"), "reward functions",
        before=lambda: Path("mine.py").write_text(SCORE, encoding="utf-8"),
    ),
    "reward_model": FileOption([*ROLLOUT, "reward_model=reward"], other_weights("reward"), "reward_model"),
    "reward_model_adapters": FileOption(
        [*ROLLOUT, "reward_model=reward", "reward_model_adapters=adapter"], other_weights("adapter"),
        "reward_model_adapters",
    ),
    "dataset": FileOption([], other_rows("data/rows.json"), "data"),
    "dataset_dir": FileOption([], lambda: write("data/dataset_info.json", {"rows": {"file_name": "held_out.json"}}),
    "data"),
    "eval_dataset": FileOption(["eval_dataset=held_out", *BEST], other_rows("data/held_out.json"), "eval_data"),
    "model_name_or_path": FileOption([], other_weights("model"), "base_model"),
    "adapter_name_or_path": FileOption([*LORA, "adapter_name_or_path=adapter"], other_weights("adapter"), "adapters"),
    "ref_model": FileOption([*DPO, "ref_model=reference"], other_weights("reference"), "ref_model"),
    "ref_model_adapters": FileOption(
        [*DPO, "ref_model=reference", "ref_model_adapters=adapter"], other_weights("adapter"), "ref_model_adapters"
    ),
    "template": FileOption(
        ["template=mine.jinja"],
        lambda: Path("mine.jinja").write_text(Path("mine.jinja").read_text().replace("user:", "person:")), "template",
    ),
    "new_special_tokens_config": FileOption(
        ["new_special_tokens_config=tokens.json", "init_special_tokens=desc_init"],
        lambda: write("tokens.json", {"<think>": "stone"}), "new_special_tokens_config",
    ),
    "peft_config": FileOption(
        ["finetuning_type=peft", "peft_config=peft.json"],
        lambda: change("peft.json", lora_alpha=32), "peft_config",
    ),
    "tokenized_path": FileOption(["tokenized_path=encoded"], encoded("stone"), "data", before=encoded("river")),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ 'user: ' if message.role == 'user' else 'assistant: ' }}{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_every_path_option_is_tested_or_declared_harmless() -> None:
    named = {name for name, spec in specs(RunOptions).items() if spec.names_place and not spec.ignored}
    of_groups = {n for g in (*GROUPS, *MEMBER_GROUPS) if g.__name__ in UNTRACKED_GROUPS for n in specs(g)}
    declared = {name for names in UNTRACKED_OPTIONS.values() for name in names} | of_groups | MAY_CHANGE
    cached = {"cache_dir", "media_dir"}  # models and images are identified by content, not by location
    assert named - declared - cached - FILE_OPTIONS.keys() == set()
    assert FILE_OPTIONS.keys() <= named


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a working directory with all files that the options of ``FILE_OPTIONS`` name."""
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
            argv = [*LORA, "max_steps=1", f"seed={seed}", f"output_dir={name}", "save_strategy=no"]
            assert cli.main(["train", "run.yaml", *argv]) == 0
    return folder


def _other_config(folder: str, **changes: Any) -> Callable[[], None]:
    return lambda: change(f"{folder}/config.json", **changes)


def _other_token(name: str, **changes: Any) -> Callable[[], None]:
    return lambda: change(f"{name}/tokenizer_config.json", **changes)


def _one_number(file: str) -> Callable[[], None]:
    """Return a function that changes one number of a weight file in place."""

    def change_file() -> None:
        raw = bytearray(Path(file).read_bytes())
        raw[-3] ^= 1
        Path(file).write_bytes(raw)

    return change_file


def _other_value_head() -> None:
    head = {"v_head.summary.weight": torch.full((1, 32), 2.0), "v_head.summary.bias": torch.zeros(1)}
    save_file(head, "reward/value_head.safetensors")


def _package(sign: str) -> Callable[[], None]:
    """Create a package of rewards in a subfolder, with an absolute and a relative import."""

    def make() -> None:
        for name, text in {
            "__init__": "", "entry": "from scorers.inner import middle\nscore = middle.score\n",
            "inner/__init__": "", "inner/middle": "from ..sign import SIGN\n"
            "def score(completions, **kwargs):\n    return [SIGN * (len(str(c)) % 3) for c in completions]\n",
            "sign": f"SIGN = {sign}\n",
        }.items():  # fmt: skip
            Path(f"scorers/{name}.py").parent.mkdir(parents=True, exist_ok=True)
            Path(f"scorers/{name}.py").write_text(text, encoding="utf-8")

    return make


def _by_name(sign: str) -> Callable[[], None]:
    """Create a reward function that imports a module from a folder that only its code adds to ``sys.path``."""

    def make() -> None:
        Path("lib").mkdir(exist_ok=True)
        Path("lib/own_sign.py").write_text(f"SIGN = {sign}\n", encoding="utf-8")
        Path("mine.py").write_text(
            "import importlib, sys\nsys.path.insert(0, 'lib')\nown = importlib.import_module('own_sign')\n"
            "def score(completions, **kwargs):\n    return [own.SIGN * (len(str(c)) % 3) for c in completions]\n",
            encoding="utf-8",
        )  # fmt: skip
        sys.modules.pop("own_sign", None)

    return make


WITHIN = {
    "one number of the weights": FileOption([], _one_number("model/model.safetensors"), "base_model"),
    "one number of an adapter": FileOption(
        [*LORA, "adapter_name_or_path=adapter"], _one_number("adapter/adapter_model.safetensors"), "adapters"
    ),
    "the model's config": FileOption([], _other_config("model", rms_norm_eps=0.1), "config"),
    "the config of ref_model": FileOption(
        [*DPO, "ref_model=reference"], _other_config("reference", rms_norm_eps=0.1), "ref_model"
    ),
    "the config of reward_model": FileOption(
        [*ROLLOUT, "reward_model=reward"], _other_config("reward", rms_norm_eps=0.1), "reward_model"
    ),
    "the head of reward_model": FileOption([*ROLLOUT, "reward_model=reward"], _other_value_head, "reward_model"),
    "the chat template of reward_model": FileOption(
        [*ROLLOUT, "reward_model=reward"], lambda: write("reward/chat_template.jinja", TEMPLATE.encode()),
        "reward_model"
    ),
    "the tokenizer's EOS": FileOption(["template=mine.jinja"], _other_token("model", eos_token="<pad>"), "tokenizer"),
    "the model's chat template": FileOption(
        [], lambda: write("model/chat_template.jinja", TEMPLATE.replace("user:", "person:").encode()), "template",
        before=lambda: write("model/chat_template.jinja", TEMPLATE.encode()),
    ),
    "a file that a reward function imports": FileOption(
        [*ROLLOUT, "reward_funcs=[scorers.entry.score]"], _package("2.0"), "reward functions", before=_package("1.0")
    ),
    "a module that a reward function imports by its name": FileOption(
        [*ROLLOUT, "reward_funcs=[mine.py:score]"], _by_name("2.0"), "reward functions", before=_by_name("1.0")
    ),
    "the columns of dataset_info": FileOption(
        [], lambda: change("data/dataset_info.json", rows={
            "file_name": "rows.json", "columns": {"prompt": "output", "response": "instruction"}}), "data",
    ),
    "the tags of dataset_info": FileOption(
        [], lambda: change("data/dataset_info.json", rows={"file_name": "rows.json", "num_samples": 11}), "data"
    ),
    "the last record of a streamed file": FileOption(["streaming=true"], lambda: _last_output("data/rows.json"),
    "data"),
}  # fmt: skip


def _last_output(name: str) -> None:
    rows = json.loads(Path(name).read_text(encoding="utf-8"))
    rows[-1]["output"] += " stone"
    write(name, rows)


@pytest.fixture
def stage_copy(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy ``stage`` to a new working directory with a new cache."""
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("stage_copy")
@pytest.mark.parametrize("part", representative_slow(WITHIN, 2))
def test_run_with_a_part_changed_in_place_is_not_resumed(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = WITHIN[part]
    place.before()
    argv = ["train", "run.yaml", "plot_loss=false", *place.argv]
    assert cli.main([*argv, "max_steps=2"]) == 0
    place.change_file()
    read_output(capsys)
    assert cli.main([*argv, "max_steps=4"]) == 2
    assert re.search(f"{place.named} (has changed|changed from )", read_output(capsys)[1])


@pytest.mark.sample(2)
@pytest.mark.usefixtures("stage_copy")
@pytest.mark.parametrize(
    "option",
    representative_slow(FILE_OPTIONS, ("reward_funcs", "dataset", "model_name_or_path", "ref_model", "template")),
)
def test_run_with_changed_file_content_is_not_resumed(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = FILE_OPTIONS[option]
    place.before()
    argv = ["train", "run.yaml", *place.argv]
    if option == "tokenized_path":
        text = Path("run.yaml").read_text(encoding="utf-8").replace("dataset: rows\n", "")
        Path("run.yaml").write_text(text, encoding="utf-8")
    assert cli.main([*argv, "max_steps=2"]) == 0
    unharmed = tmp_path / "unharmed"
    shutil.copytree(tmp_path, unharmed, ignore=shutil.ignore_patterns("unharmed", "cache"))
    place.change_file()
    read_output(capsys)
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*"))
    assert cli.main([*argv, "max_steps=4"]) == 2
    assert re.search(f"{place.named} (has changed|changed from )", read_output(capsys)[1])
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*")) == before
    monkeypatch.chdir(unharmed)
    assert cli.main([*argv, "max_steps=4"]) == 0
    assert "Resuming from out/checkpoint-2" in read_output(capsys)[0]


def test_eval_dataset_may_change_if_it_does_not_affect_results(
    stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    argv = ["train", "run.yaml", "eval_dataset=held_out", "eval_strategy=steps", "eval_steps=2"]
    assert cli.main([*argv, "max_steps=2"]) == 0
    other_rows("data/held_out.json")()
    read_output(capsys)
    assert cli.main([*argv, "max_steps=2"]) == 2  # a finished run is not evaluated twice
    assert "eval_data has changed" in read_output(capsys)[1]
    assert cli.main([*argv, "max_steps=4"]) == 0
    assert "eval_data has changed since checkpoint-2." in read_output(capsys)[0]


@pytest.mark.parametrize("at", [0.37, 0.5, 0.983])
def test_any_changed_byte_of_a_large_file_changes_its_fingerprint(
    at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(70 * 2**20))
    times = file.stat().st_mtime_ns
    before = place_fingerprint(str(file))
    with file.open("r+b") as opened:
        opened.seek(int(at * 70 * 2**20) // 8 * 8 + 5)
        opened.write(b"x")
    os.utime(file, ns=(times, times))  # modification times as set by copying tools
    assert place_fingerprint(str(file)) != before


def test_large_file_is_read_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in "abc"]
    read: list[str] = []
    monkeypatch.setattr(digests, "_read", lambda path, real=digests._read: read.append(path.name) or real(path))
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    assert len({*file_digests(files)}) == 3
    assert file_digests(files) == [hashlib.sha256(file.read_bytes()).digest() for file in files]
    assert len(read) == 6, "they have just been written: the same times could belong to other content"
    monkeypatch.setattr(digests, "_SETTLED_S", 0.0)
    expected = file_digests(files)
    read.clear()
    assert file_digests(files) == expected
    assert read == []
    files[1].write_bytes(files[1].read_bytes()[::-1])
    assert file_digests(files)[1] != expected[1]
    assert read == ["b.safetensors"]
    for damaged in digests._place(files[0]).parent.iterdir():
        damaged.write_text("{")
    assert file_digests(files)[0] == expected[0]


def test_file_argument_of_reward_function_is_identified_by_content(tmp_path: Path) -> None:
    file, folder = tmp_path / "words.txt", str(tmp_path)
    file.write_text("river", encoding="utf-8")
    value = [{"mine.py:score": {"words": str(file), "sign": 1, "folder": folder}}]
    before = place_fingerprint(value)
    assert before[0]["mine.py:score"]["folder"] == folder
    file.write_text("stone", encoding="utf-8")
    assert place_fingerprint(value) != before


def test_the_code_of_a_model_belongs_to_its_config(stage: Path, tmp_path: Path) -> None:
    shutil.copytree(stage / "model", tmp_path / "model")
    code = tmp_path / "model" / "parts" / "modeling_mine.py"
    code.parent.mkdir()
    code.write_text("SCALE = 1\n", encoding="utf-8")
    trusted = ModelOptions(model_name_or_path=str(tmp_path / "model"), trust_remote_code=True)
    plain = ModelOptions(model_name_or_path=str(tmp_path / "model"))
    before = [(config_fingerprint(o), model_fingerprint(str(o.model_name_or_path), o, "")) for o in (trusted, plain)]
    code.write_text("SCALE = 2\n", encoding="utf-8")
    after = [(config_fingerprint(o), model_fingerprint(str(o.model_name_or_path), o, "")) for o in (trusted, plain)]
    assert not set(before[0]) & set(after[0])
    assert before[1] == after[1], "code that is not run changes nothing"


def test_the_code_of_a_member_from_another_package_is_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_optimizers"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "rate.py").write_text("RATE = 1\n", encoding="utf-8")
    (package / "mine.py").write_text(
        "from burnish.optim.builtin import OPTIMIZERS\nfrom my_optimizers.rate import RATE\n"
        "@OPTIMIZERS.register('mine_of_a_package')\ndef mine(groups, options): ...\n", encoding="utf-8",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_optimizers.mine")
    try:
        options = RunOptions(model_name_or_path="model", optim="mine_of_a_package")
        before = plugin_code(options)
        assert list(before) == ["code of optim mine_of_a_package"]
        (package / "rate.py").write_text("RATE = 2\n", encoding="utf-8")
        assert plugin_code(options) != before
        assert plugin_code(RunOptions(model_name_or_path="model")) == {}
    finally:
        del OPTIMIZERS._members["mine_of_a_package"]


def test_files_of_other_installed_packages_are_not_read(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    for package in ("scores", "others"):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text("", encoding="utf-8")
    (installed / "scores" / "score.py").write_text("import others.code, scores.sign, torch\n", encoding="utf-8")
    (installed / "scores" / "sign.py").write_text("SIGN = 1\n", encoding="utf-8")
    (installed / "others" / "code.py").write_text("SIGN = 1\n", encoding="utf-8")
    before = source_digest(installed / "scores" / "score.py")
    (installed / "others" / "code.py").write_text("SIGN = 2\n", encoding="utf-8")
    assert source_digest(installed / "scores" / "score.py") == before
    (installed / "scores" / "sign.py").write_text("SIGN = 2\n", encoding="utf-8")
    assert source_digest(installed / "scores" / "score.py") != before
    assert source_digest(installed / "scores" / "none.py") == ""
