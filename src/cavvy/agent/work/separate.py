"""Separates the work from the work of other projects on the same machine, and from the files of the
user who runs the server.

The work gets its own user, mount, process and IPC namespaces. The work sees only its own processes,
so it can neither signal nor trace other processes. Empty file systems are mounted over the folders
through which processes communicate or in which a user stores keys: /tmp, /var/tmp, /dev/shm, the
user's home and runtime folders, and the server's folder. The sockets of container engines, and the
devices of other jobs, are hidden from the work. All processes of the work end when the first
process of its namespace ends. The server's user must not be root, because root owns the files of
the system in every namespace.

Usage: python separate.py FOLDER SHOWN. The exit code is 0 if this system can separate work.
"""

from __future__ import annotations

import os
import signal
import sys
from glob import glob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

if __package__:
    from . import hide
else:  # this file runs as a program
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import hide  # type: ignore[import-not-found,no-redef]

CLONE_NEWIPC, CLONE_NEWPID = 0x8000000, 0x20000000
_SOCKETS = (
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
)
_MEETING_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_PR_SET_NO_NEW_PRIVS = 38
# Landlock's system calls, and the scope that closes abstract sockets (Linux >= 6.12)
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_SCOPE_ABSTRACT_SOCKETS = 1


def separate(folder: str, shown: list[str], devices: Iterable[str] = ()) -> None:
    """Separate this process and its later children. The separated processes see neither `folder`,
    except its subfolders in `shown`, nor the device files in `devices`.

    The function returns in a new process. The calling process waits for the new process and exits
    with the new process's exit code. The calling process must have only one thread. Raises OSError;
    after an error, the process may be separated only in part.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        raise PermissionError(1, "work of the root user cannot be separated")
    cwd = os.getcwd()
    hide.call("unshare", hide.CLONE_NEWUSER | hide.CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    hide.write("self/setgroups", "deny")
    hide.write("self/uid_map", f"{uid} {uid} 1")
    hide.write("self/gid_map", f"{gid} {gid} 1")
    _cover(folder, shown, uid, devices)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        _wait_for(reader)
    os.close(reader)
    flags = hide.MS_NOSUID | hide.MS_NODEV | hide.MS_NOEXEC
    hide.mount("proc", "/proc", "proc", flags)
    program = os.fork()
    if program:
        _serve(program, writer)
    os.close(writer)
    _close_abstract_sockets()
    os.chdir(cwd if os.path.isdir(cwd) else "/")


def enter(pid: int) -> None:
    """Enter the namespaces of separated work; `pid` is the ID that the work's first process has
    outside the namespaces. Like `separate`, this function forks: only the child process returns
    from the function, and the calling process waits for the child process and exits with its exit
    code.
    """
    names = ("user", "mnt", "ipc", "pid_for_children")
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for fd in opened:
        hide.call("setns", fd, 0)
        os.close(fd)
    program = os.fork()
    if program:
        _let_go(4096)
        os._exit(_code(os.waitpid(program, 0)[1]))
    _close_abstract_sockets()


def list_covers(folder: str, uid: int) -> list[str]:
    """Return the folders to hide from the work, outer folders first."""
    import pwd

    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        home = ""
    wanted = {*_MEETING_PLACES, f"/run/user/{uid}", folder}
    wanted |= {os.path.realpath(each) for each in (home, os.environ.get("HOME", "")) if each}
    usable = [each for each in wanted if os.path.isdir(each) and each not in ("/", "")]
    return sorted(usable, key=lambda each: each.count("/"))


def list_programs() -> list[str]:
    """Return the paths of this Python and of this program, which may be an archive. If these paths
    are below a folder that is hidden from the work, the work still sees these paths. The server and
    the agents run the files at these paths, which the work cannot change.
    """
    agent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = agent if os.path.isfile(agent) else os.path.dirname(agent)
    found = {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, package)}
    return sorted(each for each in found - {"/usr"} if os.path.exists(each))


def _cover(folder: str, shown: list[str], uid: int, devices: Iterable[str]) -> None:
    covers = list_covers(folder, uid)
    programs = list_programs()
    below = [each for each in shown if any(_is_below(each, cover) for cover in covers)]
    kept = [*programs, *(each for each in below if os.path.isdir(each))]
    hide.mount("none", "/", None, hide.MS_REC | hide.MS_PRIVATE)
    opened = [(path, os.open(path, os.O_RDONLY)) for path in kept]
    for cover in covers:
        os.makedirs(cover, exist_ok=True)
        hide.mount("tmpfs", cover, "tmpfs", hide.MS_NOSUID | hide.MS_NODEV)
        if cover in _MEETING_PLACES:
            os.chmod(cover, 0o1777)
    for path, fd in opened:
        hide.make_place(path, fd)
        hide.mount(f"/proc/self/fd/{fd}", path, None, hide.MS_BIND | hide.MS_REC)
        os.close(fd)
    for path in programs:
        hide.protect(path)
    closed = hide.MS_REMOUNT | hide.MS_BIND | hide.MS_RDONLY | hide.MS_NOSUID | hide.MS_NODEV
    hide.mount("none", folder, None, closed)
    for path in (*_SOCKETS, *devices):
        if os.path.exists(path):
            hide.mount("/dev/null", os.path.realpath(path), None, hide.MS_BIND)


def list_other_gpus(own: list[str] | None) -> list[str]:
    """Return the device files of NVIDIA GPUs that are not in `own`, which contains UUIDs. The list
    is empty if the work has the whole machine or a part of a GPU.
    """
    if own is None or any(each.startswith("MIG") for each in own):
        return []
    if not own:
        names = [each for each in os.listdir("/dev") if each.startswith("nvidia")]
        return [f"/dev/{each}" for each in names if os.path.exists(f"/dev/{each}")]
    found = []
    for information in glob("/proc/driver/nvidia/gpus/*/information"):
        with open(information) as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        named = {name.strip(): value.strip() for name, value in facts.items()}
        if named.get("GPU UUID") not in own:
            found.append(f"/dev/nvidia{named.get('Device Minor', '')}")
    return [each for each in found if each != "/dev/nvidia"]


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _wait_for(reader: int) -> None:
    """Exit with the exit code that the first process of the namespace reports."""
    _let_go(reader)
    told = os.read(reader, 1)
    os._exit(told[0] if told else 137)


def _serve(program: int, writer: int) -> None:
    """Act as the first process of the namespace: report the program's exit code, and reap the
    processes that the program leaves behind. All processes of the namespace are killed when this
    process ends.
    """
    _let_go(writer)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == program:
            os.write(writer, bytes([_code(status)]))
            os.close(writer)


def _let_go(kept: int) -> None:
    """Close all files except one, and ignore signals that only the program should receive."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.closerange(0, kept)
    os.closerange(kept + 1, 4096)


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _close_abstract_sockets() -> bool:
    """Let this process and its children connect only to abstract sockets that they have created.
    Return False if the system cannot restrict connections in this way.
    """
    import ctypes
    import struct

    library = ctypes.CDLL(None, use_errno=True)
    rules = struct.pack("QQQ", 0, 0, _SCOPE_ABSTRACT_SOCKETS)
    fd = library.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if fd < 0:
        return False
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = library.syscall(_LANDLOCK_RESTRICT, fd, 0) == 0
    os.close(fd)
    return bool(done)


def main(folder: str, shown: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            separate(folder, [shown])
            alone = os.getpid() == 2 and len([x for x in os.listdir("/proc") if x.isdigit()]) == 2
            os._exit(0 if alone and os.path.isdir(shown) else 1)
        except (OSError, AttributeError, ImportError):
            os._exit(1)
        finally:
            os._exit(1)
    return _code(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
