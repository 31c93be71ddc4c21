"""Tells that something below a folder has changed, by Linux's inotify. What has changed is not
told: who is interested lists the folder.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# Linux's include/uapi/linux/inotify.h
_CLOSE_WRITE, _ATTRIB, _MOVED, _CREATE, _DELETE = 0x8, 0x4, 0xC0, 0x100, 0x200
_ONLY_FOLDERS, _OVERFLOW, _IS_FOLDER = 0x01000000, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")


class FolderWatch:
    """Watches a folder and the folders below it, except those with a name in `without`."""

    def __init__(self, folder: str, without: Collection[str] = ()) -> None:
        """Raises OSError if the system has no inotify, or no room for more watches."""
        self._folder, self._without = folder, frozenset(without)
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (AttributeError, TypeError) as error:
            raise OSError("this system has no inotify") from error
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            self._add()
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Return whether something has changed since the last call. Raises OSError."""
        changed = deeper = False
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                at = 0
                while at < len(data):
                    _, mask, _, length = _EVENT.unpack_from(data, at)
                    name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                    at += _EVENT.size + length
                    if os.fsdecode(name) not in self._without:
                        changed = True
                        deeper |= bool(mask & (_OVERFLOW | _IS_FOLDER))
        if deeper:
            self._add()
        return changed

    def close(self) -> None:
        os.close(self._fd)

    def _add(self) -> None:
        """Watch all folders; those that are watched already are not watched twice."""
        mask = _CLOSE_WRITE | _ATTRIB | _MOVED | _CREATE | _DELETE | _ONLY_FOLDERS
        for folder, inner, _ in os.walk(self._folder):
            inner[:] = [name for name in inner if name not in self._without]
            if self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
                code = ctypes.get_errno()
                if not os.path.isdir(folder):  # it was removed meanwhile
                    continue
                raise OSError(code, os.strerror(code))
