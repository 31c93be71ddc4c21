"""A hostile task: it knows where another project's job and the server are, and tries to reach them.
It prints one line of JSON for each attempt. The test gives it what to look for in HUNT.
"""

import ctypes
import glob
import json
import os
import resource
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

HUNT: dict[str, Any] = json.loads(os.environ["HUNT"])
SECRET, SERVER, PID = HUNT["secret"], HUNT["server"], HUNT["pid"]
LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALLS = {"x86_64": (310, 438, 304, 250), "aarch64": (270, 438, 265, 219)}
READV, GETFD, BY_HANDLE, KEYCTL = SYSCALLS.get(os.uname().machine, SYSCALLS["x86_64"])


def read(*paths: str) -> bool:
    """Whether one of the files can be read and is not empty."""
    return any(os.path.getsize(path) or open(path, "rb").read(1) for path in paths)


def find(pattern: str) -> list[str]:
    """Files in Cavvy's folder on this machine; this job's own do not count."""
    found = glob.glob(f"{HUNT['folder']}/{pattern}")
    return [path for path in found if os.environ["CAVVY_GANG"] not in path] or ["nothing"]


def can_change(path: str) -> bool:
    with open(path, "r+b"):
        return True


def shows(path: str) -> bool:
    """Whether the file has the planted secret."""
    return SECRET.encode() in open(path, "rb").read(1 << 20)


def runs(*argv: str, text: str = "") -> bool:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=20)
    return done.returncode == 0


def writes(path: str) -> bool:
    """Leave a file. The test looks for it outside, because it may be in a folder of this job."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(HUNT["mark"])
    return False


def scan_environments() -> bool:
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                found = b"VICTIM=" in file.read()
        except OSError:
            continue
        if found:
            return True
    return False


def list_commands() -> bool:
    paths = glob.glob("/proc/[0-9]*/cmdline")
    return any(HUNT["command"].encode() in open(path, "rb").read() for path in paths)


def read_memory() -> bool:
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    buffer = ctypes.create_string_buffer(8)
    local, remote = Part(ctypes.addressof(buffer), 8), Part(HUNT["address"], 8)
    return bool(LIBC.syscall(READV, PID, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 8)


def take_file() -> bool:
    pidfd = os.pidfd_open(PID)
    return bool(LIBC.syscall(GETFD, pidfd, 1, 0) >= 0)


def attach_segment() -> bool:
    return bool(LIBC.shmget(HUNT["segment"], 64, 0) >= 0)


def find_key() -> bool:
    """Search the user's keyring: KEYCTL_SEARCH is 10, and -4 is the keyring of the user."""
    return bool(LIBC.syscall(KEYCTL, 10, -4, b"user", b"victim", 0) > 0)


def open_by_handle() -> bool:
    """File 2 is the root folder of many file systems."""
    handle = struct.pack("IiII", 8, 1, 2, 0)
    mount = os.open("/", os.O_RDONLY)
    return bool(LIBC.syscall(BY_HANDLE, mount, handle, os.O_RDONLY) >= 0)


def connect(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(3)
        line.connect(address)
    return True


def enter_first() -> bool:
    """Enter the namespaces of the victim, or of the system's first process."""
    for pid in (PID, 1):
        fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        if LIBC.setns(fd, 0) == 0 and os.path.exists(f"{SERVER}/token"):
            return True
    return False


def raise_limits() -> bool:
    resource.prlimit(PID, resource.RLIMIT_NOFILE)
    return True


def slow_down() -> bool:
    os.setpriority(os.PRIO_PROCESS, PID, 19)
    return True


def stay() -> bool:
    """Leave processes that outlive the job, each as its own daemon."""
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", [HUNT["mark"], "600"])
            os._exit(0)
    return False  # the test looks for them


def leave_zombies() -> bool:
    for _ in range(50):
        if os.fork() == 0:
            os._exit(0)
    return False


def set_core_pattern() -> bool:
    with open("/proc/sys/kernel/core_pattern", "w") as file:
        file.write(f"|/bin/touch {SERVER}/core")
    return True


def link(path: str) -> bool:
    os.link(path, "stolen")
    return read("stolen")


def follow(path: str) -> bool:
    os.symlink(path, "pointer")
    return read("pointer")


def reach_metadata() -> bool:
    """Connect, but ask for nothing: the answer could be the machine's own credentials."""
    with socket.create_connection(("169.254.169.254", 80), timeout=3):
        return True


def become_root() -> bool:
    return runs("sudo", "-n", "true") or runs("su", "root", "-c", "true")


def run_setuid() -> bool:
    """A setuid program of one's own that changes the user would be of another user."""
    subprocess.run(["cp", "/usr/bin/id", "as-root"], check=True)
    try:
        os.chown("as-root", 0, 0)
    except OSError:
        return False
    os.chmod("as-root", 0o4755)
    done = subprocess.run(["./as-root", "-u"], capture_output=True, text=True)
    return done.stdout.strip() == "0"


def trace(request: int) -> bool:
    return bool(LIBC.ptrace(request, PID, 0, 0) == 0)


def list_attempts() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Attempts on the files and processes of the victim and of the server."""
    gang = HUNT["gang"]
    yield "victim's file", lambda: shows(f"{gang}/0/work/notes")
    yield "victim's folder", lambda: bool(os.listdir(gang))
    records = gang.replace("/gangs/", "/agents/")
    yield "victim's agent token", lambda: read(f"{records}/0/config.json")
    yield "write into victim's folder", lambda: writes(f"{gang}/0/work/planted")
    yield "victim's notice socket", lambda: connect(f"{gang}/0/notice.sock")
    for name in ("member-*.json", "*/*/supervisor.json", "*/*/agents/*/*/config.json"):
        yield f"host's {name}", lambda name=name: read(*find(name))
    yield "write into host's folder", lambda: writes(f"{HUNT['folder']}/planted")
    yield "host's program", lambda: any(map(can_change, find("*.pyz")))
    yield "rename victim's folder", lambda: os.rename(gang, f"{gang}x") is None
    yield "victim's log", lambda: bool(os.listdir(f"{SERVER}/logs"))
    yield "victim's checkpoints", lambda: bool(os.listdir(f"{SERVER}/storage/good"))
    yield "victim's sources", lambda: bool(os.listdir(f"{SERVER}/folders"))
    for name in ("token", "key", "agents.key", "cavvy.db", "installation"):
        yield f"server's {name}", lambda name=name: read(f"{SERVER}/{name}")
    yield "server's socket", lambda: connect(HUNT["socket"])
    yield "write into server's folder", lambda: writes(f"{SERVER}/planted")
    yield "hard link to the token", lambda: link(f"{SERVER}/token")
    yield "link to the token", lambda: follow(f"{SERVER}/token")
    yield "environment by /proc", lambda: shows(f"/proc/{PID}/environ")
    yield "all environments", scan_environments
    yield "command lines", list_commands
    yield "memory by /proc", lambda: read(f"/proc/{PID}/maps")
    yield "memory by a system call", read_memory
    yield "folder by /proc", lambda: shows(f"/proc/{PID}/cwd/notes")
    yield "root by /proc", lambda: shows(f"/proc/{PID}/root{gang}/0/work/notes")
    yield "files by /proc", lambda: bool(os.listdir(f"/proc/{PID}/fd"))
    yield "file by a pidfd", take_file
    yield "ptrace attach", lambda: trace(16)
    yield "ptrace seize", lambda: trace(0x4206)
    for name in ("pid", "agent", "server_pid"):
        yield f"signal to {name}", lambda name=name: os.kill(HUNT[name], 0) is None
    yield "priority of the victim", slow_down
    yield "limits of the victim", raise_limits


def list_more() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Attempts by what processes of one user share, and those that outlive the job."""
    home = HUNT["user_home"]
    yield "abstract socket", lambda: connect("\0victim-" + HUNT["mark"])
    yield "/tmp", lambda: shows(f"/tmp/{HUNT['mark']}")
    yield "/var/tmp", lambda: shows(f"/var/tmp/{HUNT['mark']}")
    yield "/dev/shm", lambda: shows(f"/dev/shm/{HUNT['mark']}")
    yield "shared memory", attach_segment
    yield "keyring", find_key
    yield "unmount", lambda: runs("umount", SERVER) and read(f"{SERVER}/token")
    yield (
        "unmount in a namespace",
        lambda: runs("unshare", "-Urm", "sh", "-c", f"umount {SERVER} && cat {SERVER}/token"),
    )
    yield (
        "another /proc",
        lambda: runs("unshare", "-Urm", "sh", "-c", f"umount /proc; cat /proc/{PID}/environ"),
    )
    yield "namespaces of others", enter_first
    yield "file handles", open_by_handle
    yield "cloud keys of the user", lambda: shows(f"{home}/.aws/credentials")
    yield "shell's start file", lambda: writes(f"{home}/.bashrc")
    yield "authorized keys", lambda: writes(f"{home}/.ssh/authorized_keys")
    yield "systemd unit", lambda: writes(f"{home}/.config/systemd/user/planted.service")
    yield "systemd", lambda: connect(f"/run/user/{os.getuid()}/bus")
    yield "cron", lambda: runs("crontab", "-", text="* * * * * true\n")
    yield "system's cron", lambda: writes("/etc/cron.d/planted")
    yield "server's program", lambda: os.access(HUNT["program"], os.W_OK)
    yield "container engine", lambda: connect("/run/docker.sock")
    yield "root", become_root
    yield "setuid program", run_setuid
    yield "core dumps", set_core_pattern
    yield "metadata service", reach_metadata
    yield "daemons", stay
    yield "zombies", leave_zombies


def main() -> None:
    for name, attempt in (*list_attempts(), *list_more()):
        try:
            done, why = bool(attempt()), ""
        except Exception as error:  # noqa: BLE001 - every failure is a defence
            done, why = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"attempt": name, "done": done, "why": why}), flush=True)


if __name__ == "__main__":
    main()
