"""The systemd unit of the server: systemd accepts it, its command serves with the environment that
systemd gives it, and a stop leaves jobs running.
"""

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.system.packed_python import give_python
from tests.system.trust import User, user_at
from tests.waits import START_S, wait_until

from cavvy.client import connect
from cavvy.client.state import read_server

pytestmark = pytest.mark.system

FOLDER = ROOT / "deploy" / "systemd"
INSTALLED = "/opt/cavvy/bin/cavvy"
OWN = str(Path(sys.executable).with_name("cavvy"))
# What `systemd-analyze security` may say at most: 10 is a unit without any restriction.
EXPOSURE = {"cavvy.service": 8.5, "no-jobs.conf": 2.0}


@pytest.fixture
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed: systemd has not checked the unit")
    return program


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with the command of this checkout instead of the installed one."""
    unit = tmp_path / "cavvy.service"
    unit.write_text((FOLDER / unit.name).read_text().replace(INSTALLED, OWN))
    return unit


def test_systemd_accepts_the_unit(analyze: str, unit: Path) -> None:
    assert run(analyze, "verify", "--man=no", str(unit)) == ""
    assert "not executable" in run(analyze, "verify", "--man=no", str(FOLDER / unit.name))


@pytest.mark.parametrize("strict", [False, True])
def test_the_unit_is_restricted(analyze: str, unit: Path, strict: bool) -> None:
    last = "no-jobs.conf" if strict else unit.name
    if strict:
        unit.write_text(unit.read_text() + (FOLDER / last).read_text())
        assert run(analyze, "verify", "--man=no", str(unit)) == ""
    threshold = f"--threshold={EXPOSURE[last] * 10:.0f}"
    told = run(analyze, "security", "--offline=yes", threshold, str(unit), code=0)
    assert "Overall exposure level" in told


def test_the_units_user_is_declared() -> None:
    service = read_unit(FOLDER / "cavvy.service")["Service"]
    line = (FOLDER / "cavvy.sysusers").read_text().splitlines()[-1]
    kind, name, _, *_, home, shell = shlex.split(line)
    assert (kind, name, home) == ("u", service["User"], service["WorkingDirectory"])
    assert home == f"/var/lib/{service['StateDirectory']}"
    assert shell.endswith("nologin")


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path) as user:
        user.home /= ".cavvy"  # the unit keeps its state in ~/.cavvy
        give_python(user.home)
        yield user


def test_the_units_command_serves_and_leaves_jobs_running(user: User, unit: Path) -> None:
    service = read_unit(unit)["Service"]
    assert service["KillMode"] == "process"
    server = start(service, user)
    job = user.submit("name: lasting\nrun: while ! test -e ../go; do sleep 0.05; done; echo went\n")
    user.wait(job, "running")
    assert user.api.server().pid == server.pid
    stop(server, user)
    assert user.worked()

    server = start(service, user)
    assert [each["name"] for each in user.json("ps")] == [job]
    assert user.job(job).phase == "running"
    user.cli("stop", job)
    user.ended(job)
    stop(server, user)


def start(service: configparser.SectionProxy, user: User) -> "subprocess.Popen[bytes]":
    """Run the unit's command as systemd does, and wait until it answers."""
    environ = {"HOME": str(user.home.parent), "USER": "cavvy", "LOGNAME": "cavvy"}
    environ |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    with (user.root / "log").open("ab") as log:
        server = subprocess.Popen(
            shlex.split(service["ExecStart"]), env=environ, cwd=user.home.parent, stderr=log
        )
    wait_until(lambda: answers(user, server), (user.root / "log").read_text, START_S)
    return server


def answers(user: User, server: "subprocess.Popen[bytes]") -> bool:
    """Whether this server serves /v1/health."""
    assert server.poll() is None, (user.root / "log").read_text()
    found = read_server(str(user.home))
    if found is None or found.pid != server.pid:
        return False
    with connect(home=str(user.home), start=False) as client:
        client.health()
    return True


def stop(server: "subprocess.Popen[bytes]", user: User) -> None:
    """Stop as systemd does with KillMode=process."""
    server.send_signal(signal.SIGTERM)
    assert server.wait(START_S) == 0
    user.forget()


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#", ";"))
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their capitals
    unit.read_string(path.read_text())
    return unit


def run(*command: str, code: int | None = None) -> str:
    """What a command says on both streams."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, env={**os.environ, "LC_ALL": "C"}
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
