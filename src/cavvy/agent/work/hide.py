"""Hides a folder of this machine from the work, such as the server's folder with its token, key and
database.

The work gets its own mount namespace, in which an empty file system is mounted over the folder;
some folders below this folder stay visible. The work also gets its own user namespace, in which
user IDs stay the same. The user namespace prevents the work from unmounting the empty file system,
and from reading the memory and files of processes outside the namespace. Hiding a folder requires
Linux, and permission to create mount and user namespaces.

Usage: python hide.py FOLDER SHOWN. The exit code is 0 if the folder can be hidden on this machine.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable

CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 0x400, 0x800, 0x200000
# as in the result of statvfs, whose other flags have the same numbers as those of mount
_ST_RELATIME = 0x1000
ALL_IDS = "0 0 4294967295"
ENTER_S = 10.0  # maximum seconds to wait until a process of the work has hidden the folder


def hide(folder: str, shown: list[str], programs: Iterable[str] = ()) -> None:
    """Hide `folder`, except the existing folders in `shown`, from this process and the process's
    later children. The files and folders in `programs` stay visible, but cannot be changed.

    The process must have only one thread. Raises OSError; after an error, parts of the folder may
    still be visible.
    """
    shown = [path for path in shown if os.path.isdir(path)]
    if os.geteuid() == 0:  # mount first: the new user namespace then cannot remove the mount
        call("unshare", CLONE_NEWNS)
        _cover(folder, shown, programs)
        _enter_user_namespace()
    else:  # the work has no capabilities in the new namespace, since it is not root there
        uid, gid = os.geteuid(), os.getegid()
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        write("self/setgroups", "deny")
        write("self/uid_map", f"{uid} {uid} 1")
        write("self/gid_map", f"{gid} {gid} 1")
        _cover(folder, shown, programs)


def can_hide(folder: str, shown: str) -> bool:
    """Return whether this machine can hide the folder from work. A child process tries it. The
    process must have only one thread."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = main(folder, shown)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def enter(folder: str, find: Callable[[], int]) -> None:
    """Wait until the process that `find` returns has hidden `folder`, then enter that process's
    namespaces.

    The caller must have only one thread. Raises OSError.
    """
    pid = wait_until_hidden(folder, find)
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt")]
    for fd in opened:
        call("setns", fd, 0)
        os.close(fd)


def wait_until_hidden(folder: str, find: Callable[[], int]) -> int:
    """Wait until the process that `find` returns has hidden `folder`, and return that process's ID.
    Raises OSError.
    """
    until = time.monotonic() + ENTER_S
    while not _has_hidden(pid := find(), folder):
        if time.monotonic() > until:
            raise ProcessLookupError(errno.ESRCH, "the work is not running")
        time.sleep(0.01)
    return pid


def _has_hidden(pid: int, folder: str) -> bool:
    """Return whether a process has its own namespaces in which the folder is hidden."""
    # An absolute link below /proc/PID/root leads out of that process's file system.
    folder = os.path.realpath(folder)
    try:
        with open(f"/proc/{pid}/gid_map") as ids:
            return (
                ids.read() != ""
                and os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
                and os.stat(f"/proc/{pid}/root{folder}").st_dev != os.stat(folder).st_dev
            )
    except OSError:
        return False


def is_hidden(folder: str, shown: list[str], path: str, *, follow: bool = True) -> bool:
    """Return whether `path` contains the hidden folder, or is in the hidden folder but outside the
    folders in `shown`. With `follow`, a link at `path` itself is resolved first."""
    above, name = os.path.split(path)
    real = os.path.realpath(path) if follow else os.path.join(os.path.realpath(above), name)
    folder = os.path.realpath(folder)
    if any(_contains(os.path.realpath(each), real) for each in shown):
        return False
    return _contains(folder, real) or _contains(real, folder)


def _contains(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def _cover(folder: str, shown: list[str], programs: Iterable[str]) -> None:
    """Mount an empty file system over the folder, and mount the folders of `shown` and the programs
    in the folder into this file system.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    real = os.path.realpath(folder)
    inside = [path for path in programs if _contains(real, path) and path != real]
    opened = [(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)) for path in shown]
    opened += [(path, os.open(path, os.O_RDONLY)) for path in inside]
    mount("tmpfs", folder, "tmpfs", 0)
    for path, fd in opened:
        make_place(path, fd)
        mount(f"/proc/self/fd/{fd}", path, None, MS_BIND | MS_REC)
        os.close(fd)
    for path in inside:
        protect(path)
    mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY)


def make_place(path: str, fd: int) -> None:
    """Create the folder or empty file on which the open file is mounted, unless the path exists."""
    if os.path.exists(path):
        return
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def protect(path: str) -> None:
    """Make the mount at the path read-only."""
    mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | _read_flags(path))


def _read_flags(path: str) -> int:
    """Return the flags of the mount at `path`. A new mount there, in a user namespace, must have
    the same flags.
    """
    flags = os.statvfs(path).f_flag
    same = MS_NOSUID | MS_NODEV | MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME
    return (flags & same) | (_MS_RELATIME if flags & _ST_RELATIME else 0)


def _enter_user_namespace() -> None:
    """Enter a new user namespace in which all user IDs stay the same. A child process outside the
    namespace maps the IDs, because a process inside the namespace has no permission to do so.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(writer)
            if os.read(reader, 1):
                for name in ("uid_map", "gid_map"):
                    write(f"{parent}/{name}", ALL_IDS)
                code = 0
        finally:
            os._exit(code)
    os.close(reader)
    try:
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        os.write(writer, b"x")
    finally:
        os.close(writer)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise PermissionError(1, "user IDs cannot be mapped")


def write(name: str, text: str) -> None:
    with open(f"/proc/{name}", "w") as file:
        file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, None)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(folder: str, shown: str) -> int:
    try:
        hide(folder, [shown])
        return 0 if os.listdir(folder) and os.path.isdir(shown) else 1
    except (OSError, AttributeError, ImportError):
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
