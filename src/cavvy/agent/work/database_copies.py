"""Copies SQLite databases that programs have open and change all the time.

SQLite recovers a database from any moment at which its power was cut. So a copy is good if nothing
changed the database and its journals while they were copied; this takes milliseconds, and is tried
again otherwise.
"""

from __future__ import annotations

import os

from ..allowed_folders import open_below
from .trees import copy_open

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checkpoint_files import FileEntry

DATABASE = b"SQLite format 3\0"  # sqlite.org/fileformat.html
JOURNALS = ("-wal", "-journal")
INDEX = "-shm"  # the index of a journal, which SQLite makes anew
TRIES = 50
LARGEST = 256 * 1024 * 1024  # bytes of a database that is copied in this way


class DatabaseCopies:
    """The copies of the databases in an open folder: `entries` has the copied files, and `files`
    their descriptors."""

    def __init__(self, top: int, folder: str) -> None:
        self._top, self._folder, self._count = top, folder, 0
        self.entries: dict[str, FileEntry] = {}
        self.files: dict[str, int] = {}

    def copy(self, entry: FileEntry, file: int) -> bool:
        """Copy a database with its journals. Return False if the file is no database, or was
        changed during each try. Raises OSError."""
        if entry.size > LARGEST or os.pread(file, len(DATABASE), 0) != DATABASE:
            return False
        for _ in range(TRIES):
            opened = self._open_all(entry.path)
            try:
                before = _read_state(opened)
                copies = {path: self._copy_one(each) for path, each in opened.items()}
                after = self._open_all(entry.path)
                same = _read_state(opened) == before == _read_state(after)
                _close(after)
                if same and entry.path in opened:
                    self._keep(entry, opened, copies)
                    return True
                _close(copies)
            finally:
                _close(opened)
        return False

    def _keep(self, entry: FileEntry, opened: dict[str, int], copies: dict[str, int]) -> None:
        self.files.update(copies)
        for path, file in opened.items():
            found = os.fstat(file)
            self.entries[path] = entry._replace(
                path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino
            )

    def _open_all(self, path: str) -> dict[str, int]:
        opened = {}
        for name in (path, *(path + ending for ending in JOURNALS)):
            try:
                opened[name] = open_below(self._top, name, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue  # there is no such journal now
        return opened

    def _copy_one(self, file: int) -> int:
        self._count += 1
        path = f"{self._folder}/database-{self._count}"
        copy_open(file, path)
        copied = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        os.unlink(path)
        return copied


def _read_state(files: dict[str, int]) -> dict[str, tuple[int, int, int]]:
    found = {path: os.fstat(file) for path, file in files.items()}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in found.items()}


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
