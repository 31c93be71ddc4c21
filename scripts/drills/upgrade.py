"""Updates two servers on one PostgreSQL one after the other, and goes back again, while jobs run.
No job may be lost or started again.

    python scripts/drills/upgrade.py --jobs 500 [--old REVISION]

The older program is that of the commit before the newest migration was added (or of --old), so its
schema is one revision older. The steps: both servers are old; `a` and then `b` are replaced by this
program, which migrates the database below the old server that still works; then `a` and `b` are
replaced by the old program again, which works with the newer schema. Jobs that are submitted to
each server after each step must end. The long jobs run on this machine through all of it, by the
provider `local`, and end when the drill says so. The exit code is 1 if anything is wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.replica_site import ReplicaSite, replica_site  # noqa: E402
from tests.waits import PATIENCE_S, wait_until  # noqa: E402

from cavvy.client import ApiClient  # noqa: E402
from cavvy.client.patience import Patience  # noqa: E402
from cavvy.client.state import process_mark, read_server  # noqa: E402
from cavvy.store.migrate import HEAD  # noqa: E402

_RUN = "from cavvy.cli.main import cli; cli(['server', 'run'])"
_MIGRATIONS = "src/cavvy/store/migrations"
_SUBMITTERS = 4
_ENDED = "SELECT COUNT(*) FROM jobs WHERE name LIKE 'long-%' AND ended_at IS NOT NULL"
_LONG_S = 1200.0  # how long all long jobs may take to start


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

    def submit_long(self, jobs: int) -> None:
        left, lock = iter(range(jobs)), threading.Lock()

        def work(name: str) -> None:
            with self.client(name) as client:
                while True:
                    with lock:
                        number = next(left, None)
                    if number is None:
                        return
                    run = f"echo $$ >> {self.ran}/long-{number}; cat {self.release}"
                    client.submit(self._task(f"long-{number}", run), consent=True)

        names = [list(self._running)[turn % 2] for turn in range(_SUBMITTERS)]
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: len(list(self.ran.iterdir())) == jobs, self._phases, _LONG_S)

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
    many = "SELECT j.name, COUNT(*) FROM attempts a JOIN jobs j ON j.id = a.job_id GROUP BY 1"
    wrong += [f"{name} has {number} attempts" for name, number in site.ask(many) if number != 1]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--old", help="the commit of the older program")
    arguments = parser.parse_args()
    old = git("rev-parse", arguments.old) if arguments.old else find_older()
    root = Path(tempfile.mkdtemp(prefix="cavvy-up-", dir="/tmp"))
    try:
        programs = {"old": unpack(old, root / "old"), "new": ROOT / "src"}
        with replica_site(root) as site:
            versioned = VersionedSite(site, programs)
            revision = "SELECT * FROM cavvy_revision"
            try:
                for name in site.homes:
                    versioned.start(name, "old")
                first = site.ask(revision)
                began = time.monotonic()
                versioned.submit_long(arguments.jobs)
                print(
                    f"{arguments.jobs} jobs run with {old[:12]} at revision {first} after "
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
                wrong = find_faults(versioned, before, arguments.jobs)
            finally:
                versioned.stop_all()
            print(f"{len(wrong)} faults")
            for each in wrong[:40]:
                print("  ", each)
            return 1 if wrong else 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
