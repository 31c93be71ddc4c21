"""Replicas on other machines: SSH hosts, reached through the tunnels of their agents."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.serving.system.test_serve import EXAMPLE, call, read_service
from tests.system.hosts import Lab, two_hosts_at
from tests.system.service_load import under_load
from tests.system.trust import User, user_at
from tests.waits import wait_until

pytestmark = pytest.mark.system
WAITS = [b"sleep", b"1234"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with two_hosts_at(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def user(lab: Lab, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[providers.local]\nenabled = false\n"
            f'[providers.ssh]\nhosts = "h1 h2"\nssh_config = "{lab.ssh_config}"\n'
            "lost_after_s = 2\nprice_usd_hr = 3.6\n"
        )
        try:
            yield user
        finally:
            user.cli("down", "--all", "--yes", code=None)
            user.cli("server", "stop", code=None)


def find_hosts(lab: Lab) -> list[int]:
    """The numbers of the hosts on which replicas run, from 0."""
    return [
        number
        for number, host in enumerate(lab.hosts)
        if any(b"hello.py" in word for _, words in host.processes() for word in words)
    ]


def find_other_rank(lab: Lab) -> int:
    """The process of a rank that is not the first."""
    found = [pid for host in lab.hosts for pid, words in host.processes() if words[:2] == WAITS]
    return found[0]


def list_ready(user: User) -> list[int]:
    """The numbers of the replicas that get requests."""
    return [each.number for each in read_service(user).replicas if each.state == "ready"]


def test_a_replica_on_a_host_answers_and_is_replaced_when_the_host_dies(
    user: User, lab: Lab
) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    file = user.work / "service.yaml"
    file.write_text(file.read_text().replace("max: 3", "max: 1").replace("idle: 5m", "idle: 10s"))
    url = user.json("serve", "--yes", "service.yaml")["url"]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(call, [f"{url}/{number}" for number in range(20)])) == [200] * 20
    first = read_service(user)
    [host] = find_hosts(lab)
    with under_load(url, callers=4, pause_s=0.0) as codes:
        lab.hosts[host].kill()
        wait_until(lambda: read_service(user).replicas[-1].state == "ready")
        wait_until(lambda: find_hosts(lab) == [1 - host])
    lab.hosts[host].start()
    assert set(codes) == {200}, "requests wait for the next replica"
    assert [each.place for each in read_service(user).replicas] == [
        first.replicas[0].place,
        f"ssh/h{2 - host}/on-demand",
    ]
    wait_until(lambda: {each.state for each in read_service(user).replicas} == {"ended"})
    user.cli("unserve", "hello")
    wait_until(lambda: user.json("services") == [])
    [bill] = user.json("cost", "--by", "tag:service")
    jobs = user.json("ps", "--all")
    assert bill["spent_micros"] == sum(each["spent_micros"] for each in jobs) > 0
    assert "pass failed" not in (user.home / "server.log").read_text()


def test_a_gang_serves_fails_and_drains_as_one(user: User, lab: Lab) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    file = user.work / "service.yaml"
    text = file.read_text().replace("{min: 0, max: 3", "{min: 2, max: 2")
    run = 'if [ "$NODE_RANK" = 0 ]; then exec python3 hello.py; else exec sleep 1234; fi'
    file.write_text(text.replace("run: exec python3 hello.py", f"nodes: 2\nrun: {run}"))
    url = user.json("serve", "--yes", "service.yaml")["url"]
    wait_until(lambda: read_service(user).ready == 2)
    with under_load(url, callers=10, pause_s=0.2) as codes:  # 50 a second
        os.kill(find_other_rank(lab), signal.SIGKILL)
        wait_until(lambda: 3 in list_ready(user) and len(list_ready(user)) == 2)
        user.cli("drill", "preempt", "hello-3", "--notice", "20s")
        wait_until(lambda: 4 in list_ready(user) and len(list_ready(user)) == 2)
    assert set(codes) == {200}, "no request is lost"
    drained = next(each for each in read_service(user).replicas if each.number == 3)
    assert "reclaimed" in drained.reason
    user.cli("unserve", "hello")
    wait_until(lambda: user.json("services") == [])
