"""Compares the programs that the control plane sent to this host with the hashes in their names. On
a host that cannot hide Cavvy's folder from jobs, an earlier job can change these programs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# the path of the agent, or of a file in an unpacked Python; names are the first digits of hashes
_AGENT = re.compile(r"(/.*/([0-9a-f]{20,64})\.pyz)")
_PYTHON = re.compile(r"(/.*/([0-9a-f]{20})\.python)/.*")


class ChangedProgram(OSError):
    """Raised if a program is not what the control plane sent. The program is removed."""


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
    with open(path, "rb", opener=_open) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        while data := file.read(1 << 20):
            found.update(data)
    return found.hexdigest()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
