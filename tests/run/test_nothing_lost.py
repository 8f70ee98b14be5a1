"""No data loss: input files, results of earlier runs, and trained but unsaved weights."""

import builtins
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT, ENOSPC
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file

from bad_inputs import cut_short, read_output, write
from burnish import cli
from burnish.config.errors import UserError
from burnish.config.options import specs
from burnish.loop.loop import Loop
from burnish.run.plan.options import RunOptions
from burnish.run.recovery.clearing import SOURCES, BackupOnOverwrite, files_of_run
from burnish.utils.files import cache_home, exclusive_writer_lock, problems_of_folder
from pair_runs import pairs
from representative import representative_slow
from small_run import WORDS

pytestmark = pytest.mark.run

LORA = ["finetuning_type=lora", "max_steps=4"]
AGAIN = "overwrite_output_dir=true"


def trained(*argv: str) -> dict[str, bytes]:
    """Train and return the files in ``out``."""
    assert cli.main(["train", "run.yaml", *argv]) == 0
    return contents()


JOURNAL = {"run.log", "launch.json", "run.yaml", "events.jsonl", "outcome.json"}
"""Files that each launch rewrites."""


def contents(folder: str = "out") -> dict[str, bytes]:
    paths = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in JOURNAL)
    return {str(path): path.read_bytes() for path in paths}


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_linked", [False, True], ids=["by name", "by link"])
@pytest.mark.parametrize(
    "source",
    [
        "adapter_name_or_path=out", "adapter_name_or_path=out/checkpoint-4", "dataset=out/checkpoint-4",
        "ref_model=out/checkpoint-4", "ref_model_adapters=out",
    ],
)  # fmt: skip
def test_run_does_not_overwrite_its_own_inputs(
    source: str, is_linked: bool, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained(*LORA)
    if is_linked:
        Path("link").symlink_to("out")
        source = source.replace("=out", "=link")
    assert cli.main(["train", "run.yaml", *LORA, source, AGAIN]) == 2
    name, _, place = source.partition("=")
    assert f'"{name}" {place} is inside output_dir "out", which the run would overwrite.' in read_output(capsys)[1]
    assert contents() == before


def test_linked_dataset_inside_output_dir_is_not_overwritten(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(*LORA)
    answers = Path("out/generated_predictions.jsonl")
    answers.write_text('{"prompt": "a", "predict": "b"}\n' * 4, encoding="utf-8")
    Path("data/answers.jsonl").symlink_to("../out/generated_predictions.jsonl")
    write("data/dataset_info.json", {"answers": {"file_name": "answers.jsonl",
                                                 "columns": {"prompt": "prompt", "response": "predict"}}})  # fmt: skip
    before = contents()
    for argv in (["dataset=answers", "streaming=true"], ["dataset=data/answers.jsonl"]):
        assert cli.main(["train", "run.yaml", *LORA, AGAIN, *argv]) == 2
        assert '"dataset" data/answers.jsonl is inside output_dir "out"' in read_output(capsys)[1]
    assert contents() == before


PLAIN_WORDS = {
    "add_special_tokens", "add_tokens", "additional_target", "apollo_target", "attn_implementation", "cache_dir",
    "columns", "ddp_backend", "default_system", "export_dir", "export_gguf_type", "export_hub_model_id",
    "export_quantization_dataset",
    "freeze_extra_modules", "freeze_trainable_modules", "fsdp", "galore_target", "gradient_checkpointing_kwargs",
    "hf_hub_token", "hub_model_id", "hub_revision", "hub_token",
    "infer_executable", "infer_url", "leave_out", "liger_kernel_config", "llama_cpp", "logging_dir",
    "lora_target", "lr_scheduler_kwargs", "metric_for_best_model", "model_revision", "ms_hub_token", "num_processes",
    "oft_target", "optim_args", "optim_target_modules", "output_dir", "project", "report_to", "resume_from_checkpoint",
    "run_name", "served_adapters", "sglang_config", "tags", "torch_compile_backend", "torch_compile_mode",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "vllm_config",
}  # fmt: skip
"""Options of any text that name nothing a run reads and would clear."""


def test_every_path_option_is_a_source_or_declared_path_free() -> None:
    free = [spec for spec in specs(RunOptions).values() if not (spec.choices or spec.ignored)]
    texts = {spec.name for spec in free if "str" in str(spec.type)}
    assert texts - {*SOURCES, "dataset", "eval_dataset"} == PLAIN_WORDS


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", ["sft", "pt", "dpo", "rm", "kto"])
def test_new_run_removes_all_files_of_an_earlier_run(stage: str, user_folder: Path) -> None:
    if stage in ("dpo", "rm"):
        write("data/rows.json", pairs())
        write("data/dataset_info.json", {"rows": {"file_name": "rows.json", "ranking": True}})
    if stage == "pt":
        write("data/rows.json", [{"text": "red green"}] * 8)
    if stage == "kto":
        write("data/rows.json", [{"prompt": "a", "completion": WORDS[i], "label": i % 2 == 0} for i in range(8)])
    evaluated = ["eval_strategy=steps", "eval_steps=2", "val_size=4", "plot_loss=true"]
    trained(f"stage={stage}", "max_steps=4", *evaluated)
    written = {path.name for path in Path("out").iterdir()}
    assert "training_loss.png" in written
    assert written - {path.name for path in files_of_run(Path("out"))} == {"launch.json", "run.yaml"}


def test_run_does_not_remove_the_checkpoint_it_starts_from(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained("max_steps=4")
    argv = ["train", "run.yaml", "model_name_or_path=out/checkpoint-4", AGAIN]
    assert cli.main(argv) == 2
    assert '"model_name_or_path" out/checkpoint-4 is inside output_dir "out"' in read_output(capsys)[1]
    assert contents() == before
    assert cli.main([*argv, "output_dir=next", "max_steps=2"]) == 0


def test_checkpoints_of_another_program_are_not_overwritten(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = Path("out/checkpoint-2")
    theirs.mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt"):
        (theirs / name).write_bytes(b"theirs")
    Path("out/trainer_log.jsonl").write_text("{}")
    before = contents()
    for argv in ([], ["resume=must"]):
        assert cli.main(["train", "run.yaml", *argv]) == 2
        assert "contains checkpoints that were not written by burnish: checkpoint-2." in read_output(capsys)[1]
    assert contents() == before
    trained(AGAIN)
    assert Path("out/checkpoint-2/manifest.json").is_file()


def test_prediction_removes_nothing(user_folder: Path) -> None:
    before = trained(*LORA)
    argv = [*LORA, "adapter_name_or_path=out", "do_predict=true", "val_size=4", AGAIN]
    assert cli.main(["train", "run.yaml", *argv]) == 0
    after = contents()
    unchanged = [name for name in before if "_results" not in name and "trainer_log" not in name]
    assert {name: after.get(name) for name in unchanged} == {name: before[name] for name in unchanged}


def failing(*args: Any, **kwargs: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("where", ["burnish.run.build.create_scheduler", "burnish.loop.loop.Loop.step"])
def test_earlier_run_is_restored_if_new_run_fails_before_first_checkpoint(
    where: str, user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trained("max_steps=4")
    with monkeypatch.context() as patched:
        patched.setattr(where, failing)
        assert cli.main(["train", "run.yaml", "seed=1", AGAIN]) == 1
    after = contents()
    after.pop("out/traceback.txt")
    assert after == before


def test_earlier_run_is_removed_after_first_checkpoint_of_new_run(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(*LORA, "plot_loss=true")
    step = Loop.step

    def take(run: Any, *arguments: Any) -> None:
        assert Path("out/.earlier-run").is_dir() or run.state.global_step >= 2
        if run.state.global_step == 5:
            assert not Path("out/.earlier-run").exists()
            raise MemoryError
        step(run, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "step", take)
        assert cli.main(["train", "run.yaml", AGAIN, "save_in_background=false"]) == 1
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert not list(Path("out").glob("adapter*"))
    assert not Path("out/training_loss.png").exists()


def test_killed_new_run_is_resumed_by_the_same_command(user_folder: Path) -> None:
    before = trained("max_steps=4")
    Path("out/.earlier-run").mkdir()
    for path in [*Path("out").glob("checkpoint-*"), Path("out/model.safetensors")]:
        path.rename(Path("out/.earlier-run", path.name))
    Path("out/trainer_log.jsonl").write_text("{}\n", encoding="utf-8")
    assert cli.main(["train", "run.yaml", "max_steps=2", AGAIN]) == 0
    assert not Path("out/.earlier-run").exists()
    assert load_file("out/model.safetensors").keys() == load_file("model/model.safetensors").keys()
    assert contents() != before


@pytest.mark.parametrize("calls", range(1, 9))
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_earlier_files_survive_a_kill_followed_by_a_failure(
    calls: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process is killed at a rename: while it moves files aside, or back if its run fails."""
    before = {"config.json": "old", "model.safetensors": "old", "tokenizer.json": "old"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    rename, renamed = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) == calls:
            raise KeyboardInterrupt
        return rename(path, target)

    def attempt(error: type[BaseException]) -> None:
        with BackupOnOverwrite(tmp_path):
            (tmp_path / "model.safetensors").write_text("new")
            if fails or error is MemoryError:
                raise error

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt, RuntimeError):
        patched.setattr(Path, "rename", killed)
        attempt(RuntimeError)
    is_replaced = not fails and len(renamed) < calls
    with suppress(MemoryError):
        attempt(MemoryError)
    expected = {"model.safetensors": "new"} if is_replaced else before
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == expected


def test_missing_model_of_finished_run_is_rewritten_from_its_checkpoint(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained(*LORA)
    for harm in (
        lambda: Path("out/adapter_model.safetensors").unlink(),
        lambda: Path("out/adapter_config.json").unlink(),
        lambda: cut_short("out/adapter_model.safetensors"),
    ):
        harm()
        read_output(capsys)
        assert cli.main(["train", "run.yaml", *LORA]) == 0
        assert "Resuming from out/checkpoint-4: step 4 of 4." in read_output(capsys)[0]
        assert Path("out/adapter_model.safetensors").read_bytes() == before["out/adapter_model.safetensors"]
        assert cli.main(["train", "run.yaml", *LORA]) == 0
        assert "there is nothing to do." in read_output(capsys)[0]


def test_finished_run_without_model_and_checkpoints_is_reported(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "run.yaml", "save_strategy=no"]
    assert cli.main(argv) == 0
    Path("out/model.safetensors").unlink()
    read_output(capsys)
    assert cli.main(argv) == 2
    err = read_output(capsys)[1]
    assert "out: this run is finished, but its model.safetensors is missing." in err
    assert "overwrite_output_dir: true" in err


def request_to_closed_port(*args: Any, **kwargs: Any) -> None:
    """Send a request to a closed port with the client of huggingface_hub."""
    import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0]).get("http://127.0.0.1:9")


@pytest.mark.parametrize("is_offline", [True, False], ids=["offline", "no server"])
def test_failed_upload_after_export_reports_the_export_folder(
    is_offline: bool, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not is_offline:
        monkeypatch.setattr("huggingface_hub.HfApi.create_repo", request_to_closed_port)
    argv = ["model_name_or_path=model", "template=chatml", "export_dir=whole", "export_hub_model_id=me/model"]
    assert cli.main(["export", *argv]) == 1
    out, err = read_output(capsys)
    assert "The model is in whole." in out
    assert "error: whole was written but could not be uploaded to me/model: " in err
    assert "hf upload me/model whole" in err
    assert "Raised in burnish" not in err
    assert load_file("whole/model.safetensors").keys() == load_file("model/model.safetensors").keys()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(ENOSPC, "No space left on device")


@pytest.mark.parametrize("tee_log", ["", "tokenized_path=rows"])
def test_full_disk_of_encoded_rows_is_reported_with_its_path(
    tee_log: str, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("burnish.data.rows.encode.RowWriter.close", full)
        assert cli.main(["train", "run.yaml", "max_steps=1", *filter(None, [tee_log])]) == 1
    place = "rows" if tee_log else str(cache_home() / "rows")
    advice = "Set a different tokenized_path." if tee_log else "Set the environment variable BURNISH_CACHE"
    assert f'error: The disk of "{place}" is full.\n  Free some space. {advice}' in read_output(capsys)[1]
    assert not list(Path(place).glob(".*partial"))
    assert cli.main(["train", "run.yaml", "max_steps=1", *filter(None, [tee_log])]) == 0


def test_full_disk_during_export_is_reported_with_a_remedy(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["export", "model_name_or_path=model", "template=chatml", "export_dir=whole"]
    with monkeypatch.context() as patched:
        patched.setattr("burnish.models.save.save_config", full)
        assert cli.main(argv) == 1
    assert (
        'error: The disk of "whole" is full.\n  Free some disk space, or set export_dir to a folder on another'
        in read_output(capsys)[1]
    )
    assert cli.main(argv) == 0


WRITING = {
    "export": ("export_dir", ["model_name_or_path=model", "template=chatml"]),
    "predict": ("save_dir", ["model", "eval_dataset=rows", "dataset_dir=data", "template=chatml"]),
    "eval": ("save_dir", ["model", "eval_dataset=rows", "dataset_dir=data", "template=chatml"]),
    "score": ("save_dir", ["model", "dataset=rows", "dataset_dir=data", "template=chatml"]),
    "train": ("output_dir", ["run.yaml", *LORA]),
}
"""Command -> the option of its output folder, other arguments."""


@pytest.mark.parametrize("command", WRITING)
def test_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: str, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, rest = WRITING[command]
    (user_folder / "file").write_text("a")
    (user_folder / "link").symlink_to("nowhere")
    (user_folder / "shared").mkdir()
    is_allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "shared" and is_allowed(path, mode))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", failing)
    reasons = {
        "file": f'Expected {option} to be a folder. "file" is a file.',
        "file/in": f'{option} "file/in" cannot be created: "{user_folder / "file"}" is a file.',
        "link": f'{option} "link" cannot be created: "link" links to nowhere, which does not exist.',
        "shared": f'{option} "shared" is not writable: no permission in "shared".',
        "shared/in": f'{option} "shared/in" is not writable: no permission in "{user_folder / "shared"}".',
    }
    for place, reason in reasons.items():
        assert cli.main([command, *rest, f"{option}={place}"]) == 2
        err = read_output(capsys)[1]
        assert reason in err
        assert f"et a different {option}." in err
    assert not any((user_folder / "shared").iterdir())


def test_read_only_file_system_is_named(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    (problem,) = problems_of_folder(user_folder / "out", "save_dir")
    assert f'is not writable: the file system of "{user_folder}" is read-only.' in str(problem)


def test_folder_that_vanishes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(ENOENT, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", missing)
    with (
        pytest.raises(UserError, match="cannot be created: No such file or directory"),
        exclusive_writer_lock(tmp_path / "a"),
    ):
        pass


@pytest.mark.parametrize(("command", "writer"), [("predict", "predictions.predict"), ("eval", "finish")])
def test_full_disk_during_prediction_is_reported_with_a_remedy(
    command: str, writer: str, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [command, "model", "eval_dataset=rows", "dataset_dir=data", "template=chatml", "save_dir=said"]
    argv += ["max_new_tokens=2", "max_samples=2"]
    with monkeypatch.context() as patched:
        patched.setattr(f"burnish.run.{writer}.save_metrics", full)
        assert cli.main(argv) == 1
    err = read_output(capsys)[1]
    assert 'error: The disk of "said" is full.\n  Free some space or set a different save_dir, and run the' in err
    assert "save_total_limit" not in err
    assert cli.main(argv) == 0


def test_full_disk_during_gguf_export_is_reported_and_leaves_no_partial_file(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    argv = ["export", "model_name_or_path=model", "template=chatml", "export_dir=whole", "export_format=gguf"]

    def cut(writer: object) -> None:  # numpy's message, which has no errno
        raise OSError("1536 requested and 8 written")

    with monkeypatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "write_tensors_to_file", cut)
        assert cli.main(argv) == 1
    out, err = read_output(capsys)
    assert (
        'error: The disk of "whole" is full.\n  Free some disk space, or set export_dir to a folder on another' in err
    )
    assert "llama-server" not in out
    assert not Path("whole").exists()
    assert cli.main(argv) == 0
    assert list(Path("whole").glob("*.gguf"))


REPORTS = ["train_results.json", "all_results.json", "eval_results.json", "trainer_state.json", "training_loss.png",
           "README.md", ".finished.json"]  # fmt: skip


@contextmanager
def full_disk_for(name: str) -> Iterator[list[str]]:
    """Let every write of the file ``name`` in ``out`` fail. Yields the names of all written files."""
    written: list[str] = []
    original_open = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = Path(file).absolute() if isinstance(file, str | Path) else None
        if path is None or path.parent.name != "out" or not set(mode) & set("wax"):
            return original_open(file, mode, *args, **kwargs)
        written.append(re.sub(r"\.\d+-\d+\.incomplete$", "", path.name))
        if name in (written[-1], written[-1].removeprefix(".")):
            raise OSError(ENOSPC, "No space left on device")
        return original_open(file, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, "open", opened)
        patched.setattr(io, "open", opened)
        yield written


@pytest.mark.sample(2)
@pytest.mark.parametrize("saves", ["steps", "no"])
@pytest.mark.parametrize("name", representative_slow(REPORTS, 2))
def test_full_disk_during_a_report_loses_only_that_report(
    name: str, saves: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "run.yaml", "max_steps=1", "val_size=0.2", "eval_strategy=steps", f"save_strategy={saves}"]
    with full_disk_for(name) as written:
        assert cli.main([*argv, "plot_loss=true"]) == 1
    others = {one if one in REPORTS else one.removeprefix(".") for one in written}
    assert set(REPORTS) - others <= {".finished.json"}
    err = read_output(capsys)[1]
    more = " or set save_total_limit: 1, then run the same command again to resume" if saves == "steps" else ""
    assert 'error: The disk is full: "out' in err.replace("a file in ", "")
    assert f'\n  The model in "out" is complete and fully trained.\n  Free some disk space{more}.\n' in err
    assert load_file("out/model.safetensors")
    if saves == "steps":
        assert cli.main([*argv, "plot_loss=false"]) == 0
        assert name.endswith(".png") or Path("out", name).is_file()


def test_restarted_run_resumes_from_its_own_config_file(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``burnish train out/run.yaml``, as started by Continue in the web UI."""
    step = Loop.step

    def take(run: Any, *arguments: Any) -> None:
        step(run, *arguments)
        if run.state.global_step == 5:
            raise OSError("gone")

    argv = ["overwrite_output_dir=true", "resume=never", "save_strategy=steps", "save_steps=2"]
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", take)
        assert cli.main(["train", "run.yaml", *argv]) == 1
    assert "# used only to start the run: overwrite_output_dir: true" in Path("out/run.yaml").read_text(
        encoding="utf-8"
    )
    capsys.readouterr()
    assert cli.main(["train", "out/run.yaml"]) == 0
    assert "Resuming from out/checkpoint-4" in read_output(capsys)[0]
