"""Reads and writes the agent's private files, and lists folders.

The work can change the agent's home folder, so the agent follows no links in this folder: see
`open_own`.
"""

from __future__ import annotations

import hashlib
import json
import os

from .allowed_folders import ignore_error, walk_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LONGEST_NAME = 255  # bytes of a file name on Linux's and most other file systems


def open_own(path: str, flags: int) -> int:
    """Open one of the agent's own files. Pass this function to `open` as `opener`. A missing file
    is created and can be accessed only by its owner. Raises OSError if the file is a link. Opening
    a pipe does not block.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def open_private(path: str, flags: int = 0) -> int:
    """Open a file for reading and writing. A missing file is created with access for its owner
    only."""
    return open_own(path, os.O_RDWR | os.O_CREAT | flags)


def open_entry(folder: str, name: str, flags: int) -> int:
    """Open a file in a folder; neither the file nor the folder may be a link. Raises OSError."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=here)
    finally:
        os.close(here)


def write_whole(path: str, text: str, *, sync: bool = False) -> None:
    """Write a private file atomically: readers see either the old or the new content as a whole.
    With `sync`, wait until the content is on the disk.
    """
    temporary = f"{path}.{os.getpid()}"
    try:
        file = open_private(temporary, os.O_EXCL)
    except FileExistsError:  # left by an earlier agent, or placed by the work
        os.unlink(temporary)
        file = open_private(temporary, os.O_EXCL)
    try:
        os.write(file, text.encode())
        if sync:
            os.fsync(file)
    finally:
        os.close(file)
    os.replace(temporary, path)


def name_part(name: str, suffix: str) -> str:
    """Return the name of an incomplete file that gets the name `name` when it is complete. If the
    suffix makes the name too long, a hash of the name replaces the name.
    """
    written = os.fsencode(name)
    if len(written) + len(suffix) > LONGEST_NAME:
        name = hashlib.sha256(written).hexdigest()
    return name + suffix


def read_text(path: str) -> str:
    """Return the text of a file without surrounding blanks, or "" if the file cannot be read."""
    try:
        with open(path, encoding="utf-8", opener=open_own) as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def read_number(path: str) -> int | None:
    """Return the number in a file, or None if the file is missing or contains no number."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_known(path: str) -> dict[str, list[Any]]:
    """Read a JSON file of records, keyed by path. Returns {} if the file is missing or damaged; the
    lost records only cause repeated work."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_process(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat that follow the program's name, beginning with the state
    and the parent's ID. The list is [] if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def walk_files(
    folder: str | int, *, on_error: Callable[[OSError], object] = ignore_error
) -> Iterator[tuple[str, os.stat_result, str]]:
    """Yield the relative path, the status and the link target of each file below a folder. The link
    target is "" for a file that is not a link. `folder` is a path or the descriptor of an open
    folder. A file or folder that cannot be listed is omitted after a call of `on_error`, unless the
    call raises an error.
    """
    try:
        top = open_own(folder, os.O_RDONLY | os.O_DIRECTORY) if isinstance(folder, str) else folder
    except OSError:
        return
    try:
        for path, entry, here in walk_below(top, on_error=on_error):
            try:
                link = os.readlink(entry.name, dir_fd=here) if entry.is_symlink() else ""
                if not entry.is_dir(follow_symlinks=False):
                    yield path, entry.stat(follow_symlinks=False), link
            except OSError as error:
                error.filename = path
                on_error(error)
    finally:
        if isinstance(folder, str):
            os.close(top)
