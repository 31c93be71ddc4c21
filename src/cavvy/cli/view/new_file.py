"""Writes a file that gets its name only when it is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from typing import BinaryIO


def _is_special(path: str) -> bool:
    """Return whether `path` is no place for a file: a device, a pipe, a socket, or a link to a
    file that a process has open, such as /dev/stdout.
    """
    if os.path.islink(path) and os.readlink(path).startswith("/proc/"):
        return True
    return os.path.exists(path) and not os.path.isfile(path)


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that only this user can read. The file gets its final name when it is complete.
    Raises OSError.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(EISDIR, "FILE is a folder; give the name of a new file", path)
    if _is_special(path):  # root would replace it
        text = "FILE is a device, pipe or socket; use - to write to standard output"
        raise OSError(EINVAL, text, path)
    part = f"{path}.part"
    with suppress(FileNotFoundError):
        os.unlink(part)  # an existing file or link may belong to another user
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        error.filename = path
        raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
