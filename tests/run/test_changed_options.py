"""Each option is changed in the middle of a run: the resumed run is bitwise equal, reports the change, or fails."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import change, read_output
from burnish import cli
from burnish.checkpoint.comparison import MAY_CHANGE
from burnish.config.options import specs
from burnish.run.plan.options import GROUPS, MEMBER_GROUPS, RunOptions
from burnish.run.recovery.fingerprints import (
    BY_CONTENT,
    UNTRACKED_GROUPS,
    UNTRACKED_OPTIONS,
    kept_options,
)
from option_effects import OPTION_EFFECTS

DECLARED = [name for names in UNTRACKED_OPTIONS.values() for name in names]
OF_GROUPS = [name for g in (*GROUPS, *MEMBER_GROUPS) if g.__name__ in UNTRACKED_GROUPS for name in specs(g)]
NOT_RESUMED = {
    "overwrite_output_dir", "resume", "resume_from_checkpoint", "output_dir", "do_train", "do_eval", "do_predict",
    *(name for name, row in OPTION_EFFECTS.items() if row.beside.keys() & {"do_predict", "do_eval"}),
}  # fmt: skip
"""They say whether the run goes on at all, or are seen in a run that does not train."""


def test_each_option_is_stored_or_fingerprinted_or_declared_harmless() -> None:
    by_content = [name for names in BY_CONTENT.values() for name in names]
    named = [*DECLARED, *by_content]
    assert len(named) == len(set(named))
    assert set(named) <= specs(RunOptions).keys()
    assert not set(named) & set(OF_GROUPS)
    left = [n for n, s in specs(RunOptions).items() if not s.ignored and not s.is_secret and n not in kept_options()]
    assert set(left) <= {*named, *OF_GROUPS}
    fingerprints = {"data", "eval_data", "template", "tokenizer", "base_model", "config", "adapters", "rows_per_step"}
    known = specs(RunOptions).keys() | fingerprints | {"world_size", "versions"}
    assert known >= MAY_CHANGE


@pytest.fixture(scope="module")
def halfway(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run that was killed after step 2 of 4 (``out``), and an uninterrupted one (``whole``)."""
    from bad_inputs import make_folder

    folder = tmp_path_factory.mktemp("halfway")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        make_folder(small_model)
        text = Path("run.yaml").read_text(encoding="utf-8").replace("max_steps: 8", "max_steps: 4")
        Path("run.yaml").write_text(f"{text}val_size: 4\n", encoding="utf-8")
        assert cli.main(["train", "run.yaml"]) == 0
        shutil.copytree("out", "whole")
        shutil.rmtree("out/checkpoint-4")
        for path in Path("out").iterdir():
            if path.is_file():
                path.unlink()
    return folder


@pytest.fixture
def half(halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(halfway, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(halfway / "cache"))
    return tmp_path


def same_bits() -> bool:
    return Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def assert_resumes_equally_or_reports(capsys: pytest.CaptureFixture[str], name: str, *argv: str) -> None:
    capsys.readouterr()
    status = cli.main(["train", "run.yaml", *argv])
    out, err = read_output(capsys)
    assert status in (0, 2), err
    if status == 0 and "nothing to do" not in out and not same_bits():
        assert re.search(f"{name} (was|has changed|changed from) ", out), out
    assert status == 2 or "Resuming from out/checkpoint-2: step 2 of" in out or "nothing to do" in out


def value_of(name: str) -> str:
    value = OPTION_EFFECTS[name].value
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


HARMLESS_OPTIONS = sorted(({*DECLARED, *OF_GROUPS} & OPTION_EFFECTS.keys()) - NOT_RESUMED)
OTHER_OPTIONS = sorted(OPTION_EFFECTS.keys() - {*DECLARED, *OF_GROUPS} - NOT_RESUMED)


def sample(names: list[str], count: int) -> list[str]:
    seed = int(os.environ.get("BURNISH_SEED", "0"))
    return sorted(random.Random(seed).sample(names, min(count, len(names))))


@pytest.mark.sample(3)
@pytest.mark.run
@pytest.mark.parametrize("name", sample(HARMLESS_OPTIONS, 8))
def test_option_declared_harmless_does_not_change_results(
    name: str, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_resumes_equally_or_reports(capsys, name, f"{name}={value_of(name)}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HARMLESS_OPTIONS, *OTHER_OPTIONS])
def test_changed_option_has_no_effect_or_is_reported(name: str, half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = [
        f"{key}={json.dumps(v) if isinstance(v, list | dict) else v}" for key, v in OPTION_EFFECTS[name].beside.items()
    ]
    assert_resumes_equally_or_reports(capsys, name, f"{name}={value_of(name)}", *beside)


def other_numbers(name: str) -> None:
    path = Path("model/tokenizer.json")
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    raw["model"]["merges"] = raw["model"]["merges"][:-2]
    path.write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize(
    ("changed", "harm", "argv"),
    [
        ("tokenizer", lambda: other_numbers("tokenizer"), []),
        ("config", lambda: change("model/config.json", rms_norm_eps=1e-3), []),
        ("config", lambda: change("model/config.json", rope_parameters={"rope_theta": 5e5}), []),
        ("rope_scaling", lambda: None, ["rope_scaling=linear"]),
        ("dataloader_drop_last", lambda: None, ["dataloader_drop_last=true"]),
        ("on_empty_target", lambda: None, ["on_empty_target=keep"]),
    ],
    ids=["tokenizer", "norm", "rope parameters", "rope_scaling", "dataloader_drop_last", "on_empty_target"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "explain"])
def test_option_that_changes_results_prevents_a_resume(
    changed: str, harm: Any, argv: list[str], command: str, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm()
    assert cli.main([command, "run.yaml", *argv]) == 2
    assert changed in read_output(capsys)[1]


@pytest.mark.run
def test_changed_implementation_option_is_reported(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.yaml", "padding_free=false"]) == 0
    assert "padding_free was true in checkpoint-2 and is false now." in read_output(capsys)[0]


@pytest.mark.run
def test_config_keys_without_effect_on_results_do_not_prevent_a_resume(half: Path) -> None:
    change("model/config.json", transformers_version="4.0.0", use_cache=False)
    assert cli.main(["train", "run.yaml"]) == 0
    assert same_bits()


@pytest.mark.slow
@pytest.mark.run
def test_different_initial_adapter_prevents_resume(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["finetuning_type=lora", "max_steps=2"]
    for seed in (1, 2):
        assert cli.main(["train", "run.yaml", *lora, f"seed={seed}", f"output_dir=a{seed}"]) == 0
    started = ["train", "run.yaml", *lora, "output_dir=next"]
    assert cli.main([*started, "adapter_name_or_path=a1"]) == 0
    shutil.copytree("a1", "moved")
    assert cli.main([*started, "adapter_name_or_path=moved"]) == 0
    read_output(capsys)
    assert cli.main([*started, "adapter_name_or_path=a2"]) == 2
    assert "adapters has changed" in read_output(capsys)[1]


@pytest.mark.run
def test_model_only_checkpoints_are_not_resumed_as_complete(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "run.yaml", "save_only_model=true"]
    assert cli.main(argv) == 0
    assert same_bits()
    assert not Path("out/checkpoint-4/optimizer.json").exists()
    shutil.rmtree("out/checkpoint-2")
    read_output(capsys)
    assert cli.main([*argv, "max_steps=5"]) == 2
    assert 'out/checkpoint-4: this checkpoint has no "optimizer"' in read_output(capsys)[1]


# --- finished and unfinished runs with other hyperparameters ----------------------------------------------------------


@pytest.fixture
def finished(halfway: Path, half: Path) -> Path:
    """Return the folder of the run that has trained all 4 steps."""
    shutil.rmtree("out")
    shutil.copytree("whole", "out")
    return half


CHANGES = ["learning_rate=2e-3", "weight_decay=0.1", "warmup_steps=1", "max_grad_norm=0.5", "seed=7", "cutoff_len=64"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
def test_changed_hyperparameter_is_rejected_with_both_values_and_remedies(
    change: str, is_finished: bool, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    request.getfixturevalue("finished" if is_finished else "half")
    name, _, value = change.partition("=")
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*"))
    for command in ("train", "explain"):
        assert cli.main([command, "run.yaml", change]) == 2
        err = read_output(capsys)[1]
        assert f"{name} changed from " in err
        assert f" to {float(value):g}" in err or f" to {value}" in err
        assert "a different output_dir" in err
        assert "overwrite_output_dir: true" in err
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("out").rglob("*")) == before


@pytest.mark.parametrize(
    "argv",
    [["max_steps=3"], ["do_predict=true", "do_train=true"], ["do_eval=true", "do_train=true"],
     ["eval_strategy=steps", "eval_steps=2"], ["plot_loss=true"], ["profile=true", "profile_steps=1", "max_steps=4"]],
    ids=" ".join,
)  # fmt: skip
def test_finished_run_rejects_options_it_would_not_apply(
    argv: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.yaml", *argv]) == 2
    err = read_output(capsys)[1]
    assert argv[0].split("=")[0] in err
    assert "overwrite_output_dir: true" in err


@pytest.mark.parametrize("argv", ["", "logging_steps=2", "save_steps=4", "dataloader_num_workers=1"])
def test_finished_run_does_nothing_if_results_are_unchanged(
    argv: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.yaml", *argv.split()]) == 0
    assert "finished at step 4: there is nothing to do." in read_output(capsys)[0]
    assert same_bits()


@pytest.mark.run
def test_finished_run_can_be_trained_further(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.yaml", "max_steps=5", "eval_strategy=steps", "eval_steps=5"]) == 0
    assert "max_steps was 4 in checkpoint-4 and is 5 now." in read_output(capsys)[0]
    assert not same_bits()
