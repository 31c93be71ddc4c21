"""Separates the work from the work of other projects on the same machine, and from the files of the
user who runs the server.

The work gets its own user, mount, process and IPC namespaces. The work sees only its own processes,
so it can neither signal nor trace other processes. Empty file systems are mounted over the folders
through which processes communicate or in which a user stores keys: /tmp, /var/tmp, /dev/shm, the
user's home and runtime folders, and the server's folder. The sockets of container engines, and the
devices of other jobs, are hidden from the work. All processes of the work end when the first
process of its namespace ends. The server's user must not be root, because root owns the files of
the system in every namespace.

`find_obstacle` tests whether this machine can separate work at all, and names the obstacle if it
cannot. The server converts the obstacle to a message for users (`providers.hosts.isolation`).
"""

from __future__ import annotations

import os
from glob import glob

from . import hide, mounts
from .alone import CLONE_NEWPID, find_code, start_alone
from .mounts import MS_NODEV, MS_NOSUID
from .own_volumes import MountedVolume, VolumeMounts
from .protect import Protection, join_names, list_homes, protect_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

CLONE_NEWIPC = 0x8000000
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


def separate(
    folder: str,
    shown: list[str],
    devices: Iterable[str] = (),
    protection: Protection | None = None,
    volumes: Sequence[MountedVolume] = (),
) -> None:
    """Separate this process and its later children. The separated processes see neither `folder`,
    except its subfolders in `shown`, nor the device files in `devices`, and see `volumes` at their
    paths.

    The function returns in a new process. The calling process waits for the new process and exits
    with the new process's exit code. The calling process must have only one thread. Raises OSError;
    after an error, the process may be separated only in part.
    """
    uid = os.geteuid()
    if uid == 0:
        raise PermissionError(1, "work of the root user cannot be separated")
    cwd = os.getcwd()
    hide.enter_own_user(hide.CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    _cover(folder, shown, uid, devices, protection, volumes)
    start_alone(protect_proc, _watch_homes())
    _close_abstract_sockets()
    os.chdir(cwd if os.path.isdir(cwd) else "/")


def _watch_homes() -> Callable[[], str]:
    """Return a function that says what was created meanwhile in the work's own home folder, which
    is removed with the work."""
    before = {each: set(os.listdir(each)) for each in list_homes()}

    def describe() -> str:
        found = [(home, set(os.listdir(home)) - names) for home, names in before.items()]
        seen = [(home, sorted(each for each in new if each[0] != ".")) for home, new in found]
        return "".join(
            f"cavvy: with isolation by namespaces, {home} is the job's own folder, and is removed "
            f"with its files: {join_names(names)}; to keep files, write them to the working folder "
            "and name them in `outputs` or `checkpoint`\n"
            for home, names in seen
            if names
        )

    return describe


def enter(folder: str, find: Callable[[], list[int]]) -> None:
    """Enter the namespaces of separated work, like `hide.enter`. Only a new process returns from
    the function, and the calling process waits for the new process and exits with its exit code.
    """
    hide.enter(folder, find, "ipc", alone=True)
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


def _cover(
    folder: str,
    shown: list[str],
    uid: int,
    devices: Iterable[str],
    protection: Protection | None,
    volumes: Sequence[MountedVolume],
) -> None:
    covers = list_covers(folder, uid)
    programs = mounts.list_programs()
    below = [each for each in shown if any(_is_below(each, cover) for cover in covers)]
    kept = [*programs, *(each for each in below if os.path.isdir(each))]
    mounts.mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
    opened = [(path, os.open(path, os.O_RDONLY)) for path in kept]
    own = VolumeMounts(volumes, folder)
    if protection is not None:
        protection.begin(homes=[])
    for cover in covers:
        os.makedirs(cover, exist_ok=True)
        mounts.mount("tmpfs", cover, "tmpfs", MS_NOSUID | MS_NODEV)
        if cover in _MEETING_PLACES:
            os.chmod(cover, 0o1777)
    for path, fd in opened:
        mounts.make_place(path, fd)
        mounts.bind(f"/proc/self/fd/{fd}", path)
        os.close(fd)
    for path in programs:
        mounts.make_read_only(path)
    own.keep()
    closed = mounts.MS_REMOUNT | mounts.MS_BIND | mounts.MS_RDONLY | MS_NOSUID | MS_NODEV
    mounts.mount("none", folder, None, closed)
    if protection is not None:
        protection.finish(folder)
    for path in (*_SOCKETS, *devices):
        if os.path.exists(path):
            mounts.bind("/dev/null", os.path.realpath(path))
    own.finish()


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
            separate(folder, [shown], (), Protection([], ""))
            alone = os.getpid() == 2 and len([x for x in os.listdir("/proc") if x.isdigit()]) == 2
            os._exit(0 if alone and os.path.isdir(shown) else 1)
        except (OSError, AttributeError, ImportError):
            os._exit(1)
        finally:
            os._exit(1)
    return find_code(os.waitpid(pid, 0)[1])


# The obstacles. METADATA is followed by a blank and the address.
NONE, ROOT, NAMESPACES, METADATA = "", "root", "namespaces", "metadata"
# Where machines of clouds find their own credentials: AWS, Google Cloud, Azure and others; tasks of
# ECS; Alibaba Cloud; over IPv6, AWS, Google Cloud, Oracle Cloud and Scaleway.
METADATA_ADDRESSES = (
    *("169.254.169.254", "169.254.170.2", "100.100.100.200"),
    *("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
)
_CONNECT_S = 0.7  # a metadata service is on the machine or one hop away


def find_obstacle(folder: str, shown: str) -> str:
    """Return the obstacle that prevents the separation of the work from its machine, or NONE. The
    separation hides `folder`, except the folder `shown`. Blocks.
    """
    if os.geteuid() == 0:
        return ROOT
    if main(folder, shown):
        return NAMESPACES
    address = find_metadata()
    return f"{METADATA} {address}" if address else NONE


def find_metadata(addresses: Sequence[str] = METADATA_ADDRESSES, port: int = 80) -> str:
    """Return the first address at which a metadata service accepts connections, or "" if there is
    none. Jobs could request the machine's credentials from a metadata service. This function sends
    no request. Blocks.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = threads.map(lambda each: _accepts(each, port), addresses)
        return next((each for each, found in zip(addresses, answers) if found), "")  # noqa: B905


def _accepts(address: str, port: int) -> bool:
    import socket

    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
