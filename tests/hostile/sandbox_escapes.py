"""What a hostile program in a sandbox tries. It prints one line of JSON: for each attempt, "" if it
failed as it must, else what it could do. `python3 sandbox_escapes.py HUNT [NAME ...]`; HUNT is JSON
of what to look for outside. With names, only these attempts are made.
"""

import ctypes
import fcntl
import glob
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HUNT: dict[str, Any] = json.loads(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
ATTEMPTS: dict[str, Callable[[], object]] = {}


def attempt(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def note(function: Callable[[], object]) -> Callable[[], object]:
        ATTEMPTS[name] = function
        return function

    return note


def call(x86: int, arm: int, *values: object) -> int:
    """Call the kernel. Raises OSError."""
    number = x86 if X86 else arm
    if number < 0:
        raise OSError(38, "not on this processor")
    found = LIBC.syscall(ctypes.c_long(number), *values)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def simple(name: str, x86: int, arm: int, *values: object) -> None:
    """An attempt that is one call, which must fail."""
    ATTEMPTS[name] = lambda: f"returned {call(x86, arm, *values)}"


def can_read(*paths: str) -> str:
    for path in paths:
        with suppress(OSError), open(path, "rb") as file:
            if file.read(64):
                return f"read {path}"
    return ""


def can_write(*paths: str) -> str:
    for path in paths:
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            return f"wrote {path}"
    return ""


def _write(path: str, text: str) -> str:
    with open(path, "w") as file:
        file.write(text)
    return "wrote"


def _lower_core() -> str:
    """Set the limit with which a crash starts the machine's program, in all ways."""
    for lower in (resource.setrlimit, lambda *new: resource.prlimit(0, *new)):
        with suppress(OSError, ValueError):
            lower(resource.RLIMIT_CORE, (0, 0))
    new = (ctypes.c_ulong * 2)(0, 0)
    for numbers, words in (((160, 164), (4, new)), ((302, 261), (0, 4, new, None))):
        with suppress(OSError):
            call(*numbers, *words)
    return "set" if resource.getrlimit(resource.RLIMIT_CORE)[0] == 0 else ""


def long(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


# Files


@attempt("secret")
def _() -> str:
    return can_read(HUNT["secret"])


@attempt("secret-by-proc")
def _() -> str:
    return can_read(f"/proc/1/root{HUNT['secret']}", f"/proc/self/root/..{HUNT['secret']}")


@attempt("secret-by-parents")
def _() -> str:
    return can_read("/" + "../" * 40 + HUNT["secret"].lstrip("/"))


@attempt("proc-1-environ")
def _() -> str:
    return can_read(f"/proc/{HUNT['pid']}/environ", "/proc/1/environ")


ATTEMPTS["proc-1-mem"] = lambda: os.open("/proc/1/mem", os.O_RDONLY)
ATTEMPTS["proc-1-maps"] = lambda: can_read("/proc/1/maps")
ATTEMPTS["proc-1-fd"] = lambda: os.listdir("/proc/1/fd")
ATTEMPTS["proc-1-cwd"] = lambda: os.listdir("/proc/1/cwd/")
ATTEMPTS["write-programs"] = lambda: can_write("/usr/bin/x", "/bin/sh", "/usr/lib/x", "/lib/x")
ATTEMPTS["write-settings"] = lambda: can_write("/etc/passwd", "/etc/ld.so.preload", "/etc/x")
ATTEMPTS["write-python"] = lambda: can_write(f"{sys.base_prefix}/x", f"{sys.prefix}/x", os.__file__)
ATTEMPTS["write-root"] = lambda: can_write("/x", "/home/x", "/mnt/x", "/run/x", "/var/x", "/new/x")
ATTEMPTS["replace-link"] = lambda: os.rename("/bin", "/bin2")
ATTEMPTS["chmod"] = lambda: os.chmod("/usr/bin/env", 0o4777)
ATTEMPTS["chown"] = lambda: os.chown("/home/sandbox", 0, 0)
ATTEMPTS["shadow"] = lambda: can_read("/etc/shadow", "/etc/ssl/private", "/root/.ssh/id_rsa")
ATTEMPTS["hard-link"] = lambda: os.link("/usr/bin/env", "/home/sandbox/env")
ATTEMPTS["host-homes"] = lambda: [
    each for each in os.listdir("/root") + os.listdir("/home") if each not in ("sandbox", ".pyenv")
]
ATTEMPTS["disk-device"] = lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0))
ATTEMPTS["memory-device"] = lambda: os.mknod("/tmp/mem", 0o20600, os.makedev(1, 1))
ATTEMPTS["devices"] = lambda: [
    each
    for each in (
        "vda",
        "sda",
        "nvme0n1",
        "mem",
        "kmsg",
        "fuse",
        "kvm",
        "vsock",
        "net/tun",
        "vhost-net",
    )
    if os.path.exists(f"/dev/{each}")
]
ATTEMPTS["other-devices"] = lambda: sorted(
    set(os.listdir("/dev"))
    - {"null", "zero", "full", "random", "urandom", "pts", "ptmx", "shm", "fd"}
    - {"stdin", "stdout", "stderr"}
)
ATTEMPTS["sys"] = lambda: os.path.isdir("/sys/kernel") and os.listdir("/sys/kernel")
ATTEMPTS["setuid-file"] = lambda: _try_setuid_file()
ATTEMPTS["su"] = lambda: _runs("su", "-c", "true") or _runs("sudo", "-n", "true")
simple("by-handle", 304, 265, -100, ctypes.create_string_buffer(64), 0)
simple(
    "name-to-handle",
    303,
    264,
    -100,
    b"/usr",
    ctypes.create_string_buffer(256),
    ctypes.byref(ctypes.c_int()),
    0,
)


def _try_setuid_file() -> str:
    path = "/home/sandbox/id"
    with open("/usr/bin/id", "rb") as source, open(path, "wb") as file:
        file.write(source.read())
    os.chmod(path, 0o6755)
    told = subprocess.run([path], capture_output=True, text=True).stdout
    return told if "euid=0" in told or "uid=0" in told else ""


def _runs(*argv: str) -> str:
    with suppress(FileNotFoundError):
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
        return "ran" if done.returncode == 0 else ""
    return ""


# Rights

ATTEMPTS["setuid"] = lambda: os.setuid(0)
ATTEMPTS["setgid"] = lambda: os.setgid(0)
ATTEMPTS["setgroups"] = lambda: os.setgroups([0])
ATTEMPTS["uid-map"] = lambda: _write("/proc/self/uid_map", "0 0 1")


@attempt("capabilities")
def _() -> str:
    header, wanted = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0xFFFFFFFF] * 6)
    return f"returned {call(126, 91, header, wanted)}"


@attempt("ambient-capability")
def _() -> object:
    return LIBC.prctl(47, 2, 21, 0, 0) == 0


ATTEMPTS["new-privileges"] = lambda: LIBC.prctl(38, 0, 0, 0, 0) == 0
ATTEMPTS["secure-bits"] = lambda: LIBC.prctl(28, 0x2F, 0, 0, 0) == 0


@attempt("wider-filter")
def _() -> str:
    """A second filter that allows everything must not widen the first."""
    program = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program, 8)
    LIBC.prctl(22, 2, ctypes.c_char_p(struct.pack("@HP", 1, ctypes.addressof(buffer))), 0, 0)
    return f"returned {call(165, 40, b'none', b'/tmp', b'tmpfs', 0, None)}"


# Namespaces and mounts


@attempt("namespaces")
def _() -> str:
    return f"returned {call(272, 97, long(0x10000000 | 0x20000))}"


def _clone(flags: int) -> str:
    pid = call(56, 220, long(flags | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"clone with {flags:#x}"


for _name, _flag in (
    ("user", 0x10000000),
    ("net", 0x40000000),
    ("pid", 0x20000000),
    ("mount", 0x20000),
):
    ATTEMPTS[f"clone-{_name}"] = lambda flag=_flag: _clone(flag)  # type: ignore[misc]
    simple(f"unshare-{_name}", 272, 97, long(_flag))


@attempt("clone3")
def _() -> str:
    wanted = ctypes.create_string_buffer(struct.pack("=11Q", 0x10000000, 0, 0, 0, 17, *[0] * 6), 88)
    pid = call(435, 435, wanted, ctypes.c_size_t(88))
    if pid == 0:
        os._exit(0)
    return "a user namespace"


ATTEMPTS["join-first"] = lambda: call(308, 268, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)
ATTEMPTS["join-own"] = lambda: call(308, 268, os.open("/proc/self/ns/user", os.O_RDONLY), 0)
ATTEMPTS["parent-namespace"] = lambda: fcntl.ioctl(
    os.open("/proc/self/ns/pid", os.O_RDONLY), 0xB702
)
ATTEMPTS["parent-user-namespace"] = lambda: fcntl.ioctl(
    os.open("/proc/self/ns/user", os.O_RDONLY), 0xB702
)
simple("mount-tmpfs", 165, 40, b"none", b"/tmp", b"tmpfs", 0, None)
simple("mount-bind", 165, 40, b"/usr", b"/tmp", None, long(0x1000), None)
simple("mount-writable", 165, 40, b"none", b"/usr", None, long(0x20 | 0x1000), None)
simple("mount-cgroup", 165, 40, b"none", b"/tmp", b"cgroup2", 0, None)
simple("mount-proc", 165, 40, b"proc", b"/tmp", b"proc", 0, None)
simple("umount", 166, 39, b"/proc", 2)
simple("umount-home", 166, 39, b"/home/sandbox", 2)
simple("pivot-root", 155, 41, b"/tmp", b"/tmp")
simple("chroot", 161, 51, b"/tmp")
simple("fsopen", 430, 430, b"tmpfs", 0)
simple("open-tree", 428, 428, -100, b"/", 1)
simple("move-mount", 429, 429, -100, b"/tmp", -100, b"/mnt", 0)
simple("mount-setattr", 442, 442, -100, b"/usr", 0, struct.pack("=QQQQ", 0, 1, 0, 0), long(32))
simple("host-name", 170, 161, b"x", long(1))
ATTEMPTS["cgroups"] = lambda: glob.glob("/sys/fs/cgroup/*")

# Processes


@attempt("host-process")
def _() -> object:
    return HUNT["pid"] if str(HUNT["pid"]) in os.listdir("/proc") else ""


@attempt("processes-seen")
def _() -> object:
    own = (os.getpid(), os.getppid(), HUNT["own"])
    for each in os.listdir("/proc"):
        if each.isdigit() and int(each) not in own:
            with suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
                if HUNT["mark"].encode() in file.read():
                    return each
    return ""


simple("trace-first", 101, 117, 16, 1, 0, 0)
simple("trace-me", 101, 117, 0, 0, 0, 0)


@attempt("read-first")
def _() -> str:
    buffer = ctypes.create_string_buffer(16)
    mine = struct.pack("@PN", ctypes.addressof(buffer), 16)
    return f"returned {call(310, 270, 1, mine, long(1), mine, long(1), long(0))}"


ATTEMPTS["pidfd-getfd"] = lambda: call(438, 438, call(434, 434, 1, 0), 0, 0)


@attempt("kill-first")
def _() -> str:
    with suppress(PermissionError):
        for number in (
            *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGALRM, signal.SIGINT),
            *range(signal.SIGRTMIN, signal.SIGRTMAX),
        ):
            os.kill(1, number)
        time.sleep(0.05)
    with open("/proc/1/stat") as file:
        state = file.read().rpartition(") ")[2][0]
    return state if state in "TtZX" else ""


ATTEMPTS["kill-host"] = lambda: os.kill(HUNT["pid"], 0)
ATTEMPTS["signal-by-owner"] = lambda: fcntl.fcntl(socket.socket(), fcntl.F_SETOWN, HUNT["pid"])
ATTEMPTS["limits-of-first"] = lambda: resource.prlimit(1, resource.RLIMIT_NPROC, (9999, 9999))
ATTEMPTS["files-of-first"] = lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 1024))
ATTEMPTS["time-of-first"] = lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1000, 1000))
ATTEMPTS["first-when-idle"] = lambda: (
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)) or "idle"
)
ATTEMPTS["first-as-batch"] = lambda: call(314, 274, 1, struct.pack("=IIQiIQQQ", 48, 3, *[0] * 6), 0)
ATTEMPTS["first-last"] = lambda: os.setpriority(os.PRIO_PROCESS, 1, 19) or "set"
ATTEMPTS["user-last"] = lambda: os.setpriority(os.PRIO_USER, 0, 19) or "set"
ATTEMPTS["disk-of-first"] = lambda: f"returned {call(251, 30, 1, 1, 3 << 13)}"
ATTEMPTS["disk-of-user"] = lambda: f"returned {call(251, 30, 3, 1000, 3 << 13)}"
# the machine's program for crashes would start, as root and outside; only the limit 1 prevents it
ATTEMPTS["crash-program"] = lambda: resource.getrlimit(resource.RLIMIT_CORE) != (1, 1)
ATTEMPTS["crash-program-again"] = lambda: _lower_core()
ATTEMPTS["more-processes"] = lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))
ATTEMPTS["more-memory"] = lambda: resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
ATTEMPTS["more-cpus"] = lambda: os.sched_setaffinity(0, range(os.cpu_count() or 1))
ATTEMPTS["first-in-turn"] = lambda: os.nice(-1)
ATTEMPTS["real-time"] = lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
ATTEMPTS["never-killed"] = lambda: _write("/proc/self/oom_score_adj", "-1000")
ATTEMPTS["inherited-files"] = lambda: [
    each for each in os.listdir("/proc/self/fd") if int(each) > 2 and _is_foreign(int(each))
]


def _is_foreign(fd: int) -> bool:
    with suppress(OSError):
        return not os.readlink(f"/proc/self/fd/{fd}").startswith(("/proc", "pipe", "/home/sandbox"))
    return False


@attempt("inherited-variable")
def _() -> object:
    return [name for name, value in os.environ.items() if HUNT["mark"] in value]


# The kernel

ATTEMPTS["settings-of-kernel"] = lambda: can_write(
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/overcommit_memory"
)
ATTEMPTS["sysrq"] = lambda: can_write("/proc/sysrq-trigger")
ATTEMPTS["kcore"] = lambda: can_read("/proc/kcore", "/proc/kmsg", "/dev/mem")
simple("add-key", 248, 217, b"user", b"x", b"x", long(1), -3)
simple("request-key", 249, 218, b"user", b"x", None, -3)


@attempt("keyring")
def _() -> str:
    return f"returned {call(250, 219, 0, -3, 1)}"


simple("bpf", 321, 280, 0, ctypes.create_string_buffer(128), 128)
simple("perf", 298, 241, struct.pack("=IIQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0)
simple("userfaultfd", 323, 282, 1)
simple("io-uring", 425, 425, 4, ctypes.create_string_buffer(120))
simple("requests-of-machine", 206, 0, 1000, ctypes.byref(ctypes.c_ulong()))
simple("kexec", 246, 104, 0, 0, None, 0)
simple("load-module", 175, 105, None, 0, b"")
simple("load-module-file", 313, 273, -1, b"", 0)
simple("reboot", 169, 142, 0, 0, 0, None)
simple("kernel-log", 103, 116, 3, ctypes.create_string_buffer(64), 64)
simple("set-time", 227, 112, 0, struct.pack("=qq", 0, 0))
simple("adjust-time", 159, 171, bytes(256))
simple("swap", 167, 224, b"/tmp/x", 0)
simple("quota", 179, 60, 0x800007, b"/dev/vda", 0, ctypes.create_string_buffer(256))
simple("accounting", 163, 89, b"/tmp/x")
simple("ports-of-machine", 173, -1, 0x80, 1, 1)
simple("personality", 135, 92, 0x0400000)
simple("segments", 154, -1, 1, bytes(16), 16)
simple("fanotify", 300, 262, 0, 0)
simple("memfd", 319, 279, b"x", 0)
simple("memfd-secret", 447, 447, 0)
simple("newer-call", 470, 470, 0)


@attempt("calls-of-32-bits")
def _() -> str:
    """`int 0x80` calls the kernel as a program of 32 bits does, with other numbers."""
    if not X86:
        return ""
    pid = os.fork()
    if pid == 0:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0 else 1)
    return "called" if os.waitpid(pid, 0)[1] == 0 else ""


ATTEMPTS["calls-of-x32"] = lambda: call(0x40000000 + 39, -1)

# Terminals


def _terminal(number: int, value: bytes) -> object:
    _, theirs = os.openpty()
    os.setsid()
    fcntl.ioctl(theirs, 0x540E, 0)  # it becomes the terminal of this process
    return fcntl.ioctl(theirs, number, value)


ATTEMPTS["type-into-terminal"] = lambda: _terminal(0x5412, b"x")
ATTEMPTS["paste-into-terminal"] = lambda: _terminal(0x541C, b"\x03")
ATTEMPTS["line-discipline"] = lambda: _terminal(0x5423, struct.pack("i", 21))
ATTEMPTS["host-terminal"] = lambda: os.open("/dev/tty", os.O_RDWR)

# Networks


def _connects(family: int, address: object) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(1)
        made.connect(address)  # type: ignore[arg-type]
    return f"connected to {address!r}"


ATTEMPTS["loopback-port"] = lambda: _connects(socket.AF_INET, ("127.0.0.1", HUNT["port"]))
ATTEMPTS["loopback-port-6"] = lambda: _connects(socket.AF_INET6, ("::1", HUNT["port"]))
ATTEMPTS["own-address"] = lambda: _connects(socket.AF_INET, (HUNT["address"], HUNT["port"]))
ATTEMPTS["any-address"] = lambda: _connects(socket.AF_INET, ("0.0.0.0", HUNT["port"]))
ATTEMPTS["metadata"] = lambda: _connects(socket.AF_INET, ("169.254.169.254", 80))
ATTEMPTS["metadata-6"] = lambda: _connects(socket.AF_INET6, ("fd00:ec2::254", 80))
ATTEMPTS["metadata-of-tasks"] = lambda: _connects(socket.AF_INET, ("169.254.170.2", 80))
ATTEMPTS["names"] = lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(
    bytes(20), ("8.8.8.8", 53)
)
ATTEMPTS["abstract-socket"] = lambda: _connects(socket.AF_UNIX, "\0" + HUNT["abstract"])
ATTEMPTS["path-socket"] = lambda: _connects(socket.AF_UNIX, HUNT["socket"])
ATTEMPTS["docker"] = lambda: [
    each
    for each in ("/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock")
    if os.path.exists(each)
]
ATTEMPTS["vsock"] = lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) and "made"
ATTEMPTS["packet-socket"] = lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW) and "made"
ATTEMPTS["crypto-socket"] = lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) and "made"
ATTEMPTS["key-socket"] = lambda: socket.socket(15, socket.SOCK_RAW, 2) and "made"
ATTEMPTS["audit-socket"] = lambda: socket.socket(16, socket.SOCK_RAW, 9) and "made"
ATTEMPTS["netfilter-socket"] = lambda: socket.socket(16, socket.SOCK_RAW, 12) and "made"
ATTEMPTS["raw-socket"] = lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and "made"


@attempt("network-device")
def _() -> str:
    with socket.socket(16, socket.SOCK_RAW, 0) as made:
        made.bind((0, 0))
        info = struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0)
        kind = (
            struct.pack("=HH", 4 + 4 + 5, 18 | 0x8000)
            + struct.pack("=HH", 9, 1)
            + b"dummy"
            + bytes(3)
        )
        body = info + kind
        made.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
        error = struct.unpack_from("=i", made.recv(4096), 16)[0]
    return "" if error else "made"


@attempt("network-address")
def _() -> object:
    asked = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton("10.0.0.1"))
    return fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8916, asked)


# What the user and the machine have few of


@attempt("terminals-of-machine")
def _() -> object:
    made = 0
    with suppress(OSError):
        while made < 200:
            os.openpty()
            made += 1
    return made if made > 64 else ""


@attempt("watchers-of-user")
def _() -> object:
    made = sum(LIBC.inotify_init1(0) >= 0 for _ in range(200))
    return made if made > 64 else ""


@attempt("watched-files-of-user")
def _() -> object:
    watcher = LIBC.inotify_init1(0)
    folders = glob.iglob("/usr/**/", recursive=True)
    made = sum(
        LIBC.inotify_add_watch(watcher, os.fsencode(each), 2) > 0
        for each, _ in zip(folders, range(9000), strict=False)
    )
    return made if made > 8192 else ""


# What programs share


@attempt("shared-memory")
def _() -> object:
    return call(29, 194, HUNT["shm_key"], long(0), 0)


ATTEMPTS["shm-file"] = lambda: can_read(HUNT["shm_file"])
ATTEMPTS["temporary-files"] = lambda: [
    each for each in os.listdir("/tmp") + os.listdir("/var/tmp") if HUNT["mark"] in each
]

# Limits


@attempt("fork-bomb")
def _() -> str:
    made = 0
    with suppress(BlockingIOError):
        while made < 2 * HUNT["processes"]:
            if os.fork() == 0:
                signal.pause()
                os._exit(0)
            made += 1
    return f"{made} processes" if made >= HUNT["processes"] else ""


@attempt("memory-bomb")
def _() -> str:
    with suppress(MemoryError):
        bytearray(HUNT["memory_mib"] << 20)
        return "allocated"
    return ""


@attempt("shared-mapping")
def _() -> object:
    return len(mmap.mmap(-1, HUNT["memory_mib"] + 1 << 20))


@attempt("shared-mapping-of-a-device")
def _() -> object:
    return len(mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20))


@attempt("huge-pages")
def _() -> object:
    private, huge = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x40000
    return len(mmap.mmap(-1, 2 << 20, flags=private | huge))


@attempt("memory-in-a-pipe")
def _() -> str:
    held = ctypes.create_string_buffer(4096)
    part = struct.pack("@PN", ctypes.addressof(held), 4096)
    return f"returned {call(278, 75, long(os.pipe()[1]), part, long(1), long(0))}"


@attempt("own-listener")
def _() -> str:
    """Who answers the questions of a filter could allow what the sandbox's own asks about."""
    program = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", 1, ctypes.addressof(buffer))
    return f"returned {call(317, 277, long(1), long(8), header)}"


def _fill(folder: str) -> str:
    size = 0
    path = f"{folder}/fill"
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while size <= HUNT["disk_mib"] << 20:
            size += file.write(bytes(1 << 20))
    os.unlink(path)
    return f"{size} bytes" if size > HUNT["disk_mib"] << 20 else ""


ATTEMPTS["fill-disk"] = lambda: _fill("/home/sandbox")
ATTEMPTS["fill-shm"] = lambda: _fill("/dev/shm")
ATTEMPTS["files-without-end"] = lambda: os.statvfs("/tmp").f_files > 1 << 17
ATTEMPTS["long-file"] = lambda: os.truncate(os.open("/tmp/x", os.O_CREAT | os.O_RDWR), 1 << 40)
ATTEMPTS["open-files"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
ATTEMPTS["pipes"] = lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 26)
ATTEMPTS["locked-memory"] = lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 30, 1 << 30))


def run(name: str) -> str:
    """Make an attempt in a process of its own. Return what it could do."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)
        said = ""
        try:
            found = ATTEMPTS[name]()
            failed = found is False or found in ("", [])
            said = "" if failed else f"{found!r}"[:200]
        except (OSError, ValueError, OverflowError, AttributeError):
            said = ""
        except BaseException as error:  # noqa: BLE001 - the attempt itself is wrong
            said = f"wrong: {error!r}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.002)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        return os.read(reader, 4096).decode()
    return ""


if __name__ == "__main__":
    HUNT["own"] = os.getpid()
    names = sys.argv[2:] or list(ATTEMPTS)
    print(json.dumps({name: run(name) for name in names}))
