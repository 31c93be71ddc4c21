"""Calls of the kernel that change the mounts and namespaces of this process."""

from __future__ import annotations

import os
import stat
import sys
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 0x20, 0x1000, 0x2000, 0x4000
MS_UNBINDABLE, MS_PRIVATE = 0x20000, 0x40000
MNT_DETACH = 2  # for umount2
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 0x400, 0x800, 0x200000
# as in the result of statvfs, whose other flags have the same numbers as those of mount
_ST_RELATIME = 0x1000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = 442, -100, 0x8000, 1


def is_root() -> bool:
    return os.geteuid() == 0


def contains(folder: str, path: str) -> bool:
    """Return whether `path` is `folder` or in it; both paths are absolute and normal."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def make_place(path: str, fd: int) -> None:
    """Create the folder or empty file on which the open file is mounted, unless the path exists."""
    if os.path.exists(path):
        return
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def list_programs() -> list[str]:
    """Return the paths of this Python and of this program, which may be an archive. If these paths
    are below a folder that is hidden from the work, the work still sees these paths. The server and
    the agents run the files at these paths, which the work cannot change.
    """
    agent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = agent if os.path.isfile(agent) else os.path.dirname(agent)
    found = {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, package)}
    # Without the module `site`, Python does not find its own virtual environment.
    venv = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.exists(venv + "/pyvenv.cfg"):
        found.add(os.path.realpath(venv))
    return sorted(each for each in found - {"/usr"} if os.path.exists(each))


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(load_library(), name)(*arguments):
        from ctypes import get_errno

        number = get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@lru_cache(maxsize=None)  # noqa: UP033  agents also run on Python 3.8
def load_library() -> ctypes.CDLL:
    """Return the C library. To load it takes longer than a call."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    call("mount", os.fsencode(source), os.fsencode(target), kind and kind.encode(), flags, None)


def bind(source: str, target: str) -> None:
    """Mount a file or folder, with everything that is mounted in it, at another path."""
    mount(source, target, None, MS_BIND | MS_REC)


def bind_itself(path: str) -> None:
    bind(path, path)


def bind_link(path: str) -> None:
    """Mount a symbolic link over itself, so that it cannot be removed or replaced."""
    opened = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if stat.S_ISLNK(os.fstat(opened).st_mode):
            link = f"/proc/self/fd/{opened}"
            mount(link, link, None, MS_BIND)
    finally:
        os.close(opened)


def make_read_only(path: str, *, recursive: bool = True) -> None:
    """Make the mount at the path read-only and, if `recursive`, all mounts below it."""
    if _set_read_only(path, _AT_RECURSIVE if recursive else 0):
        return
    below = [each for each in list_mounts() if contains(path, each)] if recursive else [path]
    for each in below:
        mount("none", each, None, MS_REMOUNT | MS_BIND | MS_RDONLY | read_flags(each))


def _set_read_only(path: str, flags: int) -> bool:
    """Make a mount, or all mounts at and below the path, read-only by one call, which needs Linux
    5.12. Return whether this succeeded."""
    number, attributes, size = load_attributes()
    where = os.fsencode(path)
    syscall = load_library().syscall
    return bool(syscall(number, _AT_FDCWD, where, flags, attributes, size) == 0)


@lru_cache(maxsize=None)  # noqa: UP033  agents also run on Python 3.8
def load_attributes() -> tuple[ctypes.c_long, bytes, ctypes.c_size_t]:
    """Return the number of the system call, the attributes and their size."""
    import ctypes
    import struct

    attributes = struct.pack("QQQQ", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
    return ctypes.c_long(_MOUNT_SETATTR), attributes, ctypes.c_size_t(len(attributes))


def make_writable(path: str) -> None:
    mount("none", path, None, MS_REMOUNT | MS_BIND | read_flags(path))


def read_flags(path: str) -> int:
    """Return the flags of the mount at `path` other than its read-only flag. A change of the
    mount, in a user namespace, must keep these flags.
    """
    flags = os.statvfs(path).f_flag
    same = MS_NOSUID | MS_NODEV | MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME
    return (flags & same) | (_MS_RELATIME if flags & _ST_RELATIME else 0)


def list_mounts() -> list[str]:
    """Return the paths of all mounts that this process sees, outer mounts first."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        found = {_decode(line.split(" ")[4]) for line in file}
    return sorted(found, key=len)


def _decode(path: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, letter)
    return path
