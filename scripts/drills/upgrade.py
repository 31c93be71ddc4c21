"""Updates two servers on one PostgreSQL one after the other, and goes back again, while jobs run.
No job may be lost or started again.

    python scripts/drills/upgrade.py --jobs 500 [--old REVISION]

The older program is that of the commit before the newest migration was added (or of --old), so its
schema is one revision older. The steps: both servers are old; `a` and then `b` are replaced by this
program, which migrates the database below the old server that still works; then `a` and `b` are
replaced by the old program again, which works with the newer schema. Jobs that are submitted to
each server after each step must end. The long jobs run on this machine through all of it, by the
provider `local`, and end when the drill says so. They start in waves: the next ones are submitted
when the last ones run, so that a slow machine is not busy with all starts at once. The exit code is
1 if anything is wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

# it makes `tests` importable
from server_pair import ROOT, find_repeated, run_drill
from tests.system.replica_site import ReplicaSite
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import ApiClient
from cavvy.client.state import process_mark, read_server
from cavvy.client.transport import Patience
from cavvy.store.migrate import HEAD

_RUN = "from cavvy.cli.main import cli; cli(['server', 'run'])"
_MIGRATIONS = "src/cavvy/store/migrations"
# Older agents look at all processes of the machine each second, which takes more than two cores for
# 500 jobs. They get this file of the new program.
_METER = "src/cavvy/agent/work/meters.py"
_SUBMITTERS = 4
_ENDED = "SELECT COUNT(*) FROM jobs WHERE name LIKE 'long-%' AND ended_at IS NOT NULL"
_WAVE = 25  # long jobs that start at the same time
_WAVE_S = 300.0  # how long a wave may take


def git(*words: str) -> str:
    told = subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def find_older() -> str:
    """The newest commit whose schema is one revision older."""
    added = git("log", "--diff-filter=A", "-1", "--format=%H", "--", f"{_MIGRATIONS}/{HEAD}_*")
    return git("rev-parse", f"{added}^")


def unpack(revision: str, folder: Path) -> Path:
    """The program of this commit."""
    folder.mkdir()
    packed = subprocess.run(
        ["git", "-C", ROOT, "archive", revision, "src"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    shutil.copy(ROOT / _METER, folder / _METER)
    return folder / "src"


class VersionedSite:
    """Both servers, each with one of the two programs."""

    def __init__(self, site: ReplicaSite, programs: dict[str, Path]) -> None:
        self.site, self._programs = site, programs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.ran = site.root / "ran"
        self.ran.mkdir()
        self.release = site.root / "release"
        os.mkfifo(self.release)
        self._shorts = 0

    def start(self, name: str, version: str) -> None:
        env = {
            **os.environ,
            "CAVVY_HOME": str(self.site.homes[name]),
            "PYTHONPATH": str(self._programs[version]),
        }
        with open(self.site.root / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN], env=env, stdout=log, stderr=log
            )
        wait_until(lambda: self._answers(name), lambda: self._log(name))
        wait_until(lambda: len(self.site.shards()) == len(self._running), lambda: self._log(name))

    def stop(self, name: str) -> None:
        """As a service manager does."""
        process = self._running.pop(name)
        process.terminate()
        process.wait(PATIENCE_S)

    def stop_all(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def client(self, name: str) -> ApiClient:
        server = read_server(str(self.site.homes[name]))
        assert server is not None
        token = (self.site.homes[name] / "token").read_text().strip()
        return ApiClient(server.address, token, patience=Patience(PATIENCE_S))

    def start_long(self, jobs: int) -> None:
        """Start the long jobs in waves."""
        for first in range(0, jobs, _WAVE):
            until = min(first + _WAVE, jobs)
            self._submit_long(range(first, until))
            wait_until(lambda: len(list(self.ran.iterdir())) >= until, self._phases, _WAVE_S)  # noqa: B023  # called at once
            if until % (4 * _WAVE) == 0:
                print(f"  {until} of {jobs} jobs run", flush=True)

    def _submit_long(self, numbers: range) -> None:
        left, lock = iter(numbers), threading.Lock()

        def work(name: str) -> None:
            with self.client(name) as client:
                while True:
                    with lock:
                        number = next(left, None)
                    if number is None:
                        return
                    run = f"echo $$ >> {self.ran}/long-{number}; exec cat {self.release}"
                    client.submit(self._task(f"long-{number}", run), consent=True)

        names = [list(self._running)[turn % 2] for turn in range(_SUBMITTERS)]
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run_short(self) -> None:
        """Each server that runs takes a job, which ends."""
        for name in self._running:
            self._shorts += 1
            with self.client(name) as client:
                self._run_to_end(client, f"short-{self._shorts}")

    def _run_to_end(self, client: ApiClient, name: str) -> None:
        client.submit(self._task(name, f"echo $$ >> {self.ran}/{name}"), consent=True)
        wait_until(lambda: client.job("default", name).ended_at is not None, self._phases)
        assert client.job("default", name).phase == "done", client.job("default", name)

    def let_go(self) -> None:
        """End all long jobs: they read a pipe that nobody writes to."""
        live = "SELECT COUNT(*) FROM jobs WHERE ended_at IS NULL"
        while self.site.ask(live) != [(0,)]:
            with suppress(OSError):  # nobody reads it any more
                os.close(os.open(self.release, os.O_WRONLY | os.O_NONBLOCK))
            time.sleep(1)

    @staticmethod
    def _task(name: str, run: str) -> str:
        return f"{{name: {name}, run: '{run}', resources: {{cpu: 0.001, memory: 32MB}}}}"

    def _answers(self, name: str) -> bool:
        server = read_server(str(self.site.homes[name]))
        assert self._running[name].poll() is None, self._log(name)
        return server is not None and process_mark(server.pid) == server.process

    def _log(self, name: str) -> str:
        return (self.site.root / f"{name}.log").read_text()[-2000:]

    def _phases(self) -> str:
        return str(self.site.ask("SELECT phase, COUNT(*) FROM jobs GROUP BY phase"))


def find_faults(versioned: VersionedSite, before: dict[str, str], jobs: int) -> list[str]:
    site, wrong = versioned.site, []
    for name, phase in site.ask("SELECT name, phase FROM jobs"):
        if phase != "done":
            wrong.append(f"{name} is {phase}")
    found = {path.name: path.read_text() for path in versioned.ran.iterdir()}
    wrong += [f"{name} started again" for name, text in found.items() if text.count("\n") != 1]
    wrong += [f"{name} is not the same process" for name in before if found[name] != before[name]]
    [(count,)] = site.ask("SELECT COUNT(*) FROM jobs WHERE name LIKE 'long-%'")
    if count != jobs:
        wrong.append(f"{jobs} long jobs were submitted, {count} are there")
    return wrong + find_repeated(site)


def drill(site: ReplicaSite, old: str, jobs: int) -> list[str]:
    """Replace both servers and go back while long jobs run, and find the faults."""
    programs = {"old": unpack(old, site.root / "old"), "new": ROOT / "src"}
    versioned, revision = VersionedSite(site, programs), "SELECT * FROM cavvy_revision"
    try:
        for name in site.homes:
            versioned.start(name, "old")
        began = time.monotonic()
        versioned.start_long(jobs)
        print(
            f"{jobs} jobs run with {old[:12]} at revision {site.ask(revision)} after "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        before = {path.name: path.read_text() for path in versioned.ran.iterdir()}
        for version in ("new", "old"):
            for name in site.homes:
                versioned.stop(name)
                versioned.start(name, version)
                versioned.run_short()
                print(
                    f"server {name} is {version}: revision {site.ask(revision)}, "
                    f"{site.ask(_ENDED)} long jobs have ended",
                    flush=True,
                )
        versioned.let_go()
        return find_faults(versioned, before, jobs)
    finally:
        versioned.stop_all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--old", help="the commit of the older program")
    given = parser.parse_args()
    old = git("rev-parse", given.old) if given.old else find_older()
    return run_drill("cavvy-up-", lambda site: drill(site, old, given.jobs))


if __name__ == "__main__":
    sys.exit(main())
