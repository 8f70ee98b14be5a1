"""End processes that a user's function forks and that return to the training.

Such a process has a copy of the whole program: it would train a second time, and write to the same files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def end_forked_processes(name: str) -> Iterator[None]:
    """End a process that was forked inside the block and leaves it, with a message and exit status 1; silently with its
    own status if it leaves through ``sys.exit``.

    Args:
        name: name of the user's function.
    """
    main, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:  # also SystemExit, which is what a forked process is expected to raise
        error = raised
        if os.getpid() == main:
            raise
    if os.getpid() == main:
        return
    status = error.code if isinstance(error, SystemExit) else None
    if status is None and not isinstance(error, SystemExit):
        reason = f": {type(error).__name__}: {error}" if error is not None else "."
        print(
            f"{name} forked a child process that continued to run the training code{reason} The child process "
            "was terminated. Call os._exit in it, or use the multiprocessing module.",
            file=sys.stderr,
        )
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
