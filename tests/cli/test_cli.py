"""The command line: commands, help, error messages, exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish import __version__, cli
from burnish.config.options import specs
from burnish.demo.command import answers, demo_plan, demo_questions
from burnish.demo.report import BUNDLED, DemoQuestion, exact_match_rate
from burnish.models.generate import PREDICTION_ONLY, GenerationOptions
from burnish.run.plan.listing import list_options
from burnish.run.plan.plan import RunOptions

pytestmark = pytest.mark.run

SOURCE = Path(__file__).parents[2] / "src"


def burnish(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run a command in this process. Returns exit status, standard output and standard error."""
    status = cli.main(list(argv))
    output = capsys.readouterr()
    return status, output.out, output.err


def run_python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_commands(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, out, _ = burnish(capsys, *argv)
    assert status == 0
    for command in ("train", "explain", "demo", "env", "run.yaml", "key=value"):
        assert command in out


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version_is_printed(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert burnish(capsys, word) == (0, f"burnish {__version__}\n", "")


def test_train_help_lists_every_option_with_default_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = burnish(capsys, "train", "--help")
    assert status == 0
    for name, spec in specs(RunOptions).items():
        assert f"--{name}" in out
        assert spec.help, f"{name} has no help"
    assert "default 5e-05" in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_train_help_can_be_searched() -> None:
    result = list_options(RunOptions, "warmup")
    assert "--warmup_steps" in result
    assert "--seed" not in result
    assert 'Did you mean "learning_rate"' in list_options(RunOptions, "learning_rats")


def test_listing_shows_choices_as_in_yaml_and_the_unit_of_options_without_a_default() -> None:
    listing = " ".join(list_options(RunOptions).split())
    assert "one of group, batch, none, true, false" in listing
    assert "(above 0 MiB)" in listing  # ddp_bucket_cap_mb
    assert "True" not in listing


def test_export_help_lists_the_options_that_its_messages_name(capsys: pytest.CaptureFixture[str]) -> None:
    out = burnish(capsys, "export", "--help")[1]
    assert "--llama_cpp" in out
    assert "--overwrite_output_dir" in out


def test_help_of_chat_and_api_lists_what_they_read(capsys: pytest.CaptureFixture[str]) -> None:
    options: tuple[str, ...] = ("infer_context", "template", "image_max_pixels")
    api, chat = (burnish(capsys, command, "--help")[1] for command in ("api", "chat"))
    assert all(f"--{name} " in api for name in options)
    assert all(f"--{name} " in chat for name in (*options, "temperature", "max_new_tokens", "quantization_bit"))
    assert all(f"--{name} " not in chat for name in (*PREDICTION_ONLY, "train_on_prompt"))
    assert "--train_on_prompt " not in api
    assert set(PREDICTION_ONLY) < set(specs(GenerationOptions))


def test_every_command_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        status, out, _ = burnish(capsys, command, "--help")
        assert status == 0
        assert out.startswith(f"burnish {command}: ")
        assert f"usage: burnish {command}" in out


def test_help_after_arguments_shows_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    expected = burnish(capsys, "train", "--help")
    assert burnish(capsys, "train", "run.yaml", "seed=3", "--help") == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["env", "--foo"], "burnish env takes no options. Received: --foo."), (["version", "x"], "takes no options"),
     (["demo", "run.yaml"], "has a fixed configuration")],
)  # fmt: skip
def test_unused_arguments_of_a_command_are_rejected(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("seed: 1\n")
    status, out, err = burnish(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err


def test_unknown_command_suggests_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = burnish(capsys, "trian")
    assert (status, out) == (2, "")
    assert 'Unknown command "trian". Did you mean "train"?' in err


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("run.yaml", "burnish train run.yaml"),
     ("--stage", "burnish train --stage")],
)  # fmt: skip
def test_missing_command_suggests_a_remedy(capsys: pytest.CaptureFixture[str], word: str, remedy: str) -> None:
    status, _, err = burnish(capsys, word)
    assert status == 2
    assert remedy in err
    assert len(err.splitlines()) <= 4


def test_env_prints_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = burnish(capsys, "env")
    assert status == 0
    for name in ("burnish", "python", "torch", "transformers", "memory"):
        assert f"\n{name}" in f"\n{out}"


def test_debug_prints_traceback_and_is_not_a_run_option(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = burnish(capsys, "train", "--debug", "learning_rat=1")
    assert status == 2
    assert "Traceback" in err
    assert '"debug"' not in err
    _, _, err = burnish(capsys, "train", "learning_rat=1")
    assert "Traceback" not in err


@pytest.mark.slow
def test_both_train_entry_points_print_the_same(tmp_path: Path) -> None:
    argv = ["--stage", "stf", "--output_dir", "out"]
    module = run_python("-m", "burnish.train", *argv, cwd=tmp_path)
    command = run_python("-m", "burnish", "train", *argv, cwd=tmp_path)
    assert module.returncode == command.returncode == 2
    assert module.stderr == command.stderr
    assert "stf" in command.stderr
    assert list(tmp_path.iterdir()) == []


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_demo_uses_bundled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = demo_plan(["num_train_epochs=0.5"])
    assert result.options.num_train_epochs == 0.5
    assert Path(result.options.model_name_or_path, "model.safetensors").is_file()
    assert result.options.output_dir == "demo-run"
    assert len(demo_questions()) == 200


def test_exact_match_compares_letter_for_letter() -> None:
    questions = [DemoQuestion("2 + 2?", "4"), DemoQuestion("Say yes.", "yes")]
    assert exact_match_rate(questions, ["4", "Yes"]) == 0.5


def test_untrained_model_answers_nothing_correctly(tmp_path: Path) -> None:
    questions = demo_questions()[:8]
    result = answers(BUNDLED / "model", questions, batch_size=3)
    assert len(result) == 8
    assert exact_match_rate(questions, result) == 0.0
