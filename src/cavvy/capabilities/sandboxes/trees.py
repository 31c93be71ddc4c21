"""Copies files between this computer and sandboxes. What comes from a sandbox may be anything:
names that lead elsewhere, sizes that are wrong, and no end.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from cavvy.capabilities.sandboxes.errors import SandboxFileError
from cavvy.capabilities.sandboxes.on_node.file_calls import ENTRY

if TYPE_CHECKING:
    from cavvy.client.landing import Landing, Receipts

PIECE = 64 << 10
_MOST_NAME = 4096  # bytes of a path
_MOST_PART = 255  # bytes of a name in it
_MOST_FILES = 1_000_000
_MOST_OVERHEAD = 128 << 20  # bytes of the heads of as many files as a sandbox has, in an archive
_SMALL, _MOST_FULL = 1 << 20, 256 << 20  # bytes for which no room is kept, and the room for others


class CopyLimit:
    """How much of a sandbox with `disk_mib` MiB is taken to `folder`. Its sizes say little: sparse
    files are sent as zeros, and a file as often as it has names.
    """

    def __init__(self, disk_mib: int, folder: Path) -> None:
        self._most = 2 * (disk_mib << 20) + _MOST_OVERHEAD
        self._taken, self._folder = 0, folder

    def take(self, size: int) -> None:
        """Note bytes that are about to be written. Raises SandboxFileError."""
        self._taken += size
        if self._taken > self._most:
            raise SandboxFileError(
                f"the sandbox sends more than {self._most >> 20} MiB, twice its disk: sparse files "
                "and files with several names count whole"
            )
        if self._taken > _SMALL:
            there = next(each for each in (self._folder, *self._folder.parents) if each.exists())
            free = shutil.disk_usage(there).free
            if free - size < _MOST_FULL:
                raise SandboxFileError(
                    f"{there} has {free >> 20} MiB free, too few for what the sandbox sends"
                )


def take_tree(pieces: Iterator[bytes], local: Path, disk_mib: int, *, replace: bool = False) -> int:
    """Write what a sandbox sends (`file_calls`) to `local`: a file, or a folder with files. Return
    how many links, pipes and devices were left out. In a folder with files that Cavvy has not put
    there, nothing is made or replaced without `replace`. Raises SandboxFileError, OSError.
    """
    from cavvy.cli.reach.received import is_git_folder, is_in_git_folder
    from cavvy.client.landing import Landing, LandingRefused, Receipts

    if is_git_folder(local) or is_in_git_folder(local):
        raise SandboxFileError(f"{local} is in a git folder, and nothing was written")
    source, limit = _Source(pieces), CopyLimit(disk_mib, local.absolute())
    try:
        first = _read_entry(source, limit)
        if first.parts == [b"."] and stat.S_ISREG(first.mode):
            with Landing(local.parent) as landing:
                _write(source, landing, local.name, first)
            return _read_entry(source, limit).left_out
        local.mkdir(parents=True, exist_ok=True)
        with Receipts(local) as receipts, Landing(local) as landing:
            arrival = _Arrival(source, local, landing, receipts, replace)
            return arrival.take(first, limit)
    except LandingRefused as error:
        told = f"{error.message}: {error.hint}" if error.hint else error.message
        raise SandboxFileError(told) from error


def send_tree(folder: Path) -> Iterator[bytes]:
    """Yield a folder of this computer as `file_calls` takes it. Links are left out."""
    for path, folders, files in os.walk(folder):
        for each in sorted(folders + files):
            whole = os.path.join(path, each)
            name = os.fsencode(os.path.relpath(whole, folder))
            about = os.lstat(whole)
            if stat.S_ISDIR(about.st_mode):
                yield ENTRY.pack(len(name), about.st_mode, 0) + name
            elif stat.S_ISREG(about.st_mode):
                yield from _send_file(whole, name, about.st_mode)
    yield ENTRY.pack(0, 0, 0)


def keep_snapshot(pieces: Iterator[bytes], disk_mib: int) -> str:
    """Write an archive to the cache, and return its hash. Raises SandboxLost, SandboxFileError,
    OSError.
    """
    folder = _open_cache()
    made, digest = folder / f".{token_hex(8)}", sha256()
    limit = CopyLimit(disk_mib, folder)
    try:
        with open(made, "xb", opener=_open_private) as file:
            for each in pieces:
                limit.take(len(each))
                digest.update(each)
                file.write(each)
        made.replace(folder / digest.hexdigest())
    finally:
        with suppress(FileNotFoundError):
            made.unlink()
    return digest.hexdigest()


def read_snapshot(name: str) -> Iterator[bytes]:
    """Yield an archive of the cache. Raises SandboxFileError."""
    path = _open_cache() / name
    if not path.exists():
        raise SandboxFileError(f"the snapshot {name} is not on this computer")
    with path.open("rb") as file:
        while data := file.read(PIECE):
            yield data


def _open_cache() -> Path:
    from cavvy.client.state import default_home

    folder = Path(default_home()) / "cache" / "sandboxes" / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Source:
    """The bytes that arrive, of which a certain number is taken."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held = pieces, b""

    def take(self, size: int) -> bytes:
        found = b"".join(self.stream(size))
        if len(found) < size:
            raise SandboxFileError("the sandbox sends less than it says")
        return found

    def stream(self, size: int) -> Iterator[bytes]:
        """Yield up to this many bytes."""
        while size:
            data = self._held or next(self._pieces, b"")
            if not data:
                return
            self._held = data[size:]
            data = data[:size]
            size -= len(data)
            yield data


def _check_name(raw: bytes) -> list[bytes]:
    """Return the parts of a relative path that stays below its folder. Raises SandboxFileError."""
    parts = raw.split(b"/")
    wrong = any(each in (b"", b"..") or len(each) > _MOST_PART or b"\0" in each for each in parts)
    if wrong or (b"." in parts and parts != [b"."]):
        raise SandboxFileError(f"the sandbox sends a file with the path {raw[:200]!r}")
    return parts


class _ArchiveEntry(NamedTuple):
    """A file or folder that a sandbox sends; `parts` is empty in the last entry."""

    parts: list[bytes]
    mode: int
    size: int
    left_out: int

    @property
    def path(self) -> str:
        return os.fsdecode(b"/".join(self.parts))


def _read_entry(source: _Source, limit: CopyLimit) -> _ArchiveEntry:
    length, mode, size = ENTRY.unpack(source.take(ENTRY.size))
    if not length:
        return _ArchiveEntry([], 0, 0, int(size))
    if length > _MOST_NAME:
        raise SandboxFileError("the sandbox sends more than can be taken")
    limit.take(size)
    parts = _check_name(source.take(length))
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise SandboxFileError("the sandbox sends what is neither a file nor a folder")
    return _ArchiveEntry(parts, mode, size, 0)


class _Arrival:
    """The files and folders that arrive in a folder, of which none was looked at before."""

    def __init__(
        self, source: _Source, folder: Path, landing: "Landing", receipts: "Receipts", replace: bool
    ) -> None:
        self._source, self._folder = source, folder
        self._landing, self._receipts, self._replace = landing, receipts, replace
        self._above = dict[str, bool]()  # folders that were looked at: whether git uses them

    def take(self, entry: _ArchiveEntry, limit: CopyLimit) -> int:
        """Take this entry and all others. Return how many the sandbox has left out."""
        count = 0
        while entry.parts:
            count += 1
            if count > _MOST_FILES:
                raise SandboxFileError("the sandbox sends more than can be taken")
            if entry.parts != [b"."]:
                self._take_one(entry)
            entry = _read_entry(self._source, limit)
        return entry.left_out

    def _take_one(self, entry: _ArchiveEntry) -> None:
        path, is_folder = entry.path, stat.S_ISDIR(entry.mode)
        self._check(path, is_folder)
        for number in range(1, len(entry.parts) + is_folder):
            self._make_folder(os.fsdecode(b"/".join(entry.parts[:number])))
        if not is_folder:
            _write(self._source, self._landing, path, entry)
            self._receipts.note(path)

    def _check(self, path: str, is_folder: bool) -> None:
        """Refuse what would be new in a folder of the user, or replaces a file of the user."""
        new, changed = self._receipts.find_doubtful([path])
        changed = [] if is_folder else changed
        if (new or changed) and not self._replace:
            what = f"replace {path!r:.200}" if changed else f"make {path!r:.200}"
            raise SandboxFileError(
                f"{self._folder} has files that Cavvy has not put there, so the sandbox may not "
                f"{what}: name a new folder, or agree with replace=True"
            )

    def _make_folder(self, path: str) -> None:
        from cavvy.cli.reach.received import is_git_folder

        if path not in self._above:
            self._above[path] = is_git_folder(self._folder / path)
            if not self._above[path]:
                self._landing.make_folder(path)
        if self._above[path]:
            raise SandboxFileError(
                f"git uses {str(self._folder / path)!r}, and would run the programs that the "
                "sandbox's settings and hooks name: name a new folder"
            )


def _write(source: _Source, landing: "Landing", path: str, entry: _ArchiveEntry) -> None:
    mode, written = 0o755 if entry.mode & 0o100 else 0o644, 0
    with landing.write(path, mode, time.time()) as file:
        file.truncate()
        for data in source.stream(entry.size):
            written += file.write(data)
        if written < entry.size:
            raise SandboxFileError("the sandbox sends less than it says")


def _send_file(path: str, name: bytes, mode: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield ENTRY.pack(len(name), mode, size) + name
        while size:
            data = file.read(min(PIECE, size)) or bytes(min(PIECE, size))
            size -= len(data)
            yield data
