"""Jobs on EC2, by the real command and server: instances really boot their user data, and fetch the agent by HTTPS."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.ec2.machines import Ec2, ec2_at
from tests.ec2.rules import allow_only
from tests.system.trust import User, user_at, wait_until

from remuda.providers.aws.policy import make_policy

pytestmark = pytest.mark.system
MINUTE = timedelta(minutes=1)
DIGITS = Path(__file__).parents[2] / "examples/digits"


@pytest.fixture
def ec2(tmp_path: Path) -> Iterator[Ec2]:
    with ec2_at(tmp_path / "ec2") as ec2:
        ec2.cloud.rules.boot = timedelta(seconds=1)
        ec2.cloud.rules.hidden = timedelta(seconds=1)
        ec2.cloud.rules.shutting_down = timedelta(seconds=1)
        allow_only(ec2.cloud.rules, make_policy())
        yield ec2


@pytest.fixture
def user(ec2: Ec2, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[server]\ntls_listen = '10.99.0.254:0'\n[providers.local]\nenabled = false\n"
            "[providers.aws]\nregions = 'us-east-1'\ninstances = 'g4dn.xlarge, m7i.large'\n"
            f"endpoint = '{ec2.endpoint}'\n"
        )
        user.variables = {
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "for the stand-in only",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(lambda: not ec2.cloud.left() or user.cli("gc", code=None) is None, lambda: str(ec2.cloud.left()), 30)


def console(ec2: Ec2) -> str:
    """What the machines said, for a test that fails."""
    logs = [(each.life.id, each.log) for each in ec2.machines.values() if each.log.exists()]
    return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs)


def test_a_job_runs(ec2: Ec2, user: User) -> None:
    name = user.submit('name: hello\nresources: {gpu: T4}\nrun: echo "on $(hostname)"; id -u\n', "--yes")
    try:
        job = user.ended(name)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{console(ec2)}") from error
    assert job.phase == "done"
    (life,) = ec2.cloud.history
    assert f"on {life.id}" in user.log(name)
    assert ec2.cloud.left().get("instances") is None
