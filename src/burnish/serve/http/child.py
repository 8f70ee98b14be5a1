"""Start processes that outlive the server, in their own sessions, and send them signals.

In: an argument list, never a shell command. Out: a process whose output goes to a file. Nothing is piped through the
server, so the process survives its end. Before a signal is sent, the identity of the process is verified.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.utils.files import ROOTS, open_for_appending

NOT_FOR_CHILDREN = ("BURNISH_KEY", "API_KEY")
"""Server keys that are removed from the environment of children, which could leak them in a log or crash report."""


def environment_of_child(roots: Iterable[Path]) -> dict[str, str]:
    """Return the environment of a process that may read data below ``roots`` only (``utils/files.py``)."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    return {**variables, ROOTS: os.pathsep.join(map(str, roots))}


def start_burnish(
    argv: Sequence[str], folder: Path, output: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start ``burnish *words`` in ``folder``, with its output appended to a file.

    Python's option -P prevents imports of modules from ``folder``, which may contain untrusted files.
    """
    with open_for_appending(output) as file:
        return subprocess.Popen(  # noqa: S603  (a list of words, the first of which we chose)
            [sys.executable, "-P", "-m", "burnish", *argv], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, close_fds=True,
        )  # fmt: skip


def send_signal(
    launch: Mapping[str, Any], number: signal.Signals, is_alive: Callable[[Mapping[str, Any]], bool]
) -> bool:  # fmt: skip
    """Send a signal to the process of ``launch``. Returns False if that process is no longer running.

    On Linux, a pidfd is held during the check, so that the pid cannot be reused by another process in between.
    """
    pid = launch.get("pid")
    if not isinstance(pid, int) or not 1 < pid < 2**31:
        return False
    try:
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return False
    try:
        if not is_alive(launch):
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
