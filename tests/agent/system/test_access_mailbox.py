"""Reaching into nodes that reach nobody: the line goes through a folder on a shared file system."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.batch.system.test_slurm_jobs import SMALL
from tests.system.pbs import user_on_pbs
from tests.system.trust import User

pytestmark = pytest.mark.system


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_on_pbs(tmp_path) as user:
        yield user


def test_a_command_and_copies_reach_the_second_rank_by_mail(user: User) -> None:
    user.submit(f"name: far\nnodes: 2\n{SMALL}\nrun: exec sleep 600")
    user.wait("far", "running")
    assert user.output("ssh", "far:1", "--", "echo rank $CAVVY_RANK; exit 4", code=4) == "rank 1\n"
    data = os.urandom(600_000)
    (user.work / "data").write_bytes(data)
    user.cli("cp", str(user.work / "data"), "far:1:there")
    user.cli("cp", "far:1:there", str(user.work / "back"))
    assert (user.work / "back").read_bytes() == data
    user.cli("stop", "far")
    user.ended("far")
