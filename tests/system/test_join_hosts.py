"""Machines that join: real hosts in network namespaces, which call the server and are never called."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.proofs import Proof
from tests.system.hosts import Lab, LabHost, lab_at, worked
from tests.system.server_home import home_at, kill_server, wait_until

from remuda.client import Client, connect

PROOF = Proof("join", True, "hosts in network namespaces that joined over TLS")
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
        assert re.fullmatch(r"h1\n[01]\n", said)
        wait_until(lambda: phase(client, "far") == "done")

        other = ranch.lab.add()
        said = other.run(f"{line} 2>&1 || true")
        assert "good for one machine" in said
        assert [machine.name for machine in client.machines()] == ["h1"]


@pytest.mark.proves(PROOF, "notice")
def test_a_cut_line_stops_no_work_and_a_machine_that_leaves_gives_it_back(ranch: Ranch) -> None:
    with connect() as client:
        first = ranch.lab.hosts[0]
        assert ranch.join(client, first, name="first") == "first"
        go = ranch.home / "go"
        client.submit(f"{{name: long, run: 'while [ ! -e {go} ]; do sleep 0.1; done; hostname'}}")
        wait_until(lambda: phase(client, "long") == "running")
        first.cut()
        time.sleep(2)
        assert phase(client, "long") == "running"
        first.mend()
        second = ranch.lab.add()
        ranch.join(client, second, name="second")
        wait_until(lambda: state_of(client, "first") == "up")
        assert len(client.job("default", "long").attempts) == 1

        os.kill(ranch.joiner(first), signal.SIGTERM)  # its owner takes it back
        wait_until(lambda: client.job("default", "long").attempts[-1].number == 2, 60)
        attempt = client.job("default", "long").attempts[0]
        assert attempt.outcome == "preempted", attempt
        wait_until(lambda: not worked(first), 90)
        wait_until(lambda: state_of(client, "first") == "left", 60)
        go.touch()
        assert b"".join(client.logs("default", "long", attempt=2, follow=True)).endswith(b"h2\n")

        client.dismiss("second")
        wait_until(lambda: [machine.name for machine in client.machines()] == ["first"])


def test_a_host_that_dies_loses_its_job_to_another_and_a_new_server_finds_the_rest(ranch: Ranch) -> None:
    with connect() as client:
        (first,) = ranch.lab.hosts
        ranch.join(client, first, name="first")
        go = ranch.home / "go"
        client.submit(f"{{name: long, run: 'while [ ! -e {go} ]; do sleep 0.1; done; hostname'}}")
        wait_until(lambda: phase(client, "long") == "running")
    kill_server(ranch.home)
    with connect() as client:
        wait_until(lambda: state_of(client, "first") == "up")
        second = ranch.lab.add()
        ranch.join(client, second, name="second")
        assert len(client.job("default", "long").attempts) == 1
        first.kill()
        wait_until(lambda: client.job("default", "long").attempts[-1].number == 2, 60)
        go.touch()
        assert b"".join(client.logs("default", "long", follow=True)).endswith(b"h2\n")
        assert state_of(client, "first") == "silent"


def test_a_machine_without_python_or_curl_joins_and_a_dismissed_one_that_was_away_ends_its_work(ranch: Ranch) -> None:
    with connect() as client:
        bare = ranch.lab.add(bare=True)
        line = client.invite(name="bare").shell
        url = re.search(r"https://\S+", line)
        assert url is not None
        token = line.rpartition(" ")[2]
        said = bare.run(f"wget -q --no-check-certificate -O - {url.group()} | sh -s -- --background {token} 2>&1")
        assert "joining in the background" in said
        wait_until(lambda: state_of(client, "bare") == "up")
        client.submit("{name: bare, run: 'exec sleep 1000'}")
        wait_until(lambda: phase(client, "bare") == "running")
        wait_until(lambda: "sleep 1000" in bare.run("ps"))
        bare.cut()
        wait_until(lambda: state_of(client, "bare") == "silent", 60)
        client.dismiss("bare")
        client.stop("default", "bare")
        bare.mend()
        wait_until(lambda: "sleep 1000" not in bare.run("ps"), 60)
        assert not client.machines()


def test_a_shell_and_copies_reach_a_machine_that_nobody_can_call(ranch: Ranch) -> None:
    def remuda(*words: str) -> "subprocess.CompletedProcess[bytes]":
        main = "from remuda.cli.main import main; main()"
        return subprocess.run([sys.executable, "-P", "-c", main, *words], capture_output=True, timeout=60)

    with connect() as client:
        (host,) = ranch.lab.hosts
        ranch.join(client, host)
        client.submit("{name: far, run: 'exec sleep 1000'}")
        wait_until(lambda: phase(client, "far") == "running")
        done = remuda("ssh", "far", "hostname; exit 5")
        assert (done.returncode, done.stdout) == (5, b"h1\n"), done.stderr
        data = os.urandom(400_000)
        (ranch.home / "data").write_bytes(data)
        assert remuda("cp", str(ranch.home / "data"), "far:there").returncode == 0
        assert remuda("cp", "far:there", str(ranch.home / "back")).returncode == 0
        assert (ranch.home / "back").read_bytes() == data
        assert b"joined: h1 (up)" in remuda("nodes").stdout
        client.stop("default", "far")
        wait_until(lambda: phase(client, "far") == "stopped")
