"""Chooses the files of a checkpoint folder that are whole at one moment, while the work goes on
writing to the folder.

The folder is listed twice, and each file of the first list stays open in between, so that a file
that was replaced by a rename is judged by itself. A file is whole if it did not change and if no
process has it open for writing. A file that only grows is taken up to the size of the first list.
Of a file that the work is changing, the newest checkpoint's version is kept.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .checkpoint_files import FileEntry

    Row = dict[str, object]

PATIENCE_S = 10.0  # a file that is held open for writing, but unchanged for so long, is whole
# a file that changed so shortly before the work was killed was being written
CUT_NS = 1_000_000_000
_NUMBER = re.compile(r"\d+")


class LookResult:
    """What two looks at the folder have shown: the two lists, the state of each open file at the
    second look (None for a file that could not be opened), who writes to which inode, the rows of
    the newest checkpoint, and a function that says whether a file begins with its version in that
    checkpoint."""

    def __init__(
        self,
        first: list[FileEntry],
        second: list[FileEntry],
        *,
        find_status: Callable[[FileEntry], os.stat_result | None],
        writers: dict[int, bool],
        before: list[Row],
        extends: Callable[[FileEntry, Row], bool],
        cut_ns: int = 0,
        torn: frozenset[int] = frozenset(),
    ) -> None:
        self.first, self.second, self.writers = first, second, writers
        self.find_status, self.extends, self.cut_ns = find_status, extends, cut_ns
        self.torn = torn
        self.before = {str(row["path"]): row for row in before}
        self.paths = {entry.path for entry in second}
        self._places = {entry.inode: entry.path for entry in second if not entry.link}

    def is_whole(self, entry: FileEntry) -> bool:
        """Return whether the work has finished the file."""
        if entry.link:
            return True
        seen = self.find_status(entry)
        if seen is None or self.was_renamed(entry):
            return False
        if (seen.st_size, seen.st_mtime_ns) != (entry.size, entry.mtime_ns):
            return False
        # a rename changes only this time, so what was renamed after the last write is finished
        finished = seen.st_ctime_ns > entry.mtime_ns
        if (self.cut_ns or self.torn) and not finished:
            fresh = bool(self.cut_ns) and entry.mtime_ns >= self.cut_ns - CUT_NS
            return not (fresh or entry.inode in self.torn)
        if self.writers.get(entry.inode) is not False:
            return True
        return bool(entry.mtime_ns < time.time_ns() - PATIENCE_S * 1e9)

    def only_grows(self, entry: FileEntry) -> bool:
        """Return whether the work only appends to the file."""
        seen = self.find_status(entry)
        if entry.link or entry.inode in self.torn or seen is None or seen.st_size < entry.size:
            return False
        row = self.before.get(entry.path)
        return self.writers.get(entry.inode) is True or (
            row is not None and "sha256" in row and self.extends(entry, row)
        )

    def was_renamed(self, entry: FileEntry) -> bool:
        """Return whether the file of the first list has another path in the second."""
        return bool(self._places.get(entry.inode, entry.path) != entry.path)


class FileChoice:
    """The files of one checkpoint: `taken` from the folder, of which those in `growing` are taken
    up to their listed size, and `kept`, the rows of the newest checkpoint whose files are being
    changed. `is_all` says whether nothing was left out."""

    __slots__ = ("growing", "is_all", "kept", "taken")

    def __init__(
        self, taken: list[FileEntry], growing: frozenset[str], kept: list[Row], *, is_all: bool
    ) -> None:
        self.taken, self.growing, self.kept, self.is_all = taken, growing, kept, is_all


def choose_files(look: LookResult) -> FileChoice:
    """Choose the whole files and folders.

    A folder that the newest checkpoint lacks is whole if nothing in it changes, or if a folder with
    the same name but a higher number exists. In other folders, each file counts by itself; but as
    long as the work overwrites one of the files, all files of that folder are kept as they were in
    the newest checkpoint, since they may belong together.
    """
    known = _list_parents(look.before)
    whole: list[FileEntry] = []
    growing: set[str] = set()
    busy: set[str] = set()
    for entry in look.first:
        if look.is_whole(entry):
            whole.append(entry)
        elif look.only_grows(entry):
            whole.append(entry)
            growing.add(entry.path)
        else:
            busy.add(entry.path)
    moved = {entry.path for entry in look.first} ^ look.paths
    unfinished = _find_unfinished({*busy, *moved}, known, look)
    rewritten = {os.path.dirname(path) for path in busy if path in look.before}
    taken = [
        entry
        for entry in whole
        if os.path.dirname(entry.path) not in rewritten
        and not any(_is_in(entry.path, folder) for folder in unfinished)
    ]
    paths = {entry.path for entry in taken}
    kept = [
        row
        for path, row in look.before.items()
        if os.path.dirname(path) in rewritten and path not in paths
    ]
    partly = len(taken) != len(look.first) or bool(growing)
    return FileChoice(taken, frozenset(growing & paths), kept, is_all=not partly)


def _list_parents(before: dict[str, Row]) -> set[str]:
    """Return all folders of the newest checkpoint, with the checkpoint folder itself."""
    found = {""}
    for path in before:
        while path:
            path = os.path.dirname(path)
            found.add(path)
    return found


def _find_unfinished(changed: set[str], known: set[str], look: LookResult) -> set[str]:
    """Return the topmost new folders with one of the changed paths, except superseded ones."""
    found = set()
    for path in changed:
        top, parent = "", os.path.dirname(path)
        while parent not in known:
            top, parent = parent, os.path.dirname(parent)
        if top:
            found.add(top)
    names = {name for path in look.paths for name in _list_folders(path)}
    names |= {name for entry in look.first for name in _list_folders(entry.path)}
    newest: dict[str, list[int]] = {}
    for name in names:
        if numbers := _read_numbers(name):
            key = _NUMBER.sub("#", name)
            newest[key] = max(newest.get(key, []), numbers)
    return {name for name in found if not _is_superseded(name, newest, look)}


def _is_superseded(name: str, newest: dict[str, list[int]], look: LookResult) -> bool:
    """Return whether a later folder of this kind exists, and no file in this one is written."""
    later = newest.get(_NUMBER.sub("#", name), [])
    return later > _read_numbers(name) and all(
        look.is_whole(entry) for entry in look.first if _is_in(entry.path, name)
    )


def _list_folders(path: str) -> list[str]:
    found = []
    while path := os.path.dirname(path):
        found.append(path)
    return found


def _read_numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def find_writers(inodes: set[int]) -> dict[int, bool]:
    """Return the inodes that a process of this user has open for writing, and whether every such
    process only appends. Processes whose files this user may not see are omitted."""
    found: dict[int, bool] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            for file in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError, ValueError):
                    inode = os.stat(f"/proc/{pid}/fd/{file}").st_ino
                    if inode in inodes and (flags := _read_flags(pid, file)) & os.O_ACCMODE:
                        appends = bool(flags & os.O_APPEND)
                        found[inode] = appends and found.get(inode, True)
    return found


def _read_flags(pid: str, file: str) -> int:
    with open(f"/proc/{pid}/fdinfo/{file}", encoding="ascii") as info:
        for line in info:
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    return 0
