"""Executes the file operations of a user's remote session. Each call gets one answer; open files
are identified by numbers.

A call consists of a line of JSON, `{"op", ...}`, and the bytes that follow it. An answer consists
of a line of JSON, `{}` or `{"error", "errno"}`, and the bytes that follow it. Paths are those that
the user sees: if the work has a container, they are paths inside it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Fields = dict[str, Any]

_open: dict[int, int] = {}  # handle -> file descriptor
_FLAGS = {"read": os.O_RDONLY, "write": os.O_WRONLY, "both": os.O_RDWR}


def answer(root: Callable[[], str], payload: bytes) -> bytes:
    """Execute one call."""
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
    """Resolves the user's paths below `root`, which is "" for the node itself."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find(self, asked: Fields, name: str = "path") -> str:
        path = str(asked[name])
        if path == "~" or path.startswith("~/"):
            path = os.path.expanduser("~") + path[1:]
        if not path.startswith("/"):
            path = os.path.join(str(asked.get("folder") or os.getcwd()), path)
        return self.root + os.path.normpath(path) if self.root else path


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
    flags = _FLAGS[asked.get("mode", "read")] | os.O_CLOEXEC
    for name, flag in (
        ("create", os.O_CREAT),
        ("truncate", os.O_TRUNC),
        ("new", os.O_EXCL),
        ("append", os.O_APPEND),
    ):
        if asked.get(name):
            flags |= flag
    descriptor = os.open(files.find(asked), flags, int(asked.get("permissions", 0o666)))
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
    path = files.find(asked)
    return describe(os.stat(path) if asked.get("follow", True) else os.lstat(path))


def do_set(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    target = _open[asked["handle"]] if "handle" in asked else files.find(asked)
    if asked.get("size") is not None:
        os.truncate(target, int(asked["size"]))
    if asked.get("uid") is not None and asked.get("gid") is not None:
        os.chown(target, int(asked["uid"]), int(asked["gid"]))
    if asked.get("mode") is not None:
        os.chmod(target, stat.S_IMODE(int(asked["mode"])))
    if asked.get("mtime") is not None:
        os.utime(target, (float(asked.get("atime") or asked["mtime"]), float(asked["mtime"])))


def do_list(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    """List a folder's names and their types, as JSON in the answer's bytes: it can be large."""
    with os.scandir(files.find(asked)) as entries:
        found = [[entry.name, describe(entry.stat(follow_symlinks=False))] for entry in entries]
    return {}, json.dumps(found).encode()


def do_walk(files: NodeFileCalls, asked: Fields, data: bytes) -> tuple[Fields, bytes]:
    """List the relative path and type of everything below a folder, without following links."""
    top, found = files.find(asked), []
    for folder, inner, names in os.walk(top):
        for name in sorted([*inner, *names]):
            path = os.path.join(folder, name)
            entry: Fields = describe(os.lstat(path))
            if os.path.islink(path):
                entry["link"] = os.readlink(path)
            found.append([os.path.relpath(path, top), entry])
    return {}, json.dumps(found).encode()


def do_remove(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    os.unlink(files.find(asked))


def do_rmdir(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    os.rmdir(files.find(asked))


def do_mkdir(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    if asked.get("parents"):
        os.makedirs(files.find(asked), exist_ok=True)
    else:
        os.mkdir(files.find(asked), int(asked.get("permissions", 0o777)))


def do_rename(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    target = files.find(asked, "target")
    if not asked.get("replace", True) and os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "it exists already")
    os.replace(files.find(asked), target)


def do_link(files: NodeFileCalls, asked: Fields, data: bytes) -> None:
    if asked.get("hard"):
        os.link(files.find(asked, "target"), files.find(asked))
        return
    path = files.find(asked)
    if asked.get("replace") and os.path.lexists(path):
        os.unlink(path)
    os.symlink(asked["target"], path)


def do_readlink(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    return {"target": os.readlink(files.find(asked))}


def do_resolve(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    path = os.path.realpath(files.find(asked))
    return {"path": path[len(files.root) :] or "/"}


def do_hash(files: NodeFileCalls, asked: Fields, data: bytes) -> Fields:
    """Return the SHA-256 of the first `size` bytes of a file, and the number of bytes read."""
    found, left, count = hashlib.sha256(), int(asked["size"]), 0
    with open(files.find(asked), "rb") as file:
        while left > 0:
            part = file.read(min(1 << 20, left))
            if not part:
                break
            found.update(part)
            left, count = left - len(part), count + len(part)
    return {"sha256": found.hexdigest(), "size": count}


OPERATIONS: dict[
    str, Callable[[NodeFileCalls, Fields, bytes], tuple[Fields, bytes] | Fields | None]
] = {name[3:]: call for name, call in list(globals().items()) if name.startswith("do_")}
