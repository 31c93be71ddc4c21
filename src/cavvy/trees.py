"""Walks and removes folders that jobs have filled. Those of Python's library call themselves for
each level, so a folder with a thousand levels is an error for them.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk_tree(top: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder with the names of its folders and of all else, from the top, as `os.walk`
    does: what the caller takes out of the first list is left out. Folders that cannot be listed are
    left out, too, and links are not followed.
    """
    todo = [os.fspath(top)]
    while todo:
        path = todo.pop()
        folders, others = list[str](), list[str]()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
        except OSError:
            continue
        yield path, folders, others
        todo += [os.path.join(path, name) for name in reversed(folders)]


def remove_tree(top: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Remove a folder with all that is in it, following no links. Folders that a job has made
    read-only, as Go does with its module cache, are removed, too. With `ignore_errors`, as much of
    it as possible; otherwise, raises OSError."""
    try:
        _remove(top, nullcontext())
    except PermissionError:
        _allow_changes(top)
    except OSError:
        if not ignore_errors:
            raise
    else:
        return
    skip = suppress(OSError) if ignore_errors else nullcontext()
    with skip:
        _remove(top, skip)


def _remove(top: str | os.PathLike[str], skip: AbstractContextManager[None]) -> None:
    root = os.open(top, _FOLDER)
    try:
        _empty(root, skip)
    finally:
        os.close(root)
    os.rmdir(top)


def _allow_changes(top: str | os.PathLike[str]) -> None:
    """Let this user list and change a folder and those in it, as far as that is possible."""
    with suppress(OSError):
        os.chmod(top, 0o700)
    for folder, folders, _ in walk_tree(top):
        for name in folders:
            with suppress(OSError):
                os.chmod(os.path.join(folder, name), 0o700)


def _empty(root: int, skip: AbstractContextManager[None]) -> None:
    """Remove all that is in an open folder. Folders of folders are moved up into it first, so that
    no path is long, and no chain of folders is open."""
    mark = os.urandom(8).hex()  # so that a job cannot place folders with these names
    fresh = (f".removed-{mark}-{number}" for number in count())
    todo = [""]  # names of folders in `root`; "" is itself
    while todo:
        name = todo.pop()
        with skip:
            here = os.open(name, _FOLDER, dir_fd=root) if name else os.dup(root)
            try:
                with os.scandir(here) as entries:
                    found = list(entries)
                for entry in found:
                    with skip:
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(entry.name, dir_fd=here)
                            continue
                        if name:
                            todo.append(_move_up(here, entry.name, root, fresh))
                        else:
                            todo.append(entry.name)
            finally:
                os.close(here)
            if name:
                os.rmdir(name, dir_fd=root)


def _move_up(here: int, name: str, root: int, fresh: Iterator[str]) -> str:
    """Move a folder into `root`, and return its new name, the first of `fresh` that no folder with
    something in it has. Raises OSError."""
    for to in fresh:
        try:
            os.rename(name, to, src_dir_fd=here, dst_dir_fd=root)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return to
    raise AssertionError("`fresh` has no end")
