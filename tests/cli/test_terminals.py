"""Terminals that are narrow, ASCII-only, closed or full: messages are printed or the command is rejected, and training
continues with a complete log."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burnish import cli
from burnish.report import console
from burnish.report.streams import encodable

pytestmark = pytest.mark.run

PROGRAM = [sys.executable, "-m", "burnish"]
TRAIN = [*PROGRAM, "train", "run.yaml"]


def slow(*values: object) -> list[Any]:
    """Return the values as cases of ``make test-slow``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash with ``$B`` for burnish."""
    options = {**os.environ, "B": " ".join(PROGRAM), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=options, check=False)


@pytest.mark.slow
def test_ascii_terminal_gets_plain_marks_in_explanation(user_folder: Path) -> None:
    completed = shell("$B explain run.yaml", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert completed.returncode == 0, completed.stderr
    assert "in [[ ]]" in completed.stdout
    assert "Traceback" not in completed.stderr
    assert completed.stdout.isascii()


@pytest.mark.parametrize("redirection", slow("> /dev/full", ">&- 2>&-", "2> /dev/full", ">&-", "2>&-"))
def test_training_continues_when_its_output_is_closed(redirection: str, user_folder: Path) -> None:
    completed = shell(f"$B train run.yaml {redirection}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert Path("out/model.safetensors").is_file()
    assert "Exception ignored" not in completed.stderr
    output = Path("out/run.log").read_text(encoding="utf-8")
    assert "Training for 8 steps" in output
    assert "Trained 8 steps" in output


@pytest.mark.slow
def test_training_continues_when_its_terminal_is_closed(user_folder: Path) -> None:
    """Closing the terminal sends SIGHUP, and later writes fail."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [*TRAIN, "save_strategy=no", "logging_steps=1", "max_steps=150"],
                  {**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    recorded = b""
    while b"step   1/150" not in recorded:
        recorded += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Path("out/model.safetensors").is_file()
    assert list(Path("out").glob("checkpoint-*"))
    output = Path("out/run.log").read_text(encoding="utf-8")
    assert (
        f"The terminal was closed: saving a checkpoint after this step, then continuing. To stop: kill {child}"
        in output
    )
    assert "Trained 150 steps" in output


@pytest.mark.slow
def test_closed_reader_does_not_end_training(user_folder: Path) -> None:
    completed = shell("set -o pipefail; $B train run.yaml | head -1; exit ${PIPESTATUS[0]}")
    assert completed.returncode == 0, completed.stderr
    assert Path("out/model.safetensors").is_file()
    assert "Trained 8 steps" in Path("out/run.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["version", *slow("explain run.yaml", "train --help", "env", "help")])
def test_unwritable_output_is_an_error(command: str, user_folder: Path) -> None:
    completed = shell(f"$B {command} > /dev/full")
    assert completed.returncode == 1
    assert "Standard output cannot be written: no space left on device." in completed.stderr
    assert "Exception ignored" not in completed.stderr
    assert "disk" not in completed.stderr
    piped = shell(f"set -o pipefail; $B {command} | true; exit ${{PIPESTATUS[0]}}")
    assert piped.returncode in (0, 141)
    assert piped.stderr == ""


def test_unencodable_characters_are_replaced_on_the_terminal() -> None:
    class AsciiTerminal:
        encoding = "ascii"

    assert encodable("⟦red⟧ … 河", AsciiTerminal()) == "[[red]] ... \\u6cb3"  # type: ignore[arg-type]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("print_message", [console.note, console.warn, console.problem])
def test_file_text_cannot_control_the_terminal(print_message: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_message('Received: {"output": "\x1b[2J\x00\x9b31m\u202e"}\n\tcolumn')
    assert '"␛[2J␀\ufffd31m\ufffd"}\n\tcolumn' in "".join(capsys.readouterr())


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay_s", [0.25, 1.2, *slow(0.6, 2.0)])
@pytest.mark.parametrize("command", ["train", "explain"])
def test_ctrl_c_before_first_step_prints_one_line(delay_s: float, command: str, user_folder: Path) -> None:
    started = subprocess.Popen(
        [*PROGRAM, command, "run.yaml", "max_steps=20000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(delay_s)
    started.send_signal(signal.SIGINT)
    time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode in (130, 0, -2)  # -2: before burnish was imported
    assert "Traceback" not in err or "burnish" not in err


@pytest.mark.parametrize("start", ["burnish", "burnish.train"])
def test_ctrl_c_during_the_first_imports_is_one_line(start: str) -> None:
    """Ctrl-C is sent at the first import after the handler is installed."""
    program = (
        "import os, runpy, signal, sys\n"
        "first = ('burnish.__main__', 'burnish.train', 'burnish.utils', 'burnish.utils.sigint', '_signal',"
        "    '__future__')\n"
        "class AtImport:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if 'burnish' in sys.modules and name not in first:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.argv = ['{start}', 'version']\n"
        "import threading, importlib, pkgutil\n"
        "sys.meta_path.insert(0, AtImport())\n"
        f"runpy.run_module('{start}', run_name='__main__', alter_sys=True)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr.strip(), completed.stdout) == (130, "Stopped by Ctrl-C.", "")


def test_ctrl_c_during_interpreter_exit_prints_nothing(user_folder: Path) -> None:
    program = (
        "import atexit, os, signal, sys\n"
        "from burnish.cli import command\n"
        "status = command(['version'])\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.exit(status)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_exit_without_finalization_runs_threads_and_exit_functions_only() -> None:
    program = (
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from burnish.utils.sigint import exit_without_finalization\n"
        "class Object:\n"
        "    def __del__(self):\n"
        "        print('finalized', flush=True)\n"
        "kept = Object()\n"
        "atexit.register(print, 'exit function')\n"
        "ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.2), print('pool')))\n"
        "threading.Thread(target=lambda: (time.sleep(0.4), print('thread'))).start()\n"
        "print('buffered')\n"
        "exit_without_finalization(3)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (3, "")
    assert completed.stdout.splitlines() == ["buffered", "pool", "thread", "exit function"]


def test_live_line_on_closed_terminal_does_not_stop_the_run(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal:
        encoding, closed = "utf-8", False

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

        def fileno(self) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", ClosedTerminal())
    try:
        assert cli.main(["train", "run.yaml"]) == 0
    finally:
        console.end_live()
    assert Path("out/model.safetensors").is_file()


def test_unwritable_log_does_not_block_the_run(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out").mkdir()
    Path("out/run.log").mkdir()  # prevents a file of that name
    assert cli.main(["train", "run.yaml"]) == 0
