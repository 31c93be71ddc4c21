"""Mounts the named volumes of this machine at the paths at which the work sees them.

The volumes' files are in a folder that is hidden from the work. In the work's own mount namespace,
each volume is mounted over the folder at its path. If there is no such folder, and this process may
not create it, as in `/`, the folder above is replaced in the namespace by a read-only one with the
same entries and the missing one. The machine itself stays as it is, except for folders that the
work may create.
"""

from __future__ import annotations

import os
from contextlib import suppress

from . import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_STAGE = ".volumes"  # in the hidden folder; the work sees it, and finds it empty


class MountedVolume:
    """A volume with its files on this node, and the path at which the work sees them."""

    def __init__(self, source: str, path: str, *, read_only: bool) -> None:
        self.source, self.path, self.read_only = source, path, read_only


class VolumeMounts:
    """Mounts volumes in this process's own mount namespace, in three steps: their folders are
    opened before `folder` is hidden, kept in the hidden folder before the system's folders become
    read-only, which would include them, and mounted at their paths at last.
    """

    def __init__(self, volumes: Sequence[MountedVolume], folder: str) -> None:
        """Raises OSError."""
        self._volumes, self._stage = volumes, f"{folder}/{_STAGE}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._opened = [os.open(each.source, flags) for each in volumes]
        self._roots: list[int] = []

    def keep(self) -> None:
        """Keep the volumes in the hidden folder, in which files can still be made. Raises
        OSError."""
        for index, opened in enumerate(self._opened):
            os.makedirs(self._at(index))
            mounts.bind(f"/proc/self/fd/{opened}", self._at(index))
            os.close(opened)
        if self._opened:
            os.mkdir(self._at("root"))

    def finish(self) -> None:
        """Mount the volumes at their paths, outer paths first. Raises OSError."""
        order = sorted(enumerate(self._volumes), key=lambda each: each[1].path.count("/"))
        for index, volume in order:
            if not os.path.isdir(volume.path):
                self._make_folder(volume.path)
            mounts.mount(self._at(index), volume.path, None, mounts.MS_MOVE)
            if volume.read_only:
                mounts.make_read_only(volume.path)
        for root in self._roots:
            os.fchdir(root)
            mounts.call("umount2", b".", mounts.MNT_DETACH)
            os.chdir("/")
            os.close(root)

    def _at(self, name: object) -> str:
        return f"{self._stage}/{name}"

    def _make_folder(self, path: str) -> None:
        with suppress(OSError):
            os.makedirs(path, exist_ok=True)
            return
        above = os.path.dirname(path)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        self._replace(os.path.realpath(above), os.path.relpath(path, above))

    def _replace(self, folder: str, missing: str) -> None:
        """Replace `folder` by one with the same entries and the folder `missing`. Raises
        OSError."""
        new = self._at("root")
        mounts.mount("tmpfs", new, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)
        # otherwise, the copy of a folder that contains it would contain the copies made before
        mounts.mount("none", new, None, mounts.MS_UNBINDABLE)
        os.chmod(new, 0o755)
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # the work does not see a file that cannot be mounted
                    _copy(entry, f"{new}/{entry.name}")
        os.makedirs(f"{new}/{missing}")
        closed = mounts.MS_REMOUNT | mounts.MS_BIND | mounts.MS_RDONLY
        mounts.mount("none", new, None, closed | mounts.MS_NOSUID | mounts.MS_NODEV)
        if folder == "/":
            self._roots.append(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            os.chdir(new)
            mounts.call("pivot_root", b".", b".")  # the old root is now mounted over the new one
            os.chdir("/")
        else:
            mounts.mount(new, folder, None, mounts.MS_MOVE)


def _copy(entry: os.DirEntry[str], target: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
        return
    opened = os.open(entry.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mounts.make_place(target, opened)
        mounts.bind(f"/proc/self/fd/{opened}", target)
    finally:
        os.close(opened)
