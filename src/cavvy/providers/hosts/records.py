"""Records on disk: small JSON files, written atomically.

`write` is for a record that must exist before a node is bought or started. `note` is for a record
of something that has already happened, such as the end of a gang or the start of its removal. If
the disk is full, `note` keeps the record in memory, where `read` finds it; a later successful
`note` writes the record to disk.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import msgspec

from cavvy.domain.gangs import NodeSeen
from cavvy.domain.values import Struct

_T = TypeVar("_T")


class AgentExit(Struct, frozen=True, kw_only=True):
    """The contents of `exit.json`, which an agent writes when its work has ended. Unknown fields
    are ignored.
    """

    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""


class HostGangEnd(Struct, frozen=True, kw_only=True):
    """The record of an ended gang. `seen_at` is the time when Cavvy detected that the gang had
    ended. Cavvy keeps the record for a fixed period that begins at `seen_at`.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    replaced: Sequence[NodeSeen] = ()  # lost nodes, which others have replaced
    seen_at: datetime


_unwritten: dict[Path, object] = {}  # path -> record of `note` that waits for disk space


def note(path: Path, value: object) -> bool:
    """Write a record with `write`, but keep the record in memory while the disk is full. Return
    True if no record is waiting to be written. Raises OSError.
    """
    _unwritten[path] = value
    return settle()


def settle() -> bool:
    """Write the records that could not be written while the disk was full. Stops when the disk is
    full again. Returns True if no record is left to write. Raises OSError.
    """
    for each in list(_unwritten):
        try:
            write(each, _unwritten[each])
        except FileNotFoundError:  # the folder was deleted, so the record is no longer needed
            pass
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                del _unwritten[each]
                raise
            return False
        _unwritten.pop(each, None)
    return True


def write(path: Path, value: object) -> None:
    """Write a record atomically; only the file's owner can read the record. Raises OSError."""
    write_bytes(path, msgspec.json.encode(value))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; only the file's owner can read the file. Raises OSError."""
    fresh = path.with_name(
        f".{path.name}.{os.getpid()}-{get_ident()}"
    )  # the name is unique, because two threads may write at the same time
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(fresh, flags, 0o600)
    except FileExistsError:  # a crash left the file, or a job placed a link there
        os.unlink(fresh)
        descriptor = os.open(fresh, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except OSError:  # a full disk must not leave a partial file
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read(path: Path, kind: type[_T]) -> _T | None:
    """Read a record. Return None if the record is missing or invalid. Records are written
    atomically, so only another program can make them invalid.
    """
    kept = _unwritten.get(path)
    if isinstance(kept, kind):
        return kept
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except msgspec.MsgspecError:
        return None


def read_file(path: Path) -> bytes:
    """Return the content of a file, or b"" if the file cannot be read. The result is also b"" if
    the file is a link, because a job could use a link to read a file of the server.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read()
    except OSError:
        return b""
