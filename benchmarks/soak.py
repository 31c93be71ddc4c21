"""Runs jobs for a long time on a server with agents on this machine, and kills one process each
30 s: an agent, the work of a job or, in the last third, the server. No job may be lost, and what
the server holds must not grow.

    python benchmarks/soak.py [--seconds 900] [--every 30] [--rate 0.5]

Each job's log must have its line. The server's memory, open files, sockets and threads are read in
the first two thirds, in which it lives: the median of the last quarter of that time is compared
with that of the second. `scripts/soak.py` looks for wrong results at more random moments; this
program looks for what grows.
"""

import argparse
import itertools
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import ROOT, process_cpu_s, process_rss_mib, record, table

sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from tests.system.trust import User

_SAMPLE_S = 5.0
_AT_ONCE = 40  # jobs that have not ended; no more are submitted then
# a job that runs for some seconds, so that an agent or its work can be killed meanwhile
_TASK = "{{name: soak-{number}, run: 'echo soak-{number}; sleep 2', resources: {{cpu: 0.1}}, "
_TASK += "retry: {{exit: 20, node: 20}}}}"


@dataclass(frozen=True)
class Held:
    """What a server holds at a moment."""

    at: float
    rss_mib: float
    files: int
    sockets: int
    threads: int


def read_held(pid: int) -> Held:
    """Read what the process holds. Raises OSError if it has ended."""
    kinds = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds.append(os.readlink(each))
        except FileNotFoundError:
            continue
    return Held(
        at=time.monotonic(),
        rss_mib=process_rss_mib(pid),
        files=sum(not each.startswith("socket:") for each in kinds),
        sockets=sum(each.startswith("socket:") for each in kinds),
        threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
    )


class Soak:
    """The load, the kills and the readings."""

    def __init__(self, user: "User", rate: float, seconds: float, every_s: float) -> None:
        self._user, self._rate, self._every_s = user, rate, every_s
        self._dice = random.Random(1)
        self._over = threading.Event()
        self._began = time.monotonic()
        self.server_dies_at = self._began + seconds * 2 / 3
        self.ends_at = self._began + seconds
        self.submitted = 0
        self.kills: list[str] = []
        self.held: list[Held] = []
        self.problems: list[str] = []
        self.cpu_s = 0.0  # of the server, until it is killed for the first time

    def run(self) -> None:
        """Soak until the time is over, and wait until all jobs have ended."""
        threads = [threading.Thread(target=self._submit), threading.Thread(target=self._watch)]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() + self._every_s < self.ends_at:
                time.sleep(self._every_s)
                self._kill()
            time.sleep(max(0.0, self.ends_at - time.monotonic()))
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _submit(self) -> None:
        with self._user.api.sibling() as own:
            for number in itertools.count(1):
                while self._count_open() >= _AT_ONCE and not self._over.is_set():
                    time.sleep(1)
                if self._over.wait(1 / self._rate):
                    return
                try:
                    own.submit(_TASK.format(number=number), consent=True)
                except Exception as error:  # noqa: BLE001 - reported at the end
                    self.problems.append(f"job {number} was not accepted: {error}")
                else:
                    self.submitted += 1

    def _count_open(self) -> int:
        return count(self._user, "ended_at IS NULL")

    def _watch(self) -> None:
        pid, used = self._user.server(), 0.0
        while time.monotonic() < self.server_dies_at and not self._over.is_set():
            if pid is not None:
                self.held.append(read_held(pid))
                used = process_cpu_s(pid)
            time.sleep(_SAMPLE_S)
        self.cpu_s = used

    def _kill(self) -> None:
        from tests.system.trust import kill

        if time.monotonic() > self.server_dies_at and len(self.kills) % 3 == 0:
            self._user.kill_server()
            self.kills.append("server")
            return
        kind = self._dice.choice(("agent", "work"))
        pids = self._user.agents() if kind == "agent" else self._user.worked()
        if pids:
            kill(self._dice.choice(pids))
            self.kills.append(kind)

    def check(self) -> tuple[int, int]:
        """Return how many jobs are not done, and how many of them lack their line in the log."""
        lost = self.submitted - count(self._user, "phase = 'done'")
        silent = 0
        for number in range(1, self.submitted + 1):
            name = f"soak-{number}"
            silent += f"soak-{number}" not in self._user.said(name)
        return lost, silent


def count(user: "User", condition: str) -> int:
    """The number of jobs that meet an SQL condition."""
    url = f"file:{user.home}/cavvy.db?mode=ro"
    with closing(sqlite3.connect(url, uri=True, timeout=60)) as database:
        found = database.execute(f"SELECT count(*) FROM jobs WHERE {condition}").fetchone()
    return int(found[0])


def grow(held: Sequence[Held], what: str) -> tuple[float, float]:
    """The medians of the second and of the last quarter."""
    figures = [float(getattr(each, what)) for each in held]
    quarter = len(figures) // 4
    return statistics.median(figures[quarter : 2 * quarter]), statistics.median(figures[-quarter:])


def show(soak: Soak, seconds: float, lost: int, silent: int, left: int) -> bool:
    """Print the figures. Returns whether all bars are met."""
    first, last = grow(soak.held, "rss_mib")
    what = f"soak of {seconds:g} s"
    bars = [
        ("growth of the server's memory, %", 100 * (last / first - 1), 5.0),
        ("jobs lost", float(lost), 0.0),
        ("jobs without their log", float(silent), 0.0),
        ("submissions refused", float(len(soak.problems)), 0.0),
        ("processes left", float(left), 0.0),
    ]
    for name in ("files", "sockets", "threads"):
        before, after = grow(soak.held, name)
        bars.append((f"more {name} than in the second quarter", after - before, 2.0))
    rows: list[tuple[str, object, object, str]] = [
        (name, figure, bar, record(f"{what}: {name}", figure, bar, ""))
        for name, figure, bar in bars
    ]
    kills = ", ".join(f"{soak.kills.count(kind)} {kind}" for kind in ("agent", "work", "server"))
    alive = soak.held[-1].at - soak.held[0].at
    rows += [
        ("jobs", soak.submitted, "-", ""),
        ("kills", kills, "-", ""),
        ("memory in the second and the last quarter, MiB", f"{first:.1f}, {last:.1f}", "-", ""),
        ("server, % of a core", 100 * soak.cpu_s / alive, "-", ""),
    ]
    table(what, ("what", "figure", "bar", ""), rows)
    for problem in soak.problems[:5]:
        print(f"  {problem}")
    return all(row[3] != "MISSED" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=0.5, help="jobs a second")
    given = parser.parse_args()
    from tests.system.trust import check_clean, environment, user_at, wait_until

    with tempfile.TemporaryDirectory(prefix="soak-") as folder, user_at(Path(folder)) as user:
        user.settings("[server]\nidle_stop_s = 0\n[providers.local]\nprice_usd_hr = 3600\n")
        with environment(user.environ):
            user.api.health()
            soak = Soak(user, given.rate, given.seconds, given.every)
            soak.run()
            user.cli("ps")  # starts the server, if the last kill was its end
            wait_until(lambda: count(user, "ended_at IS NULL") == 0, seconds=600)
            lost, silent = soak.check()
            check_clean(user)
        right = show(soak, given.seconds, lost, silent, len(user.left()))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
