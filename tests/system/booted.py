"""Machines that boot: namespaces (network, processes, mounts) that run a launch's user data as root.

A machine has its own address on the lab's wire, the metadata services of the clouds at
169.254.169.254, and commands that shut it down. It dies with the process that made it, killed or
not, because its first process reads from that one's pipe.
"""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.system.hosts import Lab
from tests.system.metadata_servers import Metadata, MetadataServer, make_handler
from tests.system.namespaces import enter
from tests.waits import PATIENCE_S

# Machines are booted by threads of a server that has many. There a child that shares its parent's
# memory until it begins its program was seen to fail with EFAULT.
subprocess._USE_VFORK = False  # type: ignore[attr-defined]  # what CPython has for such cases
_IP = shutil.which("ip") or "/usr/sbin/ip"

_METADATA = "169.254.169.254"
_SHUTDOWN = "#!/bin/sh\nkill -TERM 1\n"
# The first process: it goes when the machine is shut down (TERM) or when its maker's pipe ends.
_INIT = """
trap 'exit 0' TERM
hostname {name}
mount --bind {var} /var/lib
mkdir -p /dev/disk
mount --bind {disks} /dev/disk
mount --bind {hosts} /etc/hosts
mount --bind {apt} /etc/apt/apt.conf.d
PATH={bin}:$PATH; export PATH
HOME={home}; export HOME
cd /
sh {home}/user-data <&- >{log} 2>&1 &
read line
"""


class BootedMachine:
    """One machine. `gone` is called when it shuts itself down."""

    def __init__(
        self, lab: Lab, number: int, name: str, user_data: bytes, gone: Callable[[], object]
    ) -> None:
        self.name, self.number = name, number
        self.address, self.space = f"10.99.0.{number}", f"{lab.mark}-{number}"
        self.metadata = Metadata()
        self.folder = lab.root / f"i{number}"
        self.log = self.folder / "console.log"
        self._lab, self._user_data, self._gone = lab, user_data, gone
        self._server: MetadataServer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._killing = threading.Lock()  # the cloud may lose it while the server deletes it

    def boot(self) -> None:
        for name in ("home", "var", "bin", "disks/by-id", "apt"):
            (self.folder / name).mkdir(parents=True)
        for name in ("shutdown", "poweroff", "halt"):
            self._write_command(name, _SHUTDOWN)
        self._write_command("systemctl", f'#!/bin/sh\necho "$@" >>{self.folder}/systemctl\n')
        (self.folder / "home/user-data").write_bytes(self._user_data)
        (self.folder / "hosts").write_text(
            f"127.0.0.1 localhost\n{self.address} {self.name}\n"
        )  # as its DNS says
        self._wire()
        self._serve_metadata()
        script = _INIT.format(
            name=self.name,
            home=self.folder / "home",
            var=self.folder / "var",
            bin=self.folder / "bin",
            disks=self.folder / "disks",
            hosts=self.folder / "hosts",
            apt=self.folder / "apt",
            log=self.log,
        )
        spaces = ["unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            [_IP, "netns", "exec", self.space, *spaces, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def _write_command(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def kill(self) -> None:
        """The power is cut. What it wrote can still be read. Of several calls at the same time, one
        does it, and the others wait for that.
        """
        with self._killing:
            self._cut_power()

    def _cut_power(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(PATIENCE_S)
        server, self._server = self._server, None
        if server is not None:
            self.metadata.set(stopped=True)
            server.shutdown()
            server.server_close()
            subprocess.run([_IP, "netns", "del", self.space], check=False, capture_output=True)

    def cut(self) -> None:
        """Pull the network cable."""
        _ip("-n", self._lab.space, "link", "set", f"v{self.number}", "down")

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if self._process is process:  # by itself
            self._gone()

    def _wire(self) -> None:
        lab = self._lab
        _ip("netns", "add", self.space)
        _ip("-n", self.space, "link", "set", "lo", "up")
        _ip("-n", self.space, "addr", "add", f"{_METADATA}/32", "dev", "lo")
        peer = ("peer", "name", "eth0", "netns", self.space)
        _ip("link", "add", f"v{self.number}", "netns", lab.space, "type", "veth", *peer)
        _ip("-n", lab.space, "link", "set", f"v{self.number}", "master", "br0", "up")
        _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.space, "link", "set", "eth0", "up")

    def _serve_metadata(self) -> None:
        """The socket is made in the machine's network; threads that answer may be anywhere."""
        handler = make_handler(self.metadata)
        server = MetadataServer((_METADATA, 80), handler, bind_and_activate=False)

        def listen() -> None:
            descriptor = os.open(f"/var/run/netns/{self.space}", os.O_RDONLY)
            try:
                enter(descriptor)
            finally:
                os.close(descriptor)
            server.socket.close()
            server.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            server.allow_reuse_address = True
            server.server_bind()
            server.server_activate()

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join(PATIENCE_S)
        self._server = server
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()


def _ip(*arguments: str) -> None:
    run(_IP, *arguments)


def run(*command: str) -> str:
    """Run a command that must succeed; its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
