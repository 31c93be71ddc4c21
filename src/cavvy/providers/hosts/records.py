"""Records on disk: small JSON files that appear whole or not at all.

`write` is for what must be known before something is bought or begun. `note` is for what has
happened or is being removed: on a full disk it is kept in memory, where `read` finds it, and
written with a later note.
"""

import asyncio
import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Generic, Protocol, TypeVar

import msgspec

_T = TypeVar("_T")


class NamedRecord(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=NamedRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExit:
    """What an agent wrote to `exit.json` when its work was over; fields that a place does not
    need are ignored.
    """

    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""


_unwritten: dict[Path, object] = {}  # notes that wait for room


def note(path: Path, value: object) -> bool:
    """As `write`, or keep it until there is room; whether nothing waits. Raises OSError."""
    _unwritten[path] = value
    return settle()


def settle() -> bool:
    """Write the notes that wait, as far as there is room; whether none waits. Raises OSError."""
    for each in list(_unwritten):
        try:
            write(each, _unwritten[each])
        except FileNotFoundError:  # its folder is gone, and with it whom it told something
            pass
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                del _unwritten[each]
                raise
            return False
        _unwritten.pop(each, None)
    return True


def write(path: Path, value: object) -> None:
    """Write a record in one piece, readable by its user only. Raises OSError."""
    fresh = path.with_name(
        f".{path.name}.{os.getpid()}-{get_ident()}"
    )  # nobody else's: two may write at once
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError:  # a full disk must not leave a torn file behind
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read(path: Path, kind: type[_T]) -> _T | None:
    """A record; None where there is none or it makes no sense (records are written whole, so
    somebody changed it).
    """
    kept = _unwritten.get(path)
    if isinstance(kept, kind):
        return kept
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


class LaunchLedger(Generic[_N]):
    """Records by name, one file each, all of them read at the start; a lock for each name."""

    def __init__(self, folder: Path, kind: type[_N]) -> None:
        self._folder = folder
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._locks: dict[str, asyncio.Lock] = {}
        found = [read(path, kind) for path in self._folder.glob("[!.]*.json")]
        self.records: dict[str, _N] = {
            record.name: record for record in found if record is not None
        }

    def lock(self, name: str) -> asyncio.Lock:
        """Held while what the record tells of is made, removed or judged."""
        return self._locks.setdefault(name, asyncio.Lock())

    def get(self, name: str) -> _N | None:
        return self.records.get(name)

    def put(self, record: _N) -> None:
        """Write what has changed. Raises OSError."""
        if self.records.get(record.name) != record:
            known = record.name in self.records  # the first is what was bought
            (note if known else write)(self._folder / f"{record.name}.json", record)
            self.records[record.name] = record

    def drop(self, name: str) -> None:
        self.records.pop(name, None)
        _unwritten.pop(self._folder / f"{name}.json", None)
        (self._folder / f"{name}.json").unlink(missing_ok=True)
