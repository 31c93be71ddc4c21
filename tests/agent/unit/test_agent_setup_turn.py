"""A setup that another agent on the same machine runs already is waited for, and the user knows."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from cavvy.agent.work import prepare
from cavvy.agent.work.prepare import _await_turn, make_venv, use_venv

TEXT = "another job on this machine runs the same setup; this job then uses its result"


@pytest.mark.parametrize("busy", [True, False])
def test_a_wait_for_the_setup_of_another_job_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], busy: bool
) -> None:
    path = tmp_path / "lock"
    path.touch()
    reads, writes = os.pipe()
    with path.open() as other, path.open() as own:
        if busy:
            fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=_await_turn, args=(own.fileno(), writes), daemon=True)
        waiting.start()
        if busy:
            assert os.read(reads, 1000).decode() == f"waits {TEXT}\n"
            fcntl.flock(other, fcntl.LOCK_UN)
        waiting.join(timeout=10)
        assert not waiting.is_alive()
        with pytest.raises(BlockingIOError):  # the turn is this agent's own
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(reads)
    os.close(writes)
    assert capfd.readouterr().err == (f"cavvy: {TEXT}\n" if busy else "")


def test_the_environment_of_a_setup_that_failed_makes_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(prepare, "run", lambda argv, env, view=None: ran.append(argv[0]) or 0)
    for folder in ("venv/bin", "usual"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python3").touch(mode=0o755)
    env = {"PATH": f"{tmp_path}/usual"}
    use_venv(env, f"{tmp_path}/venv")
    make_venv(f"{tmp_path}/venv", env)
    assert ran == [f"{tmp_path}/usual/python3"]
