"""State folder of the web UI: key, presets, conversations, sockets. Runs do not depend on it.

In: ``$BURNISH_HOME``, else ``$XDG_STATE_HOME/burnish``. Files are readable only by their owner and written atomically.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from burnish.config.errors import UserError
from burnish.serve.http.errors import APIError
from burnish.serve.http.guards import new_key
from burnish.utils.files import close_in_children, expand_user, temporary_path


class Home:
    """The folder ``web`` within the state folder.

    Raises:
        UserError: if another server uses it.
    """

    def __init__(self, web_home: str | None = None) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        base = web_home or os.environ.get("BURNISH_HOME") or f"{state}/burnish"
        self.folder = expand_user(base) / "web"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.folder, 0o700)
        for name in ("presets", "chats"):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        self._lock: IO[str] | None = None

    def hold(self, address: str) -> None:
        """Lock the folder for this server. Raises UserError with the address of the other server if it is locked."""
        path = self.folder / "lock"
        lock = close_in_children(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            content = lock.read().strip()
            where = f" at {content}" if content else ""
            what = f"Another web UI is already running{where} with the same state folder {self.folder}."
            raise UserError(what, remedy="Use that one, or set a different web_home.") from error
        lock.truncate(0)
        lock.write(address)
        lock.flush()
        self._lock = lock

    def key(self) -> str:
        """The key, generated at the first start and stored."""
        path = self.folder / "key"
        try:
            if path.is_file() and len(found := path.read_text(encoding="utf-8").strip()) >= 16:
                return found
        except UnicodeDecodeError as error:
            what = f'The key file "{path}" is not UTF-8 text.'
            raise UserError(what, remedy="Remove it; a new key is generated.") from error
        key = new_key()
        self._write("key", key + "\n")
        return key

    def redirecting_file(self, link: str) -> str:
        """URI of a private HTML file that redirects to ``link``. Opening ``link`` directly would show the key in the
        browser's command line, which every user of the machine can read."""
        self._write("open.html", f'<!doctype html><meta http-equiv="refresh" content="0;url={link}">\n')
        return (self.folder / "open.html").resolve().as_uri()

    def write(self, name: str, text: str) -> None:
        """Write a file for a request. Raises APIError as ``writing``."""
        with self.writing():
            self._write(name, text)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert an error of writing to the state folder.

        Raises:
            APIError: 507, such as on a full disk.
        """
        try:
            yield
        except OSError as error:
            message = f"Cannot write to the state folder {self.folder}: {error.strerror or error}."
            raise APIError(507, "not_written", message) from error

    def _write(self, name: str, text: str) -> None:
        target = self.folder / name
        temporary = temporary_path(target)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> Any:
        """Parsed JSON of a file, or None if it does not exist or is invalid."""
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def remove(self, name: str) -> bool:
        """Remove a file. Returns whether it existed. Raises APIError as ``writing``."""
        path = self.folder / name
        is_there = path.is_file()
        with self.writing():
            path.unlink(missing_ok=True)
        return is_there

    def names(self, kind: str) -> list[str]:
        """Names of the files of one kind, without their endings."""
        return sorted(path.stem for path in (self.folder / kind).iterdir() if not path.name.startswith("."))
