"""Machines that join: real hosts in network namespaces, which call the server and are never called."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.hosts import Lab, LabHost, lab_at
from tests.system.server_home import home_at, wait_until

from remuda.client import Client, connect

pytestmark = pytest.mark.system
SETTINGS = """
[server]
tls_listen = "10.99.0.254:{port}"
[providers.local]
enabled = false
[providers.join]
lost_after_s = 4
"""


class Ranch:
    """A server on the lab's wire, and hosts beside it."""

    def __init__(self, lab: Lab, home: Path) -> None:
        self.lab, self.home = lab, home

    def paste(self, host: LabHost, line: str) -> str:
        """Paste a line into the host's shell."""
        return host.run(line.replace("sh -s -- ", "sh -s -- --background "))

    def join(self, client: Client, host: LabHost, **how: str) -> str:
        """Have a host join; its name."""
        before = {machine.name for machine in client.machines()}
        self.paste(host, client.invite(**how).shell)
        wait_until(lambda: any(m.name not in before and m.state == "up" for m in client.machines()))
        return next(m.name for m in client.machines() if m.name not in before)

    def joiner(self, host: LabHost) -> int:
        """The process id, seen from here, of the host's far end."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                inside = os.stat(f"/proc/{name}/ns/net").st_ino == os.stat(f"/var/run/netns/{host.space}").st_ino
            except OSError:
                continue
            if inside and any(word.endswith(b".pyz") for word in words) and b"10.99.0.254" in b" ".join(words):
                return int(name)
        raise AssertionError(f"nobody of {host.name} is joined")


@pytest.fixture
def ranch(tmp_path: Path) -> Iterator[Ranch]:
    with lab_at(tmp_path / "lab") as lab, lab.entered(), home_at(tmp_path / "home") as home:
        (tmp_path / "settings.toml").write_text(SETTINGS.format(port=7443))
        lab.add(gpus=2)
        yield Ranch(lab, home)


def state_of(client: Client, name: str) -> str:
    return next((machine.state for machine in client.machines() if machine.name == name), "")


def phase(client: Client, name: str) -> str:
    return client.job("default", name).phase


def test_a_pasted_line_makes_a_node_once(ranch: Ranch) -> None:
    with connect() as client:
        line = client.invite().shell
        (host,) = ranch.lab.hosts
        ranch.paste(host, line)
        wait_until(lambda: state_of(client, "h1") == "up")
        assert "2 x T4" in client.machines()[0].has
        made = client.submit(
            "{name: far, run: 'hostname; echo $CUDA_VISIBLE_DEVICES', resources: {accelerators: T4:1}}"
        )
        said = b"".join(client.logs("default", made.name, follow=True)).decode()
        assert re.fullmatch(r"h1\nGPU-0001-000[01]\n", said)
        wait_until(lambda: phase(client, "far") == "done")

        other = ranch.lab.add()
        said = other.run(f"{line} 2>&1 || true")
        assert "good for one machine" in said
        assert [machine.name for machine in client.machines()] == ["h1"]
