"""Starts the engine of a model, and with it the model's `cavvy_process.py`, or `trtexec`, without
the device's rights: `python -m cavvy.agent.work.confine FOLDER FILES WORK PROGRAM…`. FOLDER is the
device's, with its key, FILES the folder of the model, and WORK one that the program may write to,
or "". It ends when the program that started it ends.

If this program runs as root, the engine runs as a user of its own, which owns nothing. On a kernel
with Landlock (Linux 5.13), also without root, it reads only the model, Python, the system and what
its command names, and writes only to /dev/shm, WORK and accelerators. It gets no capabilities, and
few variables beside those that the server has set for engines. What is missing of this is said on
the standard error, and the engine runs: a device must go on serving. With `--strict` before FOLDER,
for which `cavvy model publish` converts the models of jobs, the program has no sockets either, no
accelerators and no /dev/shm: it reaches no network and no other program. Where the kernel cannot do
all this, it does not run.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import os
import pwd
import resource
import shutil
import signal
import stat
import struct
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress

from .reaper import prctl

VARIABLES = "CAVVY_ENGINE_VARIABLES"  # by which it gets an engine's variables, as JSON
MODEL_PACKAGES = "CAVVY_ENGINE_PACKAGES"  # and the folder with a model's Python packages

# The users that systemd too gives to services for the time that they run, as of 2024:
# https://systemd.io/UIDS-GIDS. None of them has a name or files.
_USERS = range(61184, 65520)
_KEPT = ("PATH", "LANG", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH")  # variables, and by their beginning
_KEPT_BEGINNINGS = ("LC_", "OMP_", "ORT_", "CUDA_", "NVIDIA_")
_SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/proc", "/sys"]
_SYSTEM += ["/run/systemd/resolve"]
_PLAIN = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED = ("/dev/shm",)  # with other programs of the same user
_ACCELERATORS = [f"/dev/{each}" for each in ("nvidia*", "nvhost*", "nvmap", "dri", "kfd")]
_ACCELERATORS += ["/dev/apex_*", "/dev/hailo*"]
_MOST_PROCESSES = 4096  # and threads, of the user of an engine
# From linux/prctl.h and linux/landlock.h. The numbers of the system calls are the same for all
# processors. With each version of Landlock, more kinds of access can be ruled.
_DROP_CAPABILITY, _NO_NEW_PRIVILEGES, _CAPABILITIES = 24, 38, 64
_END_WITH_PARENT = 1
_MAKE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
# From linux/seccomp.h, linux/filter.h, linux/audit.h and linux/prctl.h.
_SECCOMP, _FILTER = 22, 2
_LOAD, _IF_EQUAL, _IF_NOT_LESS, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _END = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
_X32 = 0x40000000  # where another numbering of x86 begins
# System calls by which a program reaches others, each with its numbers on x86_64 and on aarch64:
# sockets, also by a ring of requests, memory, messages and keys that all programs of a user share,
# and what looks into other programs or leaves Landlock. What stays are files, which Landlock rules.
_CLOSED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_PROCESSORS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE
_SCOPED_SINCE, _SCOPED = 6, 3  # no signals and no abstract sockets to processes outside


def main(arguments: list[str]) -> None:
    strict = arguments[:1] == ["--strict"]
    arguments = arguments[strict:]
    folder, files, work, *line = arguments
    # not among the variables of this program, which may be root's
    given = json.loads(os.environ.pop(VARIABLES, "{}"))
    packages = os.environ.pop(MODEL_PACKAGES, "")
    parent, environ = os.getppid(), choose_variables(os.environ)
    path = filter(None, (packages, environ.get("PYTHONPATH")))
    environ["PYTHONPATH"] = os.pathsep.join(path)
    line[0] = shutil.which(line[0]) or line[0]
    needed = [*_find_python(environ), files, *find_named(folder, line)]
    nodes = [path for each in _ACCELERATORS for path in glob.glob(each)]
    user = None
    if os.geteuid() == 0:
        open_folder(folder, needed)
        user = None if (closed := _find_closed(needed)) else choose_user(folder, files)
        if closed:
            _say(f"an engine runs as root, because no other user can read {closed}")
    written = list(_PLAIN if strict else (*_PLAIN, *_SHARED, *nodes))
    if work:
        environ |= {"HOME": work, "TMPDIR": work}
        written.append(work)
        os.makedirs(work, mode=0o700, exist_ok=True)
        if user is not None:
            os.chown(work, user, user, follow_symlinks=False)
    os.chdir("/")  # modules of the working folder are not those of the engine
    for number in range(_CAPABILITIES):
        prctl(_DROP_CAPABILITY, number)
    # 1, unlike 0, also keeps the kernel from starting the machine's program for crashes, as root
    # and with what an engine has in its memory (`fs/coredump.c`)
    with suppress(ValueError):  # where it is 0 for good
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if user is not None:
        most = min(_MOST_PROCESSES, *filter(lambda n: n > 0, _most_processes()))
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        os.setgroups(sorted({os.stat(each).st_gid for each in nodes} - {0}))
        os.setgid(user)
        os.setuid(user)
    os.umask(0o077)
    prctl(_NO_NEW_PRIVILEGES, 1)
    prctl(_END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    restricted = restrict([*_SYSTEM, *needed], written)
    if strict and not (restricted and close_calls()):
        sys.exit("the kernel cannot confine a program: it lacks Landlock (Linux 5.13) or seccomp")
    if not restricted and user is None:
        _say("an engine can read the key of this device: the kernel has no Landlock (Linux 5.13)")
    sys.stderr.flush()
    os.execve(line[0], line, {**environ, **given})


def _say(text: str) -> None:
    sys.stderr.write(f"cavvy edge: {text}\n")
    sys.stderr.flush()


def is_able() -> bool:
    """Return whether the kernel can confine programs strictly."""
    if sys.platform != "linux" or os.uname().machine not in _PROCESSORS:
        return False
    # a filter at no address is refused for its address, if the kernel has filters
    number = ctypes.CDLL(None, use_errno=True).prctl(_SECCOMP, _FILTER, None, 0, 0)
    has_filters = number == -1 and ctypes.get_errno() == errno.EFAULT
    return has_filters and _call(_MAKE, None, 0, 1) > 0


def close_calls() -> bool:
    """Refuse the system calls by which this process and those that it starts would reach other
    programs, for ever. Return False if the kernel cannot do it. Another numbering than that of the
    processor, such as that of 32-bit programs, ends the program.
    """
    known = _PROCESSORS.get(os.uname().machine)
    if known is None or struct.calcsize("P") != 8:
        return False
    mark, column = known
    numbers = [each[column] for each in _CLOSED.values()]
    # each with the numbers of instructions to skip if the comparison is true or false
    lines = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, mark), (_RETURN, 0, 0, _END), (_LOAD, 0, 0, 0)]
    lines += [(_IF_NOT_LESS, 0, 1, _X32), (_RETURN, 0, 0, _END)]
    lines += [(_IF_EQUAL, len(numbers) - at, 0, each) for at, each in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(text))
    return bool(ctypes.CDLL(None).prctl(_SECCOMP, _FILTER, program, 0, 0) == 0)


def choose_variables(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables that an engine gets: none that may be a secret."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }
    return {**kept, "HOME": "/", "TMPDIR": "/dev/shm"}


def find_named(folder: str, line: Sequence[str]) -> list[str]:
    """Return what a command names in the device's own `edge.json`: the folder of its program, the
    virtual environment around that, and arguments that are paths, perhaps after `=`. Of a folder
    that has the device's folder in it, nothing is returned."""
    program, own = line[0], os.path.realpath(folder)
    around = os.path.dirname(os.path.dirname(program))
    found = [program, os.path.realpath(program), os.path.dirname(program)]
    found += [around] if os.path.exists(f"{around}/pyvenv.cfg") else []
    found += [each.rpartition("=")[2] for each in line[1:]]
    return [
        each
        for each in found
        if os.path.isabs(each)
        and os.path.exists(each)
        and not f"{own}/".startswith(f"{os.path.realpath(each).rstrip('/')}/")
    ]


def choose_user(folder: str, files: str) -> int:
    """Return the number of a user that no program and no other model has, as far as can be told."""
    start = int(hashlib.sha256(f"{folder}\0{files}".encode()).hexdigest(), 16)
    for number in range(len(_USERS)):
        user = _USERS[(start + number) % len(_USERS)]
        try:
            pwd.getpwuid(user)
        except KeyError:
            return user
    raise OSError("all users for engines are taken")


def open_folder(folder: str, needed: Iterable[str]) -> None:
    """Let other users read what is `needed` in a device's folder, and nothing else of it."""
    folder = os.path.abspath(folder)
    for each in os.scandir(folder):
        if each.is_file(follow_symlinks=False):
            os.chmod(each.path, each.stat(follow_symlinks=False).st_mode & 0o700)
    for path in map(os.path.abspath, needed):
        above = os.path.dirname(path)
        if not path.startswith(f"{folder}/"):
            continue
        while above.startswith(folder):
            _add_mode(above, 0o011)
            above = os.path.dirname(above)
        for inner, _, names in os.walk(path):
            for name in names:
                _add_mode(f"{inner}/{name}", 0o044)
            _add_mode(inner, 0o055)
        if os.path.isfile(path):
            _add_mode(path, 0o044)


def _add_mode(path: str, more: int) -> None:
    mode = os.lstat(path).st_mode
    more |= 0o011 if mode & 0o100 else 0
    if not stat.S_ISLNK(mode) and mode & more != more:
        os.chmod(path, stat.S_IMODE(mode) | more)


def _find_python(environ: dict[str, str]) -> list[str]:
    """Return what Python needs, without a folder of the user that is on its path by chance."""
    found = [sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]
    found += [sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += environ.get("PYTHONPATH", "").split(os.pathsep)
    return sorted({each for each in found if each.strip("/") and os.path.exists(each)})


def _find_closed(paths: Iterable[str]) -> str:
    """Return a path that a user who owns nothing cannot read, or ""."""
    for path in paths:
        above, needed = path, 0o004 if os.path.isfile(path) else 0o005
        while above not in ("", "/"):
            if os.stat(above).st_mode & needed != needed:
                return above
            above, needed = os.path.dirname(above), 0o001
    return ""


def _most_processes() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NPROC)


def restrict(read: Sequence[str], written: Sequence[str]) -> bool:
    """Let this process and those that it starts open only what is in these folders and files, for
    ever. Return False if the kernel cannot do it."""
    version = _call(_MAKE, None, 0, 1)
    if version < 1:
        return False
    handled = _ACCESSES[min(version, max(_ACCESSES))]
    asked = struct.pack("QQQ", handled, 0, _SCOPED if version >= _SCOPED_SINCE else 0)
    size = 24 if version >= _SCOPED_SINCE else 8
    rules = _call(_MAKE, asked, size, 0)
    if rules < 0:
        return False
    try:
        looked = _EXECUTE | _READ | _LIST
        for path, allowed in [(each, looked) for each in read] + [
            (each, handled) for each in written
        ]:
            with suppress(OSError):  # what a system does not have
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    allowed &= _OF_FILES & handled
                _call(_ADD, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
                os.close(descriptor)
        return _call(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _call(number: int, *values: int | bytes | None) -> int:
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in values]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *words))


if __name__ == "__main__":
    main(sys.argv[1:])
