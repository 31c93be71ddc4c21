"""Reads and writes the agent's private files, and lists folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def open_private(path: str, flags: int = 0) -> int:
    """Open a file for reading and writing. A missing file is created for its owner only."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def write_whole(path: str, text: str, *, sync: bool = False) -> None:
    """Write a private file atomically: readers see the old content or all of the new. `sync` waits
    until the content is on the disk.
    """
    temporary = f"{path}.{os.getpid()}"
    file = open_private(temporary, os.O_TRUNC)
    try:
        os.write(file, text.encode())
        if sync:
            os.fsync(file)
    finally:
        os.close(file)
    os.replace(temporary, path)


def read_text(path: str) -> str:
    """The text of a file without surrounding blanks, or "" if the file cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def read_number(path: str) -> int | None:
    """The number in a file, or None if the file is missing or contains no number."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_known(path: str) -> dict[str, list[Any]]:
    """Read a JSON file of records, keyed by path. Returns {} if the file is missing or damaged,
    which only causes repeated work."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_process(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name: state, parent and so on; [] if there is no such
    process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def walk_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and the status of everything below a folder except folders; files
    that vanish meanwhile are left out.
    """
    todo = [""]
    while todo:
        below = todo.pop()
        try:
            entries = list(os.scandir(os.path.join(folder, below)))
        except OSError:
            continue
        for entry in entries:
            path = os.path.join(below, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                else:
                    yield path, entry.stat(follow_symlinks=False)
            except OSError:
                continue
