"""Nodes that fail their check at boot are given back and avoided: real SSH hosts, a slow GPU, a
slow link.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers import make_driver
from tests.system.hosts import Lab, LabHost, lab_at
from tests.system.trust import User, user_at, wait_until

pytestmark = pytest.mark.system
PYTHON = """#!/bin/sh
LD_LIBRARY_PATH={driver} exec /usr/bin/python3 "$@"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab:
        for gbs in (90, 250, 260):  # a T4's data sheet says 320
            host = lab.add(gpus=1)
            driver = make_driver(
                host.folder / "driver", gpus=1, name="Tesla T4", mib=15360, gbs=gbs
            )
            (host.folder / "bin/python3").write_text(PYTHON.format(driver=driver))
            (host.folder / "bin/python3").chmod(0o755)
        with lab.entered():
            yield lab


@pytest.fixture
def user(lab: Lab, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        hosts = " ".join(host.name for host in lab.hosts)
        user.settings(
            f'[providers.local]\nenabled = false\n[providers.ssh]\nhosts = "{hosts}"\nssh_config = '
            f'"{lab.ssh_config}"\n'
        )
        yield user
        user.cli("down", "--all", "--yes")


def told(user: User, name: str, kind: str) -> list[str]:
    return [text for each, text in user.scenario(name) if each == kind]


def test_a_host_with_a_slow_gpu_is_given_back_and_the_gang_starts_on_others(user: User) -> None:
    name = user.submit(
        "name: pair\nnodes: 2\nresources: {gpu: T4, check: true}\nrun: echo $CAVVY_HOSTS\n"
    )
    job = user.ended(name)
    assert job.phase == "done", user.scenario(name)
    assert job.attempt == 2
    assert user.log(name) == "10.99.0.2,10.99.0.3\n"
    slow = "GPU fault: GPU 0: the memory speed is 90 GB/s; a T4 must reach 192 on rank 0"
    assert any(text.startswith(slow) for text in told(user, name, "queued")), user.scenario(name)
    assert any(text.startswith("ssh/h1 is avoided until ") for text in told(user, name, "avoided"))
    measured = told(user, name, "check")
    assert any(
        "memory tested, no memory errors, 250 GB/s of a T4's 320" in text for text in measured
    ), measured


def test_a_slow_link_between_hosts_is_told_with_its_speed(user: User, lab: Lab) -> None:
    slow = lab.hosts[1]
    _shape(slow, "add", "rate", "40mbit", "burst", "64kb", "latency", "50ms")
    try:
        name = user.submit(
            "name: links\nnodes: 3\nresources: {check: {link: 100Mbps}}\nrun: hostname\n"
        )
        wait_until(lambda: told(user, name, "avoided"), lambda: str(user.scenario(name)))
    finally:
        _shape(slow, "del")
    reason = told(user, name, "queued")[-1]
    assert reason.startswith("slow link: ")
    assert "Mbit/s from rank 1 (10.99.0.2), required: at least 100 Mbit/s on rank 2" in reason
    assert "slow link" in told(user, name, "avoided")[0]


def _shape(host: LabHost, verb: str, *words: str) -> None:
    command = [
        "tc",
        "-n",
        host.space,
        "qdisc",
        verb,
        "dev",
        "eth0",
        "root",
        *(["tbf", *words] if words else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and words:
        pytest.skip(f"this kernel cannot slow a link down (tc tbf): {done.stderr}")
