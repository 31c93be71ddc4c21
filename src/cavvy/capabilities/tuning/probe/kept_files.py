"""Prevents a script from changing files that existed before the script was started."""

import builtins
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any
from unittest.mock import patch

import torch

# Number of files of torch.save whose content can still be read. The number is low because
# checkpoints are large.
KEPT = 2
Work = Callable[..., Any]


class KeptFiles:
    """While a `KeptFiles` is installed, a script cannot replace, empty, rename or delete a file
    that is older than the `KeptFiles` object. The script's writes are redirected to a file in
    `folder`, and later reads of the same path use that file. Files of `torch.save` are always
    written to `folder`.

    The protection covers `torch.save`, `open` with "w", and the functions of `os` and `shutil`. The
    protection does not cover native code, other programs, and files that are opened to append or to
    update.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # by the clock that the kernel uses for files
        with tempfile.TemporaryFile(dir=folder) as now:
            self._since = os.fstat(now.fileno()).st_ctime_ns
        # For each path, the file that holds its content; "" if the content is no longer kept.
        self._instead: dict[str, str] = {}
        self._saves: list[str] = []  # the files in `folder` that torch.save has written
        # new files that torch.save has written through open file objects
        self._made: set[str] = set()
        self._stack = ExitStack()

    def install(self) -> None:
        opened, copies = self._open(io.open), ("copyfile", "copy", "copy2")
        changes: list[tuple[Any, str, Work]] = [
            (torch, "save", self._save(torch.save)),
            (builtins, "open", opened),
            (io, "open", opened),
            *((os, name, self._remove(getattr(os, name))) for name in ("remove", "unlink")),
            (os, "rmdir", self._remove(os.rmdir)),
            (shutil, "rmtree", self._remove(shutil.rmtree)),
            *((os, name, self._rename(getattr(os, name))) for name in ("rename", "replace")),
            *((os, name, self._link(getattr(os, name))) for name in ("link", "symlink")),
            *((shutil, name, self._copy(getattr(shutil, name))) for name in copies),
        ]
        for where, name, new in changes:
            self._stack.enter_context(patch.object(where, name, new))

    def remove(self) -> None:
        """Restore the functions, and delete the new checkpoints. Later calls do nothing."""
        self._stack.close()
        for path in self._made:
            with suppress(OSError):
                os.unlink(path)
        self._made.clear()

    def _is_old(self, path: str) -> bool:
        """Return whether a file or link existed before the script's run. A folder is old if it
        contains an old file or link. The time of the last status change (ctime) decides, so a copy
        counts as new even if the script preserved the original's modification time.
        """
        try:
            found = os.lstat(path)
        except OSError:
            return False
        if S_ISDIR(found.st_mode):
            files = (os.path.join(top, each) for top, _, names in os.walk(path) for each in names)
            return any(self._is_old(each) for each in files)
        is_file = S_ISREG(found.st_mode) or S_ISLNK(found.st_mode)
        return is_file and found.st_ctime_ns < self._since

    def _is_kept(self, path: str) -> bool:
        """Return whether writing to this path would change an old file."""
        target = os.path.realpath(path)
        return os.path.isfile(target) and self._is_old(target)

    def _divert(self, path: str) -> str:
        """Create a file in `folder` for the content of this path. Returns the path of the new
        file.
        """
        before = self._instead.pop(path, "")
        number, new = tempfile.mkstemp(dir=self._folder)
        os.close(number)
        self._instead[path] = new
        if before not in self._instead.values():
            self._drop(before)
        return new

    def _drop(self, file: str) -> None:
        """Delete a file in `folder`."""
        for path in [path for path, each in self._instead.items() if each == file]:
            self._instead[path] = ""
        if os.path.dirname(file) == self._folder:
            with suppress(FileNotFoundError):
                os.unlink(file)

    def _save(self, save: Work) -> Work:
        def write(obj: Any, f: Any, *given: Any, **options: Any) -> None:
            path = _path(f)
            if path is not None:
                new = self._divert(path)
                save(obj, new, *given, **options)
                self._saves.append(new)
                for each in self._saves[:-KEPT]:
                    self._drop(each)
                del self._saves[:-KEPT]
                return
            name = getattr(f, "name", None)
            path = os.path.abspath(name) if isinstance(name, str) else ""
            if os.path.dirname(path) != self._folder and self._is_kept(path):
                with tempfile.TemporaryFile(dir=self._folder) as instead:
                    save(obj, instead, *given, **options)
                return
            save(obj, f, *given, **options)
            if os.path.isfile(path) and os.path.dirname(path) != self._folder:
                self._made.add(path)

        return write

    def _open(self, work: Work) -> Work:
        def call(file: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
            path = None if options.get("opener") else _path(file)
            if path is None:
                return work(file, mode, *given, **options)
            if "w" in mode and (path in self._instead or self._is_kept(path)):
                return work(self._divert(path), mode, *given, **options)
            return work(self._instead.get(path) or file, mode, *given, **options)

        return call

    def _remove(self, work: Work) -> Work:
        def call(path: Any, *given: Any, **options: Any) -> None:
            place = None if "dir_fd" in options else _path(path)
            if place in self._instead:
                del self._instead[place]
            elif place is None or not self._is_old(place):
                work(path, *given, **options)

        return call

    def _rename(self, work: Work) -> Work:
        def call(src: Any, dst: Any, **options: Any) -> None:
            old, new = _path(src), _path(dst)
            if options or old is None or new is None:
                work(src, dst, **options)
            elif old in self._instead:
                self._instead[new] = self._instead.pop(old)
            elif self._is_old(old):
                self._instead[new] = old
            elif os.path.isfile(old) and self._is_old(new) and not os.path.isdir(new):
                shutil.copyfile(old, self._divert(new))
                os.unlink(old)
            else:
                work(src, dst)
                self._instead.pop(new, None)
                self._made = {
                    new + each[len(old) :] if (each + os.sep).startswith(old + os.sep) else each
                    for each in self._made
                }

        return call

    def _link(self, work: Work) -> Work:
        def call(src: Any, dst: Any, *given: Any, **options: Any) -> None:
            new = _path(dst)
            if new is None or _path(src) is None:
                work(src, dst, *given, **options)
                return
            is_symbolic = work.__name__ == "symlink"
            where = os.path.dirname(new) if is_symbolic else os.getcwd()
            old = os.path.abspath(os.path.join(where, os.fsdecode(src)))
            if old in self._instead:
                self._instead[new] = self._instead[old]
            elif not self._is_old(new):
                work(src, dst, *given, **options)

        return call

    def _copy(self, work: Work) -> Work:
        def call(src: Any, dst: Any, *given: Any, **options: Any) -> Any:
            old, new = _path(src), _path(dst)
            if old is None or new is None:
                return work(src, dst, *given, **options)
            if os.path.isdir(new):
                new = os.path.join(new, os.path.basename(old))
            if old in self._instead:
                self._instead[new] = self._instead[old]
            elif self._is_kept(new):
                shutil.copyfile(old, self._divert(new))
            else:
                work(src, dst, *given, **options)
                self._made |= {new} if old in self._made else set()
            return dst

        return call


def _path(file: Any) -> str | None:
    """Return the absolute path of a file, or None if the argument is a file object instead of a
    path.
    """
    if isinstance(file, str | bytes | os.PathLike):
        return os.path.abspath(os.fsdecode(file))
    return None
