"""Files and folders: remove them without following links, recognize special files, and lock a folder for one run."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import IO, Any, BinaryIO, TextIO, TypeVar
from weakref import WeakSet

from burnish.config.errors import NotSavedError, Problem, UserError

FileT = TypeVar("FileT", bound=IO[str])

LOCK = ".lock"
ROOTS = "BURNISH_ROOTS"
"""Environment variable of processes that the web page starts: the folders from which they may read data."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISDIR, "a folder"),
)  # fmt: skip


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link without its target. Does nothing if the path does not
    exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def expand_user(path: str | Path) -> Path:
    """The path with ``~`` and ``~name`` expanded; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def check_below_roots(path: str | Path) -> None:
    """Raise UserError for a path that, with links resolved, is outside of the roots of the web page that started
    this process."""
    roots = [Path(root) for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]
    if roots and not is_below(Path(path), roots):
        what = f'"{path}" is outside of {" or ".join(map(str, roots))}, the folders that the web UI may read.'
        raise UserError(what, remedy="Move the file there, or start burnish webui with a different web_roots.")


def check_texts_below_roots(value: Any) -> None:
    """Raise UserError if a text in ``value``, the content of a JSON file, is a path outside of the roots.

    Absolute paths and paths with ``..`` are rejected whether they exist or not.
    """
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            check_texts_below_roots(item)
    elif isinstance(value, str) and os.environ.get(ROOTS):
        path = expand_user(value.removeprefix("file://"))
        if path.is_absolute() or ".." in path.parts or os.path.lexists(path):
            check_below_roots(path)


def check_folder_below_roots(folder: Path) -> None:
    """Raise UserError for a folder outside of the roots, or with a link that leads out of them."""
    check_below_roots(folder)
    for place, folders, files in os.walk(folder) if os.environ.get(ROOTS) else ():
        for entry in (Path(place, name) for name in (*folders, *files)):
            if entry.is_symlink():
                check_below_roots(entry)


def is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Whether ``path``, with links resolved, is inside one of ``roots``. False for invalid paths."""
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a null byte, a loop of links, a lone surrogate
        return False
    return any(resolved.is_relative_to(root) for root in roots)


def special_file_kind(path: Path) -> str:
    """The kind of a special file ("a folder", "a pipe", ...), because reading it may block forever; "" for others."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return _kind(mode)


def _kind(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")


def is_endless(path: Path) -> bool:
    """Whether reading or writing ``path`` may never end: a pipe, a socket, a device."""
    return bool(special_file_kind(path)) and not path.is_dir()


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for other kinds: reading a pipe may block, a device may not
    end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if kind := _kind(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if kind == "a folder" else errno.EINVAL, f"it is {kind}", str(path))
    return os.fdopen(descriptor, "rb")


def open_regular_file_inside(path: Path) -> BinaryIO:
    """Open a file for reading like ``open_regular_file``. Also raises OSError for a link that leads out of the file's
    folder, so that a folder from outside cannot expose another file of this machine.
    """
    if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise OSError(errno.ELOOP, "it is a link that points to another folder", str(path))
    return open_regular_file(path)


def open_for_appending(path: Path) -> BinaryIO:
    """Open a file for appending. A link or pipe in its place is removed first, because it would lead elsewhere or
    block.
    """
    if path.is_symlink() or is_endless(path):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def error_number(error: BaseException) -> int | None:
    """The operating system's error number. Rust libraries (safetensors) only include it in their message, "(os error
    28)", and numpy only reports that a file was not written completely: "96 requested and 8 written".
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        return errno.ENOSPC
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


@contextmanager
def report_full_disk(place: Path, remedy: str) -> Iterator[None]:
    """Convert errors about a full disk in the block to NotSavedError with ``place``, because the system's error does
    not name it."""
    try:
        yield
    except Exception as error:  # safetensors' errors are from Rust and derive from Exception only
        if error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotSavedError(Problem(f'The disk of "{place}" is full.', remedy=remedy)) from error


def open_lock(path: Path) -> TextIO:
    """Open a lock file. A link or pipe in its place is removed first, because it would lead elsewhere or block."""
    if is_endless(path) or (path.is_symlink() and not path.is_dir()):
        path.unlink()
    return close_in_children(path.open("w", encoding="ascii"))


_closed_in_children: WeakSet[IO[str]] = WeakSet()


def close_in_children(lock: FileT) -> FileT:
    """Close a lock file in processes that are forked from now on: worker processes of a killed run live for a few
    seconds, in which they would hold its lock. Returns the file."""
    _closed_in_children.add(lock)
    return lock


def _close_locks() -> None:
    for lock in list(_closed_in_children):
        lock.close()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def exclusive_writer_lock(folder: Path, traces: Collection[str] = ()) -> Iterator[None]:
    """Lock ``folder`` for this process. A folder created here is removed again if nothing is left in it.

    Args:
        folder: the output folder.
        traces: names of files of an attempt, which are removed with such a folder if the run is refused.

    Raises:
        UserError: if the folder cannot be created, or another run holds the lock.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError, FileExistsError, PermissionError) as error:
        what = f'"{folder}" cannot be created: {error.strerror}.'
        raise UserError(what, remedy="Set a different folder.") from error
    with open_lock(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.fstat(lock.fileno()).st_nlink > 0  # 0: the previous holder has just removed the file
        except BlockingIOError:
            is_locked = False
        if not is_locked:
            what = "another run is writing to this folder."
            raise UserError(what, where=str(folder), remedy="Wait for it to end, or set a different folder.")
        try:
            yield
        except BaseException as error:
            leaves = {LOCK, *(traces if isinstance(error, UserError) else ())}
            with suppress(OSError):  # the folder may have been removed or replaced
                if is_new and set(os.listdir(folder)) <= leaves:
                    shutil.rmtree(folder)
            raise
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)  # while locked: other processes with the open file notice it


def problems_of_folder(folder: Path, option: str) -> list[Problem]:
    """Return an error if ``folder``, which ``option`` sets, is not writable or cannot be created."""
    remedy = f"Set a different {option}."
    try:
        if link := broken_link(folder):
            what = f'"{link}" links to {os.readlink(link)}, which does not exist.'
            remedy = f"Remove the link, or set a different {option}."
            return [Problem(f'{option} "{folder}" cannot be created: {what}', remedy=remedy, option=option)]
        if folder.exists() and not folder.is_dir():
            what = f'Expected {option} to be a folder. "{folder}" is a file.'
            return [Problem(what, remedy=remedy, option=option)]
        parent = nearest_existing(folder)
        if not parent.is_dir():
            what = f'{option} "{folder}" cannot be created: "{parent}" is a file.'
            return [Problem(what, remedy=remedy, option=option)]
        is_read_only = bool(os.statvfs(parent).f_flag & os.ST_RDONLY)
        if is_read_only or not os.access(parent, os.W_OK | os.X_OK):
            why = f'the file system of "{parent}" is read-only' if is_read_only else f'no permission in "{parent}"'
            return [Problem(f'{option} "{folder}" is not writable: {why}.', remedy=remedy, option=option)]
    except OSError as error:  # for example, a parent folder that may not be searched
        what = f'{option} "{folder}" cannot be created: {error.strerror}.'
        return [Problem(what, remedy=remedy, option=option)]
    return []


def nearest_existing(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def broken_link(path: Path) -> Path | None:
    """``path``, or its nearest parent folder, that is a broken link; None if there is none."""
    for place in (path, *path.absolute().parents):
        if os.path.islink(place) and not os.path.exists(place):
            return place
    return None


def absolute_if_local(model: str | None) -> str | None:
    """A model name that is valid in any working directory: a local folder becomes an absolute path."""
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model or None


def as_file_name(name: str) -> str:
    """Return a dataset name escaped for use in a file name: ``a/b`` becomes ``a%2Fb``. The mapping is injective."""
    return name.replace("%", "%25").replace("/", "%2F")


def temporary_path(path: Path) -> Path:
    """A name in the same folder for the content of ``path`` until it is complete. No other process or thread of this
    machine uses it."""
    return path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.incomplete")


def cache_home() -> Path:
    """The cache folder. Its contents can be recreated."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")


def folder_until_exit(prefix: str) -> Path:
    """Create a temporary folder that is removed when the process exits."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
