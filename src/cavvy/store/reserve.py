"""Reserves disk space, so that users can stop jobs even when the disk is full."""

import json
import os
from contextlib import suppress
from pathlib import Path

_NOTES = 256 * 1024  # bytes of the file of stop requests; enough for several thousand
_RESERVE = 4 * 1024 * 1024  # bytes that SQLite and small files need when the server starts


class StopNotes:
    """Keeps stop requests for jobs in a file of fixed size. A new request is written over existing
    bytes of the file, so it needs no free disk space. A later process can read the requests.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        """Return the reasons of the requested stops, keyed by job ID. A missing file is created if
        the disk has enough space.
        """
        with suppress(OSError, ValueError):
            said = json.loads(self._path.read_bytes().rstrip(b"\0 ") or b"{}")
            if isinstance(said, dict):
                return {str(job): str(reason) for job, reason in said.items()}
        with suppress(OSError):
            take_room(self._path, _NOTES)
        return {}

    def write(self, stops: dict[str, str]) -> None:
        """Replace all stop requests in the file. If the file cannot be written, the new requests
        exist only in memory and are lost when the process ends.
        """
        while len(text := json.dumps(stops).encode()) > _NOTES:
            stops.popitem()
        with suppress(OSError):
            number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(number, text.ljust(_NOTES), 0)
                os.fsync(number)
            finally:
                os.close(number)


def free_space(folder: Path) -> int:
    """Return the number of bytes that this process can still write to the folder's disk. Disks may
    hold back space for root. Raises OSError."""
    room = os.statvfs(folder)
    return room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)


class Reserve:
    """A file that reserves disk space. When the disk is full, the file is deleted so that a server
    can start."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"

    def take(self) -> None:
        """Create the file if more than twice its size is free on the disk."""
        with suppress(OSError):
            room = os.statvfs(self._path.parent)
            if not self._path.exists() and room.f_bavail * room.f_frsize > 2 * _RESERVE:
                take_room(self._path, _RESERVE)

    def give_up(self) -> bool:
        """Delete the file; return whether it existed."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def is_full(folder: str) -> bool:
    """Return whether the disk has less free space than the start of a server needs."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize < _RESERVE


def take_room(path: Path, size: int) -> None:
    """Create a file of `size` zero bytes. If the creation fails, no file is left behind. Raises
    OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
