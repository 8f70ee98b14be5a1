"""A token is used where it is needed and shown nowhere: every command, with a marker in every secret, and then no file
and no line that holds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bad_inputs import ROWS, write
from burnish import cli
from burnish.app.plan import RunOptions
from burnish.core.options import specs
from burnish.core.secrets import BLOTTED, has_secret_name, without_secrets
from burnish.hf.arguments.training import TrainingArguments

pytestmark = pytest.mark.run

GIVEN, OF_THE_SYSTEM = "hf_GIVENxMARKER0123", "hf_SYSTEMxMARKER456"
SECRETS = [name for name, spec in specs(RunOptions).items() if spec.is_secret]
WORDS = [f"{name}={GIVEN}" for name in SECRETS]


def test_what_is_called_a_token_or_a_key_is_declared_as_a_secret() -> None:
    declared = {**specs(RunOptions), **TrainingArguments.declared}
    assert {name for name, spec in declared.items() if spec.is_secret} == {n for n in declared if has_secret_name(n)}
    assert {"hf_hub_token", "ms_hub_token", "hub_token"} <= {n for n, spec in declared.items() if spec.is_secret}
    for name in ("max_new_tokens", "include_num_input_tokens_seen", "add_special_tokens", "eos_token_id"):
        assert not has_secret_name(name)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_TOKEN": OF_THE_SYSTEM, "WANDB_API_KEY": OF_THE_SYSTEM, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "burnish", *words], capture_output=True, text=True, env=environment, check=False
    )


def write_failing_optimizer() -> None:
    """A failure that holds the token in its text."""
    Path("sitecustomize.py").write_text(
        "import burnish.core.loop as loop\n"
        f"def fails(*a, **k): raise RuntimeError('the hub refused {GIVEN} and {OF_THE_SYSTEM}')\n"
        "loop.take_step = fails\n",
        encoding="utf-8",
    )


COMMANDS = {
    "train": (["train", "run.yaml"], 0),
    "evaluate and predict": (["train", "run.yaml", "do_predict=true", "val_size=4", "output_dir=other"], 0),
    "explain": (["explain", "run.yaml", "output_dir=other"], 0),
    "export": (["export", "model_name_or_path=model", "export_dir=whole", "template=chatml"], 0),
    "env": (["env"], 0),
    "a wrong option": (["train", "run.yaml", f"hub_tokn={GIVEN}", "output_dir=other"], 2),
    "an option that is not here": (["train", "run.yaml", f"om_hub_token={GIVEN}", "output_dir=other"], 2),
    "a wrong value": (["train", "run.yaml", f'hf_hub_token=["{GIVEN}"', "lora_rank=x", "output_dir=other"], 2),
    "a model that is nowhere": (["train", "run.yaml", "model_name_or_path=no/model", "output_dir=other"], 2),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_or_writes_a_secret(
    name: str, user_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, OF_THE_SYSTEM)
    words, status = COMMANDS[name]
    assert cli.main([*words, *([] if name == "env" else WORDS)]) == status
    out, err = capfd.readouterr()
    assert_nowhere(out + err, user_folder)


@pytest.mark.parametrize("debug", [[], pytest.param(["--debug"], marks=pytest.mark.slow)], ids=["file", "debug"])
def test_no_traceback_holds_a_secret(debug: list[str], user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_failing_optimizer()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(user_folder), os.environ.get("PYTHONPATH", "")]))
    done = run("train", "run.yaml", *WORDS, *debug)
    assert done.returncode == 1
    assert f"the hub refused {BLOTTED} and {BLOTTED}" in done.stderr
    Path("sitecustomize.py").unlink()
    assert_nowhere(done.stdout + done.stderr, user_folder)


def assert_nowhere(said: str, folder: Path) -> None:
    caches = [Path(os.environ["BURNISH_CACHE"])]
    for marker in (GIVEN, OF_THE_SYSTEM):
        assert marker not in said
        for path in (path for place in (folder, *caches) for path in place.rglob("*") if path.is_file()):
            assert marker.encode() not in path.read_bytes(), path
    write("data/rows.json", ROWS)


def test_the_arguments_of_a_script_do_not_show_their_token(tmp_path: Path) -> None:
    made = TrainingArguments(output_dir=str(tmp_path), hub_token=GIVEN, report_to="none", use_cpu=True)
    shown = f"{made!r} {made} {made.to_dict()} {made.to_json_string()} {made.to_sanitized_dict()}"
    assert GIVEN not in shown
    assert made.hub_token == GIVEN


def test_ordinary_words_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_TOKEN", "a")
    assert without_secrets("a cat sat") == "a cat sat"
