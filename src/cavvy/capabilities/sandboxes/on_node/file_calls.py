"""Reads and writes files of a sandbox, as a program inside it: with its rights and limits, and
seeing only its files. What goes wrong is told on standard error, as JSON.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import tarfile
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

_PIECE = 1 << 16
# before each entry of a folder that is sent: the bytes of its path, its mode, and its size
ENTRY = struct.Struct(">IIQ")
_MOST_LISTED = 10_000


def run(call: dict[str, Any]) -> int:
    """Do what `call` says, with standard input and output. Return the exit code."""
    try:
        _CALLS[call["name"]](call)
    except OSError as error:
        _tell(error.strerror or str(error), error.errno or 0, str(error.filename or ""))
        return 1
    except tarfile.TarError as error:
        _tell(str(error), 0, "")
        return 1
    return 0


def _read(call: dict[str, Any]) -> None:
    with _open_file(call["path"]) as file:
        _copy(file, 1)


def _write(call: dict[str, Any]) -> None:
    path = call["path"]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    opened = os.open(path, flags, call.get("mode", 0o644))
    _check_regular(opened, path)
    while data := os.read(0, _PIECE):
        _write_all(opened, data)
    with suppress(KeyError, OSError):
        os.fchmod(opened, call["mode"])


def _list(call: dict[str, Any]) -> None:
    found: list[tuple[str, str, int]] = []
    with os.scandir(call["path"]) as entries:
        for entry in entries:
            if len(found) >= _MOST_LISTED:
                raise OSError(0, f"more than {_MOST_LISTED} files", call["path"])
            with suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                kind = "link" if entry.is_symlink() else _name_kind(about.st_mode)
                found.append((os.fsencode(entry.name).hex(), kind, about.st_size))
    _write_all(1, json.dumps(found).encode())


def _make_folder(call: dict[str, Any]) -> None:
    os.makedirs(call["path"], exist_ok=True)


def _remove(call: dict[str, Any]) -> None:
    path = call["path"]
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path)
    else:
        os.unlink(path)


def _send_tree(call: dict[str, Any]) -> None:
    """Send a file, or the files and folders in a folder, one after another. Links, pipes and
    devices are left out, and counted in the last entry, whose path is empty."""
    root, left_out = os.path.abspath(call["path"]), 0
    if not os.path.isdir(root):
        with _open_file(root) as file:
            _send_entry("", os.fstat(file.fileno()), file)
    for path, name in _walk(root):
        about = os.lstat(path)
        if stat.S_ISDIR(about.st_mode):
            _write_all(1, _head(name, about.st_mode, 0))
        elif stat.S_ISREG(about.st_mode):
            with _open_file(path) as file:
                _send_entry(name, about, file)
        else:
            left_out += 1
    _write_all(1, ENTRY.pack(0, 0, left_out))


def _walk(root: str) -> Iterator[tuple[str, str]]:
    for folder, folders, files in os.walk(root):
        for each in sorted(folders + files):
            path = os.path.join(folder, each)
            with suppress(FileNotFoundError):
                yield path, os.path.relpath(path, root)


def _send_entry(name: str, about: os.stat_result, file: BinaryIO) -> None:
    """Send exactly as many bytes as announced, though the file may change meanwhile."""
    size = os.fstat(file.fileno()).st_size
    _write_all(1, _head(name or ".", about.st_mode, size))
    while size:
        data = file.read(min(_PIECE, size)) or bytes(min(_PIECE, size))
        _write_all(1, data)
        size -= len(data)


def _head(name: str, mode: int, size: int) -> bytes:
    raw = os.fsencode(name)
    return ENTRY.pack(len(raw), mode, size) + raw


def _take_tree(call: dict[str, Any]) -> None:
    """Write the entries that arrive into a folder. They are those of `_send_tree`, from outside."""
    root = call["path"]
    os.makedirs(root, exist_ok=True)
    with os.fdopen(0, "rb", closefd=False) as source:
        while True:
            length, mode, size = ENTRY.unpack(_take(source, ENTRY.size))
            if not length:
                return
            path = os.path.join(root, os.fsdecode(_take(source, length)))
            if stat.S_ISDIR(mode):
                os.makedirs(path, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
            while size:
                data = _take(source, min(_PIECE, size))
                _write_all(opened, data)
                size -= len(data)
            os.fchmod(opened, mode & 0o777)
            os.close(opened)


def _pack(call: dict[str, Any]) -> None:
    """Send the folder as an archive, which only sandboxes read."""
    with (
        os.fdopen(1, "wb", closefd=False) as target,
        tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, name in _walk(call["path"]):
            about = os.lstat(path)
            if stat.S_ISREG(about.st_mode) or os.path.isdir(path) or os.path.islink(path):
                archive.add(path, name, recursive=False)


def _unpack(call: dict[str, Any]) -> None:
    with os.fdopen(0, "rb", closefd=False) as source:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            archive.extractall(call["path"], filter="tar")
        while source.read(_PIECE):
            pass


def _open_file(path: str) -> BinaryIO:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _check_regular(opened, path)
    return os.fdopen(opened, "rb")


def _check_regular(opened: int, path: str) -> None:
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(0, f"it is a {_name_kind(mode)}, no file", path)


def _name_kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "folder"),
        (stat.S_ISREG, "file"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")


def _copy(source: BinaryIO, target: int) -> None:
    while data := source.read(_PIECE):
        _write_all(target, data)


def _write_all(target: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]


def _take(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise OSError(0, "the connection ended")
    return data


def _tell(text: str, number: int, path: str) -> None:
    with suppress(OSError):
        _write_all(2, json.dumps({"text": text, "errno": number, "path": path}).encode()[:4096])


_CALLS = {
    "read": _read,
    "write": _write,
    "list": _list,
    "make_folder": _make_folder,
    "remove": _remove,
    "send_tree": _send_tree,
    "take_tree": _take_tree,
    "pack": _pack,
    "unpack": _unpack,
}
sys.setrecursionlimit(2000)
