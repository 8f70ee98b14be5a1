"""Invalid options: rejected by name, in at most four lines, with exit status 2, without a traceback, before anything is
written."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bad_inputs import matches_stored_message
from burnish import cli
from burnish.config.errors import UserError
from burnish.run.plan.checks import trains
from burnish.run.plan.config_files import read_config
from burnish.run.plan.plan import Plan, plan

MODEL = Path(__file__).parents[2] / "src" / "burnish" / "demo" / "model"
ROWS = [{"instruction": f"Say {word}.", "input": "", "output": word} for word in ("yes", "no", "maybe", "never")] * 6


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small data set. The cache of rows is outside of it."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "answers.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "data" / "dataset_info.json").write_text('{"answers": {"file_name": "answers.json"}}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(folder: Path, **changes: str | None) -> Path:
    """Write a valid ``run.yaml`` with ``changes``; None removes an option. Returns its path."""
    lines = {
        "model_name_or_path": str(MODEL), "stage": "sft", "finetuning_type": "full", "dataset_dir": "data",
        "dataset": "answers", "cutoff_len": "128", "output_dir": "out", "max_steps": "3", "report_to": "none",
        "per_device_train_batch_size": "2", **changes,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text("".join(f"{k}: {v}\n" for k, v in lines.items() if v is not None), encoding="utf-8")
    return path


@dataclass(frozen=True)
class BadRun:
    """An invalid configuration: its number, the expected messages, and changes to ``run.yaml`` and the arguments."""

    number: str
    expected: list[str]
    changes: dict[str, str | None] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)  # additional command-line arguments

    def __str__(self) -> str:
        return self.number


REJECTED = [
    BadRun("A04", ['"learning_rat"', "run.yaml, line 11", 'Did you mean "learning_rate"?'], {"learning_rat": "1e-4"}),
    BadRun("A07", ["run.yaml, line 11", "num_train_epochs", "a number", "three"], {"num_train_epochs": "three"}),
    BadRun("A08", ["learning_rate", "greater than 0", "-0.001"], {"learning_rate": "-0.001"}),
    BadRun("A10", ["per_device_train_batch_size", "at least 1", "0"], {"per_device_train_batch_size": "0"}),
    BadRun("A11", ["per_device_train_batch_size", "at least 1", "-1"], {"per_device_train_batch_size": "-1"}),
    BadRun("A13", ["num_train_epochs", "greater than 0"], {"num_train_epochs": "0", "max_steps": None}),
    BadRun("A14", ["num_train_epochs", "greater than 0", "-1"], {"num_train_epochs": "-1", "max_steps": None}),
    BadRun("A17", ["qwenn", "qwen"], {"template": "qwenn"}),
    BadRun("A18b", ["llama3", "<|start_header_id|>"], {"template": "llama3"}),
    BadRun("A19", ["adamx", "adamw_torch"], {"optim": "adamx"}),
    BadRun("an optimizer's argument", ["beta1 must be a number", "Received: abc", "run.yaml, line"],
          {"optim": "adafactor", "optim_args": "beta1=abc"}),
    BadRun("an argument of BAdam", ["maximize must be true or false", "run.yaml, line"],
          {"use_badam": "true", "optim_args": "maximize=no"}),
    BadRun("A21", ["wandb", "pip install"], {"report_to": "wandb"}),
    BadRun("A21b", ["wandbb", "wandb"], {"report_to": "wandbb"}),
    BadRun("A23", ["Wqkv", "q_proj"], {"finetuning_type": "lora", "lora_target": "Wqkv"}),
    BadRun("A23b", ["Wqkv", "q_proj"], {"finetuning_type": "lora", "lora_target": "q_proj,Wqkv"}),
    BadRun("A24b", ["1000 warmup steps", "3 steps", "warmup_steps"], {"warmup_steps": "1000"}),
    BadRun("A25", ["save_steps", "greater than 0"], {"save_steps": "0"}),
    BadRun("A27", ["eval_strategy", "eval_dataset", "val_size"], {"eval_strategy": "steps"}),
    BadRun("A28", ["val_size"], {"val_size": "0.9999"}),
    BadRun("A29", ["cutoff_len", "at least"], {"cutoff_len": "0"}),
    BadRun("A29b", ["cutoff_len"], {"cutoff_len": "1"}),
    BadRun("A31", ["load_best_model_at_end", "eval_strategy"], {"load_best_model_at_end": "true"}),
    BadRun("A33", ["quantization_bit", "lora"], {"quantization_bit": "4"}),
    BadRun("A34", ["deepspeed", "zero.json", "does not exist"], {"deepspeed": "zero.json"}),
    BadRun("A37", ['"learning_rat"', "command line", '"learning_rate"'], argv=["learning_rat=1e-3"]),
    BadRun("A37, a prefix is no name", ['"learn"', "command line"], argv=["--learn", "1e-3"]),
    BadRun("A39, stage", ["stf", "sft"], {"stage": "stf"}),
    BadRun("A39, method", ["loar", "lora"], {"finetuning_type": "loar"}),
    BadRun("A41", ["max_samples", "at least 1"], {"max_samples": "0"}),
    BadRun("A42", ["model_name_or_path", "/nowhere/at/all"], {"model_name_or_path": "/nowhere/at/all"}),
    BadRun("A42b", ["some/model", "HF_HUB_OFFLINE"], {"model_name_or_path": "some/model"}),
    BadRun("A65", ["model_name_or_path"], {"model_name_or_path": None}),
    BadRun("A65, empty", ["model_name_or_path"], {"model_name_or_path": "''"}),
    BadRun("A67", ["lora_dropout", "less than 1"], {"lora_dropout": "1.5", "finetuning_type": "lora"}),
    BadRun("no data set", ["dataset"], {"dataset": None}),
    BadRun("an unknown data set", ["answerz", "answers"], {"dataset": "answerz"}),
    BadRun("two formats", ["bf16", "fp16"], {"bf16": "true", "fp16": "true"}),
    BadRun("a mapping for a number", ["seed", "an integer"], {"seed": "{a: 1}"}),
    BadRun("nothing for a number", ["seed", "an empty value"], {"seed": "null"}),
    BadRun("half an integer", ["max_steps", "2.5"], {"max_steps": "2.5"}),
    BadRun("a preference stage", ["dpo", "sft"], {"stage": "dpo"}),
    BadRun("another tool's quantization", ["fp8", "bf16"], {"fp8": "true"}),
    BadRun("an interval of one and a half", ["logging_steps", "1.5"], {"logging_steps": "1.5"}),
    BadRun("a schedule's argument", ["cosine", "lr_scheduler_kwargs"],
          {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "{cycles: 2}"}),
    BadRun("a value of a schedule's argument", ["warmup_stable_decay", "lr_scheduler_kwargs", "line"],
          {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": "{decay_type: slow}"}),
    BadRun("a rate that falls upwards", ["min_lr 1 is above learning_rate 5e-05"],
          {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "{min_lr: 1}"}),
    BadRun("an argument of a schedule that follows a metric", ["greedy", "lr_scheduler_kwargs", "run.yaml, line"],
          {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": "{calm: 2}", "eval_strategy": "steps",
           "val_size": "4"}),
    BadRun("a value of one", ["reduce_lr_on_plateau", "lr_scheduler_kwargs", "< 1.0"],
          {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": "{factor: 2.0}",
           "eval_strategy": "steps", "val_size": "4"}),
    BadRun("a metric that must be asked for", ["eval_accuracy", "compute_accuracy: true", "run.yaml, line"],
          {"metric_for_best_model": "accuracy", "eval_strategy": "steps", "val_size": "4", "save_strategy": "best"}),
    BadRun("a metric that there is not", ["eval_f1", "Available: eval_aux_loss, eval_loss"],
          {"metric_for_best_model": "f1", "eval_strategy": "steps", "val_size": "4"}),
]  # fmt: skip


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize("wrong", REJECTED, ids=str)
def test_wrong_option_is_rejected(
    wrong: BadRun, command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder, **wrong.changes)
    before = sorted(path for path in folder.rglob("*"))
    assert cli.main([command, "run.yaml", *wrong.argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    for message in wrong.expected:
        assert message in output.err
    assert matches_stored_message(f"option {wrong}", output.err, folder)
    assert len(output.err.splitlines()) <= 4
    assert "Traceback" not in output.err
    assert sorted(path for path in folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("template", "qwenn"), ("template", "llama3"), ("template", "mine.yaml"), ("template", "mine.jinja"),
        ("dataset", "answerz"), ("dataset", "more/answers.json"), ("eval_dataset", "answerz"), ("dataset_dir", "dat"),
        ("optim", "lomo"), ("optim_args", "speed=3"), ("adapter_name_or_path", "nowhere"),
        ("tokenized_path", "run.yaml"), ("resume_from_checkpoint", "nowhere"),
        ("new_special_tokens_config", "nowhere.yaml"),
    ],
)  # fmt: skip
def test_error_found_after_parsing_names_the_line_of_the_value(
    name: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(folder, **{name: value})
    line = 1 + [text.split(":")[0] for text in path.read_text().splitlines()].index(name)
    assert cli.main(["explain", "run.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: run.yaml, line {line}: ")


def test_misspelled_optimizer_suggests_installed_ones(folder: Path) -> None:
    with pytest.raises(UserError) as raised:
        make_plan(folder, optim="adaloma")
    assert "adalomo" not in str(raised.value)
    assert "adam_mini" in str(raised.value)
    with pytest.raises(UserError, match='does not support "optim" adalomo: it updates each weight during the backward'):
        make_plan(folder, optim="adalomo")


def test_mistakes_of_four_kinds_are_reported_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder, learning_rat="1e-4", save_steps="0", model_name_or_path="nowhere/here/model", dataset="absent")
    assert cli.main(["train", "run.yaml"]) == 2
    output = capsys.readouterr().err
    for expected in ("learning_rat", "save_steps", "nowhere/here/model", '"absent"'):
        assert expected in output
    assert len(output.splitlines()) <= 12


# --- accepted options -------------------------------------------------------------------------------------------------


def make_plan(folder: Path, **changes: str | None) -> Plan:
    return plan(read_config(write_run(folder, **changes)))


def test_half_precision_on_a_cpu_reports_its_dtype(folder: Path) -> None:
    """A16, A62."""
    assert any("fp16" in note and "CPU" in note for note in make_plan(folder, fp16="true", use_cpu="true").notes)
    assert make_plan(folder, bf16="true", use_cpu="true").options.bf16


def test_both_override_syntaxes_are_accepted(folder: Path) -> None:
    """A38."""
    from burnish.run.plan.config_files import merge, read_arguments

    write_run(folder)
    for argv in (["--learning_rate", "5.0"], ["learning_rate=5.0"]):
        result = plan(merge(*read_arguments(["run.yaml", *argv]), {}))
        assert result.options.learning_rate == 5.0
        assert result.provenance["learning_rate"] == "the command line"


def test_training_is_enabled_by_default(folder: Path) -> None:
    """A61."""
    assert trains(make_plan(folder).options)
