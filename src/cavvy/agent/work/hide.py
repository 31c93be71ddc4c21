"""Hides a folder of this machine from the work, such as the server's folder with its token, key and
database.

The work gets its own mount namespace, in which an empty file system is mounted over the folder;
some folders below this folder stay visible. The work also gets its own user namespace, in which
user IDs stay the same. The user namespace prevents the work from unmounting the empty file system,
and from reading the memory and files of processes outside the namespace. Hiding a folder requires
Linux, and permission to create mount and user namespaces.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from .alone import CLONE_NEWPID, continue_as_child, start_alone
from .mounts import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    bind,
    call,
    contains,
    is_root,
    list_programs,
    make_place,
    make_read_only,
    mount,
)
from .own_volumes import MountedVolume, VolumeMounts
from .protect import Protection, protect_proc

CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
_PROCESSES, _BELOW = ".processes", "proc"  # in the hidden folder, and in it
_PROCESSES_FLAGS = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
ALL_IDS = "0 0 4294967295"
ENTER_S = 10.0  # maximum seconds to wait until a process of the work has hidden the folder
# What a machine can do: hide the folder, and also give the work its own processes.
HIDES, ALONE = "hides", "alone"


def hide(
    folder: str,
    shown: list[str],
    protection: Protection | None = None,
    *,
    alone: bool = False,
    volumes: Sequence[MountedVolume] = (),
) -> None:
    """Hide `folder`, except the existing folders in `shown`, from this process and the process's
    later children, which cannot change what `protection` protects, and which see `volumes` at their
    paths.

    With `alone`, the function returns in a new process with its own process namespace, as
    `start_alone` describes. The process must have only one thread. Raises OSError; after an error,
    parts of the folder may still be visible.
    """
    shown = [path for path in shown if os.path.isdir(path)]
    spaces = CLONE_NEWNS | (CLONE_NEWPID if alone else 0)
    if is_root():  # mount first: the new user namespace then cannot remove the mounts
        limits = os.open("/proc", os.O_PATH)  # stays writable
        call("unshare", spaces)
        _cover(folder, shown, protection, volumes, places=(_PROCESSES,) if alone else ())
        if alone:
            _start_alone_as_root(f"{folder}/{_PROCESSES}")
        else:
            _enter_user_namespace()
        _forbid_groups(f"self/fd/{limits}/")
        os.close(limits)
    else:  # the work has no capabilities in the new namespace, since it is not root there
        enter_own_user(spaces)
        _cover(folder, shown, protection, volumes)
        if alone:
            start_alone(protect_proc)


def enter_own_user(spaces: int) -> None:
    """Enter a new user namespace in which this user, who is not root, keeps its IDs, and other new
    namespaces. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | spaces)
    write("self/setgroups", "deny")
    write("self/uid_map", f"{uid} {uid} 1")
    write("self/gid_map", f"{gid} {gid} 1")
    _forbid_groups()


def _forbid_groups(proc: str = "") -> None:
    """Forbid new namespaces of control groups. In one, the work could mount the control groups and
    end its own group, which Cavvy's server may share."""
    with suppress(FileNotFoundError):
        write(proc + "sys/user/max_cgroup_namespaces", "0")


def enter(folder: str, find: Callable[[], list[int]], *others: str, alone: bool = False) -> None:
    """Wait until one of the processes that `find` returns has hidden `folder`, then enter that
    process's namespaces, those in `others` included. With `alone`, the function returns in a new
    process.

    The caller must have only one thread. Raises OSError.
    """
    pid = wait_until_hidden(folder, find)
    names = ["user", "mnt", *others]
    if alone:  # root's process namespace belongs to the user namespace above that of the work
        names.insert(0 if is_root() else len(names), "pid_for_children")
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for fd in opened:
        call("setns", fd, 0)
        os.close(fd)
    if alone:
        continue_as_child()


def wait_until_hidden(folder: str, find: Callable[[], list[int]]) -> int:
    """Wait until one of the processes that `find` returns has hidden `folder`, and return that
    process's ID. Raises OSError.
    """
    until = time.monotonic() + ENTER_S
    while True:
        for pid in find():
            if _has_hidden(pid, folder):
                return pid
        if time.monotonic() > until:
            raise ProcessLookupError(errno.ESRCH, "the work is not running")
        time.sleep(0.01)


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
    if any(contains(os.path.realpath(each), real) for each in shown):
        return False
    return contains(folder, real) or contains(real, folder)


def _cover(
    folder: str,
    shown: list[str],
    protection: Protection | None,
    volumes: Sequence[MountedVolume],
    places: tuple[str, ...] = (),
) -> None:
    """Mount an empty file system over the folder, and mount the folders of `shown`, and Cavvy's
    programs, into this file system, in which empty folders are made with the names `places`. Then
    mount the volumes at their paths.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    real = os.path.realpath(folder)
    programs = [each for each in list_programs() if contains(real, each) and each != real]
    opened = [(path, os.open(path, os.O_RDONLY)) for path in [*shown, *programs]]
    own = VolumeMounts(volumes, folder)
    if protection is not None:
        protection.begin()
        protection.pin(real)
    mount("tmpfs", folder, "tmpfs", 0)
    for name in places:
        os.makedirs(f"{folder}/{name}/{_BELOW}", 0o700)
    own.keep()
    for path, fd in opened:
        make_place(path, fd)
        bind(f"/proc/self/fd/{fd}", path)
        os.close(fd)
    for path in programs:
        make_read_only(path)
    mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    if protection is not None:
        protection.finish(real)
    own.finish()


def _start_alone_as_root(processes: str) -> None:
    """Start the unshared process namespace. The function returns in a new process, in a new user
    namespace in which all user IDs stay the same. The first process maps the IDs.

    A folder in `processes` shows the same as /proc, read-only and with nothing mounted over parts
    of it. The kernel lets the work mount /proc in namespaces of its own, such as those of
    sandboxes, only if it has this already; and then only read-only, too. An empty folder covers it,
    as a search through the home folder would read files of /proc without end.
    """
    ours, theirs = socket.socketpair()

    def show_processes() -> None:
        protect_proc()
        mount("proc", f"{processes}/{_BELOW}", "proc", _PROCESSES_FLAGS)
        mount("tmpfs", processes, "tmpfs", _PROCESSES_FLAGS)

    def meet(program: int) -> None:
        ours.close()
        _map_ids(theirs, program)

    start_alone(show_processes, meet=meet)
    theirs.close()
    _have_ids_mapped(ours)


def _enter_user_namespace() -> None:
    """Enter a new user namespace in which all user IDs stay the same. A child process outside the
    namespace maps the IDs, because a process inside the namespace has no permission to do so.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        ours.close()
        _map_ids(theirs, parent)
        os._exit(0)
    theirs.close()
    try:
        _have_ids_mapped(ours)
    finally:
        os.waitpid(helper, 0)


def _have_ids_mapped(helper: socket.socket) -> None:
    """Enter a new user namespace whose IDs the process at the other end maps."""
    with helper:
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        helper.send(b"x")
        if not helper.recv(1):
            raise PermissionError(1, "user IDs cannot be mapped")


def _map_ids(asker: socket.socket, pid: int) -> None:
    """Map the IDs of the namespace that the process `pid` at the other end has entered."""
    with asker, suppress(OSError):
        if asker.recv(1):
            for name in ("uid_map", "gid_map"):
                write(f"{pid}/{name}", ALL_IDS)
            asker.send(b"x")


def write(name: str, text: str) -> None:
    with open(f"/proc/{name}", "w") as file:
        file.write(text)


def find_ability(folder: str, shown: str) -> str:
    """Return what this machine can do: ALONE, HIDES or "" if it cannot hide the folder `folder`
    except its part `shown`. Each attempt runs in a process of its own."""
    for ability in (ALONE, HIDES):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                hide(folder, [shown], Protection([], ""), alone=ability == ALONE)
                code = 0 if os.listdir(folder) and os.path.isdir(shown) else 1
            except (OSError, AttributeError, ImportError):
                code = 1
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1] == 0:
            return ability
    return ""
