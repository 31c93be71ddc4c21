"""Describes the files of a checkpoint folder: which files exist, when they changed, and how long
the work needed to write them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import time
from collections import namedtuple

from ..allowed_folders import AllowedFolders, ignore_error, raise_unless_vanished
from ..disk import read_known, walk_files, write_whole
from ..outbox import file_time_text
from .open_files import find_writers
from .torn_files import TornFiles
from .unsafe_files import Overwritten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

# `link` is the target of a symbolic link; "" for a file.
FileEntry = namedtuple("FileEntry", "path size mtime_ns inode mode link")
NEWEST_NS = 1 << 62  # ns since 1970; the control plane accepts no later time of a file
# minimum seconds of a write whose rate is measured; the rate of a shorter write is useless
SHORTEST_S = 0.02
RESTLESS = 4  # checks, a few seconds apart, after which a folder is taken to change all the time
_AT_FDCWD, _NO_FOLLOW, _STATX_BTIME = -100, 0x100, 0x800  # linux/fcntl.h, linux/stat.h
_REALTIME_COARSE = 5  # linux/time.h; the time module does not name this clock


class CheckpointWatcher:
    """Detects new checkpoints: a checkpoint is new when files of the folder have changed since the
    last checkpoint and then stayed unchanged between two checks. A program that saves more often
    than that never rests: its checkpoint is new if the folder had the same files at RESTLESS
    checks, and none of them is being written. With `elsewhere`, processes of other machines write
    to the folder, too, so it must rest. The object must be created before the work starts.
    """

    def __init__(self, folder: str, elsewhere: bool = False) -> None:
        self._folder, self._elsewhere = folder, elsewhere
        self._told = self._last = measure(folder)
        self._began_ns = watch_start_ns(self._told[0] > 0)
        self._torn, self._torn_text = TornFiles(), ""
        self._overwritten = Overwritten(_find_states(list_folder(folder)))
        self._names: list[str] = []  # the files at the latest checks, between which they changed
        self._restless = 0  # the number of these checks

    def note_writers(self) -> None:
        """Take note of the files that the work has open, before it gets a signal."""
        self._torn.note({entry.inode for entry in list_folder(self._folder)})

    def explain_torn(self, *, failed: bool) -> str:
        """Return which files the ended work was writing when it got a signal, or ""."""
        entries = list_folder(self._folder)
        changed_ns = {entry.inode: entry.mtime_ns for entry in entries}
        torn = self._torn.find(changed_ns, failed=failed)
        names = [entry.path for entry in entries if entry.inode in torn]
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if names[1:] else ""
        self._torn_text = (
            f"the program was writing {names[0]}{more} in the checkpoint folder when a signal "
            "ended it, and this folder keeps what is there: to never lose the previous state, "
            "write a new file and rename it when it is complete"
        )
        return self._torn_text

    def look(self, *, last: bool = False) -> dict[str, object]:
        """Return the fields of a `checkpoint` message, or {} if there is no new checkpoint. Pass
        `last` when the work has ended and writes no more. The `text` names files that may be torn.
        """
        found = measure(self._folder)
        still, self._last = found == self._last or last, found
        if found == self._told or not found[0]:
            return {}
        entries = list_folder(self._folder)
        if not still and not self._is_whole(entries):
            return {}
        self._restless = 0
        sent, seconds = written(self._folder, entries, self._told[2], self._began_ns)
        self._told = found
        files, size, newest = found
        fields: dict[str, object] = {
            "files": files,
            "bytes": size,
            "newest_at": file_time_text(newest / 1e9),
        }
        if seconds >= SHORTEST_S:
            fields.update(sent=sent, seconds=round(seconds, 3), cost_s=round(seconds, 3))
        if text := self._torn_text or self._overwritten.note(_find_states(entries)):
            fields["text"] = text
        return fields

    def _is_whole(self, entries: list[FileEntry]) -> bool:
        """Whether the folder holds a whole checkpoint although it changes all the time: a save that
        takes long would add files, or have one open."""
        if self._elsewhere:  # this machine does not know what others have open
            return False
        names = [entry.path for entry in entries]
        self._restless = self._restless + 1 if names == self._names else 1
        self._names = names
        return self._restless >= RESTLESS and not find_writers({each.inode for each in entries})


def _find_states(entries: list[FileEntry]) -> dict[int, tuple[str, int, int]]:
    return {each.inode: (each.path, each.size, each.mtime_ns) for each in entries if not each.link}


def list_checkpoint(
    config: AgentConfig, folder: str, given: list[str] | None = None
) -> list[FileEntry]:
    """Return every file and link below the checkpoint folder. This folder must be in the working
    folder or in a volume; `given` lists the volumes. The list is empty if the checkpoint folder is
    missing. Raises LeadsOutside, OSError.
    """
    try:
        top = AllowedFolders([config.folder], given).open_folder(folder)
    except FileNotFoundError:
        return []
    try:
        return list_folder(top, on_error=raise_unless_vanished)
    finally:
        os.close(top)


def list_folder(
    folder: str | int, *, on_error: Callable[[OSError], object] = ignore_error
) -> list[FileEntry]:
    """Return every file and link below the folder, sorted by path. The arguments are the same as
    for `walk_files`. Raises OSError."""
    found: list[FileEntry] = []
    for path, seen, link in walk_files(folder, on_error=on_error):
        if stat.S_ISLNK(seen.st_mode):
            found.append(FileEntry(path, 0, 0, 0, 0, link))
        elif stat.S_ISREG(seen.st_mode):
            mode = stat.S_IMODE(seen.st_mode)
            size, mtime_ns = seen.st_size, seen.st_mtime_ns
            found.append(FileEntry(path, size, mtime_ns, seen.st_ino, mode, ""))
    return sorted(found)


def fingerprint(entries: list[FileEntry]) -> str:
    """Return a fingerprint of the folder, which changes whenever a file in the folder is written,
    or "" for an empty folder."""
    return (
        hashlib.sha256(repr(entries).encode("utf-8", "surrogateescape")).hexdigest()
        if entries
        else ""
    )


def newest(entries: list[FileEntry]) -> int:
    """Return when any file was last changed, in nanoseconds since the epoch, or 0 if no files
    exist."""
    return min(max((entry.mtime_ns for entry in entries), default=0), NEWEST_NS)


def written(folder: str, entries: list[FileEntry], since: int, watched: int) -> tuple[int, float]:
    """Return the size in bytes of the files that changed after `since`, and the seconds needed to
    write them.

    The time runs from the creation of the first file to the last change of any file. If a file's
    creation time is unknown, the time of the file's last change is used instead. Files created
    before `watched` belong to earlier attempts. `since` and `watched` are in ns since the epoch.
    """
    fresh = [entry for entry in entries if entry.mtime_ns > since and not entry.link]
    if not fresh:
        return 0, 0.0
    first = min(fresh, key=lambda entry: entry.mtime_ns)
    began = born_ns(os.path.join(folder, first.path))
    if (
        began is None or not max(since, watched) <= began <= first.mtime_ns
    ):  # an old file that was overwritten at an unknown time
        began = first.mtime_ns
    ended = min(
        max(entry.mtime_ns for entry in fresh), time.time_ns()
    )  # a file's time may lie in the future
    return sum(entry.size for entry in fresh), max(0, ended - began) / 1e9


def watch_start_ns(has_files: bool) -> int:
    """Return the creation time from which files are new, in ns since the epoch, for a folder that
    was listed just now and that has files or none.

    The kernel may date a new file with a coarse clock, which is up to 10 ms behind `time.time_ns`.
    If the folder has files, the exact time is returned, because they were restored just now: a file
    that the work creates in the next 10 ms is then taken for a restored one.
    """
    return time.time_ns() if has_files else time.clock_gettime_ns(_REALTIME_COARSE)


def born_ns(path: str) -> int | None:
    """Return when the file was created, in ns since the epoch, or None if the file system does not
    record it. Calls statx(2) through the C library, because Python's standard library does not
    offer it.
    """
    try:
        from ctypes import CDLL, c_uint, create_string_buffer

        found = create_string_buffer(256)
        if CDLL(None).statx(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, c_uint(_STATX_BTIME), found):
            return None
    except (ImportError, OSError, AttributeError):  # Python without statx, or an old C library
        return None
    if not struct.unpack_from("=I", found, 0)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
    return int(seconds * 1_000_000_000 + nanoseconds)


def measure(folder: str) -> tuple[int, int, int]:
    """Return the number of files, their total size in bytes, and the time of the newest change (ns
    since the epoch)."""
    files = size = newest = 0
    for _, seen, _ in walk_files(folder):
        files, size, newest = files + 1, size + seen.st_size, max(newest, seen.st_mtime_ns)
    return files, size, newest


def rows_of(config: AgentConfig) -> str:
    """Return the file that lists the files of the newest checkpoint of this node."""
    return config.private + "/checkpoint.json"


def read_rows(config: AgentConfig) -> list[dict[str, object]]:
    """Return the files of the newest checkpoint that this node has restored or uploaded."""
    found = read_known(rows_of(config)).get("files", [])
    return [row for row in found if isinstance(row, dict)]


def write_rows(config: AgentConfig, rows: list[dict[str, object]]) -> None:
    """Store the list of files of this node's newest checkpoint."""
    write_whole(rows_of(config), json.dumps({"files": rows}))


def split_names(entries: list[FileEntry]) -> tuple[list[FileEntry], str]:
    """Return the entries whose name and target are UTF-8, and the first other name, or "". The
    control plane cannot store other names."""
    fit, other = [], ""
    for entry in entries:
        try:
            check_names([entry])
            fit.append(entry)
        except OSError:
            other = other or repr(entry.path)
    return fit, other


def check_names(entries: list[FileEntry]) -> None:
    """Raise OSError if a name or the target of a link is not UTF-8, because the control plane
    cannot store such a name."""
    for entry in entries:
        try:
            (entry.path + entry.link).encode()
        except UnicodeEncodeError as error:
            told = "the file's name or the link's target is not UTF-8"
            raise OSError(errno.EILSEQ, told, entry.path) from error
