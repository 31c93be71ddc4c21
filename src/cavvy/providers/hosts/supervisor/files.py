"""Locks, small files that are written atomically, and the comparison of the programs that the
control plane sent to this host with the hashes in their names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
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


# the path of the agent, or of a file in an unpacked Python; names are the first digits of hashes
_AGENT = re.compile(r"(/.*/([0-9a-f]{20,64})\.pyz)")
_PYTHON = re.compile(r"(/.*/([0-9a-f]{20})\.python)/.*")


class ChangedProgram(OSError):
    """Raised if a program is not what the control plane sent. The program is removed. On a host
    that cannot hide Cavvy's folder from jobs, an earlier job can change the programs.
    """


def check_programs(command: list[str]) -> None:
    """Raise ChangedProgram if a program of the command was changed. Programs of the system, such as
    its Python, are not compared."""
    matches = [kind.fullmatch(word) for word in command for kind in (_AGENT, _PYTHON)]
    for path, name in sorted({match.group(1, 2) for match in matches if match}):
        if not hash_program(path).startswith(name):
            remove_program(path)
            raise ChangedProgram(f"{path} was changed on this host, so it must be sent again")


def hash_program(path: str) -> str:
    """Return the SHA-256 of a file, or of the list of the files in a folder, as `ssh_link.sh`
    computes it. Return "" if something is missing or is neither a file nor a folder."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return _hash_file(path)
        lines = sorted(f"{_hash_file(f'{path}/{each}')}  ./{each}\n" for each in _list_files(path))
    except OSError:
        return ""
    return hash_lines(lines)


def hash_lines(lines: list[str]) -> str:
    """Return the hash of the list of a folder's files. Each line has the form of `sha256sum`."""
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def remove_program(path: str) -> None:
    """Remove a file or a folder. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _list_files(folder: str) -> Iterator[str]:
    for above, folders, names in os.walk(folder):
        links = [each for each in folders if os.path.islink(os.path.join(above, each))]
        for name in [*names, *links]:
            yield os.path.relpath(os.path.join(above, name), folder)


def _hash_file(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb", opener=open_own) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        while data := file.read(1 << 20):
            found.update(data)
    return found.hexdigest()
