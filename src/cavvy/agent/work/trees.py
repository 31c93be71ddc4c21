"""Copies files and folders. Copies share disk blocks with their originals if the file system
supports it. A link is copied as a link. To follow links would not be safe, because the work can
change the folders during the copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat

from ..allowed_folders import check_regular, open_below, raise_error, walk_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file until either is written to
CHUNK = 1024 * 1024  # bytes that are copied at once
TEXT_LIMIT = 256 * 1024  # maximum bytes of a text file; scripts are smaller, data files are larger
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_open(
    source: int, target: str, *, folder: int | None = None, mode: int | None = None
) -> None:
    """Copy an open file's content and times to a new file in `folder`. If `mode` is None, the copy
    has the source's mode. Raises OSError."""
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=folder)
    try:
        try:
            fcntl.ioctl(made, FICLONE, source)
        except OSError:  # another disk, or a file system that cannot share blocks: copy the bytes
            _copy_bytes(source, made)
        found = os.fstat(source)
        os.fchmod(made, stat.S_IMODE(found.st_mode) if mode is None else mode)
        os.utime(made, ns=(found.st_atime_ns, found.st_mtime_ns))
    finally:
        os.close(made)


def _copy_bytes(source: int, target: int) -> None:
    """Copy an open file's content to an open empty file. Holes are not written, so a sparse file
    stays sparse. Raises OSError."""
    size, at = os.fstat(source).st_size, 0
    while at < size:
        at, end = find_data(source, at, size)
        while at < end:
            data = os.pread(source, min(end - at, CHUNK), at)
            if not data:
                return  # the file has become shorter
            at += os.pwrite(target, data, at)
    os.ftruncate(target, at)  # a hole at the end
    while data := os.pread(source, CHUNK, at):  # some file systems state too small a size
        at += os.pwrite(target, data, at)


def find_data(file: int, at: int, size: int) -> tuple[int, int]:
    """Return the start and the end of the next data of an open file at or after `at`; both are
    `size` if only a hole follows. Raises OSError."""
    try:
        start = os.lseek(file, at, os.SEEK_DATA)
        return start, os.lseek(file, start, os.SEEK_HOLE)
    except AttributeError:
        return at, size  # the system does not report holes
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size, size
        if error.errno != errno.EINVAL:
            raise
        return at, size  # the file system does not report holes


def copy_tree(source: str, target: str, marker: bytes = b"") -> list[str]:
    """Copy folders, files and links into `target`, and overwrite existing files. Sockets and
    similar files are omitted.

    Return the relative paths of the text files that contain `marker`. Raises OSError.
    """
    os.makedirs(target, exist_ok=True)
    original = os.open(source, FOLDER)
    try:
        made = os.open(target, FOLDER)
        try:
            return copy_below(original, made, marker=marker)
        finally:
            os.close(made)
    finally:
        os.close(original)


def copy_below(
    source: int,
    target: int,
    *,
    marker: bytes = b"",
    takes_link: Callable[[str], bool] = lambda path: True,
) -> list[str]:
    """Copy a tree as `copy_tree` does, but from one open folder to another. A link is omitted if
    `takes_link` returns False for the link's path. Raises OSError.
    """
    marked, modes = [], [("", os.fstat(source).st_mode)]
    above, there = "", os.dup(target)
    try:
        for path, entry, here in walk_below(source, on_error=raise_error):
            if os.path.dirname(path) != above:
                above = os.path.dirname(path)
                os.close(there)
                there = open_below(target, above, FOLDER)
            if entry.is_symlink():
                if takes_link(path):
                    remove_below(there, entry.name)
                    os.symlink(os.readlink(entry.name, dir_fd=here), entry.name, dir_fd=there)
            elif entry.is_dir():
                modes.append((path, entry.stat(follow_symlinks=False).st_mode))
                _make_folder(there, entry.name)
            elif entry.is_file() and _copy_entry(here, entry.name, there, marker):
                marked.append(path)
    finally:
        os.close(there)
    # set the modes last, because files cannot be added to a read-only folder
    for path, mode in reversed(modes):
        folder = open_below(target, path, FOLDER)
        os.fchmod(folder, stat.S_IMODE(mode))
        os.close(folder)
    return marked


def _copy_entry(here: int, name: str, there: int, marker: bytes) -> bool:
    """Copy a file to the folder `there`. Return whether the file is a text that contains
    `marker`."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "the file is not a regular file", name)
        remove_below(there, name)
        copy_open(file, name, folder=there)
        return bool(marker) and is_text_with(file, marker)
    finally:
        os.close(file)


def _make_folder(folder: int, name: str) -> None:
    """Create a folder, or use the existing folder. A file or link with this name is removed first.
    Raises OSError."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    os.mkdir(name, dir_fd=folder)


def is_text_with(file: int, marker: bytes) -> bool:
    """Return whether an open file is a short text that contains `marker`, like the scripts of a
    virtual environment.
    """
    if os.fstat(file).st_size > TEXT_LIMIT:
        return False
    data = os.pread(file, TEXT_LIMIT, 0)
    return marker in data and b"\0" not in data


def replace_in(folder: str, path: str, old: bytes, new: bytes) -> None:
    """Replace bytes in a short file below a folder, and preserve the file's mode and times. Raises
    OSError."""
    top = os.open(folder, FOLDER)
    try:
        made = check_regular(open_below(top, path, os.O_RDWR | os.O_NONBLOCK), path)
    finally:
        os.close(top)
    with open(made, "r+b") as file:
        found, data = os.fstat(made), file.read()
        file.seek(0)
        file.truncate()
        file.write(data.replace(old, new))
        file.flush()
        os.utime(made, ns=(found.st_atime_ns, found.st_mtime_ns))


def remove_tree(path: str) -> None:
    """Remove a folder or file, if it exists. Folders that the work has made read-only, as Go does
    with its module cache, are removed too. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        try:
            shutil.rmtree(path)
        except PermissionError:
            make_removable(path)
            shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def make_removable(path: str) -> None:
    """Let this user list and change a folder and all folders below it. Raises OSError."""
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)


def remove_below(folder: int, name: str) -> None:
    """Remove a file, link or folder in an open folder, if it exists. Raises OSError."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        below = os.open(name, FOLDER, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        for each in os.listdir(below):
            remove_below(below, each)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=folder)
