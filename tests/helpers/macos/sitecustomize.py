"""Let a process run as on macOS, if this folder is in PYTHONPATH.

Functions that only Linux has are removed, /proc and /sys cannot be read, new processes are spawned, and burnish's
modules see ``sys.platform`` as "darwin". Libraries are installed for Linux and still see it.
"""

import builtins
import multiprocessing
import os
import resource
import select
import signal
import sys

for owner, names in {
    os: "sched_getaffinity sched_setaffinity pidfd_open posix_fadvise posix_fallocate memfd_create eventfd splice "
    "copy_file_range pipe2 getrandom getxattr setxattr unshare O_DIRECT O_TMPFILE O_PATH",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR",
    resource: "prlimit RUSAGE_THREAD",
    select: "epoll",
}.items():
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)

multiprocessing.set_start_method("spawn")


def _hide_linux_files(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")) and _is_called_by_burnish():
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _is_called_by_burnish():
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("pathlib", "io", "codecs"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("burnish", "__main__")


sys.addaudithook(_hide_linux_files)


class _MacSystem:
    """The module ``sys`` as seen by burnish's modules."""

    platform = "darwin"

    def __getattr__(self, name):
        return getattr(sys, name)


_import, _mac_system = builtins.__import__, _MacSystem()


def _import_mac_system(name, globals=None, locals=None, fromlist=(), level=0):
    spec = (globals or {}).get("__spec__")
    if name == "sys" and spec is not None and spec.name.split(".")[0] == "burnish":
        return _mac_system
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _import_mac_system
