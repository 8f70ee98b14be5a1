"""Hooks and fixtures of all tests: few threads, no network, a shared model and data sets."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch

from representative import mark_unsampled

GOLDEN = Path(__file__).parent / "golden"

PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
running_tests: list[pytest.Item] = []


def _fail_on_process_start(event: str, arguments: tuple[object, ...]) -> None:
    # Chat templates are rendered in a process.
    is_renderer = event == "subprocess.Popen" and any("render" in str(word) for word in arguments[1])
    if event in PROCESS_EVENTS and running_tests and not is_renderer:
        pytest.fail(f"{running_tests[-1].nodeid} starts a process ({arguments[:1]}): mark it `run`")


def pytest_configure(config: pytest.Config) -> None:
    """Fail tests that start a process without the mark ``run``, if only unmarked tests run (``make test-fast``)."""
    # on other systems, Python starts processes itself
    if "not run" in config.option.markexpr and sys.platform == "linux":
        sys.addaudithook(_fail_on_process_start)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running_tests[:] = [item]
    try:
        return (yield)
    finally:
        running_tests.clear()


@pytest.fixture(autouse=True)
def _hide_source_folder(monkeypatch):
    """Let error messages name the same install command wherever the source code is."""
    monkeypatch.setattr("burnish.config.errors.source_folder", lambda: None)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _propagate_torch_logs() -> None:
    """Let torch's loggers pass records on. pytest adds two handlers to each logger that does not, in every test, and
    torch has 80 of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def _restore_signal_handlers():
    """Handle SIGINT and SIGHUP, also in child processes. Background jobs and nohup ignore them."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _destroy_process_group():
    """Destroy a process group that a test left open, also for the child processes of later tests."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _forget_secrets() -> Iterator[None]:
    """Forget the secrets that a test registered, so that they are not masked in the output of later tests."""
    yield
    if secrets := sys.modules.get("burnish.config.secrets"):
        secrets._known_secrets.clear()


@pytest.fixture(autouse=True)
def _restore_patches() -> Iterator[None]:
    """Restore the library functions that a test patched."""
    patching = sys.modules.get("burnish.utils.patching")
    before = list(patching._OF_PROCESS) if patching else []
    yield
    if patching := sys.modules.get("burnish.utils.patching"):
        patching.restore([patch for patch in patching._OF_PROCESS if patch not in before])


@pytest.fixture(autouse=True)
def _restore_log_levels() -> Iterator[None]:
    """Restore the log levels of libraries that a test changed, directly or by a run's options."""
    loggers = [logging.getLogger(name) for name in ("burnish", "transformers", "datasets", "peft", "accelerate")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        if logger.level != level:  # clears the cache of every logger of the process
            logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache of encoded rows in each session, independent of other versions of burnish."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, which tests may read or copy but not change."""
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
    """``caplog`` that also captures transformers' logs, whatever earlier tests of the process have configured."""
    for name in ("transformers", "transformers.trainer"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    with caplog.at_level(logging.INFO, logger="transformers"), caplog.at_level(logging.INFO, "transformers.trainer"):
        yield caplog


@pytest.fixture
def golden_folder() -> Path:
    """The folder of expected rows, numbers and data sets; its README names the program that produced each."""
    return GOLDEN


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that ``sample`` leaves out as slow, before ``-m`` selects tests.

    Raises:
        pytest.UsageError: if a test id contains an address: ids then differ between the processes of pytest-xdist.
    """
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"Test ids contain addresses of objects: {unstable[:3]}")
    mark_unsampled(items)
