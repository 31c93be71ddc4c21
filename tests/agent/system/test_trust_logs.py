"""A job that writes gigabytes of log: its size on disk, and the memory of everybody who handles
it, stay bounded.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.trust import User, check_clean, user_at, wait_until

pytestmark = pytest.mark.system
MIB = 1 << 20
LIMIT_MIB = 16
WRITTEN = 190_000_000 * 17  # whole lines, 3 GiB of them


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(f"[logs]\njob_mib = {LIMIT_MIB}\n")
        yield user


def memory_mib(pid: int) -> float:
    """The most that the process has held in memory so far; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    peak = next((line for line in lines if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(peak.split()[1]) / 1024


def disk_mib(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total / MIB


class Watcher(threading.Thread):
    """Keeps the highest figures of memory and disk that were seen."""

    def __init__(self, user: User) -> None:
        super().__init__(daemon=True)
        self.user, self.over = user, threading.Event()
        self.agent = self.server = self.disk = 0.0

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.agent = max([self.agent, *map(memory_mib, self.user.agents())])
            self.server = max(self.server, memory_mib(self.user.server() or 0))
            self.disk = max(self.disk, disk_mib(self.user.home))


def test_three_gigabytes_of_log(user: User) -> None:
    user.cli("server", "start")
    watcher = Watcher(user)
    watcher.start()
    try:
        run = (
            f"echo first; yes 0123456789abcdef | head -c {WRITTEN}; for i in 1 2 3; do echo last "
            "$i; done"
        )
        reader = user.start("run", user.task(f"{{name: loud, run: '{run}'}}"))
        assert reader.stdout is not None
        assert (
            reader.stdout.readline() == "first\n"
        )  # and no more of it, like a terminal that is held
        wait_until(lambda: user.job("loud").attempts[0].nodes[0].exited_at, seconds=300)
        job = user.ended("loud")
        command = memory_mib(reader.pid)
        reader.kill()
    finally:
        watcher.over.set()
        watcher.join()
    assert (job.phase, job.attempt) == ("done", 1)
    assert user.log("loud", "--tail", "3") == "last 1\nlast 2\nlast 3\n"
    whole = user.log("loud")
    assert whole.startswith("first\n0123456789abcdef\n")
    assert "bytes of the log were dropped here" in whole
    assert len(whole) < (LIMIT_MIB + 1) * MIB
    assert command < 256
    assert watcher.agent < 64
    assert watcher.server < 256
    assert watcher.disk < 4 * LIMIT_MIB + 32
    check_clean(user)
