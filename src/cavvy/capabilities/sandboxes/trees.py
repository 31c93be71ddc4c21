"""Copies files between this computer and sandboxes. What comes from a sandbox may be anything:
names that lead elsewhere, sizes that are wrong, and no end.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from cavvy.capabilities.sandboxes.errors import SandboxFileError
from cavvy.capabilities.sandboxes.on_node.file_calls import ENTRY

PIECE = 64 << 10
_MOST_NAME = 4096  # bytes of a path
_MOST_PART = 255  # bytes of a name in it
_MOST_FILES = 1_000_000
_MOST_OVERHEAD = 128 << 20  # bytes of the heads of as many files as a sandbox has, in an archive
_SMALL, _MOST_FULL = 1 << 20, 256 << 20  # bytes for which no room is kept, and the room for others
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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


def take_tree(pieces: Iterator[bytes], local: Path, disk_mib: int) -> int:
    """Write what a sandbox sends (`file_calls`) to `local`: a file, or a folder with files. Return
    how many links, pipes and devices were left out. Raises SandboxFileError, OSError.
    """
    source, count, limit = _Source(pieces), 0, CopyLimit(disk_mib, local.absolute())
    while True:
        length, mode, size = ENTRY.unpack(source.take(ENTRY.size))
        if not length:
            if not count:
                local.mkdir(parents=True, exist_ok=True)
            return int(size)
        count += 1
        if length > _MOST_NAME or count > _MOST_FILES:
            raise SandboxFileError("the sandbox sends more than can be taken")
        limit.take(size)
        parts = _check_name(source.take(length))
        if parts == [b"."] and stat.S_ISREG(mode):
            _take_file(source, local, size, mode)
        else:
            local.mkdir(parents=True, exist_ok=True)
            _take_entry(source, local, parts, mode, size)


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
        with open(made, "xb") as file:
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


def _take_file(source: _Source, local: Path, size: int, mode: int) -> None:
    target = local
    above = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _write(source, above, os.fsencode(target.name), size, mode)
    finally:
        os.close(above)


def _take_entry(source: _Source, local: Path, parts: list[bytes], mode: int, size: int) -> None:
    """Write an entry below `local`, through no link."""
    at = os.open(local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts if stat.S_ISDIR(mode) else parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
            below = os.open(part, _READ, dir_fd=at)
            os.close(at)
            at = below
        if stat.S_ISREG(mode):
            _write(source, at, parts[-1], size, mode)
        elif not stat.S_ISDIR(mode):
            raise SandboxFileError("the sandbox sends what is neither a file nor a folder")
    finally:
        os.close(at)


def _write(source: _Source, folder: int, name: bytes, size: int, mode: int) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise SandboxFileError(f"{name[:200]!r} is a folder on this computer")
        os.unlink(name, dir_fd=folder)
    opened = os.open(name, _MAKE, 0o600, dir_fd=folder)
    with os.fdopen(opened, "wb") as file:
        written = 0
        for data in source.stream(size):
            written += file.write(data)
        if written < size:
            raise SandboxFileError("the sandbox sends less than it says")
        os.fchmod(file.fileno(), 0o755 if mode & 0o100 else 0o644)


def _send_file(path: str, name: bytes, mode: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield ENTRY.pack(len(name), mode, size) + name
        while size:
            data = file.read(min(PIECE, size)) or bytes(min(PIECE, size))
            size -= len(data)
            yield data
