"""Two ranks in two network namespaces: what one sends to the other is not on the wire as plain text.

Needs root and network namespaces. The capture sees everything that passes between the namespaces.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.proofs import ALONE
from tests.system.storages import install

from cavvy.agent.tunnel import find_missing

ROOT = Path(__file__).parents[3]
BOTH = ("a", "b")


@pytest.fixture
def wireguard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `wg` and wireguard-go in the PATH: Debian's, unpacked into the cache, if none are
    installed.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("WireGuard tunnels need Linux")
    if shutil.which("wg") is None or shutil.which("wireguard-go") is None:
        program = install(
            "wireguard",
            "usr/bin/wireguard-go",
            "apt-get download -q wireguard-go wireguard-tools",
            "for each in *.deb; do dpkg-deb -x $each .; done",
        )
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    if missing := find_missing():
        pytest.skip(missing)
    if not Path("/dev/net/tun").exists():
        pytest.skip("wireguard-go needs /dev/net/tun: sudo modprobe tun")
    name = f"cvy-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    if made.returncode:
        pytest.skip(f"this machine permits no network namespaces: {made.stderr.strip()}")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def spaces(wireguard: None) -> Iterator[dict[str, str]]:
    """Two namespaces with one link between them. The names by rank."""
    tag = secrets.token_hex(3)
    names = {each: f"cvy-{tag}-{each}" for each in BOTH}
    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("link", "add", f"v{tag}a", "netns", names["a"], "type", "veth", "peer", "name",
           f"v{tag}b", "netns", names["b"])  # fmt: skip
        for each, name in names.items():
            link = f"v{tag}{each}"
            ip("-n", name, "addr", "add", f"10.77.0.{1 if each == 'a' else 2}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield {**names, "link": f"v{tag}b"}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class WireCapture:
    """All frames on a link, read by a thread in its namespace."""

    def __init__(self, space: str, link: str) -> None:
        self.frames: list[bytes] = []
        self._stopped = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(space, link))
        self._thread.start()
        assert self._ready.wait(10)

    def _read(self, space: str, link: str) -> None:
        with open(f"/run/netns/{space}") as file:
            os.setns(file.fileno(), os.CLONE_NEWNET) if hasattr(os, "setns") else _enter(file)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
            wire.bind((link, 0))
            wire.settimeout(0.1)
            self._ready.set()
            while not self._stopped:
                try:
                    self.frames.append(wire.recv(65536))
                except TimeoutError:
                    continue

    def stop(self) -> bytes:
        self._stopped = True
        self._thread.join()
        return b"".join(self.frames)


def _enter(file: object) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(file.fileno(), 0x40000000) == 0  # type: ignore[attr-defined]  # CLONE_NEWNET


def start(space: str, home: Path, rank: int) -> "subprocess.Popen[str]":
    home.mkdir()
    return subprocess.Popen(
        ["ip", "netns", "exec", space, sys.executable, "-m", "tests.system.tunnel_rank",
         str(home), str(rank)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.proves(ALONE, "tunnel")
def test_a_planted_text_is_not_on_the_wire(spaces: dict[str, str], tmp_path: Path) -> None:
    capture = WireCapture(spaces["b"], spaces["link"])
    ranks = [start(spaces[each], tmp_path / each, rank) for rank, each in enumerate(BOTH)]
    planted = f"planted {secrets.token_hex(16)}"
    (tmp_path / "b" / "planted").write_text(planted)
    try:
        offers = [json.loads(tell(rank)) for rank in ranks]
        assert all(offer.get("tunnel_key") for offer in offers), offers
        peers = [
            {"key": offer["tunnel_key"], "endpoint": f"10.77.0.{number}:25{number:03}",
             "address": f"198.18.0.{number}"}
            for number, offer in enumerate(offers, 1)
        ]  # fmt: skip
        work = {"job": "j", "job_id": "j", "project": "p", "attempt": 1, "run": "x", "nodes": 2,
                "addresses": [peer["address"] for peer in peers], "master_port": 25000,
                "tunnel": {"prefix": 30, "peers": peers}}  # fmt: skip
        for rank in ranks:
            say(rank, json.dumps(work))
        assert [tell(rank) for rank in ranks] == ["open", "open"]
        say(ranks[1], "rank 0 listens")
        assert tell(ranks[0]) == planted
        assert [rank.wait(20) for rank in ranks] == [0, 0]
        send_plainly(spaces["b"], "sent without the tunnel")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        seen = capture.stop()
    assert b"sent without the tunnel" in seen  # the capture sees what is not encrypted
    assert planted.encode() not in seen
    assert b"\x04\x00\x00\x00" in seen  # WireGuard's data messages were seen
    private = (tmp_path / "a" / "tunnel.key").read_text().strip()
    assert private.encode() not in seen


def send_plainly(space: str, text: str) -> None:
    program = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        f"s.sendto({text.encode()!r}, ('10.77.0.1', 7))"
    )
    subprocess.run(["ip", "netns", "exec", space, sys.executable, "-c", program], check=True)


def say(rank: "subprocess.Popen[str]", line: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line + "\n")
    rank.stdin.flush()


def tell(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()
