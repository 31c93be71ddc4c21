"""Jobs of a real server, with the real agent, on the stand-in for PBS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent.system.test_trust_gangs import check_ranks_meet
from tests.contract import pbs_stand_in
from tests.providers.batch.contract.test_provider_pbs import PROOF
from tests.providers.batch.system.test_slurm_jobs import SMALL
from tests.system.pbs import list_jobs, user_on_pbs
from tests.system.trust import User, counting, wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_on_pbs(tmp_path) as user:
        yield user


def check_gone(user: User) -> None:
    """Nothing is left in PBS, in the shared folder or among the processes."""
    wait_until(lambda: not list_jobs(user), lambda: f"jobs: {list_jobs(user)}")
    wait_until(lambda: not user.gang_folders(), lambda: f"left: {user.gang_folders()}")
    wait_until(lambda: not user.left(), lambda: f"left: {user.left()}")
    assert user.json("nodes") == []


def test_a_job_runs_to_its_end(user: User) -> None:
    assert "stand-in" in user.cli("check", "pbs")
    (user.work / "data.txt").write_text("from the folder\n")
    out = user.cli(
        "run", user.task(f"name: plain\nworkdir: .\n{SMALL}\nrun: cat data.txt; exit 7"), code=7
    )
    assert out.startswith("from the folder\n")
    assert (user.ended("plain").phase, user.ended("plain").exit_code) == ("failed", 7)
    check_gone(user)


def test_ranks_of_a_gang_meet(user: User) -> None:
    check_ranks_meet(user, SMALL)
    check_gone(user)


def test_a_job_that_pbs_takes_away_goes_on(user: User) -> None:
    steps = counting(f"[ ! -e {user.root}/go ]")
    user.submit(f"name: taken\n{SMALL}\ncheckpoint: state\nrun: |{steps}")
    wait_until(lambda: "step 2" in user.said("taken"))
    user.wait("taken", "running")
    (number,) = list_jobs(user, "R")
    pbs_stand_in.end_all(number)  # as the scheduler does for a job that goes first
    job = user.wait("taken", lambda job: job.attempt == 2)
    assert job.attempts[0].outcome == "preempted"
    (user.root / "go").touch()
    assert user.ended("taken").phase == "done"
    assert "told to go" in user.log("taken", "--attempt", "1")
    assert "begins at 2" in user.log("taken")
    check_gone(user)


def test_a_job_that_an_administrator_deletes_is_stopped(user: User) -> None:
    user.submit(f"name: no\n{SMALL}\nrun: sleep 300")
    user.wait("no", "running")
    (number,) = list_jobs(user, "R")
    pbs_stand_in.qdel(user.root.parent / "pbs", [number])
    job = user.ended("no")
    assert (job.phase, job.attempt, job.attempts[0].outcome) == ("stopped", 1, "stopped")
    assert job.reason == "the job was deleted in PBS, not by Cavvy"
    check_gone(user)
    assert list_jobs(user, "F") == [number]


@pytest.mark.proves(PROOF, "notice")
def test_a_walltime_is_asked_for_and_its_end_is_a_notice(user: User) -> None:
    user.settings(
        user.config.read_text() + "warning_s = 3615\n"
    )  # of an hour, the grace of 10 s and the duration
    run = (
        f"trap 'cat $CAVVY_NOTICE_FILE; exit 75' TERM; while [ ! -e {user.root}/go ]; do sleep "
        "0.05; done"
    )
    user.submit(f'name: timed\n{SMALL}\nlimits: {{duration: 10s}}\nrun: "{run}"')
    user.wait("timed", lambda job: job.attempt == 2)
    assert "nearly over" in user.log("timed", "--attempt", "1")
    (user.root / "go").touch()
    job = user.ended("timed")
    assert (job.phase, job.attempts[0].outcome) == ("done", "preempted")
    check_gone(user)


def test_a_job_is_stopped_while_it_waits_and_while_it_runs(user: User) -> None:
    text = "{name: NAME, resources: {gpu: H100:4}, run: sleep 300}"
    for name in ("one", "two"):
        user.submit(text.replace("NAME", name))
    for name in ("one", "two"):  # PBS may start jobs that arrive together in any order
        user.wait(name, lambda job: job.phase == "running")
    user.submit(text.replace("NAME", "three"))
    user.wait("three", lambda job: "waits at pbs: PBS: Insufficient" in job.reason)
    for name in ("three", "one", "two"):
        user.cli("stop", name)
        assert user.ended(name).phase == "stopped"
    check_gone(user)
