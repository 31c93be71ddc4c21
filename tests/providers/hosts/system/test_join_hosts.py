"""Machines that join: real hosts in network namespaces, which call the server and are never
called.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.proofs import Proof
from tests.system.hosts import Lab, LabHost, lab_at, worked
from tests.system.packed_python import give_python
from tests.system.server_state import follow_to_end, home_at, kill_server, wait_until
from tests.system.vm_jobs import GANG

from cavvy.cli.main import cli
from cavvy.client import ApiClient, connect

PROOF = Proof("join", True, "hosts in network namespaces that joined over TLS")
pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[4]
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

    def join(self, client: ApiClient, host: LabHost, **how: str) -> str:
        """Have a host join; its name."""
        before = {machine.name for machine in client.joined()}
        self.paste(host, client.invite(**how).shell)
        wait_until(lambda: any(m.name not in before and m.state == "up" for m in client.joined()))
        return next(m.name for m in client.joined() if m.name not in before)

    def joiner(self, host: LabHost) -> int:
        """The process id, seen from here, of the host's far end."""
        for number, words in host.processes():
            if any(word.endswith(b".pyz") for word in words) and b"10.99.0.254" in b" ".join(words):
                return number
        raise AssertionError(f"nobody of {host.name} is joined")


@pytest.fixture
def ranch(tmp_path: Path) -> Iterator[Ranch]:
    with lab_at(tmp_path / "lab") as lab, lab.entered(), home_at(tmp_path / "home") as home:
        give_python(home)
        (tmp_path / "settings.toml").write_text(SETTINGS.format(port=7443))
        lab.add(gpus=2)
        yield Ranch(lab, home)


def state_of(client: ApiClient, name: str) -> str:
    return next((machine.state for machine in client.joined() if machine.name == name), "")


def phase(client: ApiClient, name: str) -> str:
    return client.job("default", name).phase


def log_at_the_end(
    client: ApiClient, name: str, attempt: int | None = None, seconds: float = 120
) -> bytes:
    follow_to_end(client, name, seconds)
    return b"".join(client.logs("default", name, attempt=attempt))


def test_a_pasted_line_makes_a_node_once(ranch: Ranch) -> None:
    with connect() as client:
        line = client.invite().shell
        (host,) = ranch.lab.hosts
        ranch.paste(host, line)
        wait_until(lambda: state_of(client, "h1") == "up")
        assert "2 x T4" in client.joined()[0].has
        made = client.submit(
            "{name: far, run: 'hostname; echo $CUDA_VISIBLE_DEVICES', resources: {accelerators: "
            "T4:1}}"
        )
        said = log_at_the_end(client, made.name).decode()
        assert re.fullmatch(r"h1\n[01]\n", said)
        wait_until(lambda: phase(client, "far") == "done")

        other = ranch.lab.add()
        said = other.run(f"{line} 2>&1 || true")
        assert "works for only one machine" in said
        assert [machine.name for machine in client.joined()] == ["h1"]


def test_a_machine_without_curl_joins_in_the_background(ranch: Ranch) -> None:
    (host,) = ranch.lab.hosts
    line = CliRunner().invoke(cli, ["join", "--python", "--background"]).stdout.strip()
    said = host.run(f"{line} 2>&1")  # comes back while the machine is joined
    assert "joining in the background" in said
    with connect() as client:
        wait_until(lambda: state_of(client, "h1") == "up")


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
        wait_until(lambda: client.job("default", "long").attempts[-1].number == 2)
        attempt = client.job("default", "long").attempts[0]
        assert attempt.outcome == "preempted", attempt
        wait_until(lambda: not worked(first))
        wait_until(lambda: state_of(client, "first") == "left")
        go.touch()
        assert log_at_the_end(client, "long", attempt=2).endswith(b"h2\n")

        client.dismiss("second")
        wait_until(lambda: [machine.name for machine in client.joined()] == ["first"])


def test_two_joined_machines_talk_to_each_other(ranch: Ranch) -> None:
    with connect() as client:
        ranch.join(client, ranch.lab.hosts[0], group="pair")
        ranch.join(client, ranch.lab.add(), group="pair")
        (ranch.home / "gang.py").write_text(GANG)
        client.submit(
            "name: gang\nnodes: 2\nresources: {check: {link: 10Mbps}}\n"
            f"run: exec python3 {ranch.home}/gang.py\n"
        )
        said = log_at_the_end(client, "gang", seconds=200).decode()
        job = client.job("default", "gang")
        assert job.phase == "done", (job.reason, said)
        assert "called from 10.99.0.2" in said
        told = [
            each.text for each in client.events("default", "gang").events if each.kind == "check"
        ]
        assert len(told) == 2, told
        assert any("from rank 1 (10.99.0.2)" in text for text in told), told


def test_a_host_that_dies_loses_its_job_to_another_and_a_new_server_finds_the_rest(
    ranch: Ranch,
) -> None:
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
        wait_until(lambda: client.job("default", "long").attempts[-1].number == 2)
        go.touch()
        assert log_at_the_end(client, "long").endswith(b"h2\n")
        assert state_of(client, "first") == "silent"


def test_a_lease_that_nobody_renews_ends_the_work_on_the_machine_and_frees_it_for_the_next_try(
    ranch: Ranch,
) -> None:
    (first,) = ranch.lab.hosts
    starts, go = ranch.home / "starts", ranch.home / "go"
    with connect() as client:
        ranch.join(client, first, name="first")
        run = f"trap 'echo told >>{starts}; exit 1' TERM; echo $CAVVY_ATTEMPT >>{starts}; "
        run += f"while [ ! -e {go} ]; do sleep 0.1; done; hostname"
        client.submit(
            json.dumps(
                {"name": "alone", "limits": {"unattended": "12s"}, "grace": "3s", "run": run}
            )
        )
        wait_until(lambda: starts.exists() and phase(client, "alone") == "running")
    kill_server(ranch.home)  # and nobody starts another one: the machine is all by itself
    wait_until(lambda: starts.read_text().split() == ["1", "told"])
    wait_until(lambda: not worked(first))
    with connect() as client:
        wait_until(lambda: state_of(client, "first") == "up")
        wait_until(lambda: client.job("default", "alone").attempts[-1].number == 2)
        told = client.job("default", "alone").attempts[0]
        assert (told.outcome, "the lease has expired" in told.reason) == ("preempted", True), told
        wait_until(lambda: starts.read_text().split() == ["1", "told", "2"])
        go.touch()
        wait_until(lambda: phase(client, "alone") == "done")
        assert b"".join(client.logs("default", "alone", attempt=2)) == b"h1\n"


def test_a_machine_that_is_cut_off_ends_its_work_with_its_lease(ranch: Ranch) -> None:
    (first,) = ranch.lab.hosts
    with connect() as client:
        ranch.join(client, first, name="first")
        client.submit("{name: cut, limits: {unattended: 12s}, grace: 1s, run: exec sleep 1000}")
        wait_until(lambda: any(b"1000" in words for _, words in first.processes()))
        first.cut()
        wait_until(lambda: not any(b"1000" in words for _, words in first.processes()))
        first.mend()
        wait_until(lambda: client.job("default", "cut").attempts[-1].number == 2)
        wait_until(lambda: any(b"1000" in words for _, words in first.processes()))


def test_a_machine_without_python_or_curl_joins_and_a_dismissed_one_that_was_away_ends_its_work(
    ranch: Ranch,
) -> None:
    with connect() as client:
        bare = ranch.lab.add(bare=True)
        line = client.invite(name="bare").shell
        url = re.search(r"https://\S+", line)
        assert url is not None
        token = line.rpartition(" ")[2]
        said = bare.run(
            f"wget -q --no-check-certificate -O - {url.group()} | sh -s -- --background {token} "
            "2>&1"
        )
        assert "joining in the background" in said
        wait_until(lambda: state_of(client, "bare") == "up")
        client.submit("{name: bare, run: 'exec sleep 1000'}")
        wait_until(lambda: phase(client, "bare") == "running")
        wait_until(lambda: "sleep 1000" in bare.run("ps"))
        bare.cut()
        wait_until(lambda: state_of(client, "bare") == "silent")
        client.dismiss("bare")
        client.stop("default", "bare")
        bare.mend()
        wait_until(lambda: "sleep 1000" not in bare.run("ps"))
        assert not client.joined()


def test_a_shell_and_copies_reach_a_machine_that_nobody_can_call(ranch: Ranch) -> None:
    def cavvy(*words: str) -> "subprocess.CompletedProcess[bytes]":
        main = "from cavvy.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-P", "-c", main, *words], capture_output=True, timeout=60
        )

    with connect() as client:
        (host,) = ranch.lab.hosts
        ranch.join(client, host)
        client.submit("{name: far, run: 'exec sleep 1000'}")
        wait_until(lambda: phase(client, "far") == "running")
        done = cavvy("ssh", "far", "hostname; exit 5")
        assert (done.returncode, done.stdout) == (5, b"h1\n"), done.stderr
        data = os.urandom(400_000)
        (ranch.home / "data").write_bytes(data)
        assert cavvy("cp", str(ranch.home / "data"), "far:there").returncode == 0
        assert cavvy("cp", "far:there", str(ranch.home / "back")).returncode == 0
        assert (ranch.home / "back").read_bytes() == data
        assert b"joined: h1 (up)" in cavvy("nodes").stdout
        client.stop("default", "far")
        wait_until(lambda: phase(client, "far") == "stopped")
