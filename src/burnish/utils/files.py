"""Files and folders as they lie on a disk: taken away without following links, known for what they are,
and a folder written by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from burnish.config.errors import NotSavedError, Problem, UserError

LOCK = ".lock"
ROOTS = "BURNISH_ROOTS"
"""Environment variable of processes that the web page starts: the folders below which they may read data."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISDIR, "a folder"),
)  # fmt: skip


def remove(path: Path) -> None:
    """Take away a file, a folder with all in it, or a link without what it leads to; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def expanded(path: str | Path) -> Path:
    """The path with ``~`` and ``~name`` as the folders that they stand for; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def check_below_roots(path: Path) -> None:
    """Refuse a path that, with links resolved, lies outside the roots of the web page that started this process."""
    roots = [Path(root) for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]
    if roots and not is_below(path, roots):
        what = f'"{path}" is outside of {" or ".join(map(str, roots))}, the folders that the web UI may read.'
        raise UserError(what, remedy="Move the file there, or start burnish webui with another web_roots.")


def check_folder_below_roots(folder: Path) -> None:
    """Refuse a folder outside of the roots, and one with a link in it that leads out of them."""
    check_below_roots(folder)
    for place, folders, files in os.walk(folder) if os.environ.get(ROOTS) else ():
        for entry in (Path(place, name) for name in (*folders, *files)):
            if entry.is_symlink():
                check_below_roots(entry)


def is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Tell whether ``path``, with links resolved, lies in one of ``roots``; what is no path lies nowhere."""
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a zero byte, a circle of links, half of a UTF-16 pair
        return False
    return any(resolved.is_relative_to(root) for root in roots)


def odd_kind(path: Path) -> str:
    """Name what ``path`` is if it is there and no regular file: a reader of it may wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return _kind(mode)


def _kind(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")


def is_endless(path: Path) -> bool:
    """Tell whether to read or write ``path`` may wait for ever, or never end: a pipe, a socket, a device."""
    return bool(odd_kind(path)) and not path.is_dir()


def regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for what is none: a pipe would be waited for, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if kind := _kind(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if kind == "a folder" else errno.EINVAL, f"it is {kind}", str(path))
    return os.fdopen(descriptor, "rb")


def regular_inside(path: Path) -> BinaryIO:
    """Open a file for reading as ``regular`` does. Raises OSError also for a link that leads out of the file's folder:
    a folder that somebody sent must not show another file of this machine as its own."""
    if Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise OSError(errno.ELOOP, "it is a link that leads to another folder", str(path))
    return regular(path)


def appended(path: Path) -> BinaryIO:
    """Open a file to append to it. A link or a pipe in its place is removed: it would lead elsewhere, or wait for
    ever."""
    if path.is_symlink() or is_endless(path):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def error_number(error: BaseException) -> int | None:
    """The operating system's error number. Libraries in Rust (safetensors) have it in their text, "(os error 28)", and
    numpy says only that a file did not take all: "96 requested and 8 written"."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        return errno.ENOSPC
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


@contextmanager
def named_where_full(place: Path, remedy: str) -> Iterator[None]:
    """Name the place that the block writes to where its disk is full: the system's error names none."""
    try:
        yield
    except Exception as error:  # safetensors' errors, written in Rust, are of no kind of Python's
        if error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotSavedError(Problem(f'The disk of "{place}" is full.', remedy=remedy)) from error


def open_lock(path: Path) -> TextIO:
    """Open a file to be locked. A link or a pipe in its place gives way: it would lead elsewhere, or wait for ever."""
    if is_endless(path) or (path.is_symlink() and not path.is_dir()):
        path.unlink()
    return path.open("w", encoding="ascii")


@contextmanager
def only_writer(folder: Path, traces: Collection[str] = ()) -> Iterator[None]:
    """Lock ``folder`` for this process. A folder made here is removed again if nothing is left in it.

    Args:
        traces: names of files that tell of an attempt, and go with such a folder where the run is refused.
    Raises:
        UserError: where another run holds it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.fstat(lock.fileno()).st_nlink > 0  # 0: the run that held it took it away just now
        except BlockingIOError:
            is_held = False
        if not is_held:
            what = "another run is writing into this folder."
            raise UserError(what, where=str(folder), remedy="Wait for it to end, or set another folder.")
        try:
            yield
        except BaseException as error:
            leaves = {LOCK, *(traces if isinstance(error, UserError) else ())}
            with suppress(OSError):  # the folder may have gone, or be something else by now
                if is_new and set(os.listdir(folder)) <= leaves:
                    shutil.rmtree(folder)
            raise
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)  # while it is held: who opened it before finds it gone


def broken_link(path: Path) -> Path | None:
    """Return ``path``, or the nearest of the folders that it lies in, if it is a link that leads nowhere."""
    for place in (path, *path.absolute().parents):
        if os.path.islink(place) and not os.path.exists(place):
            return place
    return None


def from_anywhere(model: str | None) -> str | None:
    """The name of a model as it can be read from any folder: that of a folder on this machine in full."""
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model or None


def cache_home() -> Path:
    """The folder of the cache; everything in it can be made again."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")
