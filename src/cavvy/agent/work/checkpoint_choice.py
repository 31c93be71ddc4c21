"""Chooses the files of a checkpoint folder that are whole at one moment, while the work goes on
writing to the folder.

The folder is listed twice, and each file of the first list stays open in between, so that a file
that was replaced by a rename is judged by itself. A file is whole if it did not change and if no
process has it open for writing. A file that only grows is taken up to the size of the first list.
If the work is changing other files of the newest checkpoint, all files that may belong to them stay
as they are in that checkpoint.
"""

from __future__ import annotations

import os
import re
import time

from .database_copies import DATABASE, INDEX, JOURNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .checkpoint_files import FileEntry

    Row = dict[str, object]

PATIENCE_S = 10.0  # a file that is held open for writing, but unchanged for so long, is whole
# a file that changed so shortly before the work was killed was being written
CUT_NS = 1_000_000_000
FILLED_S = 30.0  # if the task states no interval
# the same, as a multiple, for a folder like others that were filled in less time
UNITS = 10
# maximum bytes of a file that is always being changed, and that no other file belongs to
STATUS_BYTES = 1024 * 1024
_NUMBER = re.compile(r"\d+")
# a number, a UUID or a hash, as in names of files that differ from one save to the next
_ANY_NUMBER = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}|\d+")


class LookResult:
    """What two looks at the folder have shown: the two lists, the state of each open file at the
    second look (None for a file that could not be opened), which inodes are open for writing (True
    if only for appending) and of which this is `unknown`, the rows of the newest checkpoint, and
    functions that say whether a file begins with its version in that checkpoint, and how it begins.

    `since` is the list of an earlier look, if there was one: a new folder must not have changed
    since then. `restless`: files that were being changed in each earlier look. `find_birth` returns
    when a folder was created (ns since 1970); a new folder that the work has been filling for
    longer than `filled_s` seconds is one in which it always writes. `ended`: whether the work has
    ended and adds nothing to a new folder.
    """

    def __init__(
        self,
        first: list[FileEntry],
        second: list[FileEntry],
        *,
        find_status: Callable[[FileEntry], os.stat_result | None],
        writers: dict[int, bool],
        before: list[Row],
        extends: Callable[[FileEntry, Row], bool],
        read_start: Callable[[FileEntry], bytes] = lambda entry: b"",
        unknown: Iterable[int] = (),
        since: list[FileEntry] | None = None,
        restless: frozenset[str] = frozenset(),
        find_birth: Callable[[str], int | None] = lambda folder: None,
        filled_s: float = FILLED_S,
        ended: bool = False,
        cut_ns: int = 0,
        torn: frozenset[int] = frozenset(),
    ) -> None:
        self.ended = ended
        self.find_birth, self.filled_ns = find_birth, int(filled_s * 1e9)
        self.first = [entry for entry in first if not entry.path.endswith(INDEX)]
        self.second, self.writers, self.unknown = second, writers, frozenset(unknown)
        self.find_status, self.extends, self.cut_ns = find_status, extends, cut_ns
        self.read_start, self.torn, self.restless = read_start, torn, restless
        self.since = self.first if since is None else since
        self.before = {str(row["path"]): row for row in before}
        self.paths = {entry.path for entry in second}
        self._places: dict[int, set[str]] = {}
        for entry in second:
            if not entry.link:
                self._places.setdefault(entry.inode, set()).add(entry.path)
        self._by_path = {entry.path: entry for entry in self.first}

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
            if fresh or entry.inode in self.torn:
                return self.is_database(entry)
            return True
        is_open = self.writers.get(entry.inode) is False or entry.inode in self.unknown
        if not is_open or self.is_database(entry):
            return True
        return bool(entry.mtime_ns < time.time_ns() - PATIENCE_S * 1e9)

    def is_database(self, entry: FileEntry) -> bool:
        """Return whether the file is an SQLite database, or belongs to one. If it does not change,
        it is whole, although it is open: SQLite undoes a change that was cut short."""
        for ending in JOURNALS:
            if entry.path.endswith(ending):
                main = self._by_path.get(entry.path[: -len(ending)])
                return main is not None and self.read_start(main).startswith(DATABASE)
        return self.read_start(entry).startswith(DATABASE)

    def only_grows(self, entry: FileEntry) -> bool:
        """Return whether the work only appends to the file."""
        seen = self.find_status(entry)
        if entry.link or seen is None or seen.st_size < entry.size or self.is_database(entry):
            return False
        if entry.inode in self.torn:
            return False
        return self.writers.get(entry.inode) is True or self.extends_row(entry)

    def extends_row(self, entry: FileEntry) -> bool:
        """Return whether the file begins with its version in the newest checkpoint."""
        row = self.before.get(entry.path)
        return row is not None and "sha256" in row and self.extends(entry, row)

    def was_renamed(self, entry: FileEntry) -> bool:
        """Return whether the file of the first list has another path in the second."""
        return entry.path not in self._places.get(entry.inode, {entry.path})


class FileChoice:
    """The files of one checkpoint: `taken` from the folder, of which those in `growing` are taken
    up to their listed size, and `kept`, the rows of the newest checkpoint whose files are being
    changed. `is_all` says whether nothing was left out; `busy` are the files of the newest
    checkpoint that the work is changing. If any are, another look may show more. `unsafe` are the
    files that are being written and that the newest checkpoint does not have."""

    __slots__ = ("busy", "growing", "is_all", "kept", "taken", "unsafe")

    def __init__(
        self,
        taken: list[FileEntry],
        growing: frozenset[str],
        kept: list[Row],
        busy: frozenset[str],
        *,
        is_all: bool,
        unsafe: frozenset[str],
    ) -> None:
        self.taken, self.growing, self.kept = taken, growing, kept
        self.busy, self.is_all, self.unsafe = busy, is_all, unsafe


def choose_files(look: LookResult) -> FileChoice:
    """Choose the whole files and folders.

    A folder that the newest checkpoint lacks is whole if nothing in it changes, or if a folder with
    the same name but a higher number exists. In other folders, each file counts by itself; but as
    long as the work overwrites or removes one of the files, all these folders are kept as they were
    in the newest checkpoint, since their files may belong together.
    """
    known = _list_parents(look.before)
    whole, growing, busy = _sort_files(look)
    unfinished, opened = _find_unfinished(_find_changed(busy, look), known, look)
    known |= opened
    touched = _find_touched(busy, unfinished, look)
    status = {path for path in touched & look.restless if _is_small(path, look)}
    # the folders that are kept as they were
    rewritten = known if touched - status else {os.path.dirname(path) for path in status}
    taken = [
        entry
        for entry in whole
        if os.path.dirname(entry.path) not in rewritten
        and not any(_is_in(entry.path, folder) for folder in unfinished)
    ]
    paths = {entry.path for entry in taken}
    alone = {path for path in busy if path in look.before}
    alone |= _find_replaced(busy, unfinished, paths, look)
    kept = [
        row
        for path, row in look.before.items()
        if (os.path.dirname(path) in rewritten or path in alone) and path not in paths
    ]
    partly = len(taken) != len(look.first) or bool(growing)
    return FileChoice(
        taken,
        frozenset(growing & paths),
        kept,
        frozenset(touched),
        is_all=not partly,
        unsafe=frozenset(busy - look.before.keys()),
    )


def _find_replaced(
    busy: set[str], unfinished: set[str], taken: set[str], look: LookResult
) -> set[str]:
    """Return the files of the newest checkpoint that the work has removed, although those of the
    same kind with a higher number are not finished. Of each kind, these are the last ones, and none
    if later ones are `taken`."""
    kinds = {_NUMBER.sub("#", name) for name in busy | unfinished if _NUMBER.search(name)}
    here = {entry.path for entry in look.first}
    old, gone = _sort_by_kind(look.before), _sort_by_kind(look.before.keys() - here)
    now, whole = _sort_by_kind(look.paths | here), _sort_by_kind(taken)
    found = set[str]()
    for kind in kinds & gone.keys():
        complete = whole.get(kind, {}).keys() - gone[kind].keys() - unfinished
        for name in _find_last(gone[kind].keys(), complete, old[kind].keys(), now[kind].keys()):
            found |= gone[kind][name]
    return found


def _sort_by_kind(paths: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    """Map each kind of name with a number to its files and folders, and these to their files."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in paths:
        for name in (path, *_list_folders(path)):
            kind = _NUMBER.sub("#", name)
            if kind != name:
                found.setdefault(kind, {}).setdefault(name, set()).add(path)
    return found


def _find_last(
    gone: Iterable[str], complete: Iterable[str], old: Iterable[str], now: Iterable[str]
) -> list[str]:
    """Return which removed names of one kind the checkpoint still needs. The numbers that have
    become higher between the `old` names and those of `now` tell one save from the next; names that
    differ only in other numbers, as those of ranks, belong together."""
    olds = [_read_numbers(name) for name in old]
    news = [_read_numbers(name) for name in now]
    highest = [max(found) for found in zip(*olds, strict=True)]
    grown = [at for at, found in enumerate(zip(*news, strict=True)) if max(found) > highest[at]]

    def read_save(name: str) -> tuple[int, ...]:
        numbers = _read_numbers(name)
        return tuple(numbers[at] for at in grown)

    def list_parts(names: Iterable[str], save: tuple[int, ...]) -> set[tuple[int, ...]]:
        numbers = [_read_numbers(name) for name in names if read_save(name) == save]
        return {
            tuple(number for at, number in enumerate(found) if at not in grown) for found in numbers
        }

    if not grown:
        return list(gone)
    last = max(map(read_save, gone))
    parts = list_parts(old, last)
    later = {save for save in map(read_save, complete) if save > last}
    if any(list_parts(complete, save) >= parts for save in later):
        return []
    return [name for name in gone if read_save(name) == last]


def _sort_files(look: LookResult) -> tuple[list[FileEntry], set[str], set[str]]:
    """Return the files that can be taken, the paths of those that grow, and the paths of the
    others."""
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
    return whole, growing, busy


def _find_changed(busy: set[str], look: LookResult) -> set[str]:
    """Return the paths that appeared, vanished or changed during the looks."""
    earlier = {entry.path: entry[1:] for entry in look.since}
    changed = {entry.path for entry in look.first if earlier.get(entry.path) != entry[1:]}
    return busy | changed | ({entry.path for entry in look.first} ^ look.paths)


def _find_touched(busy: set[str], unfinished: set[str], look: LookResult) -> set[str]:
    """Return the files of the newest checkpoint, and of databases, that the work is overwriting or
    removing, and those that may name an unfinished folder, because they were written after its
    first file."""
    entries = {entry.path: entry for entry in look.first}
    newest = _find_newest_numbers(look)
    found = {
        path
        for path in busy
        if (path in look.before or look.is_database(entries[path]))
        and not (entries[path].inode in look.torn and look.extends_row(entries[path]))
    }
    for path in look.before:
        removed = path in entries and path not in look.paths and path not in busy
        absent = path not in entries and path in look.paths
        if (removed or absent) and not any(
            _is_outdated(each, newest) for each in (path, *_list_folders(path))
        ):
            found.add(path)
    for folder in unfinished:
        times = [each.mtime_ns for each in look.first if _is_in(each.path, folder)]
        began = min(times, default=time.time_ns())
        found |= {path for path in look.before if _may_name(entries.get(path), folder, began, look)}
    return found


def _may_name(entry: FileEntry | None, folder: str, began_ns: int, look: LookResult) -> bool:
    """Return whether the file may name the unfinished folder, the first file of which was written
    at `began_ns`."""
    if entry is None or not _is_above(os.path.dirname(entry.path), folder):
        return False
    if entry.link:
        target = _find_target(entry)
        return target == folder or _is_in(target, folder)
    if entry.mtime_ns < began_ns or _is_same(entry, look.before[entry.path]):
        return False
    return not (look.writers.get(entry.inode) or look.extends_row(entry))


def _is_same(entry: FileEntry, row: Row) -> bool:
    return (row.get("size"), row.get("mtime_ns")) == (entry.size, entry.mtime_ns)


def _is_small(path: str, look: LookResult) -> bool:
    sizes = [entry.size for entry in look.first if entry.path == path]
    return all(size <= STATUS_BYTES for size in sizes)


def _find_target(entry: FileEntry) -> str:
    return str(os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.link)))


def _list_parents(before: dict[str, Row]) -> set[str]:
    """Return all folders of the newest checkpoint, with the checkpoint folder itself."""
    found = {""}
    for path in before:
        while path:
            path = os.path.dirname(path)
            found.add(path)
    return found


def _find_unfinished(
    changed: set[str], known: set[str], look: LookResult
) -> tuple[set[str], set[str]]:
    """Return the topmost new folders with one of the changed paths, except those that the work has
    finished all the same; and the new folders in which the work always writes."""
    found: set[str] = set()
    opened: set[str] = set()
    for path in sorted(changed):
        for folder in reversed(_list_folders(path)):
            if folder in known or folder in opened:
                continue
            if folder not in found and _is_always_filled(folder, look):
                opened.add(folder)
                continue
            found.add(folder)
            break
    if not look.ended:
        new = {name for entry in look.first for name in _list_folders(entry.path)} - known - opened
        tops = {name for name in new if os.path.dirname(name) not in new}
        found |= {name for name in tops if _is_fresh(name, look) or _misses_files(name, look)}
    newest, shapes = _find_newest_numbers(look), _find_shapes(look)

    def is_whole(name: str) -> bool:
        if not _is_still(name, look):
            return False
        if _is_named(name, look):
            return True
        # the work may be removing an outdated folder
        return _is_outdated(name, newest) and not _is_half_removed(name, shapes)

    return {name for name in found if not is_whole(name)}, opened


def _find_shapes(look: LookResult) -> dict[str, dict[str, set[str]]]:
    """Map each kind of folder with a number to its folders, and these to the kinds of their
    files."""
    found: dict[str, dict[str, set[str]]] = {}
    for entry in look.first:
        for name in _list_folders(entry.path):
            kind = _NUMBER.sub("#", name)
            if kind != name:
                shape = _ANY_NUMBER.sub("#", entry.path[len(name) :])
                found.setdefault(kind, {}).setdefault(name, set()).add(shape)
    return found


def _is_half_removed(folder: str, shapes: dict[str, dict[str, set[str]]]) -> bool:
    """Return whether another folder of the same kind has the files of this one, and more."""
    alike = shapes.get(_NUMBER.sub("#", folder), {})
    return any(found > alike.get(folder, set()) for found in alike.values())


def _is_fresh(folder: str, look: LookResult) -> bool:
    """Return whether a new folder has rested for less time than the work needed to fill it."""
    times = [entry.mtime_ns for entry in look.first if _is_in(entry.path, folder)]
    spent = min(max(times) - min(times), int(PATIENCE_S * 1e9))
    return bool(time.time_ns() - max(times) < spent)


def _misses_files(folder: str, look: LookResult) -> bool:
    """Return whether a new folder lacks files that the largest folder of its kind in the newest
    checkpoint has, and has not rested for long."""
    kind = _NUMBER.sub("#", folder)
    others: dict[str, set[str]] = {}
    for path in look.before:
        for name in _list_folders(path):
            if name != folder and _NUMBER.sub("#", name) == kind:
                others.setdefault(name, set()).add(_NUMBER.sub("#", path))
    entries = [entry for entry in look.first if _is_in(entry.path, folder)]
    has = {_NUMBER.sub("#", entry.path) for entry in entries}
    if not others or max(others.values(), key=len) <= has:
        return False
    last = max(entry.mtime_ns for entry in entries)
    return bool(last > time.time_ns() - PATIENCE_S * 1e9)


def _is_always_filled(folder: str, look: LookResult) -> bool:
    """Return whether the work has written to a new folder for so long that this is no single save.
    Folders of the same kind in the newest checkpoint show how long a save takes."""
    times = [entry.mtime_ns for entry in look.first if _is_in(entry.path, folder)]
    began = look.find_birth(folder) or min(times, default=0)
    age, kind = time.time_ns() - began, _NUMBER.sub("#", folder)
    spans: dict[str, list[int]] = {}
    for path, row in look.before.items():
        for other in _list_folders(path):
            if other != folder and _NUMBER.sub("#", other) == kind and "mtime_ns" in row:
                spans.setdefault(other, []).append(int(str(row["mtime_ns"])))
    short = spans and all(max(found) - min(found) < look.filled_ns for found in spans.values())
    return age >= look.filled_ns * (UNITS if short else 1)


def _is_still(folder: str, look: LookResult) -> bool:
    """Return whether no file in the folder is being written, and none was added or removed."""
    entries = [entry for entry in look.first if _is_in(entry.path, folder)]
    return all(look.is_whole(entry) for entry in entries)


def _is_named(folder: str, look: LookResult) -> bool:
    """Return whether a file or link that may name the folder was written after it: an index, or a
    file such as `latest`."""
    if {each for each in look.paths if _is_in(each, folder)} != {
        each.path for each in look.first if _is_in(each.path, folder)
    }:
        return False
    last = max((each.mtime_ns for each in look.first if _is_in(each.path, folder)), default=0)
    return any(
        _find_target(entry) == folder if entry.link else entry.mtime_ns >= last
        for entry in look.first
        if _is_above(os.path.dirname(entry.path), folder)
        and (entry.link or (look.is_whole(entry) and entry.inode not in look.writers))
    )


def _is_above(parent: str, folder: str) -> bool:
    return not parent or _is_in(folder, parent)


def _find_newest_numbers(look: LookResult) -> dict[str, list[list[int]]]:
    """Return the highest numbers of each kind of name, such as `checkpoint-#`: several if none of
    them is the highest in each place, as for `rank-#/step-#`."""
    names = {*look.paths, *(entry.path for entry in look.first)}
    names |= {name for path in tuple(names) for name in _list_folders(path)}
    newest: dict[str, list[list[int]]] = {}
    for name in names:
        if numbers := _read_numbers(name):
            others = newest.setdefault(_NUMBER.sub("#", name), [])
            if not any(_is_behind(numbers, other) for other in others):
                others[:] = [other for other in others if not _is_behind(other, numbers)]
                others.append(numbers)
    return newest


def _is_behind(numbers: list[int], other: list[int]) -> bool:
    return all(one <= two for one, two in zip(numbers, other, strict=True))


def _is_outdated(name: str, newest: dict[str, list[list[int]]]) -> bool:
    """Return whether a file or folder of this kind has a higher number than this one."""
    numbers = _read_numbers(name)
    others = newest.get(_NUMBER.sub("#", name), [])
    return any(numbers != other and _is_behind(numbers, other) for other in others)


def _list_folders(path: str) -> list[str]:
    found = []
    while path := os.path.dirname(path):
        found.append(path)
    return found


def _read_numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")
