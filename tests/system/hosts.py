"""Real hosts for tests: an sshd each, in network, process and mount namespaces of their own, on one
wire.

A host has its own address (10.99.0.N), host name, processes and home folder, and dies whole when it
is killed. Nothing is added to the machine's main network namespace: whoever wants to reach the
hosts enters the wire's (`Lab.entered`), and everything that is started from there is in it too.
Needs root.
"""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.system.namespaces import enter
from tests.system.packages import install_packages
from tests.waits import PATIENCE_S, START_S

PACKAGES = ("openssh-server", "openssh-client", "iproute2", "busybox-static")
_NEEDED = ("ip", "unshare", "ssh-keygen", "/usr/sbin/sshd", "busybox")
_labs = itertools.count(1)  # of this process
SMI = """#!/bin/sh
cat <<'ROWS'
{rows}
ROWS
"""


def require_hosts() -> None:
    """Skip the test, saying what to do, where no hosts can be made."""
    if os.getuid() != 0:
        pytest.skip("hosts in namespaces need root: run the tests as root")
    why = "" if not _missing() else install_packages(PACKAGES)
    if missing := _missing():
        pytest.skip(f"hosts need {', '.join(missing)}: {why}")


def _missing() -> list[str]:
    return [name for name in _NEEDED if shutil.which(name) is None]


class LabHost:
    """One host. `bare` ones have a busybox and nothing else: no Python, no libraries but sshd's
    own. A host with a `script` runs it before its sshd starts, which then accepts only the keys
    that the script has installed.
    """

    def __init__(
        self,
        lab: "Lab",
        number: int,
        *,
        gpus: int = 0,
        bare: bool = False,
        sshd: str = "",
        script: str = "",
    ) -> None:
        self.lab, self.number, self.bare, self.sshd = lab, number, bare, sshd
        self.script = script
        self.name, self.address = f"h{number}", f"10.99.0.{number}"
        self.folder = lab.root / self.name
        self.home = self.folder / "home"
        self.space = f"{lab.mark}-{number}"
        self._process: subprocess.Popen[bytes] | None = None
        (self.folder / "bin").mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        if gpus:
            self.set_gpus(gpus)

    def set_gpus(self, count: int) -> None:
        """What the host's nvidia-smi says from now on."""
        rows = [f"{n}, GPU-{self.number:04x}-{n:04x}, Tesla T4, 15360, [N/A]" for n in range(count)]
        path = self.folder / "bin/nvidia-smi"
        path.write_text(SMI.format(rows="\n".join(rows)))
        path.chmod(0o755)

    def wire(self) -> None:
        """Put the host on the lab's wire."""
        _ip("netns", "add", self.space)
        _ip("-n", self.space, "link", "set", "lo", "up")
        peer = ("peer", "name", "eth0", "netns", self.space)
        _ip("link", "add", f"v{self.number}", "netns", self.lab.space, "type", "veth", *peer)
        _ip("-n", self.lab.space, "link", "set", f"v{self.number}", "master", "br0", "up")
        _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.space, "link", "set", "eth0", "up")

    def start(self) -> None:
        """Boot: sshd is the first process, and everything ends with it."""
        config = self.folder / "sshd_config"
        config.write_text(self._config())
        root = self._make_root() if self.bare else None
        mounts = f"mount -t proc proc {root}/proc" if root else self._make_home()
        inside = "/etc/ssh/sshd_config" if root else str(config)
        chroot = f"chroot {root} " if root else ""
        setup = f"hostname {self.name}; {mounts}"
        if self.script:
            (self.folder / "script").write_text(self.script)
            setup += f"; HOME=/root sh {self.folder}/script"
        script = f"{setup}; exec {chroot}/usr/sbin/sshd -D -e -f {inside}"
        spaces = ["unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        with open(self.folder / "sshd.log", "ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *spaces, "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_for_sshd()

    def kill(self) -> None:
        """The power is cut: every process of the host is gone at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def cut(self) -> None:
        """Pull the network cable."""
        _ip("-n", self.lab.space, "link", "set", f"v{self.number}", "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self.lab.space, "link", "set", f"v{self.number}", "up")

    def file(self, path: str) -> Path:
        """A file of the host's, seen from here; `~` is its home."""
        root = self.folder / "root" if self.bare else Path("/")
        home = root / "root" if self.bare else self.home
        return home / path.removeprefix("~/") if path.startswith("~/") else root / path.lstrip("/")

    def processes(self) -> Iterator[tuple[int, list[bytes]]]:
        """Each process of the host: its number here, and its command line."""
        space = os.stat(f"/var/run/netns/{self.space}").st_ino
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if os.stat(f"/proc/{name}/ns/net").st_ino == space:
                    yield int(name), words

    def run(self, command: str) -> str:
        """Run a command on the host, by SSH as a user would."""
        done = subprocess.run(
            ["ssh", "-F", str(self.lab.ssh_config), self.name, command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _make_home(self) -> str:
        """The commands that mount root's home. A host with a script keeps the Python of the tests,
        with its packages, even if that is in the home which is hidden.
        """
        kept = {Path(sys.prefix), Path(sys.base_prefix)} if self.script else set()
        commands = []
        for path in sorted(each for each in kept if each.is_relative_to("/root")):
            place = self.home / path.relative_to("/root")
            commands.append(f"mkdir -p {place}; mount --bind -o ro {path} {place}; ")
        return f"{''.join(commands)}mount --rbind {self.home} /root"

    def _config(self) -> str:
        keys = "/etc/ssh" if self.bare else str(self.lab.root)
        path = "/bin:/usr/bin" if self.bare else f"{self.folder}/bin:/usr/local/bin:/usr/bin:/bin"
        lines = {
            "Port": "22",
            "ListenAddress": self.address,
            "HostKey": f"{keys}/host",
            "PidFile": "none",
            "AuthorizedKeysFile": ".ssh/authorized_keys" if self.script else f"{keys}/id.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": "100",
            "SetEnv": f"PATH={path}",
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items()) + self.sshd

    def _make_root(self) -> Path:
        """A file system with a busybox, an sshd and what sshd alone needs."""
        root = self.folder / "root"
        if root.exists():
            return root
        for name in (
            "bin",
            "usr/sbin",
            "etc/ssh",
            "root",
            "proc",
            "dev",
            "tmp",
            "run/sshd",
            "var/empty",
        ):
            (root / name).mkdir(parents=True)
        (root / "root").chmod(0o700)
        (root / "tmp").chmod(0o1777)
        sshd = Path("/usr/sbin/sshd")
        files = [sshd, *_libraries(sshd)]
        for path in files:
            target = root / str(path).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
        applets = subprocess.run(
            ["busybox", "--list"], capture_output=True, text=True, check=True
        ).stdout.split()
        for applet in set(applets) - {"busybox"}:
            (root / "bin" / applet).symlink_to("busybox")
        for device, number in {"null": 3, "zero": 5, "urandom": 9}.items():
            os.mknod(root / "dev" / device, 0o666 | 0o020000, os.makedev(1, number))
        (root / "etc/passwd").write_text(
            "root:x:0:0:root:/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n"
        )
        (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
        for name in ("id.pub", "host"):
            shutil.copy(self.lab.root / name, root / "etc/ssh" / name)
        (root / "etc/ssh/sshd_config").write_text(self._config())
        return root

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + START_S
        with self.lab.entered():
            while True:
                with (
                    suppress(OSError),
                    socket.create_connection((self.address, 22), timeout=1) as probe,
                ):
                    if probe.recv(4) == b"SSH-":
                        return
                log = (self.folder / "sshd.log").read_text(errors="replace")
                assert time.monotonic() < deadline, (
                    f"{self.name}: its sshd does not answer: {log[-2000:]}"
                )
                time.sleep(0.02)


class Lab:
    """Several hosts on one wire, and an SSH configuration that knows them."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.mark = f"rmd{os.getpid()}-{next(_labs)}"  # what an earlier lab left is in nobody's way
        self.space = f"{self.mark}-lab"
        self.hosts: list[LabHost] = []
        self.ssh_config = root / "ssh_config"
        self.known_hosts = root / "known_hosts"
        self._made = 0

    def up(self) -> None:
        """The wire, without hosts yet."""
        _remove_old()
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "host"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / key)]
            subprocess.run(command, check=True, timeout=PATIENCE_S)
        _ip("netns", "add", self.space)
        _ip("-n", self.space, "link", "set", "lo", "up")
        _ip("-n", self.space, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.space, "addr", "add", "10.99.0.254/24", "dev", "br0")
        _ip("-n", self.space, "link", "set", "br0", "up")

    def add(
        self, *, gpus: int = 0, bare: bool = False, sshd: str = "", script: str = ""
    ) -> LabHost:
        """One more host, which is up; `sshd` are further lines of its server's configuration."""
        host = LabHost(self, self.count(), gpus=gpus, bare=bare, sshd=sshd, script=script)
        self.hosts.append(host)
        host.wire()
        host.start()
        self._configure()
        return host

    def count(self) -> int:
        """The number of the next machine on the wire, which is part of its address."""
        self._made += 1
        return self._made

    def remove(self, host: LabHost) -> None:
        """One host less."""
        host.kill()
        self.hosts.remove(host)
        subprocess.run(["ip", "netns", "del", host.space], check=False, capture_output=True)
        self._configure()

    def down(self) -> None:
        """Nothing of it is left."""
        for host in self.hosts:
            host.kill()
        for name in (*(host.space for host in self.hosts), self.space):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, is on the wire while the block runs."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/var/run/netns/{self.space}", os.O_RDONLY)
        try:
            enter(there)
            yield
        finally:
            enter(before)
            os.close(there)
            os.close(before)

    def _configure(self) -> None:
        blocks = [
            f"Host {host.name}\n  HostName {host.address}\n  User root\n  IdentityFile "
            f"{self.root}/id\n"
            f"  UserKnownHostsFile {self.known_hosts}\n"
            for host in self.hosts
        ]
        self.ssh_config.write_text("\n".join(blocks))
        key = (self.root / "host.pub").read_text().split()[:2]
        self.known_hosts.write_text(
            "".join(f"{host.address} {' '.join(key)}\n" for host in self.hosts)
        )


@contextmanager
def lab_at(root: Path) -> Iterator[Lab]:
    """A lab of which nothing is left afterwards."""
    require_hosts()
    lab = Lab(root)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


@contextmanager
def two_hosts_at(root: Path) -> Iterator[Lab]:
    """A lab of two hosts, from inside of it."""
    with lab_at(root) as lab:
        lab.add()
        lab.add()
        with lab.entered():
            yield lab


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _libraries(program: Path) -> Sequence[Path]:
    """The shared libraries that a program needs, its loader among them."""
    listed = subprocess.run(
        ["ldd", str(program)], capture_output=True, text=True, check=True
    ).stdout
    words = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
    names = [
        *Path("/lib/x86_64-linux-gnu").glob("libnss_files*"),
        *Path("/lib").glob("*/libnss_files.so.2"),
    ]
    return list(dict.fromkeys([*(Path(word) for word in words), *names]))


def _remove_old() -> None:
    """Namespaces of test runs that were killed."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for name in [line.split()[0] for line in listed.splitlines() if line.startswith("rmd")]:
        pid = name.removeprefix("rmd").partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def worked(host: LabHost) -> list[str]:
    """The command line, as one line, of every process on a host that carries a gang's mark, except
    those that only carry last words to the server.
    """
    command = (
        "for f in /proc/[0-9]*/environ; do grep -aqs CAVVY_GANG= $f && "
        "{ tr '\\0\\n' '  ' < ${f%environ}cmdline; echo; }; done; :"
    )
    return [
        line
        for line in host.run(command).splitlines()
        if line.strip() and " --deliver " not in line
    ]
