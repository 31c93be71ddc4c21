"""Locks, and small files that are written atomically."""

from __future__ import annotations

import fcntl
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]


class FileLock:
    """Locks a file inside a `with` block."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *failure: object) -> None:
        os.close(self._fd)


def write_json(path: str, value: Fields) -> None:
    write_text(path, json.dumps(value))


def write_text(path: str, text: str) -> None:
    """Write a file atomically; only the file's owner can read the file. Raises OSError."""
    fresh = f"{path}.{os.getpid()}.new"
    remove_file(fresh)  # a crash left the file, or a job placed a link there
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.rename(fresh, path)
    except OSError:
        remove_file(fresh)
        raise


def read_json(path: str) -> Fields | None:
    try:
        value = json.loads(read_own(path))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_text(path: str) -> str:
    """Return the text of a file, stripped, or "" if the file is missing or unreadable."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def open_own(path: str, flags: int) -> int:
    """Open a file that jobs can change; `open` can use this function as its `opener`. If the file
    is a symbolic link, OSError is raised. If the file is a named pipe, the call does not wait for
    the pipe's other end.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def read_own(path: str) -> str:
    """Read a file like `read_text`, but return "" if the path is a symbolic link, because jobs may
    create symbolic links.
    """
    try:
        with open(path, errors="replace", opener=open_own) as file:
            return file.read().strip()
    except OSError:
        return ""


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
