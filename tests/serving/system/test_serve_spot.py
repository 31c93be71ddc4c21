"""A service on spot instances: the policy chooses the market, a notice drains the replica, and
another one replaces it.
"""

import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.machines import Ec2
from tests.providers.aws.system.test_aws_jobs import console, quick_ec2_at, user_of
from tests.serving.system.test_serve import EXAMPLE, read_service
from tests.system.service_load import under_load
from tests.system.trust import User
from tests.waits import wait_until

from cavvy.client.service_wire import ReplicaView

pytestmark = pytest.mark.system


@pytest.fixture
def ec2(tmp_path: Path) -> Iterator[Ec2]:
    with quick_ec2_at(tmp_path / "ec2") as ec2:
        yield ec2


@pytest.fixture
def user(ec2: Ec2, tmp_path: Path) -> Iterator[User]:
    with user_of(ec2, tmp_path / "user") as user:
        yield user


def list_ready(user: User) -> list[ReplicaView]:
    return [each for each in read_service(user).replicas if each.state == "ready"]


def test_a_service_survives_the_interruption_of_its_spot_instance(ec2: Ec2, user: User) -> None:
    ec2.cloud.rules.notice = timedelta(seconds=20)
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    file = user.work / "service.yaml"
    text = file.read_text().replace(
        "resources:\n  cpu: 0.2\n  memory: 64MiB\n", "resources: {spot: auto}\n"
    )
    text = text.replace("exec python3", f"exec {sys.executable}").replace("max: 3", "max: 1")
    file.write_text(text)
    url = user.json("serve", "--yes", "service.yaml")["url"]
    with under_load(url, callers=4, pause_s=0.1) as codes:
        wait_until(
            lambda: any(each.place.endswith("/spot") for each in list_ready(user)),
            lambda: f"{read_service(user)}\n{console(ec2)}",
        )
        first = next(each for each in list_ready(user) if each.place.endswith("/spot"))
        zone = first.place.split("/")[1]
        [life] = [
            each
            for each in ec2.cloud.history
            if each.lives and each.market == "spot" and each.zone == zone
        ]
        ec2.cloud.interrupt(life)
        wait_until(
            lambda: any(each.number > first.number for each in list_ready(user)),
            lambda: f"{read_service(user)}\n{console(ec2)}",
        )
        wait_until(lambda: not life.lives)
    assert set(codes) == {200}, "no request is lost"
    gone = next(each for each in read_service(user).replicas if each.number == first.number)
    # the replica knows from its own notice, or from the end of its job
    assert "reclaim" in gone.reason
    user.cli("unserve", "hello")
    wait_until(lambda: user.json("services") == [])
    assert "pass failed" not in (user.home / "server.log").read_text()
