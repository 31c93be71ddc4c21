"""Several servers on one PostgreSQL: both serve and both reconcile, and a crash of each of them, or
of the database, loses no job and runs none twice.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import psycopg
import pytest
from tests.system.postgres import PostgresMissing, new_database
from tests.system.server_state import home_at, kill_server
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import ApiClient, ApiError, connect
from cavvy.client.embedded import ensure_server
from cavvy.client.patience import Patience

pytestmark = pytest.mark.system
JOBS = 24
_PRICE = "[providers.local]\nprice_usd_hr = 3.6\n"


class Site:
    """Two servers, `a` and `b`, with one database and one folder for files."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url, self.files = root, url, root / "f"
        self.homes = {name: self.files / name for name in "ab"}

    def connect(self, name: str) -> ApiClient:
        """A client of one server, which starts that server if it does not run."""
        return connect(home=str(self.homes[name]), patience=Patience(PATIENCE_S))

    def kill(self, name: str) -> None:
        assert kill_server(self.homes[name], signal.SIGKILL)

    def run(self, sql: str) -> None:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]  # our own SQL

    def ask(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            return connection.execute(sql).fetchall()  # type: ignore[call-overload,no-any-return]  # our own SQL

    def shards(self) -> dict[str, int]:
        """How many leases each server that lives holds, by its folder."""
        rows = self.ask(
            "SELECT r.folder, COUNT(*) FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder"
            " GROUP BY 1"
        )
        return {Path(str(folder)).name: int(str(count)) for folder, count in rows}

    def shared(self) -> bool:
        """Whether both servers have a part of the work."""
        found = self.shards()
        return len(found) == 2 and sum(found.values()) == 68


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    try:
        url = new_database()
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
    made = Site(tmp_path, url)
    # the tests' PostgreSQL may lose the newest transactions in a crash, unlike one for real use
    made.run(
        f"ALTER DATABASE {url.partition('@/')[2].partition('?')[0]} SET synchronous_commit = on"
    )
    made.files.mkdir(mode=0o700)
    given = {"CAVVY_SERVER_DATABASE": url, "CAVVY_SERVER_FILES": str(made.files)}
    with home_at(made.homes["a"], **given):
        (tmp_path / "f" / "settings.toml").write_text(_PRICE)
        try:
            yield made
        finally:
            with made.connect("a") as client:
                client.down()
                wait_until(lambda: not client.nodes())
            kill_server(made.homes["b"])


def test_no_crash_loses_a_job_or_runs_it_twice(site: Site) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    (site.root / "ran").mkdir()
    servers = cycle(site.homes)

    def submit(number: int) -> str:
        run = f"sleep 0.5; echo ran >> {site.root}/ran/job-{number}"
        with site.connect(next(servers)) as client:
            return client.submit(f"{{name: job-{number}, run: '{run}'}}", consent=True).name

    def crash_all() -> None:
        for name in site.homes:
            site.kill(name)
            with site.connect(name) as client:
                client.health()
            wait_until(site.shared)
        (victim,) = site.ask(
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
            "datname = current_database() LIMIT 1"
        )
        os.kill(int(str(victim[0])), signal.SIGKILL)  # PostgreSQL ends all and recovers

    with ThreadPoolExecutor(4) as threads:
        crashing = threads.submit(crash_all)
        names = list(threads.map(submit, range(JOBS)))
        crashing.result()
    assert len(set(names)) == JOBS
    with site.connect("b") as client:
        wait_until(lambda: _ended(client) == JOBS, lambda: str(client.jobs("default", limit=99)))
        assert {each.phase for each in client.jobs("default", limit=99).jobs} == {"done"}
        assert {each.verdict for each in client.audit("default").bills} == {"agrees"}
    ran = {path.name: path.read_text() for path in (site.root / "ran").iterdir()}
    assert ran == {f"job-{number}": "ran\n" for number in range(JOBS)}
    assert site.ask("SELECT COUNT(*) FROM attempts") == [(JOBS,)]
    recount = "SELECT COALESCE(SUM(amount), 0) FROM charges c WHERE c.job_id = j.id"
    assert site.ask(f"SELECT j.id FROM jobs j WHERE j.spent <> ({recount})") == []
    assert site.ask("SELECT COUNT(*) FROM jobs WHERE spent > 0") == [(JOBS,)]


def _ended(client: ApiClient) -> int:
    return sum(each.ended_at is not None for each in client.jobs("default", limit=99).jobs)


def test_a_command_in_a_job_is_refused_where_its_agent_is_not_heard(site: Site) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    with site.connect("a") as a, site.connect("b") as b:
        job = a.submit("{name: long, run: exec sleep 600}", consent=True).name
        wait_until(lambda: b.job("default", job).phase == "running")

        def says(client: ApiClient) -> str:
            try:
                client.open_tunnel("default", job)
            except ApiError as error:
                return error.code
            return ""

        wait_until(lambda: sorted((says(a), says(b))) == ["", "agent-elsewhere"])
        a.stop("default", job)  # of either server; the owner of the job acts at once
        wait_until(lambda: b.job("default", job).ended_at is not None)
