"""Chooses and cleans the caches that the agents of one machine share: the folder `cache` and, below
it, the caches of projects.

If namespaces hide Cavvy's folder from work, each project has its own cache, which the work of other
projects cannot see. Otherwise, the control plane gives the cache a new random name whenever another
project gets the machine, and the agent removes the caches of earlier projects before the work
starts. So no work uses what the work of another project prepared or changed.

The cleaning removes entries that were not used for a long time and, if the caches are too large,
also the least recently used entries. Agents mark the entries that they use, so that an entry in use
is never removed.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

from ..disk import open_private, walk_files
from .hide import ALONE, find_ability
from .trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    Part = tuple[float, int, str]  # (time of the last use, bytes, path)
    from ..config import AgentConfig

DAY_S = 86400.0
EVERY_S = DAY_S
AGE_S = 14 * DAY_S  # seconds without use after which an entry is removed
YOUNG_S = DAY_S  # an entry is never removed within this many seconds after its last use
TOUCH_S = 3600.0  # minimum seconds between two marks of an entry in use
SHARE = 0.25  # maximum share of the file system that the cache may fill


def is_due(cache: str) -> bool:
    """Return whether the next cleaning of the cache is due. In a new cache, the first cleaning is
    due after a full interval."""
    mark = cache + "/swept"
    try:
        return time.time() - os.stat(mark).st_mtime >= EVERY_S
    except FileNotFoundError:
        os.makedirs(cache, mode=0o700, exist_ok=True)
        touch(mark, make=True)
        return False


def touch(path: str, *, make: bool = False) -> bool:
    """Record the current time as the entry's last use. Return False if the entry does not exist.
    With `make`, create the entry."""
    try:
        if make:
            os.close(open_private(path))
        os.utime(path)
    except OSError:  # the entry is missing, or this user may not change it
        return os.path.exists(path)
    return True


def sweep(cache: str, *, limit: float | None = None) -> int:
    """Remove old entries, then remove the least recently used entries until the cache has at most
    `limit` bytes (by default a share of the file system). Always returns 0, because the function
    runs in a process of its own, which exits with the result.
    """
    os.nice(19)
    touch(cache + "/swept", make=True)
    room = os.statvfs(cache)
    most = SHARE * room.f_blocks * room.f_frsize if limit is None else limit
    own = [entry.path for entry in _scan(cache) if entry.is_dir(follow_symlinks=False)]
    parts = sorted(part for each in [cache, *own] for part in _list_parts(each))
    total, now = sum(size for _, size, _ in parts), time.time()
    for used, size, path in parts:
        idle = now - used
        if idle < YOUNG_S or (idle < AGE_S and total <= most):
            break  # all following entries were used more recently
        if _remove(path, used):
            total -= size
    return 0


def _list_parts(cache: str) -> list[Part]:
    return [
        *_list_files(cache + "/blobs"),
        *_list_files(cache + "/sif"),
        *_list_setups(cache + "/setups"),
    ]


def _list_files(folder: str) -> list[Part]:
    found = []
    for entry in _scan(folder):
        try:
            seen = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        found.append((seen.st_mtime, seen.st_size, entry.path))
    return found


def _list_setups(folder: str) -> list[Part]:
    """Yield the setups in the cache. A setup that is being created is listed too, but
    is locked."""
    found = []
    for entry in _scan(folder):
        mark = entry.path + "/finished"
        try:
            used = os.stat(mark if os.path.exists(mark) else entry.path).st_mtime
        except OSError:
            continue
        found.append((used, _measure(entry.path), entry.path))
    return found


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _measure(folder: str) -> int:
    """Return the number of bytes on disk of all files below a path."""
    return sum(seen.st_blocks * 512 for _, seen, _ in walk_files(folder))


def _remove(path: str, used: float) -> bool:
    """Remove an entry unless it was used after the time `used`. Return whether the entry was
    removed. A setup is not removed while an agent creates or copies it.

    The lock file of a removed setup is kept, because agents may be waiting for the lock.
    """
    try:
        if not os.path.isdir(path):
            if os.lstat(path).st_mtime > used:
                return False
            os.unlink(path)
            return True
        lock = open_private(path + "/lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark = path + "/finished"
            if os.path.exists(mark) and os.stat(mark).st_mtime > used:
                return False
            remove_tree(
                mark
                # remove the file `finished` first, so that a partly removed setup does not count as
                # finished
            )
            remove_tree(path + "/tree")
            remove_tree(path + "/dir")
            remove_tree(path + "/venv")
        finally:
            os.close(lock)
    except OSError:
        return False
    return True


def open_cache(config: AgentConfig) -> int | None:
    """Test whether Cavvy's folder can be hidden from the work, unless the configuration says so,
    and set `config.cache` to the cache of the work's project. Return an open file that marks the
    cache as used until the file is closed, or None if no agent could remove the cache because
    another project got the machine. Raises OSError.
    """
    if config.covers is None:
        ability = find_ability(config.hides, config.home) if config.hides else ""
        config.covers, config.alone = bool(ability), ability == ALONE
    if not config.own_cache:
        return None
    seen = bool(config.fresh_cache) and not config.covers
    name = config.fresh_cache if seen else config.own_cache
    config.cache = os.path.join(config.caches, name)
    os.makedirs(config.cache, mode=0o700, exist_ok=True)
    if not config.fresh_cache:
        return None  # file systems of clusters may offer no locks
    lock = open_private(config.cache + "/used")
    fcntl.flock(lock, fcntl.LOCK_SH)
    if seen:
        _remove_others(config.caches, name)
    return lock


def _remove_others(caches: str, name: str) -> None:
    """Remove the caches of earlier projects on this machine, except caches that an agent uses. The
    names of a machine's caches have the same first part."""
    place = name.partition("-")[0] + "-"
    for each in os.listdir(caches):
        path = os.path.join(caches, each)
        if each == name or not each.startswith(place):
            continue
        with suppress(OSError):  # earlier work could make a cache that cannot be removed
            if os.path.islink(path) or not _is_used(path):
                remove_tree(path)


def _is_used(cache: str) -> bool:
    try:
        lock = open_private(cache + "/used")
    except OSError:
        return False  # earlier work has replaced the file
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
