"""The walls of a sandbox: its own user, mount, process, network, IPC and host name spaces, a file
system with the system's programs, Landlock, no capabilities and few system calls.

`build_template` makes what all sandboxes of a host share, once. `clone` makes the first process of
a sandbox, which calls `close_in`. The functions change the calling process, which must have one
thread. They raise OSError.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import struct
import sys
from contextlib import suppress

from cavvy.capabilities.sandboxes.on_node import system_calls

USER = 1000  # the ID of the sandbox's only user, as the sandbox sees it
WORK = "/home/sandbox"
_FIRST_OUTSIDE = 0x70000000  # where the IDs of sandboxes begin as the machine sees them, for root
MOST_USERS = 1 << 20  # sandboxes of a host that have different IDs
_TEMPLATE_MIB = 16
CLIENT = "opt/cavvy"  # where programs of sandboxes find `cavvy.Dict` and `cavvy.Queue`
_MOST_FILES = 65536  # each takes about 1 KiB of the kernel's memory
_MOST_TERMINALS = 64  # the machine has 4,096

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (
    *(0x1, 0x2, 0x4, 0x8, 0x20, 0x1000, 0x4000, 0x40000),
)
_DETACH = 2
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    *(0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000),
)
_ALL_SPACES = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
_SIGCHLD, _SIGKILL = 17, 9
_SET_PDEATHSIG, _SET_DUMPABLE, _DROP_BOUNDING, _SET_NO_NEW_PRIVS = 1, 4, 24, 38
_SET_CAPABILITIES = {"x86_64": 126, "aarch64": 91}
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITIES_3 = 0x20080522
_LAST_CAPABILITY = 63
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# Landlock (`include/uapi/linux/landlock.h`)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS_1, _REFER, _TRUNCATE, _IOCTL = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "nix", "gnu")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SETTINGS = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "pki", "protocols", "rpc", "services", "ssl"),
    *("terminfo", "timezone"),
)
_PASSWD = f"root:x:0:0:root:/root:/usr/sbin/nologin\nsandbox:x:{USER}:{USER}::{WORK}:/bin/sh\n"
_WRITTEN = {
    "passwd": _PASSWD,
    "group": f"root:x:0:\nsandbox:x:{USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
}
_COVERED = (WORK[1:], "tmp", "var/tmp", "dev/shm")  # where each sandbox has its own files
_FOLDERS = (
    "dev/pts",
    "dev/shm",
    "etc",
    "mnt",
    "new",
    "proc",
    "run",
    "tmp",
    "var/tmp",
    "home/sandbox",
)

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # calls keep Python's lock, as a fork does


class Walls:
    """Which walls this machine has."""

    def __init__(self) -> None:
        self.filter = b""
        self.landlock = 0  # its version; 0: none

    def list_missing(self) -> list[str]:
        """Return what is missing, of what sandboxes can do without."""
        missing = []
        if self.landlock < 1:
            missing.append("Landlock, the second check of files (Linux 5.13 with lsm=landlock)")
        elif self.landlock < 6:
            missing.append("Landlock's scopes of signals and sockets (Linux 6.12)")
        return missing


def find_walls() -> Walls:
    """Return the walls of this machine. Raises OSError if one that each sandbox needs is
    missing."""
    walls = Walls()
    walls.filter = system_calls.make_filter(system_calls.find_machine())
    walls.landlock = max(0, _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    return walls


def build_template(walls: Walls, folder: str, shown: list[str], client: str = "") -> None:
    """Build what sandboxes see in an own mount namespace, and make it the current folder. `shown`
    are more folders that they can read, such as Python's, and `client` is copied, since its files
    may be only the host's."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _unshare(_NEWNS)
    else:
        _unshare(_NEWNS | _NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount("none", "/", None, _REC | _PRIVATE)
    copied = _read_files(client)
    os.makedirs(folder, exist_ok=True)
    options = f"mode=755,size={_TEMPLATE_MIB}m"
    _mount("tmpfs", folder, "tmpfs", _NOSUID, options)
    os.chdir(folder)
    os.umask(0o022)
    for each in _FOLDERS:
        os.makedirs(each, exist_ok=True)
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), name)
        elif os.path.isdir(f"/{name}"):
            _show(f"/{name}")
    for name in _SETTINGS:
        with suppress(OSError):  # a sandbox works without it
            if os.path.exists(f"/etc/{name}"):
                _copy_setting(name)
    for name, text in _WRITTEN.items():
        _write(f"etc/{name}", text)
    for name, data in copied.items():
        os.makedirs(os.path.dirname(f"{CLIENT}/{name}"), exist_ok=True)
        with open(f"{CLIENT}/{name}", "xb") as file:
            file.write(data)
    for path in sorted(shown):
        if not any(_contains(f"/{each}", path) for each in _SYSTEM):
            _show(path)
    _show_devices(walls)
    _mount("none", ".", None, _REMOUNT | _BIND | _RDONLY | _NOSUID)


def _read_files(folder: str) -> dict[str, bytes]:
    """Return the files below a folder, by their path in it."""
    found = {}
    for above, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


def _show_devices(walls: Walls) -> None:
    for name in _DEVICES:
        if name == "zero" and not walls.landlock:  # nothing else keeps it from being written to
            continue
        _write(f"dev/{name}", "")
        _mount(f"/dev/{name}", f"dev/{name}", None, _BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"dev/{name}")
    os.symlink("pts/ptmx", "dev/ptmx")


def clone() -> int:
    """Return in a new process with namespaces of its own with 0, and here with its ID."""
    number = _CLONE[system_calls.find_machine()]
    pid: int = _held.syscall(
        ctypes.c_long(number), ctypes.c_long(_ALL_SPACES | _SIGCHLD), 0, 0, 0, 0
    )
    if pid < 0:
        raise OSError(ctypes.get_errno(), "a process with own namespaces")
    return pid


def map_user(pid: int, number: int) -> None:
    """Map the user of a sandbox: for root, to one that no other sandbox has."""
    if os.geteuid() == 0:
        outside = outside_group = _FIRST_OUTSIDE + number
    else:
        outside, outside_group = os.geteuid(), os.getegid()
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"{USER} {outside} 1")
    _write(f"/proc/{pid}/gid_map", f"{USER} {outside_group} 1")
    with suppress(OSError):  # the kernel ends programs of sandboxes first if memory is short
        _write(f"/proc/{pid}/oom_score_adj", "900")


def close_in(walls: Walls, disk_mib: int, shown: list[str], *, is_root: bool) -> int:
    """Close this process, the first of its namespaces, in a sandbox. The current folder is the
    template. Return the file with the questions of its programs (`system_calls.install`)."""
    if is_root:
        os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    prctl(_SET_PDEATHSIG, _SIGKILL)
    _build_root(disk_mib, shown)
    socket.sethostname("sandbox")
    _raise_loopback()
    os.chdir(WORK)
    _drop_capabilities()
    prctl(_SET_DUMPABLE, 0)  # programs of the sandbox cannot read this process
    if walls.landlock:
        _restrict_files(walls.landlock)
    return system_calls.install(walls.filter)


def _build_root(disk_mib: int, shown: list[str]) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount(".", "new", None, _BIND | _REC)
    os.chdir("new")
    # read-only: what is mounted there is, too, in the namespaces of a job of root
    _mount("proc", "proc", "proc", _NOSUID | _NODEV | _NOEXEC | _RDONLY)
    options = f"mode=755,size={disk_mib}m,nr_inodes={_MOST_FILES}"
    _mount("tmpfs", "mnt", "tmpfs", _NOSUID | _NODEV, options)
    for name, place, mode in (
        ("home", WORK[1:], 0o755),
        ("tmp", "tmp", 0o1777),
        ("tmp2", "var/tmp", 0o1777),
        ("shm", "dev/shm", 0o1777),
    ):
        os.mkdir(f"mnt/{name}")
        os.chmod(f"mnt/{name}", mode)
        _mount(f"mnt/{name}", place, None, _BIND)
    _unmount("mnt")
    for path in shown:
        if any(_contains(f"/{each}", path) for each in _COVERED):
            os.makedirs(path[1:], exist_ok=True)
            _mount(f"..{path}", path[1:], None, _BIND | _REC)
    with suppress(OSError):  # programs work without terminals
        options = f"newinstance,ptmxmode=0666,mode=0620,max={_MOST_TERMINALS}"
        _mount("devpts", "dev/pts", "devpts", _NOSUID | _NOEXEC, options)
    if _libc.syscall(ctypes.c_long(_PIVOT_ROOT[system_calls.find_machine()]), b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    _unmount(".")
    os.chdir("/")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        asked = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(made, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(made, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _drop_capabilities() -> None:
    for number in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_DROP_BOUNDING, number, 0, 0, 0):
            break  # the kernel has no more
    prctl(_SET_NO_NEW_PRIVS, 1)
    header, none = struct.pack("=Ii", _CAPABILITIES_3, 0), bytes(24)
    number = _SET_CAPABILITIES[system_calls.find_machine()]
    if _libc.syscall(ctypes.c_long(number), header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _restrict_files(version: int) -> None:
    """Let this process and its children write only where the sandbox's own files are, and reach
    neither signals nor abstract sockets outside."""
    handled = _RIGHTS_1
    for least, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        handled |= right if version >= least else 0
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", handled, 0, scopes)[:size]
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    in_file = (_EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL) & handled
    try:
        _allow(rules, "/", reading)
        for path in _COVERED:
            _allow(rules, f"/{path}", handled & ~_IOCTL)
        for name in _DEVICES:
            # who can write to `zero` can map memory that no process has
            _allow(rules, f"/dev/{name}", in_file & ~(_WRITE_FILE if name == "zero" else 0))
        _allow(rules, "/dev/pts", reading | _WRITE_FILE | _IOCTL & handled)
        if _libc.syscall(_LANDLOCK_RESTRICT, rules, 0):
            raise OSError(ctypes.get_errno(), "Landlock")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        beneath = struct.pack("=Qi", rights, opened)
        if _libc.syscall(_LANDLOCK_ADD, rules, 1, beneath, 0):
            raise OSError(ctypes.get_errno(), "Landlock", path)
    finally:
        os.close(opened)


def _show(path: str) -> None:
    """Let sandboxes read a folder of this machine, at the same path."""
    place = path.lstrip("/")
    os.makedirs(place, exist_ok=True)
    _mount(path, place, None, _BIND | _REC)
    for mount in _list_mounts(os.path.abspath(place)):
        flags = os.statvfs(mount).f_flag & (_NOSUID | _NODEV | _NOEXEC)
        _mount("none", mount, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | flags)


def _list_mounts(below: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        found = {line.split(" ")[4].replace("\\040", " ") for line in file}
    return sorted(each for each in found if _contains(below, each))


def _copy_setting(name: str) -> None:
    source, place = f"/etc/{name}", f"etc/{name}"
    if os.path.isdir(source):
        shutil.copytree(source, place, symlinks=True, ignore=shutil.ignore_patterns("private"))
    else:
        shutil.copyfile(source, place)


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def prctl(number: int, value: int) -> None:
    """Set a property of this process. Raises OSError."""
    if _libc.prctl(number, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {number}")


def end_with_parent() -> None:
    """Let this process be killed when its parent ends."""
    prctl(_SET_PDEATHSIG, _SIGKILL)


def _unshare(flags: int) -> None:
    if _libc.unshare(ctypes.c_int(flags)):
        raise OSError(ctypes.get_errno(), "own mount namespaces")


def _mount(source: str, place: str, kind: str | None, flags: int, options: str = "") -> None:
    named = None if kind is None else kind.encode()
    given = options.encode() or None
    if _libc.mount(os.fsencode(source), os.fsencode(place), named, ctypes.c_ulong(flags), given):
        raise OSError(ctypes.get_errno(), f"mount {place}")


def _unmount(place: str) -> None:
    if _libc.umount2(os.fsencode(place), _DETACH):
        raise OSError(ctypes.get_errno(), f"umount {place}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def list_python() -> list[str]:
    """Return the folders of this Python and of its environment."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    real = {os.path.realpath(each) for each in found}
    return sorted(each for each in found | real if stat.S_ISDIR(os.stat(each).st_mode))
