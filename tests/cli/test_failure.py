"""Failures of a command: a message and an exit status, never a traceback."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from burnish.cli import main
from burnish.config.errors import NonFiniteError, Problem, UserError
from burnish.run.plan.memory import Formats
from burnish.run.recovery import failure
from burnish.run.recovery.failure import TRACEBACK_NAME, explain_failure
from burnish.utils.activity import Activity, annotate_errors, interrupted_activity
from burnish.utils.files import error_number
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run


def exception_of(action, *args):
    """Call a function that raises, and return the exception with its traceback."""
    try:
        action(*args)
    except BaseException as error:
        return error
    raise AssertionError("no exception was raised")


def explained_failure(capsys, error, output_dir=None, debug=False):
    status = explain_failure(error, str(output_dir) if output_dir else None, debug)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert debug or "Traceback" not in captured.err
    return status, captured.err


def checkpoint(folder, step, is_complete=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if is_complete:
        (path / "manifest.json").write_text("{}")
    return path


# --- user errors ------------------------------------------------------------------------------------------------------


def test_all_user_errors_are_printed_and_nothing_is_written(tmp_path, capsys):
    error = UserError([Problem("One is wrong.", where="run.yaml, line 1", remedy="Mend it."), Problem("Two is wrong.")])
    status, text = explained_failure(capsys, error, tmp_path)
    assert status == 2
    assert text == "error: run.yaml, line 1: One is wrong.\n  Mend it.\nerror: Two is wrong.\n"
    assert list(tmp_path.iterdir()) == []


def test_debug_prints_traceback_of_user_error(tmp_path, capsys):
    status, text = explained_failure(capsys, exception_of(_raise_user_error), tmp_path, debug=True)
    assert status == 2
    assert "Traceback (most recent call last)" in text
    assert "error: It is wrong." in text


def _raise_user_error():
    raise UserError("It is wrong.")


def test_user_error_is_found_as_cause_of_a_library_error(capsys):
    def wrapped():
        try:
            _raise_user_error()
        except UserError as error:
            raise RuntimeError("a worker failed") from error

    assert explained_failure(capsys, exception_of(wrapped)) == (2, "error: It is wrong.\n")


# --- the disk ---------------------------------------------------------------------------------------------------------


def _fill_the_disk():
    with open("/dev/full", "w") as file:  # writes fail as on a full disk
        file.write("x" * 100_000)


def test_full_disk_is_reported_with_what_is_saved(tmp_path, capsys):
    checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 120, is_complete=False)
    status, text = explained_failure(capsys, exception_of(_fill_the_disk), tmp_path)
    assert status == 1
    assert "The disk is full" in text
    assert f"Safe: {tmp_path / 'checkpoint-100'}." in text
    assert "save_total_limit" in text
    assert len(text.splitlines()) <= 4


def test_full_disk_before_first_checkpoint_reports_that_none_exists(tmp_path, capsys):
    _, text = explained_failure(capsys, exception_of(_fill_the_disk), tmp_path)
    assert "No checkpoint was saved." in text
    assert "Free some disk space, then run the same command again." in text
    assert "save_total_limit" not in text


@pytest.mark.parametrize(
    ("number", "message", "remedy"),
    [(errno.EMFILE, "This process cannot open more files: ", "ulimit -n"),
     (errno.EIO, "cannot be written or read: input/output error.", "The disk or its connection failed"),
     (errno.EEXIST, "cannot be written or read: file exists.", "move it")],
)  # fmt: skip
def test_system_error_is_reported_with_a_remedy(number, message, remedy, tmp_path, capsys):
    checkpoint(tmp_path, 20)
    error = OSError(number, os.strerror(number), str(tmp_path / "model.safetensors"))
    status, text = explained_failure(capsys, error, tmp_path)
    assert status == 1
    assert message in text
    assert f'"{tmp_path / "model.safetensors"}"' in text
    assert f"Safe: {tmp_path / 'checkpoint-20'}." in text
    assert remedy in text


SAVE_ABOVE_SIZE_LIMIT = """
import resource, sys
import torch
from safetensors.torch import save_file
from burnish.run.recovery.failure import explain_failure
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_file({"a": torch.zeros(100_000)}, sys.argv[1] + "/model.safetensors")
except BaseException as error:
    sys.exit(explain_failure(error, sys.argv[1]))
"""


@pytest.mark.slow
def test_file_size_limit_is_recognized_in_safetensors_error(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-c", SAVE_ABOVE_SIZE_LIMIT, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    assert completed.returncode == 1
    assert "A file would exceed the file size limit" in completed.stderr
    assert "No checkpoint was saved." in completed.stderr
    assert (tmp_path / TRACEBACK_NAME).is_file()


def test_full_disk_is_found_as_cause_of_a_library_error(capsys):
    def wrapped():
        try:
            _fill_the_disk()
        except OSError as error:
            raise ValueError("An error occurred while generating the dataset") from error

    assert "The disk is full" in explained_failure(capsys, exception_of(wrapped))[1]


def test_unwritable_path_is_reported(tmp_path, capsys):
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "model.safetensors"))
    status, text = explained_failure(capsys, error, tmp_path)
    assert status == 1
    assert f'"{tmp_path}/model.safetensors" cannot be written: permission denied.' in text
    assert "a different output_dir" in text
    data_error = PermissionError(errno.EACCES, "Permission denied", "data/train.json")
    assert '"data/train.json" cannot be opened' in explained_failure(capsys, data_error, tmp_path)[1]
    beside = PermissionError(errno.EACCES, "Permission denied", f"{tmp_path}_data/train.json")
    assert 'train.json" cannot be opened' in explained_failure(capsys, beside, tmp_path)[1]


def test_error_number_is_read_from_os_and_rust_errors():
    assert error_number(OSError(28, "No space left on device")) == 28
    assert error_number(Exception("I/O error: No space left on device (os error 28)")) == 28
    assert error_number(ValueError("28")) is None


# --- memory -----------------------------------------------------------------------------------------------------------


def test_out_of_memory_reports_sizes_and_remedies(tmp_path, capsys):
    error = exception_of(torch.empty, 2**50)
    assert "DefaultCPUAllocator" in str(error)
    status, text = explained_failure(capsys, error, tmp_path)
    assert status == 1
    assert "4096.0 TiB requested" in text
    assert " free" in text
    assert "gradient_accumulation_steps" in text
    assert len(text.splitlines()) <= 4


def test_accelerator_out_of_memory_is_reported_with_its_sizes(capsys):
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.00 GiB of which 3.50 GiB "
        "is free. Including non-PyTorch memory, this process has 135.00 GiB memory in use."
    )
    _, text = explained_failure(capsys, error)
    assert "20.0 GiB requested and 3.5 GiB free" in text


@pytest.mark.run
@pytest.mark.parametrize(
    ("function", "activity", "remedy"),
    [
        (
            "burnish.losses.lm.LmObjective.loss",
            "in the forward pass of a micro-batch of 5",
            "gradient_checkpointing",
        ),
        ("torch.autograd.backward", "in the backward pass of a micro-batch", "per_device_train_batch_size"),
        ("torch.optim.AdamW.step", "in the optimizer's update", "optim: adafactor"),
        ("burnish.models.load._pretrained_model", "while the model was loaded", "quantization_bit: 4"),
    ],
)
def test_out_of_memory_names_its_activity_and_a_remedy(tmp_path, monkeypatch, capsys, function, activity, remedy):
    def fails(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 bytes.")

    options = make_workspace(tmp_path, max_steps=1, save_strategy="no")
    monkeypatch.setattr(function, fails)
    monkeypatch.setattr("burnish.run.prepare.formats_of", lambda *_: Formats(4, 4, 4, 8))  # also runs a training step
    assert main(["train", *as_arguments(options)]) == 1
    output = " ".join(capsys.readouterr().err.split())
    assert f"Out of memory {activity}" in output
    assert "4.0 TiB requested" in output
    assert remedy in output


@pytest.mark.parametrize("activity", Activity)
def test_out_of_memory_remedy_depends_on_activity_not_function_names(capsys, activity):
    def allocate():
        with annotate_errors(Activity.EVALUATE), annotate_errors(activity, {"input_ids": torch.zeros(2, 3)}):
            return bytearray(2**60)

    error = exception_of(allocate)
    assert interrupted_activity(error) == (activity, 6)
    description, remedy = failure._ADVICE[activity]
    text = " ".join(explained_failure(capsys, error)[1].split())
    assert f"Out of memory {description} of 6 tokens" in text
    assert remedy in text


def test_python_memory_error_is_reported_as_out_of_memory(capsys):
    status, text = explained_failure(capsys, exception_of(bytearray, 2**60))
    assert status == 1
    assert text.startswith("error: Out of memory")


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_non_finite_loss_is_reported_with_last_checkpoint(tmp_path, capsys):
    checkpoint(tmp_path, 4)
    status, text = explained_failure(capsys, NonFiniteError("The loss of step 7 is not finite."), tmp_path)
    assert status == 1
    assert "The loss of step 7 is not finite." in text
    assert "checkpoint-4" in text


def test_ctrl_c_prints_one_line_and_sets_exit_status(tmp_path, capsys):
    checkpoint(tmp_path, 8)
    status, text = explained_failure(capsys, KeyboardInterrupt(), tmp_path)
    assert status == 130
    assert text == f"warning: Stopped by Ctrl-C. Safe: {tmp_path / 'checkpoint-8'}.\n"


def test_ctrl_c_in_prediction_reports_saved_answers(tmp_path, capsys):
    (tmp_path / "generated_predictions.partial.jsonl").write_text("{}\n")
    status, text = explained_failure(capsys, KeyboardInterrupt(), tmp_path)
    assert status == 130
    assert f"The results so far are in {tmp_path / 'generated_predictions.partial.jsonl'}; run the same command" in text
    assert "checkpoint" not in text


def test_unexpected_error_prints_a_line_and_saves_a_traceback(tmp_path, capsys):
    def fault():
        raise KeyError("q_proj")

    status, text = explained_failure(capsys, exception_of(fault), tmp_path)
    assert status == 1
    assert text.startswith("error: KeyError: 'q_proj'.\n")
    assert f"The traceback is in {tmp_path / TRACEBACK_NAME}" in text
    traceback = (tmp_path / TRACEBACK_NAME).read_text()
    assert "Traceback (most recent call last)" in traceback
    assert "in fault" in traceback


def test_internal_error_names_its_source_file(tmp_path, capsys):
    from burnish.config.options import union

    text = explained_failure(capsys, exception_of(union, "Options", int), tmp_path)[1]
    assert "Raised in burnish/config/options.py, line " in text


def test_failure_does_not_create_output_folder(tmp_path, capsys):
    folder = tmp_path / "never-made"
    _, text = explained_failure(capsys, ZeroDivisionError("by zero"), folder)
    assert not folder.exists()
    path = text.split("The traceback is in ")[1].split(";")[0]
    assert "by zero" in Path(path).read_text()
    Path(path).unlink()


def test_temporary_traceback_is_a_private_new_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "victim"
    target.write_text("mine")
    (tmp_path / f"burnish-{os.getpid()}-{TRACEBACK_NAME}").symlink_to(target)
    text = explained_failure(capsys, ZeroDivisionError("by zero"))[1]
    path = Path(text.split("The traceback is in ")[1].split(";")[0])
    assert target.read_text() == "mine"
    assert "by zero" in path.read_text()
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_traceback_in_run_folder_replaces_a_link(tmp_path, capsys):
    target = tmp_path / "victim"
    target.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / TRACEBACK_NAME).symlink_to(target)
    explained_failure(capsys, ZeroDivisionError("by zero"), folder)
    assert target.read_text() == "mine"
    assert "by zero" in (folder / TRACEBACK_NAME).read_text()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_missing_permission_writes_no_traceback(tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = explained_failure(capsys, OSError(number, os.strerror(number), str(tmp_path / "x")))[1]
    assert "traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_debug_prints_traceback_and_writes_none(tmp_path, capsys):
    status, text = explained_failure(capsys, exception_of(lambda: 1 / 0), tmp_path, debug=True)
    assert status == 1
    assert "Traceback (most recent call last)" in text
    assert list(tmp_path.iterdir()) == []


PIPE = """
import sys
from burnish.run.recovery.failure import explain_failure
try:
    for _ in range(100_000):
        print("a line")
except BaseException as error:
    sys.exit(explain_failure(error, None))
"""


def test_closed_output_pipe_prints_no_error():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    writer = subprocess.Popen([sys.executable, "-c", PIPE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.wait() == 141
    assert writer.stderr is not None
    assert writer.stderr.read() == b""


def test_misspelled_command_is_reported_without_importing_torch():
    completed = subprocess.run(
        [sys.executable, "-c", "import sys; import burnish.run.recovery.failure; print('torch' in sys.modules)"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    assert completed.stdout == "False\n"
