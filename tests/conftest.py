"""Shared by all tests: few threads, no network, models and data sets."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

import pytest
import torch

from representative import mark_unsampled

GOLDEN = Path(__file__).parent / "golden"

BEGINS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
of_now: list[pytest.Item] = []


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    renders = event == "subprocess.Popen" and any("render" in str(word) for word in arguments[1])  # a chat template
    if event in BEGINS_A_PROCESS and of_now and not renders:
        pytest.fail(f"{of_now[-1].nodeid} starts a process ({arguments[:1]}): mark it `run`")


def pytest_configure(config: pytest.Config) -> None:
    """Fail a test of ``make test-fast`` that starts a process, which is what it leaves out."""
    if "not run" in config.option.markexpr and sys.platform == "linux":  # elsewhere the library of Python asks programs
        sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    of_now[:] = [item]
    try:
        return (yield)
    finally:
        of_now.clear()


@pytest.fixture(autouse=True)
def _errors_name_no_folder_of_this_machine(monkeypatch):
    """The command that installs an extra is the same wherever the source code is."""
    monkeypatch.setattr("burnish.config.errors.source_folder", lambda: None)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard():
    """A suite that a shell started in the background ignores Ctrl-C, and under nohup the end of its terminal; so would
    every process that a test starts."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """A group of processes that a test opened is none of the next test, nor of the processes that it forks."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_secret_is_left() -> Iterator[None]:
    """A secret that a test registered is not masked in the output of the next test."""
    yield
    if secrets := sys.modules.get("burnish.config.secrets"):
        secrets._known_secrets.clear()


@pytest.fixture(autouse=True)
def _no_patch_is_left() -> Iterator[None]:
    """A function of a library that a test replaced is the library's own in the next test."""
    patching = sys.modules.get("burnish.utils.patching")
    before = list(patching._OF_PROCESS) if patching else []
    yield
    if patching := sys.modules.get("burnish.utils.patching"):
        patching.restore([done for done in patching._OF_PROCESS if done not in before])


@pytest.fixture(autouse=True)
def _log_levels_are_kept() -> Iterator[None]:
    """A log level that a test set for a library, directly or by a run's options, does not apply to the next test."""
    loggers = [logging.getLogger(name) for name in ("burnish", "transformers", "datasets", "peft", "accelerate")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of encoded rows for this session, so that no test reads what another version of burnish wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, to be read and copied."""
    from small_run import make_model  # here, because transformers takes seconds to import

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def user_folder(
    small_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working directory with a model, a data set and ``run.yaml``."""
    from bad_inputs import make_folder

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    make_folder(small_model)
    return tmp_path


@pytest.fixture
def library_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog``, with the loggers of transformers speaking to it, whatever earlier tests of the process have set."""
    for name in ("transformers", "transformers.trainer"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    with caplog.at_level(logging.INFO, logger="transformers"), caplog.at_level(logging.INFO, "transformers.trainer"):
        yield caplog


@pytest.fixture
def golden_folder() -> Path:
    """The folder of rows, numbers and data sets of other programs; its README says where each comes from."""
    return GOLDEN


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that ``sample`` leaves out as slow, before ``-m`` selects tests.

    Raises:
        pytest.UsageError: if test ids differ between processes, because pytest-xdist could not distribute the tests.
    """
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"Test ids contain addresses of objects: {unstable[:3]}")
    mark_unsampled(items)
