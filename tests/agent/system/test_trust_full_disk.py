"""On a full disk nodes are let go of first, and that is written down when there is room again."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.server_state import kill_server
from tests.system.trust import User, check_bill, check_clean, user_at, wait_until

pytestmark = pytest.mark.system
LONG = "{name: NAME, grace: 1s, LIMITS resources: {cpu: 0.5}, run: 'echo began; sleep 300'}"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.home.mkdir(mode=0o700, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", user.home]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip(
                "cannot mount a small file system; to run this: be root outside of a restricted "
                "container"
            )
        try:
            yield user
        finally:
            kill_server(user.home)
            subprocess.run(["umount", "-l", user.home], check=True)


def fill(user: User) -> None:
    """Until not a byte more can be written."""
    with (user.home / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 20, 4096, 1):
            try:
                while ballast.write(b"x" * size):
                    pass
            except OSError:
                continue


def make_room(user: User) -> None:
    (user.home / "ballast").unlink()


def begin(user: User, *names: str, limits: str = "") -> dict[str, str]:
    """Their ids, once they work."""
    for name in names:
        user.submit(LONG.replace("NAME", name).replace("LIMITS", limits), "--yes")
    wait_until(
        lambda: all("began" in user.said(name) for name in names),
        lambda: str([user.scenario(name) for name in names]),
    )
    return {name: user.job(name).id for name in names}


def gone(job_id: str) -> bool:
    """Whether no process of the job is left, whatever the server says."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"CAVVY_JOB_ID={job_id}".encode() in found:
            return False
    return True


def test_what_runs_is_stopped_on_a_full_disk_and_the_bill_is_right_later(user: User) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 360\n")
    ids = begin(user, "one", "two") | begin(user, "dear", limits="limits: {budget: 3},")
    fill(user)
    refused = user.cli("run", "-d", "--yes", user.task("{name: more, run: 'true'}"), code=None)
    assert "disk" in refused
    user.cli("stop", "one")
    wait_until(lambda: gone(ids["one"]))
    assert not gone(ids["two"])
    wait_until(lambda: gone(ids["dear"]))  # its budget ended it
    user.cli("down", "--all", "--yes")
    assert gone(ids["two"])
    assert [user.job(name).phase for name in ids] == [
        "stopped",
        "stopped",
        "failed",
    ]
    make_room(user)
    wait_until(lambda: all(user.job(n).spent_micros for n in ids))
    kill_server(user.home, signal.SIGTERM)  # what it knew is on the disk
    user.forget()
    for name, phase in {"one": "stopped", "two": "stopped", "dear": "failed"}.items():
        job = user.ended(name)
        assert (job.phase, job.attempts[0].phase) == (phase, "ended")
        check_bill(user, job)
    assert user.job("dear").spent_micros <= 4_000_000  # its agent waits to tell its end
    check_clean(user)


def test_who_follows_a_job_on_a_full_disk_is_told_why_nothing_comes(user: User) -> None:
    begin(user, "one")
    told = "the server's disk is full"
    assert told not in user.cli("server", "status")
    fill(user)
    assert told in user.cli("server", "status")
    with user.start("logs", "-f", "one") as follower:
        assert follower.stderr is not None
        assert any(told in line for line in follower.stderr)
        follower.kill()
    make_room(user)
    assert told not in user.cli("server", "status")


def test_stopping_work_that_filled_the_disk_makes_room_again(user: User) -> None:
    user.submit(
        "{name: one, grace: 1s, resources: {cpu: 0.5}, run: 'dd if=/dev/zero of=big bs=1M; sleep "
        "300'}",
        "--yes",
    )
    told = "the server's disk is full"
    wait_until(lambda: told in user.cli("server", "status"))
    user.cli("stop", "one")
    wait_until(lambda: told not in user.cli("server", "status"))
    assert user.ended("one").phase == "stopped"
    check_clean(user)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_starts_on_a_full_disk_takes_everything_down(
    user: User, number: signal.Signals
) -> None:
    ids = begin(user, "one", "two")
    wait_until(lambda: (user.home / "reserve").exists())
    fill(user)
    user.cli("stop", "one")
    kill_server(user.home, number)
    user.forget()
    fill(user)
    user.cli("down", "--all", "--yes")
    wait_until(lambda: gone(ids["one"]) and gone(ids["two"]))
    make_room(user)
    assert user.ended("one").phase == user.ended("two").phase == "stopped"
    check_clean(user)
