"""Machines behind instance ids: namespaces (network, processes, mounts) that boot a launch's user
data as root.

Each has its own address on the wire, its metadata service at 169.254.169.254 (version 2 only), and
commands that shut it down. It dies with the process that made it, killed or not, because its first
process reads from that one's pipe.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ec2.cloud import Cloud, Life
from tests.ec2.disks import Disk
from tests.ec2.server import Front, served
from tests.system.hosts import Lab, lab_at
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


class Machine:
    """One instance's machine."""

    def __init__(self, lab: Lab, number: int, life: Life, gone: Any) -> None:
        self.life, self.number = life, number
        self.address, self.space = f"10.99.0.{number}", f"{lab.mark}-{number}"
        self.notice_at: datetime | None = None
        self.folder = lab.root / f"i{number}"
        self.log = self.folder / "console.log"
        self._lab, self._gone = lab, gone
        self._tokens: set[str] = set()
        self._metadata: ThreadingHTTPServer | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        for name in ("home", "var", "bin", "disks/by-id", "apt"):
            (self.folder / name).mkdir(parents=True)
        for name in ("shutdown", "poweroff", "halt"):
            self._write_command(name, _SHUTDOWN)
        self._write_command("systemctl", f'#!/bin/sh\necho "$@" >>{self.folder}/systemctl\n')
        (self.folder / "home/user-data").write_bytes(self.life.user_data)
        (self.folder / "hosts").write_text(
            f"127.0.0.1 localhost\n{self.address} {self.life.id}\n"
        )  # as its DNS says
        self._wire()
        self._serve_metadata()
        script = _INIT.format(
            name=self.life.id,
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
        """The power is cut. What it wrote can still be read."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(PATIENCE_S)
        if self._metadata is not None:
            self._metadata.shutdown()
            self._metadata.server_close()
            self._metadata = None
            subprocess.run([_IP, "netns", "del", self.space], check=False, capture_output=True)

    def cut(self) -> None:
        """Pull the network cable."""
        _ip("-n", self._lab.space, "link", "set", f"v{self.number}", "down")

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if self._process is process:  # by itself
            self._gone(self.life)

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
        machine = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                machine.answer(self, "PUT")

            def do_GET(self) -> None:
                machine.answer(self, "GET")

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer((_METADATA, 80), Handler, bind_and_activate=False)

        def listen() -> None:
            _enter(self.space)
            server.socket.close()
            server.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            server.allow_reuse_address = True
            server.server_bind()
            server.server_activate()

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join(PATIENCE_S)
        self._metadata = server
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        """As the instance metadata service, version 2."""
        code, text = self._tell(method, request.path, request.headers)
        body = text.encode()
        request.send_response(code)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _tell(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if method == "PUT":
            if (
                path != "/latest/api/token"
                or not headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
            ):
                return 400, ""
            token = os.urandom(8).hex()
            self._tokens.add(token)
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            return 401, ""
        told = {
            "instance-id": self.life.id,
            "ami-launch-index": str(self.life.index),
            "local-ipv4": self.address,
            "instance-type": str(self.life.instance.instance_type),
        }
        if self.notice_at is not None:
            action = {
                "action": "terminate",
                "time": self.notice_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            told["spot/instance-action"] = json.dumps(action)
        text = told.get(path.removeprefix("/latest/meta-data/"))
        return (404, "") if text is None else (200, text)


class Booted:
    """Boots a machine behind each instance of a cloud."""

    def __init__(self, cloud: Cloud, lab: Lab) -> None:
        self.cloud, self.lab = cloud, lab
        self.machines: dict[str, Machine] = {}
        self._loops: dict[str, str] = {}

    def boot(self, life: Life) -> None:
        machine = Machine(self.lab, len(self.machines) + 1, life, self.cloud.shut_down_itself)
        self.machines[life.id] = machine
        life.instance.nics[0].private_ip_address = machine.address
        machine.boot()

    def kill(self, life: Life) -> None:
        self.machines[life.id].kill()

    def plug(self, life: Life, disk: Disk) -> None:
        """A block device appears under the name that NVMe disks have. Its size is not the
        volume's.
        """
        image = self.lab.root / f"{disk.id}.img"
        with image.open("ab") as file:
            file.truncate(64 << 20)
        loop = _run("losetup", "-f", "--show", str(image)).strip()
        self._loops[disk.id] = loop
        self._name(life, disk).symlink_to(loop)

    def unplug(self, life: Life, disk: Disk) -> None:
        """The image keeps what was written."""
        self._name(life, disk).unlink()
        _run("losetup", "-d", self._loops.pop(disk.id))

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        for loop in self._loops.values():
            subprocess.run(["losetup", "-d", loop], check=False, capture_output=True)

    def _name(self, life: Life, disk: Disk) -> Path:
        name = f"nvme-Amazon_Elastic_Block_Store_{disk.id.replace('-', '')}"
        return self.machines[life.id].folder / "disks/by-id" / name

    def notice(self, life: Life, at: datetime) -> None:
        self.machines[life.id].notice_at = at


class Ec2:
    """A cloud whose instances boot, at an address on the lab's wire."""

    def __init__(self, cloud: Cloud, booted: Booted, lab: Lab, endpoint: str) -> None:
        self.cloud, self.machines, self.lab, self.endpoint = cloud, booted.machines, lab, endpoint


@contextmanager
def ec2_at(root: Path) -> Iterator[Ec2]:
    """An EC2 of which nothing is left afterwards; this thread is on its wire meanwhile."""
    with lab_at(root) as lab, lab.entered():
        _ip("-n", lab.space, "link", "set", "lo", "up")
        cloud = Cloud()
        booted = Booted(cloud, lab)
        cloud.machines = booted
        over = threading.Event()

        def keep_time() -> None:
            while not over.wait(0.1):
                cloud.tick()

        clock = threading.Thread(target=keep_time, daemon=True)
        clock.start()
        try:
            with served(Front(cloud), "10.99.0.254") as endpoint:
                yield Ec2(cloud, booted, lab, endpoint)
        finally:
            over.set()
            clock.join(10)
            booted.close()


def _ip(*arguments: str) -> None:
    _run(_IP, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _enter(space: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{space}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
