"""Records on disk: small JSON files, written atomically.

`write` is for a record that must exist before something is bought or started. `note` is for an
event or a removal: on a full disk it is kept in memory, where `read` finds it, and written with a
later note.
"""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExit:
    """What an agent wrote to `exit.json` when its work was over; unknown fields are ignored."""

    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""


_unwritten: dict[Path, object] = {}  # notes waiting for disk space


def note(path: Path, value: object) -> bool:
    """Like `write`, or keep the record until the disk has space. Returns whether all records are
    written. Raises OSError.
    """
    _unwritten[path] = value
    return settle()


def settle() -> bool:
    """Write the waiting notes, as far as the disk has space. Returns whether all are written.
    Raises OSError.
    """
    for each in list(_unwritten):
        try:
            write(each, _unwritten[each])
        except FileNotFoundError:  # its folder was deleted, so no reader is left
            pass
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                del _unwritten[each]
                raise
            return False
        _unwritten.pop(each, None)
    return True


def write(path: Path, value: object) -> None:
    """Write a record atomically, readable by its user only. Raises OSError."""
    fresh = path.with_name(
        f".{path.name}.{os.getpid()}-{get_ident()}"
    )  # unique, since two threads may write at once
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError:  # a full disk must not leave a partial file
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read(path: Path, kind: type[_T]) -> _T | None:
    """A record, or None if it is missing or invalid (records are written whole, so another program
    changed it).
    """
    kept = _unwritten.get(path)
    if isinstance(kept, kind):
        return kept
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
