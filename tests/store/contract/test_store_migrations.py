"""A database of any age opens, by one process or several at once, on SQLite and PostgreSQL."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract import store_suite
from tests.waits import PATIENCE_S

from cavvy.domain.events import Charge
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, NodePhase, UnsureBill
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.server.open_state import make_tidy
from cavvy.store import migrate, own_tables
from cavvy.store.base import AtomicWrite, LedgerFilter, SealedSecret, StoreUnusable
from cavvy.store.documents import encode, to_micros
from cavvy.store.drivers import DatabaseSession, make_driver
from cavvy.store.ledger import make_subject
from cavvy.store.own_tables import list_own_migrations
from cavvy.store.rows import ALLOCATIONS, CHARGES, EVENTS, HOSTS, JOB_COLUMNS, job_values
from cavvy.store.sql import Store

OLD = "0001"
# tables of capabilities that migrations of the core made
ADOPTED = {
    *("notice_targets", "notices"),
    *("edge_invitations", "edge_devices", "edge_samples", "edge_sites", "edge_settings"),
    *("models", "model_repositories", "rollouts"),
    *("rung_values",),
}


DAY = timedelta(days=1)


@pytest.fixture(params=["sqlite-wal", "sqlite-delete", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_suite.store_url(request.param, tmp_path)


@contextmanager
def connected(url: str) -> Iterator[DatabaseSession]:
    with closing(make_driver(url, journal="wal").connect()) as session:
        yield session


def make_old(url: str, until: str = OLD) -> None:
    """A database at the first revision, or at this one."""
    with connected(url) as session:
        session.begin()
        for number, migration in migrate.MIGRATIONS.items():
            if number <= until:
                migrate.run_script(session, migration.sql)
        insert(session, migrate.VERSION_TABLE, version_num=until)
        insert(session, "meta", key="installation", value="install-1")
        session.commit()


def insert(session: DatabaseSession, table: str, **values: object) -> None:
    marks = ", ".join("?" * len(values))
    sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"
    session.run(sql, list(values.values()))


def value(session: DatabaseSession, sql: str) -> object:
    """The only column of the first row."""
    row = session.run(sql).fetchone()
    assert row is not None
    return row[0]


def write_old_job(connection: DatabaseSession, job: JobRecord) -> None:
    """As the program of the first revision wrote it."""
    values = dict(zip(JOB_COLUMNS, job_values(job, 1), strict=True))
    old = {name: values[name] for name in JOB_COLUMNS_0001.split()}
    insert(connection, "jobs", **old, place="fake/here/big:0/on-demand")
    insert(connection, "documents", job_id=job.id, task=encode(job.task), origin=encode(job.origin))
    insert(
        connection,
        "events",
        project="p",
        job_id=job.id,
        attempt=0,
        at=1_000_000,
        kind="queued",
        text="hello",
    )


def write_old_charge(connection: DatabaseSession, charge: Charge) -> None:
    insert(
        connection,
        "charges",
        attempt_id=charge.attempt_id,
        rank=0,
        kind="node",
        since=to_micros(charge.since),
        project="p",
        job_id=charge.job_id,
        until=to_micros(charge.until),
        rate=charge.rate.micros_per_hour,
        amount=charge.amount.micros,
    )


JOB_COLUMNS_0001 = (
    "id project name user_name phase reason priority submitted_at since not_before stop_reason "
    "ended_at attempt"
    " exit_code rest document version"
)


def shape(session: DatabaseSession) -> dict[str, object]:
    """Everything that makes two schemas differ, without the order in which it was made."""
    return (_sqlite_shape if session.driver.is_sqlite else _postgresql_shape)(session)


def _sqlite_shape(session: DatabaseSession) -> dict[str, object]:
    def rows(sql: str) -> list[object]:
        return sorted(map(str, session.run(sql).fetchall()))

    tables = session.run("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: {
            "columns": rows(
                f'SELECT name, type, "notnull", dflt_value, pk {_info("table", table)}'
            ),
            "foreign": rows(
                f'SELECT "table", "from", "to", on_delete {_info("foreign_key_list", table)}'
            ),
            "indexes": rows(
                f"SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = '{table}'"
            ),
            "unique": [
                rows(f"SELECT seqno, name {_info('index_info', name)}")
                for (name,) in sorted(
                    session.run(
                        f'SELECT name {_info("index_list", table)} WHERE "unique" = 1'
                    ).fetchall()
                )
            ],
        }
        for (table,) in sorted(tables)
    }


def _info(what: str, name: str) -> str:
    return f"FROM pragma_{'table_info' if what == 'table' else what}('{name}')"


def _postgresql_shape(session: DatabaseSession) -> dict[str, object]:
    tables = session.run("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    of_table = "= (quote_ident(?))::regclass"
    queries = {
        "columns": "SELECT attname, format_type(atttypid, atttypmod), attnotnull, attcollation,"
        " pg_get_expr(adbin, adrelid) FROM pg_attribute LEFT JOIN pg_attrdef"
        f" ON adrelid = attrelid AND adnum = attnum WHERE attnum > 0 AND attrelid {of_table}",
        "constraints": "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
        f" WHERE conrelid {of_table}",
        "indexes": "SELECT indexname, indexdef FROM pg_indexes"
        " WHERE schemaname = current_schema() AND tablename = ?",
    }
    return {
        table: {
            name: sorted(map(str, session.run(sql, (table,)).fetchall()))
            for name, sql in queries.items()
        }
        for (table,) in sorted(tables.fetchall())
    }


def test_the_known_revisions_have_no_gap() -> None:
    numbers = [int(revision) for revision in migrate.MIGRATIONS]
    assert numbers == list(range(1, len(numbers) + 1))
    names = [each.name for each in migrate._read_migrations()]
    assert len(names) == len(numbers)  # no number stands twice
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+", name) for name in names)
    assert all(each.sql.strip() for each in migrate.MIGRATIONS.values())
    assert int(migrate.HEAD) == numbers[-1]


@pytest.mark.parametrize("kind", ["sqlite-wal", "postgres"])
def test_the_shipped_schema_has_the_columns_of_the_rows(kind: str, tmp_path: Path) -> None:
    with connected(store_suite.store_url(kind, tmp_path)) as session:
        session.begin()
        migrate.run_script(session, migrate.SCHEMA.read_text())
        tables = {
            "jobs": JOB_COLUMNS,
            "events": EVENTS.columns,
            "charges": CHARGES.columns,
            "hosts": HOSTS.columns,
            "allocations": ALLOCATIONS.columns,
        }
        for table, columns in tables.items():
            session.run(f"SELECT {', '.join(columns)} FROM {table}")


@pytest.mark.parametrize("kind", ["sqlite-wal", "postgres"])
def test_migrations_make_the_schema(kind: str, tmp_path: Path) -> None:
    """When this fails: make the change of the last migration in schema.sql too."""
    shapes = []
    migrations = [each.sql for each in migrate.MIGRATIONS.values()]
    for name, scripts in (("migrated", migrations), ("shipped", [migrate.SCHEMA.read_text()])):
        (tmp_path / name).mkdir()
        with connected(store_suite.store_url(kind, tmp_path / name)) as session:
            session.begin()
            for script in scripts:
                migrate.run_script(session, script)
            for own in list_own_migrations():
                migrate.run_own(session, own)
            session.commit()
            shapes.append(shape(session))
    migrated, shipped = shapes
    # old databases keep the tables of a capability that was taken out
    assert {name: migrated.get(name) for name in shipped} == shipped
    assert migrated.keys() - shipped.keys() <= ADOPTED
    assert shipped.keys() >= {"jobs", "documents", "allocations"}


async def test_a_fresh_database_is_at_head(url: str) -> None:
    store = Store(url)
    await store.open()
    await store.close()
    with connected(url) as connection:
        rows = connection.run(f"SELECT version_num FROM {migrate.VERSION_TABLE}").fetchall()
    assert [tuple(row) for row in rows] == [(migrate.HEAD,)]


@pytest.mark.parametrize("first", [OLD, "0046"])
async def test_tables_that_no_capability_adopts_are_left_out(
    url: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database whose tables the core made, before they were a capability's, states none."""
    installed = list_own_migrations()

    def install(*names: str) -> None:
        some = [each for each in installed if each.capability in names]
        for module in (migrate, own_tables):
            monkeypatch.setattr(module, "list_own_migrations", lambda: some)

    make_old(url, until=first)
    install()
    store = Store(url)
    await store.open()
    assert await store.list_left_out() == [], "tables without rows name no files"
    with connected(url) as session:
        insert(session, "models", project="p", name="m@1", snapshot="s", document="{}", version=1)
    assert await store.list_left_out() == ["models"]
    swept: list[object] = []

    class Blobs:
        def sweep(self, snapshots: object, **_: object) -> int:
            swept.append(snapshots)
            return 0

    await make_tidy(store, Blobs())(datetime.now(UTC))  # type: ignore[arg-type]
    assert swept == [], "models may name the files"
    await store.close()
    install("models")
    store = Store(url)
    await store.open()
    assert await store.list_left_out() == []
    await make_tidy(store, Blobs())(datetime.now(UTC))  # type: ignore[arg-type]
    await store.close()
    assert swept
    install()
    with connected(url) as session:
        assert own_tables.list_left_out(session) == ["models"]


async def check_rest(store: Store, first: Attempt) -> None:
    """The events are there, and the charges so far are the first entries of the ledger."""
    assert [event.text for event in await store.events("j1")] == ["hello"]
    counted_since = datetime.fromisoformat(await store.fact("requests-counted-since") or "")
    assert abs(datetime.now(UTC) - counted_since.replace(tzinfo=counted_since.tzinfo or UTC)) < DAY
    opening = await store.ledger_lines(LedgerFilter())
    assert [(each.entry.id, each.entry.amount) for each in opening] == [
        ("j0-1/0/1", Money(8)),
        ("j1-1/0/1", Money(40)),
        ("j1-1/0/2", Money(2)),
    ]
    assert [each.subject.tags for each in opening] == [{}, *[{"team": "vision"}] * 2]
    assert opening[0].subject == make_subject(first, "", "before", "", {})
    assert [each.subject.account for each in opening] == ["fake@p", "fake", "fake"]


async def test_jobs_in_flight_go_on_after_a_migration(url: str, tmp_path: Path) -> None:
    make_old(url)
    job = store_suite.make_job(
        "j1",
        phase=JobPhase.RUNNING,
        attempt=1,
        origin=store_suite.FULL_ORIGIN,
        version=4,
        task=TaskSpec(name="train", run="true", tags={"team": "vision"}),
    )
    waiting = store_suite.make_job("j2", name="waiting", version=1)
    attempt = store_suite.make_attempt(job, phase=AttemptPhase.RUNNING, version=3)
    before = store_suite.make_job("j0", name="before", phase=JobPhase.DONE, version=1)
    handed_on = store_suite.make_attempt(
        before,
        gang=f"{attempt.gang}@j0-1",
        offer=replace(attempt.offer, credential="p"),
        phase=AttemptPhase.ENDED,
        unsure_bill=UnsureBill(latest=store_suite.NOW, more=Money(7)),
        version=3,
    )
    node = store_suite.make_node(attempt, phase=NodePhase.RUNNING, claim="n", version=7)
    charges = [store_suite.make_charge(attempt, 40), store_suite.make_charge(attempt, 2, since=60)]
    secret = SealedSecret(project="p", name="TOKEN", sealed=b"\x01", updated_at=store_suite.NOW)
    with connected(url) as connection:
        write_old_job(connection, job)
        write_old_job(connection, waiting)
        write_old_job(connection, before)
        for each in (attempt, handed_on):
            insert(
                connection,
                "attempts",
                id=each.id,
                job_id=each.job_id,
                project="p",
                number=1,
                gang=each.gang,
                phase=str(each.phase),
                document=encode(each).replace('"unsure_bill":', '"unseen_end":'),
                version=3,
            )
        insert(
            connection,
            "nodes",
            attempt_id="j1-1",
            rank=0,
            project="p",
            document=encode(node),
            version=7,
        )
        for charge in (*charges, store_suite.make_charge(handed_on, 8)):
            write_old_charge(connection, charge)
        insert(
            connection,
            "hosts",
            name="local/here",
            cpus=4.0,
            memory_mib=8192,
            devices='["GPU-0","GPU-1"]',
        )
        insert(
            connection,
            "allocations",
            gang=attempt.gang,
            rank=0,
            host="local/here",
            project="p",
            cpus=1.0,
            memory_mib=1024,
            devices='["GPU-0"]',
        )
        insert(
            connection, "held_devices", host="local/here", device="GPU-0", gang=attempt.gang, rank=0
        )
        insert(
            connection,
            "secrets",
            project="p",
            name="TOKEN",
            sealed=b"\x01",
            updated_at=to_micros(store_suite.NOW),
        )
    store = Store(url)
    await store.open()
    try:
        assert await store.installation() == "install-1"
        assert await store.job("j1") == job
        assert await store.waiting(store_suite.NOW, [waiting.id]) == [waiting]
        assert await store.unfinished() == ["j1", "j2"]
        assert [*await store.open_attempts(), *await store.attempts("j0")] == [attempt, handed_on]
        assert await store.attempt_of_gang(attempt.gang) == attempt
        assert await store.nodes("j1-1") == [node]
        assert [*await store.charges("j1"), await store.gang_spent(attempt.gang)] == [
            *charges,
            Money(42 + 8),
        ]
        await check_rest(store, handed_on)
        assert await store.allocations() == [store_suite.make_allocation(attempt.gang, "GPU-0")]
        assert await store.hosts() == [store_suite.make_host()]
        assert await store.secrets("p") == [secret]
        summaries = {summary.id: summary for summary in (await store.list_jobs("p")).jobs}
        assert (summaries["j1"].spent, summaries["j2"].spent) == (Money(42), Money(0))
        assert (summaries["j1"].tags, summaries["j2"].tags) == ({"team": "vision"}, {})
        assert set(await store.snapshots()) == {store_suite.FULL_ORIGIN.snapshot}
        done = replace(job, phase=JobPhase.DONE, exit_code=0)
        ended = replace(attempt, phase=AttemptPhase.ENDED)
        more = [store_suite.make_charge(attempt, 50, until=90), charges[1]]  # the whole bill so far
        await store.commit(
            AtomicWrite(
                jobs=[done],
                attempts=[ended],
                charges=more,
                events=[store_suite.make_event(job)],
                release=[attempt.gang],
            )
        )
        assert (await store.list_jobs("p", {JobPhase.DONE})).jobs[0].spent == Money(52)
        assert (await store_suite.submit(store, "j3", name="waiting")).name == "waiting-2"
    finally:
        await store.close()
    if url.startswith("sqlite"):
        check_backup(tmp_path / "cavvy.db.backup-0001")


def check_backup(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    with connected(f"sqlite:///{path}") as connection:
        assert value(connection, f"SELECT version_num FROM {migrate.VERSION_TABLE}") == OLD
        assert value(connection, "SELECT phase FROM jobs WHERE id = 'j1'") == "running"
        assert value(connection, "PRAGMA integrity_check") == "ok"


async def test_a_database_of_a_newer_program_is_left_alone(url: str) -> None:
    store = Store(url)
    await store.open()
    await store_suite.begin(store, await store_suite.submit(store, "j1"))
    await store.close()
    with connected(url) as connection:
        connection.run(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '0999'")
        before = shape(connection)
    with pytest.raises(StoreUnusable, match=rf"revision 0999.*up to {migrate.HEAD}.*[Ii]nstall"):
        await Store(url).open()
    with connected(url) as connection:
        assert shape(connection) == before
        assert value(connection, "SELECT COUNT(*) FROM jobs") == 1


_KILLED = """
import asyncio, os, signal, sys
from cavvy.store.drivers import DatabaseSession
from cavvy.store.sql import Store
run = DatabaseSession.run
def die(self, sql, values=()):
    if sql.startswith("CREATE INDEX"):
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, sql, values)
DatabaseSession.run = die
asyncio.run(Store(sys.argv[1]).open())
"""


async def test_a_migration_killed_half_way_can_be_made_again(url: str) -> None:
    make_old(url)
    job = store_suite.make_job("j1", origin=store_suite.FULL_ORIGIN, version=1)
    with connected(url) as connection:
        write_old_job(connection, job)
        before = shape(connection)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, url], capture_output=True, timeout=60, text=True
    )
    assert killed.returncode == -9, killed.stderr
    with connected(url) as connection:
        assert shape(connection) == before
    store = Store(url)
    await store.open()
    assert await store.job("j1") == job
    await store.close()


_OPEN = """
import asyncio, sys
from tests.contract.store_suite import submit
from cavvy.store.sql import Store

async def main(url, number):
    store = Store(url)
    print("ready", flush=True)
    sys.stdin.readline()
    await store.open()
    await submit(store, "new-" + number)
    print(await store.installation(), len((await store.list_jobs("p")).jobs) > 0)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("age", ["fresh", "old"])
async def test_many_open_at_once(url: str, age: str) -> None:
    if age == "old":
        make_old(url)
    command = [sys.executable, "-c", _OPEN, url]
    openers = [
        subprocess.Popen([*command, str(i)], stdin=-1, stdout=-1, stderr=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    told = [await asyncio.to_thread(opener.communicate, timeout=PATIENCE_S) for opener in openers]
    assert [opener.returncode for opener in openers] == [0] * 4, told
    assert len({out for out, _ in told}) == 1
    with connected(url) as connection:
        assert value(connection, "SELECT COUNT(*) FROM jobs") == 4
        assert connection.run(f"SELECT version_num FROM {migrate.VERSION_TABLE}").fetchall() == [
            (migrate.HEAD,)
        ]
