"""`examples/distributed/ray.yaml` as it stands, but for its setup: a Ray of its own on two nodes
of this machine.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.ray_cluster import installed
from tests.system.trust import User, check_clean, user_at, wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # Ray may have to be installed first

EXAMPLE = Path(__file__).resolve().parents[4] / "examples/distributed"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    installed()
    with user_at(tmp_path / "user") as user:
        yield user


def make_task(user: User, program: str) -> str:
    """The example, run by a Python that has Ray already."""
    for name in ("ray_gang.py", "ray_pi.py"):
        (user.work / name).write_text((EXAMPLE / name).read_text())
    text = (EXAMPLE / "ray.yaml").read_text()
    before, _, rest = text.partition("setup:\n")
    run = rest[rest.index("\nrun:") :].replace("cpu: 2+", "cpu: 1")
    assert "python3 ray_gang.py ray_pi.py" in run
    run = run.replace(
        "python3 ray_gang.py ray_pi.py",
        f"{installed()}/python {program}",
    )
    return user.task(before.replace("cpu: 2+", "cpu: 1") + run)


def test_ray_starts_on_a_gang_and_ends_with_its_program(user: User) -> None:
    before = folders()
    user.cli("run", "-d", make_task(user, "ray_gang.py ray_pi.py"))
    job = user.wait("ray", lambda job: job.phase in ("done", "failed"), 200)
    said = user.log("ray")
    assert job.phase == "done", (job.reason, said)
    assert "pi is about 3.14" in said
    assert "by 2 of 2 nodes" in said
    user.ended("ray")
    check_clean(user)
    wait_until(lambda: folders() <= before, lambda: str(folders() - before))


def test_a_program_that_fails_fails_the_job(user: User) -> None:
    (user.work / "wrong.py").write_text("raise SystemExit(7)\n")
    user.cli("run", "-d", make_task(user, "ray_gang.py wrong.py"))
    job = user.wait("ray", lambda job: job.phase in ("done", "failed"), 200)
    assert job.phase == "failed", user.log("ray")
    assert job.attempts[-1].exit_code == 7, job.attempts
    user.ended("ray")
    check_clean(user)


def folders() -> set[str]:
    return {name for name in os.listdir("/tmp") if name.startswith("ray-gang-")}
