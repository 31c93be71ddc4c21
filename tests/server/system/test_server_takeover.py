"""Two servers for one database and state folder: one works, the other takes over when it is killed.
No job is lost or started twice, and bills equal a recount.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest
from tests.system.server_state import PYTHON, follow_to_end, home_with_jobs, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.state import host_name, process_mark, read_server, server_holds_lock, write_server

pytestmark = pytest.mark.system
JOBS = 12
KILLS = 4
_RUN = "from cavvy.cli.main import cli; cli(['server', 'run', '--wait'])"
_RECOUNT = """
SELECT j.name, j.spent, COALESCE(SUM(c.amount), 0),
  COALESCE(SUM(ROUND(c.rate * (c.until - c.since) / 3600000000.0)), 0), COUNT(DISTINCT a.id)
FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id LEFT JOIN charges c ON c.attempt_id = a.id
GROUP BY j.id, j.name, j.spent ORDER BY j.name
"""


class Replicas:
    """Processes of `cavvy server run --wait` on one state folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with open(self.home.parent / "replicas.log", "ab") as log:
            self.running.append(
                subprocess.Popen([PYTHON, "-c", _RUN], stdout=log, stderr=log, close_fds=True)
            )

    def active(self) -> subprocess.Popen[bytes] | None:
        """The replica that answers."""
        server = read_server(str(self.home))
        if server is None or process_mark(server.pid) != server.process:
            return None
        return next((each for each in self.running if each.pid == server.pid), None)

    def wait(self) -> subprocess.Popen[bytes]:
        wait_until(self.active)
        found = self.active()
        assert found is not None
        return found

    def kill_active(self) -> None:
        """Kill the active server, and start another one in its place."""
        active = self.wait()
        active.kill()
        active.wait()
        self.running.remove(active)
        self.start()

    def stop(self) -> None:
        for each in self.running:
            each.kill()
            each.wait()


@contextmanager
def replicas_at(home: Path) -> Iterator[Replicas]:
    replicas = Replicas(home)
    try:
        replicas.start()
        replicas.wait()
        replicas.start()
        yield replicas
    finally:
        replicas.stop()


@pytest.fixture
def home(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CAVVY_SERVER_DATABASE", url)
    monkeypatch.setenv("CAVVY_PROVIDERS_LOCAL_PRICE_USD_HR", "3600.0")
    with home_with_jobs(tmp_path / "home") as folder:
        yield folder


def crash_postgres(url: str) -> None:
    """Kill one of its processes: PostgreSQL then ends all connections and recovers from its log."""
    connection = psycopg.connect(url.replace("+psycopg", ""))
    os.kill(connection.info.backend_pid, signal.SIGKILL)
    connection.close()


def keep_commits(url: str) -> None:
    """A commit survives the crash, which the tests' PostgreSQL does not promise by itself."""
    name = url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = on")  # type: ignore[call-overload]  # our own name


def submit_all(client: ApiClient, folder: Path) -> None:
    for number in range(JOBS):
        work = f"echo $CAVVY_ATTEMPT >> {folder}/starts-{number}; sleep {number % 4}"
        task = f"{{name: j{number:02}, resources: {{cpu: 1}}, run: '{work}; exit {number % 3}'}}"
        client.submit(task, consent=True)


def check_jobs(client: ApiClient, folder: Path) -> None:
    for number in range(JOBS):
        job = client.job("default", f"j{number:02}")
        assert (job.phase in ("done", "failed"), job.exit_code) == (True, number % 3), job
        assert (folder / f"starts-{number}").read_text().split() == ["1"]


def check_bills(url: str) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        rows = connection.execute(_RECOUNT).fetchall()
    assert len(rows) == JOBS
    for name, spent, charged, recounted, attempts in rows:
        assert attempts == 1, name
        assert spent == charged > 0, name
        assert abs(recounted - charged) <= 2, name


def test_kills_of_the_active_server_lose_and_repeat_nothing(
    home: Path, url: str, tmp_path: Path
) -> None:
    keep_commits(url)
    with replicas_at(home) as replicas, connect() as client:
        submit_all(client, tmp_path)
        for number in range(KILLS):
            before = replicas.wait().pid
            replicas.kill_active()
            assert replicas.wait().pid != before
            wait_until(lambda: client.server().pid)
            if number == KILLS // 2:
                crash_postgres(url)
        for number in range(JOBS):
            follow_to_end(client, f"j{number:02}")
        check_jobs(client, tmp_path)
        wait_until(lambda: not client.nodes())  # bills are complete when the gangs have ended
        check_bills(url)


def test_a_standby_has_loaded_its_program_before_it_takes_over(home: Path) -> None:
    with replicas_at(home) as replicas:
        active = replicas.wait()
        (standby,) = [each for each in replicas.running if each is not active]
        log = home.parent / "replicas.log"
        wait_until(lambda: "waiting to take over" in log.read_text())
        assert "uvloop" in Path(f"/proc/{standby.pid}/maps").read_text()
        active.send_signal(signal.SIGTERM)
        assert active.wait() == 0
        wait_until(lambda: replicas.active() is standby)


def test_a_server_on_another_host_is_replaced_once_its_lease_is_free(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The state folder is on a network file system, whose locks another host may not see."""
    (tmp_path / "run").mkdir(mode=0o700)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nfiler:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setenv("CAVVY_MOUNTS_FILE", str(mounts))
    with replicas_at(home) as replicas:
        active = replicas.wait()
        server = read_server(str(home))
        assert server is not None
        active.kill()
        active.wait()
        # as a lost host leaves it: with a fresh mark, which would keep others out for two minutes
        write_server(str(home), msgspec.structs.replace(server, host="lost-host"))
        replicas.wait()
        taken = read_server(str(home))
        assert taken is not None
        assert taken.host == host_name()
        assert taken.pid != server.pid
    wait_until(lambda: not server_holds_lock(str(home)))
