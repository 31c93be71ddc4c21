"""Copies files and folders; copies share nothing with their originals except disk blocks, where
supported.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat

FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file until either is written to
TEXT_LIMIT = 256 * 1024  # bytes; scripts are smaller, data files are larger


def copy_file(source: str, target: str, mode: int | None = None) -> None:
    """Copy a file's content and times. If `mode` is None, the copy has the source's mode. Raises
    OSError."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
        except OSError:  # another disk, or no support for sharing: copy the bytes
            shutil.copyfileobj(reader, writer, 1024 * 1024)
    found = os.stat(source)
    os.chmod(target, stat.S_IMODE(found.st_mode) if mode is None else mode)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def copy_tree(source: str, target: str, marker: bytes = b"") -> list[str]:
    """Copy folders, files and links into `target`, overwriting; sockets and similar files are left
    out.

    Returns the relative paths of the text files that contain `marker`. Raises OSError.
    """
    marked = []
    os.makedirs(target, exist_ok=True)
    todo = [""]
    while todo:
        below = todo.pop()
        for entry in os.scandir(os.path.join(source, below)):
            path = os.path.join(below, entry.name)
            made = os.path.join(target, path)
            is_link = entry.is_symlink()
            if os.path.lexists(made) and not (entry.is_dir() and not is_link and _is_folder(made)):
                remove_tree(made)
            if is_link:
                os.symlink(os.readlink(entry.path), made)
            elif entry.is_dir():
                os.makedirs(made, exist_ok=True)
                todo.append(path)
            elif entry.is_file():
                copy_file(entry.path, made)
                if marker and is_text_with(made, marker):
                    marked.append(path)
    _copy_modes(source, target)
    return marked


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def is_text_with(path: str, marker: bytes) -> bool:
    """Whether a file is a short text that contains `marker`, like the scripts of a virtual
    environment.
    """
    if os.stat(path).st_size > TEXT_LIMIT:
        return False
    with open(path, "rb") as file:
        data = file.read()
    return marker in data and b"\0" not in data


def replace_in(path: str, old: bytes, new: bytes) -> None:
    """Replace bytes in a short file and preserve its mode and times."""
    found = os.stat(path)
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(data.replace(old, new))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def remove_tree(path: str) -> None:
    """Remove a folder or file; no error if it is missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _copy_modes(source: str, target: str) -> None:
    """Set the modes of the folders after all copies, because a read-only folder could not be
    filled."""
    for folder, _, _ in os.walk(source, topdown=False):
        made = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
        os.chmod(made, stat.S_IMODE(os.stat(folder).st_mode))
