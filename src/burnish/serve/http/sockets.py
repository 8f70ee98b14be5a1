"""Sockets of a server: a TCP port, or a Unix socket that only its owner can open.

In: a host and a port, or a path. Out: a listening socket. Errors: a port or path in use (another one is never chosen
silently), an address that does not belong to this machine.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

from burnish.config.errors import Problem, UserError

WAITING_CONNECTIONS = 128


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``; port 0 selects a free port.

    Args:
        host: address to bind to.
        port: port to bind to.
        option: name of the port's option, for the error.
    Raises:
        UserError: if the address is invalid or the port cannot be opened.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f'"{host}" is not an address of this machine: {error}.') from error
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen(WAITING_CONNECTIONS)
    except OSError as error:
        found.close()
        raise UserError(_listen_problem(error, host, port, option)) from error
    return found


def _listen_problem(error: OSError, host: str, port: int, option: str) -> Problem:
    if error.errno == errno.EADDRINUSE:
        return Problem(
            f"Port {port} of {host} is in use by another process.",
            remedy=f"Stop that process, or set a different port: {option}={port + 1}",
        )
    if error.errno == errno.EACCES:
        return Problem(
            f"This user is not permitted to open port {port}.", remedy=f"Set a port above 1023: {option}=8000"
        )
    return Problem(f"Cannot listen on {host}, port {port}: {error.strerror or error}.")


def listen_unix(path: str) -> socket.socket:
    """Return a Unix socket that only its owner can open: the mode is set before it listens.

    Raises:
        UserError: if another process listens there, or the path is not a socket.
    """
    _remove_stale_socket(path)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
        os.chmod(path, 0o600)
        found.listen(WAITING_CONNECTIONS)
    except OSError as error:
        found.close()
        raise UserError(f'Cannot create the socket "{path}": {error.strerror or error}.') from error
    return found


def file_identity(path: str) -> tuple[int, int, int] | None:
    """Return what distinguishes the file at a path from a later one, None if there is none. The number of a removed
    file may be reused, so the time is part of it."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def remove_own_socket(path: str, identity: tuple[int, int, int] | None) -> None:
    """Remove the file of a socket of this process, unless another server has created one at the same path since.

    Args:
        identity: ``file_identity`` of the socket after ``listen_unix``.
    """
    if identity is not None and file_identity(path) == identity:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _remove_stale_socket(path: str) -> None:
    """Remove the stale socket of a killed process."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:  # there is no file; otherwise the socket cannot be created either, for the same reason
        return
    if is_socket and not _accepts_connections(path):
        os.unlink(path)
    else:
        what = "Another process is listening on it" if is_socket else "A file that is not a socket exists at this path"
        raise UserError(f'Cannot create the socket "{path}". {what}.', remedy="Set a different path.")


def _accepts_connections(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def shown_address(found: socket.socket) -> str:
    """Return ``http://127.0.0.1:8000``, or the path of a Unix socket."""
    if found.family == socket.AF_UNIX:
        return str(found.getsockname())
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
