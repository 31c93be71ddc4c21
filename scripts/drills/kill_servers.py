"""Two servers on one PostgreSQL work while everything is killed. No job may be lost, none may run
twice, and each bill must equal a recount.

    python scripts/drills/kill_servers.py --minutes 5

Every 5 s, one server is killed (SIGKILL) and started again. The first process of PostgreSQL is
killed twice, and PostgreSQL is started again. The connections between server `b` and PostgreSQL,
which pass through a proxy, are cut twice: first they are silent for 15 s, then they are closed.
Meanwhile, users submit jobs to both servers and stop some. Jobs run on this machine, by the
provider `local`. PostgreSQL is that of the tests (Debian's), with synchronous_commit = on, but
without fsync: the processes crash, the machine does not. The exit code is 1 if anything is wrong.
"""

import argparse
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# it makes `tests` importable
from server_pair import find_repeated, run_drill
from tests.system.postgres import crash_postgres, socket_folder
from tests.system.replica_site import ReplicaSite
from tests.system.server_state import kill_server
from tests.waits import wait_until

from cavvy.client import ApiError
from cavvy.client.connection import ensure_server
from cavvy.client.errors import StartFailed
from cavvy.client.wire import AuditRow

_SILENCE_S = 15.0
_DRAIN_S = 600.0  # how long the last jobs may take after the last crash
_RECOUNT = """
SELECT j.name, j.spent, COALESCE(SUM(c.amount), 0),
  COALESCE(SUM(ROUND(c.rate * (c.until - c.since) / 3600000000.0)), 0)
FROM jobs j LEFT JOIN charges c ON c.job_id = j.id GROUP BY j.id, j.name, j.spent
"""
_POSTED = """
SELECT s.job, SUM(e.amount) FROM ledger e JOIN ledger_subjects s ON s.id = e.subject GROUP BY 1
"""


class DatabaseProxy:
    """Passes the connections of one server to PostgreSQL, until they are cut."""

    def __init__(self, folder: Path, target: str) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen(64)
        self._open: set[socket.socket] = set()
        self._passes = threading.Event()
        self._passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self, seconds: float) -> None:
        """Pass nothing for some time, in either direction, and then go on."""
        self._passes.clear()
        time.sleep(seconds)
        self._passes.set()

    def close_all(self) -> None:
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            self._passes.wait()
            outer = socket.socket(socket.AF_UNIX)
            try:
                outer.connect(self._target)
            except OSError:
                inner.close()
                continue
            self._open |= {inner, outer}
            for one, other in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                self._passes.wait()
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            self._open.discard(each)


class Users:
    """Submit jobs to both servers and stop some of them. Each job writes a line when it starts."""

    def __init__(self, site: ReplicaSite, pause_s: float) -> None:
        self._site, self._pause_s, self._over = site, pause_s, threading.Event()
        self.ran = site.root / "ran"
        self.ran.mkdir()
        self.names: list[str] = []
        self.stopped: set[str] = set()
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._use, args=(name,)) for name in site.homes]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _use(self, server: str) -> None:
        dice, count = random.Random(server), 0
        while not self._over.wait(self._pause_s * dice.uniform(0.5, 1.5)):
            count += 1
            name = f"{server}{count:04}"
            long = count % 10 == 0
            work_s = dice.uniform(20, 60) if long else dice.uniform(0, 6)
            run = f"echo ran >> {self.ran}/{name}; exec sleep {work_s:.1f}"
            try:
                with self._site.connect(server) as client:
                    task = f"{{name: {name}, run: '{run}', resources: {{cpu: 0.1}}}}"
                    self.names.append(client.submit(task, consent=True).name)
                    if long and count % 20 == 0:
                        client.stop("default", name)
                        self.stopped.add(name)
            except (ApiError, OSError) as error:
                self.failed.append(f"{server}: {type(error).__name__}: {error}")


def crash_all(
    site: ReplicaSite, proxy: DatabaseProxy, minutes: float, every_s: float
) -> Counter[str]:
    """Crash everything for some minutes. Returns how often each thing was done."""
    done: Counter[str] = Counter()
    began = time.monotonic()
    end = began + minutes * 60
    # in the middle of the time between two kills, so that these do not always come together
    events: list[tuple[float, str, Callable[[], None]]] = [
        (0.15, "silences", lambda: proxy.silence(_SILENCE_S)),
        (0.35, "crashes of PostgreSQL", lambda: crash_postgres(site.url)),
        (0.55, "cuts", proxy.close_all),
        (0.75, "crashes of PostgreSQL", lambda: crash_postgres(site.url)),
    ]
    turn, starting = 0, list[threading.Thread]()
    while (now := time.monotonic()) < end:
        if events and now - began > events[0][0] * minutes * 60:
            _, what, act = events.pop(0)
            act()
            done[what] += 1
            print(f"  {now - began:.0f} s: {what}", flush=True)
            continue
        victim = "ab"[turn % 2]
        turn += 1
        if kill_server(site.homes[victim]) is not None:
            done["kills of a server"] += 1
        else:
            done["kills of a server that was still starting"] += 1
        starting.append(threading.Thread(target=start_again, args=(site, victim)))
        starting[-1].start()
        time.sleep(max(0.0, every_s - (time.monotonic() - now)))
    for thread in starting:
        thread.join()
    return done


def start_first(site: ReplicaSite) -> None:
    """Start both servers. They remember their database; `b` reaches it through the proxy."""
    proxied = f"{site.url.partition('?')[0]}?host={site.root / 'p'}"
    for name, url in (("a", site.url), ("b", proxied)):
        os.environ["CAVVY_SERVER_DATABASE"] = url
        ensure_server(home=str(site.homes[name]))
    del os.environ["CAVVY_SERVER_DATABASE"]


def start_again(site: ReplicaSite, name: str) -> None:
    """Start a server, unless a user has done so. While PostgreSQL recovers, it cannot start, and
    the next user or kill starts it.
    """
    with suppress(StartFailed):
        ensure_server(home=str(site.homes[name]))


def find_faults(site: ReplicaSite, users: Users) -> list[str]:
    """What is wrong after all jobs have ended."""
    wrong = list(users.failed)
    phases = dict(site.ask("SELECT name, phase FROM jobs"))
    wrong += [f"{name} is lost" for name in users.names if name not in phases]
    wrong += [f"{name} was submitted twice" for name in phases if name not in users.names]
    for name, phase in phases.items():
        wanted = ("done", "stopped") if name in users.stopped else ("done",)
        if phase not in wanted:
            wrong.append(f"{name} is {phase}")
        path = users.ran / str(name)
        times = path.read_text().count("ran") if path.exists() else 0
        if times > 1 or (times == 0 and phase == "done"):
            wrong.append(f"{name} ran {times} times")
    wrong += find_repeated(site)
    for name, spent, charged, counted in site.ask(_RECOUNT):
        if not spent == charged == counted:
            wrong.append(f"{name} has spent {spent}, charges {charged}, recount {counted}")
    posted = dict(site.ask(_POSTED))
    for name, spent, *_ in site.ask(_RECOUNT):
        if int(str(posted.get(name, 0))) != spent:
            wrong.append(f"{name}: the ledger has {posted.get(name, 0)}, not {spent}")
    with site.connect("a") as client:
        wrong += [
            f"the bill of {each.job}: {each}, {list_evidence(site, each)}"
            for each in client.audit("default").bills
            if each.verdict != "agrees"
        ]
        wrong += [f"a node is left: {each}" for each in client.nodes()]
        wrong += [f"a gang is left: {each}" for each in client.gc(dry_run=True)]
    return wrong


def list_evidence(site: ReplicaSite, bill: AuditRow) -> list[object]:
    """The rows of the bill, and what the provider recorded of the gang."""
    of_job = f"WHERE job_id = (SELECT id FROM jobs WHERE name = '{bill.job}')"
    found: list[object] = [site.ask(f"SELECT document FROM attempts {of_job}")]
    found += site.ask(f"SELECT rank, kind, since, until, rate, amount FROM charges {of_job}")
    records = site.root.rglob(f"{bill.gang}.json")
    return [*found, *(f"{path}: {path.read_text()}" for path in records)]


def drill(site: ReplicaSite, minutes: float, every_s: float, pause_s: float) -> list[str]:
    """Crash everything while users work, wait until all jobs have ended, and find the faults."""
    proxy = DatabaseProxy(site.root / "p", f"{socket_folder(site.url)}/.s.PGSQL.5432")
    start_first(site)
    wait_until(site.shared)
    users = Users(site, pause_s)
    users.start()
    done = crash_all(site, proxy, minutes, every_s)
    for name in site.homes:
        start_again(site, name)
    users.finish()
    began = time.monotonic()
    live = "SELECT COUNT(*) FROM jobs WHERE ended_at IS NULL"
    wait_until(
        lambda: site.ask(live) == [(0,)],
        lambda: str(site.ask("SELECT name, phase, reason FROM jobs WHERE ended_at IS NULL")),
        _DRAIN_S,
    )
    drained_s = time.monotonic() - began
    wait_until(lambda: site.ask("SELECT COUNT(*) FROM attempts WHERE phase <> 'ended'") == [(0,)])
    told = ", ".join(f"{count} {what}" for what, count in done.items())
    print(f"{len(users.names)} jobs, {len(users.stopped)} of them stopped; {told}")
    print(f"the last job ended {drained_s:.0f} s after the last kill")
    return find_faults(site, users)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds between two submissions of a user"
    )
    given = parser.parse_args()
    return run_drill(
        "cavvy-kill-", lambda site: drill(site, given.minutes, given.every, given.pause)
    )


if __name__ == "__main__":
    sys.exit(main())
