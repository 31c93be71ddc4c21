"""Executes the file operations of a user's remote session. Each call produces one answer. Open
files are identified by numbers (handles).

A call consists of a line of JSON, `{"op", ...}`, and the bytes that follow it. An answer consists
of a line of JSON, `{}` or `{"error", "errno"}`, and the bytes that follow it. Paths are given as
the user sees them: inside the work's container, if the work has one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from contextlib import contextmanager, suppress

from ..allowed_folders import VANISHED, AllowedFolders, walk_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Fields = dict[str, Any]

_open: dict[int, int] = {}  # handle -> file descriptor
_DRAFT = ".cavvy-part"  # suffix of a file that is not complete
_MOST_BYTES = 1 << 20  # of the files in one answer
_FLAGS = {"read": os.O_RDONLY, "write": os.O_WRONLY, "both": os.O_RDWR}


def answer(root: Callable[[], str], payload: bytes) -> bytes:
    """Execute one encoded call and return the encoded answer. If the call fails, the answer
    contains the error."""
    line, _, data = payload.partition(b"\n")
    try:
        asked = json.loads(line)
        made = OPERATIONS[asked["op"]](NodeFileCalls(root()), asked, data)
    except (OSError, KeyError, ValueError, OverflowError) as error:
        said = {
            "error": getattr(error, "strerror", None) or str(error),
            "errno": getattr(error, "errno", None) or errno.EINVAL,
        }
        return json.dumps(said).encode() + b"\n"
    fields: Fields | None
    fields, given = made if isinstance(made, tuple) else (made, b"")
    return json.dumps(fields or {}).encode() + b"\n" + given


class NodeFileCalls:
    """Resolves the user's paths below `root`, the root folder of the work's container.

    Without a container, `root` is "", because this process sees the same files as the work.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        # In a container, `find` follows links itself: absolute links start at the container's root.
        self.flags = os.O_CLOEXEC | (os.O_NOFOLLOW if root else 0)
        self._inside = AllowedFolders.of_root(root)

    def read_path(self, asked: Fields, name: str = "path") -> str:
        """Return the absolute path in the call's field `name`."""
        path = str(asked[name])
        if path == "~" or path.startswith("~/"):
            path = os.path.expanduser("~") + path[1:]
        if not path.startswith("/"):
            path = os.path.join(str(asked.get("folder") or os.getcwd()), path)
        return path

    @contextmanager
    def find(
        self, asked: Fields, name: str = "path", *, follow: bool = True, make: bool = False
    ) -> Iterator[str]:
        """Yield the path on this node that corresponds to the user's path. In a container, `follow`
        means that the path's last name is also resolved if it is a link. With `make`, missing
        parent folders are created. Raises OSError.
        """
        path = self.read_path(asked, name)
        if not self.root:
            if make:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            yield path
            return
        folder, last = self._inside.find(path, follow=follow, make=make)
        try:
            yield f"/proc/self/fd/{folder}/{last}"
        finally:
            os.close(folder)

    @contextmanager
    def hold(self, asked: Fields) -> Iterator[str]:
        """Yield a path to the file that `find` locates. In a container, this path stays valid even
        if the work later renames or replaces the file. Raises OSError.
        """
        with self.find(asked) as path:
            if not self.root:
                yield path
                return
            file = os.open(path, os.O_PATH | self.flags)
        try:
            yield f"/proc/self/fd/{file}"
        finally:
            os.close(file)

    def resolve(self, asked: Fields) -> str:
        """Return the user's path with all symbolic links resolved. Raises OSError."""
        path = self.read_path(asked)
        if not self.root:
            return os.path.realpath(path)
        try:
            return self._inside.resolve(path)
        except FileNotFoundError:
            return os.path.normpath(path)


def describe(found: os.stat_result) -> Fields:
    return {
        "size": found.st_size,
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "atime": found.st_atime,
        "mtime": found.st_mtime,
    }


def do_open(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    flags = _FLAGS[asked.get("mode", "read")] | files.flags
    for name, flag in (
        ("create", os.O_CREAT),
        ("truncate", os.O_TRUNC),
        ("new", os.O_EXCL),
        ("append", os.O_APPEND),
    ):
        if asked.get(name):
            flags |= flag
    with files.find(asked, follow=not asked.get("new")) as path:
        descriptor = os.open(path, flags, int(asked.get("permissions", 0o666)))
    _open[descriptor] = descriptor
    return {"handle": descriptor, **describe(os.fstat(descriptor))}


def do_close(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    os.close(_open.pop(asked["handle"]))


def do_read(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    return {}, os.pread(
        _open[asked["handle"]], min(int(asked["size"]), 1 << 20), int(asked["offset"])
    )


def do_write(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    rest, at = memoryview(data), int(asked["offset"])
    while rest:
        count = os.pwrite(_open[asked["handle"]], rest, at)
        rest, at = rest[count:], at + count


def do_stat(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    if "handle" in asked:
        return describe(os.fstat(_open[asked["handle"]]))
    follow = bool(asked.get("follow", True))
    with files.hold(asked) if follow else files.find(asked, follow=False) as path:
        return describe(os.stat(path, follow_symlinks=follow))


def do_set(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    if "handle" in asked:
        change(_open[asked["handle"]], asked)
    else:
        with files.hold(asked) as path:
            change(path, asked)


def change(target: str | int, asked: Fields) -> None:
    """Set the file's size, owner, mode and time to the values in `asked`. Raises OSError."""
    if asked.get("size") is not None:
        os.truncate(target, int(asked["size"]))
    if asked.get("uid") is not None and asked.get("gid") is not None:
        os.chown(target, int(asked["uid"]), int(asked["gid"]))
    if asked.get("mode") is not None:
        os.chmod(target, stat.S_IMODE(int(asked["mode"])))
    if asked.get("mtime") is not None:
        os.utime(target, (float(asked.get("atime") or asked["mtime"]), float(asked["mtime"])))


def do_list(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    """List a folder's names and their types. The list of names can be large, so it is returned as
    JSON in the answer's bytes.
    """
    with files.hold(asked) as path, os.scandir(path) as entries:
        found = [[entry.name, describe(entry.stat(follow_symlinks=False))] for entry in entries]
    return {}, json.dumps(found).encode()


def do_walk(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    """Without following links, list the relative path and type of every entry below a folder,
    except folders with a name in `without` and what is in them. The field `unlisted` contains the
    paths of folders that cannot be listed, with the reasons.
    """
    found: list[tuple[str, Fields]] = []
    unlisted: list[tuple[str, str]] = []

    def note(error: OSError) -> None:
        if not isinstance(error, VANISHED):
            unlisted.append((error.filename, error.strerror or str(error)))

    with files.find(asked) as path:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | files.flags)
    try:
        without = frozenset(asked.get("without", ()))
        for path, listed, folder in walk_below(top, on_error=note, without=without):
            entry = describe(listed.stat(follow_symlinks=False))
            if listed.is_symlink():
                entry["link"] = os.readlink(listed.name, dir_fd=folder)
            found.append((path, entry))
    finally:
        os.close(top)
    return {"unlisted": unlisted}, json.dumps(
        sorted(found, key=lambda each: each[0].split("/"))
    ).encode()


def do_remove(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    with files.find(asked, follow=False) as path:
        os.unlink(path)


def do_rmdir(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    with files.find(asked, follow=False) as path:
        os.rmdir(path)


def do_mkdir(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    parents = bool(asked.get("parents"))
    with files.find(asked, make=parents) as path:
        try:
            os.mkdir(path, int(asked.get("permissions", 0o777)))
        except FileExistsError:
            if not parents or not os.path.isdir(path):
                raise


def do_rename(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    with files.find(asked, follow=False) as path, files.find(asked, "target", follow=False) as new:
        if not asked.get("replace", True) and os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "it exists already")
        os.replace(path, new)


def do_link(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    with files.find(asked, follow=False) as path:
        if asked.get("hard"):
            with files.find(asked, "target", follow=False) as target:
                os.link(target, path, follow_symlinks=False)
            return
        if asked.get("replace") and os.path.lexists(path):
            os.unlink(path)
        os.symlink(asked["target"], path)


def do_readlink(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    with files.find(asked, follow=False) as path:
        return {"target": os.readlink(path)}


def do_resolve(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    return {"path": files.resolve(asked)}


def do_hash(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    """Return the SHA-256 of the first `size` bytes of a file, and the number of bytes read."""
    found, left, count = hashlib.sha256(), int(asked["size"]), 0
    with files.find(asked) as path:
        descriptor = os.open(path, os.O_RDONLY | files.flags)
    with open(descriptor, "rb") as file:
        while left > 0:
            part = file.read(min(1 << 20, left))
            if not part:
                break
            found.update(part)
            left, count = left - len(part), count + len(part)
    return {"sha256": found.hexdigest(), "size": count}


def _below(asked: Fields, name: object) -> Fields:
    return {"path": os.path.join(str(asked["path"]), str(name))}


def do_put(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    """Write many files, links or folders below a folder. Each entry of `files` states what its path
    must be now, `was`: null if nothing, or the size and the time of a file. An entry that is not as
    expected, because a program has changed it meanwhile, is left alone. `wrote` has the new time
    of each entry, or null.

    The bytes of the files follow each other in the call. With `staged`, the content is a file that
    `open` and `write` made at this path.
    """
    rest, wrote = memoryview(data), list[object]()
    made = ""  # the folder that was made last: most entries are in the same one as the entry before
    for entry in asked["files"]:
        content = rest[: int(entry.get("size", 0))]
        rest = rest[len(content) :]
        inside = os.path.dirname(str(entry["path"]))
        try:
            make = not made or inside != made
            with files.find(_below(asked, entry["path"]), follow=False, make=make) as path:
                made = inside
                wrote.append(_put(files, asked, entry, path, content))
        except OSError:
            made = ""
            wrote.append(None)
    return {"wrote": wrote}


def _put(
    files: NodeFileCalls, asked: Fields, entry: Fields, path: str, content: memoryview
) -> float | None:
    if "folder" in entry:
        with suppress(FileExistsError):
            os.mkdir(path)
        return 0.0 if stat.S_ISDIR(os.lstat(path).st_mode) else None
    if "staged" in entry and not _is_as(path, entry.get("was")):
        return None
    draft = f"{path}{_DRAFT}"
    if "link" in entry:
        if os.path.lexists(draft):
            os.unlink(draft)
        os.symlink(entry["link"], draft)
    elif "staged" in entry:
        with files.find(_below(asked, entry["staged"]), follow=False) as draft:
            return _replace(draft, path, entry)
    else:
        # what a program puts there, such as a pipe or a link, is neither waited for nor written to
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(draft, flags, 0o600)
        except FileExistsError:
            os.unlink(draft)
            file = os.open(draft, flags, 0o600)
        try:
            while content:
                content = content[os.write(file, content) :]
            os.fchmod(file, stat.S_IMODE(int(entry["mode"])))
            os.utime(file, ns=(int(entry["mtime_ns"]), int(entry["mtime_ns"])))
            wrote = os.fstat(file).st_mtime
        finally:
            os.close(file)
        return _replace(draft, path, entry, wrote)
    return _replace(draft, path, entry)


def _replace(draft: str, path: str, entry: Fields, mtime: float | None = None) -> float | None:
    """Give the draft, whose time is `mtime` if known, its name, unless a program has changed the
    old file meanwhile. Return its time.
    """
    if not _is_as(path, entry.get("was")):
        os.unlink(draft)
        return None
    os.replace(draft, path)
    return os.lstat(path).st_mtime if mtime is None else mtime


def _is_as(path: str, was: list[float] | None) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return was is None
    if was is None or stat.S_ISDIR(found.st_mode):
        return False
    return [found.st_size, found.st_mtime] == [int(was[0]), float(was[1])]


def do_get(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    """Read many files below a folder. `got` has the size and time of each file, or null if it is
    no longer a file, or too large for the rest of `most` bytes. The contents follow each other.
    """
    got, parts, left = list[object](), list[bytes](), min(int(asked["most"]), _MOST_BYTES)
    for name in asked["files"]:
        try:
            with files.find(_below(asked, name), follow=False) as path:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                found = os.fstat(file)
                content = opened.read(left + 1) if stat.S_ISREG(found.st_mode) else None
        except OSError:
            content = None
        if content is None or len(content) > left or len(content) != found.st_size:
            got.append(None)
            continue
        got.append([found.st_size, found.st_mtime])
        parts.append(content)
        left -= len(content)
    return {"got": got}, b"".join(parts)


def do_hashes(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    """Return the SHA-256 of many files below a folder, or null for what is not a file."""
    found = list[str | None]()
    for name in asked["files"]:
        try:
            with files.find(_below(asked, name), follow=False) as path:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "not a file")
                digest = hashlib.sha256()
                while part := opened.read(1 << 20):
                    digest.update(part)
            found.append(digest.hexdigest())
        except OSError:
            found.append(None)
    return {"sha256": found}


def do_drop(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    """Remove many files and empty folders below a folder; `was` is as for `put`, and "folder" for a
    folder. `dropped` says which of them are gone.
    """
    dropped = list[bool]()
    for name, was in asked["files"]:
        try:
            with files.find(_below(asked, name), follow=False) as path:
                if was == "folder":
                    os.rmdir(path)
                elif _is_as(path, was):
                    os.unlink(path)
                dropped.append(not os.path.lexists(path))
        except FileNotFoundError:
            dropped.append(True)
        except OSError:
            dropped.append(False)
    return {"dropped": dropped}


OPERATIONS: dict[
    str, Callable[[NodeFileCalls, Fields, bytes], tuple[Fields, bytes] | Fields | None]
] = {name[3:]: call for name, call in list(globals().items()) if name.startswith("do_")}
