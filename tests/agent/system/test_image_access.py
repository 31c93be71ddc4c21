"""Reaching into a job that runs in an image: commands, copies and ports are the container's own."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.agent.system.test_image_jobs import BASE, engine
from tests.system.ports import free_port
from tests.system.server_state import home_at, wait_until

from cavvy.client import connect

__all__ = ["engine"]
pytestmark = pytest.mark.system
CAVVY = [sys.executable, "-P", "-c", "from cavvy.cli.main import main; main()"]


def cavvy(*words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [*CAVVY, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )


def test_ports_are_forwarded_into_a_container_and_out_of_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        home_at(tmp_path / "home"),
        connect() as client,
        socket.create_server(("127.0.0.1", 0)) as ours,
    ):
        try:
            inside, back = free_port(), free_port()
            # Whoever connects is told what lies in the container alone.
            run = f"echo from inside >/marker; echo up; nc -ll -p {inside} -e /bin/cat /marker"
            client.submit(json.dumps({"name": "boxed", "image": BASE, "run": run}))
            wait_until(lambda: b"up" in b"".join(client.logs("default", "boxed")))
            with forwarded("boxed", f"0:{inside}") as told:
                port = int(told.partition(" leads")[0].rpartition(":")[2])
                wait_until(lambda: hear(port) == b"from inside\n")
            with forwarded("boxed", f"{ours.getsockname()[1]}:{back}", "-R"):
                asked = [
                    *CAVVY,
                    "exec",
                    "boxed",
                    "--",
                    "sh",
                    "-c",
                    f"echo out | nc 127.0.0.1 {back}",
                ]
                with subprocess.Popen(
                    asked, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                ) as sent:
                    ours.settimeout(30)
                    peer = ours.accept()[0]
                    with peer:
                        assert peer.recv(9) == b"out\n"
                    assert sent.wait(30) == 0
        finally:
            client.down()
            wait_until(lambda: not client.nodes())


def hear(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        return line.recv(99)


@contextmanager
def forwarded(*words: str) -> Iterator[str]:
    """`cavvy forward` at work, and what it said when it was ready."""
    command = subprocess.Popen(
        [*CAVVY, "forward", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    try:
        yield command.stdout.readline()
    finally:
        command.send_signal(signal.SIGINT)
        command.wait(20)
        command.stdout.close()


def test_exec_ssh_and_cp_land_in_the_container(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with home_at(tmp_path / "home"), connect() as client:
        try:
            run = "echo inside >/marker; echo up; sleep 1000"
            client.submit(f"{{name: boxed, image: '{BASE}', run: '{run}', env: {{COLOUR: bay}}}}")
            wait_until(lambda: b"up" in b"".join(client.logs("default", "boxed")))
            done = cavvy("exec", "boxed", "--", "sh", "-c", "cat /marker; echo $COLOUR $CAVVY_JOB")
            assert done.stdout == b"inside\nbay boxed\n", done
            done = cavvy("ssh", "boxed", "cat", "/marker")
            assert (done.returncode, done.stdout) == (0, b"inside\n"), done
            (tmp_path / "here").write_text("brought\n")
            assert cavvy("cp", str(tmp_path / "here"), "boxed:there").returncode == 0
            assert cavvy("exec", "boxed", "--", "cat", "there").stdout == b"brought\n"
            assert cavvy("cp", "boxed:there", str(tmp_path / "back")).returncode == 0
            assert (tmp_path / "back").read_text() == "brought\n"
            secret = tmp_path / "secret"  # on the machine; the container has no such file
            secret.write_text("of the machine\n")
            assert cavvy("exec", "boxed", "--", "ln", "-s", str(secret), "/link").returncode == 0
            assert cavvy("cp", "boxed:/link", str(tmp_path / "stolen")).returncode
            assert not (tmp_path / "stolen").exists()
            cavvy("exec", "boxed", "--", "mkdir", "-p", str(tmp_path))
            # `cavvy cp` writes `other.cavvy-part` first
            made = cavvy("exec", "boxed", "--", "ln", "-s", str(secret), "/other.cavvy-part")
            assert made.returncode == 0
            assert cavvy("cp", str(tmp_path / "here"), "boxed:/other").returncode == 0
            assert cavvy("exec", "boxed", "--", "cat", "/other").stdout == b"brought\n"
            assert secret.read_text() == "of the machine\n"
            if shutil.which("ssh"):
                assert cavvy("ssh", "--setup").returncode == 0
                plain = [
                    "ssh",
                    "-F",
                    str(tmp_path / ".ssh/config.d/cavvy"),
                    "boxed",
                    "cat /marker; exit 6",
                ]
                found = subprocess.run(
                    plain, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
                )
                assert (found.returncode, found.stdout) == (6, b"inside\n"), found.stderr
        finally:
            client.down()
            wait_until(lambda: not client.nodes())
