"""A database of any age opens, by one process or several at once, on SQLite and PostgreSQL."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from tests.contract.store_suite import (
    FULL_ORIGIN,
    NOW,
    begin,
    make_allocation,
    make_attempt,
    make_charge,
    make_event,
    make_host,
    make_job,
    make_node,
    store_url,
    submit,
)

from cavvy.domain.jobs import AttemptPhase, Job, JobPhase, NodePhase
from cavvy.domain.units import Money
from cavvy.store import migrate
from cavvy.store.base import AtomicWrite, SealedSecret, StoreUnusable
from cavvy.store.documents import encode, to_micros
from cavvy.store.drivers import make_driver
from cavvy.store.rows import JOB_COLUMNS, job_values
from cavvy.store.schema import make_ddl, metadata
from cavvy.store.sql import SqlStore

pytestmark = pytest.mark.anyio
OLD = "0001"


@pytest.fixture(params=["sqlite-wal", "sqlite-delete", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request.param, tmp_path)


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    with closing(migrate.make_engine(make_driver(url, journal="wal")).connect()) as connection:
        yield connection


def make_old(url: str) -> None:
    """A database at the first revision."""
    with connected(url) as connection:
        connection.exec_driver_sql("BEGIN")
        migrate.upgrade(connection, OLD)
        connection.exec_driver_sql("COMMIT")
        insert(connection, "meta", key="installation", value="install-1")


def insert(connection: sa.Connection, table: str, **values: object) -> None:
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


def write_old_job(connection: sa.Connection, job: Job) -> None:
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


JOB_COLUMNS_0001 = (
    "id project name user_name phase reason priority submitted_at since not_before stop_reason "
    "ended_at attempt"
    " exit_code rest document version"
)


def shape(connection: sa.Connection) -> dict[str, object]:
    """Everything that makes two schemas differ, without the order in which it was made."""
    inspector = sa.inspect(connection)
    tables = set(inspector.get_table_names()) - {migrate.VERSION_TABLE}
    return {
        table: {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in inspector.get_columns(table)
            },
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "unique": sorted(
                str(u["column_names"]) for u in inspector.get_unique_constraints(table)
            ),
            "foreign": sorted(
                str(
                    (
                        f["constrained_columns"],
                        f["referred_table"],
                        f["referred_columns"],
                        f["options"],
                    )
                )
                for f in inspector.get_foreign_keys(table)
            ),
            "indexes": indexes(connection, table),
        }
        for table in sorted(tables)
    }


def indexes(connection: sa.Connection, table: str) -> list[str]:
    """Their definitions, as the database itself spells them."""
    if connection.dialect.name == "sqlite":
        sql = (
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND "
            "tbl_name = :table"
        )
    else:
        sql = (
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() AND "
            "tablename = :table"
        )
    return sorted(
        " ".join(str(row[1]).split()) for row in connection.execute(sa.text(sql), {"table": table})
    )


def test_the_known_revisions_are_the_files() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrate.__file__).with_name("migrations")))
    script = ScriptDirectory.from_config(config)
    assert (
        tuple(reversed([revision.revision for revision in script.walk_revisions()]))
        == migrate.REVISIONS
    )
    assert script.get_heads() == [migrate.HEAD]


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_shipped_schema_is_new(dialect: str) -> None:
    """When this fails: python -m cavvy.store.schema"""
    assert (
        Path(migrate.__file__).with_name("migrations") / f"head.{dialect}.sql"
    ).read_text() == make_ddl(dialect)


@pytest.mark.parametrize("kind", ["sqlite-wal", "postgres"])
def test_migrations_make_the_schema(kind: str, tmp_path: Path) -> None:
    shapes = []
    for name in ("migrated", "metadata", "shipped"):
        (tmp_path / name).mkdir()
        with connected(store_url(kind, tmp_path / name)) as connection:
            connection.exec_driver_sql("BEGIN")
            match name:
                case "migrated":
                    migrate.upgrade(connection)
                case "metadata":
                    metadata.create_all(connection, checkfirst=False)
                case "shipped":
                    text = (
                        Path(migrate.__file__).with_name("migrations")
                        / f"head.{connection.dialect.name}.sql"
                    )
                    for statement in filter(str.strip, text.read_text().split(";\n")):
                        connection.exec_driver_sql(statement)
            connection.exec_driver_sql("COMMIT")
            shapes.append(shape(connection))
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0].keys() >= {"jobs", "documents", "allocations"}


async def test_a_fresh_database_is_at_head(url: str) -> None:
    store = SqlStore(url)
    await store.open()
    await store.close()
    with connected(url) as connection:
        rows = connection.exec_driver_sql(
            f"SELECT version_num FROM {migrate.VERSION_TABLE}"
        ).fetchall()
    assert [tuple(row) for row in rows] == [(migrate.HEAD,)]


async def test_jobs_in_flight_go_on_after_a_migration(url: str, tmp_path: Path) -> None:
    make_old(url)
    job = make_job("j1", phase=JobPhase.RUNNING, attempt=1, origin=FULL_ORIGIN, version=4)
    waiting = make_job("j2", name="waiting", version=1)
    attempt = make_attempt(job, phase=AttemptPhase.RUNNING, version=3)
    node = make_node(attempt, phase=NodePhase.RUNNING, claim="n", version=7)
    charges = [make_charge(attempt, 40), make_charge(attempt, 2, since=60)]
    secret = SealedSecret(project="p", name="TOKEN", sealed=b"\x01", updated_at=NOW)
    with connected(url) as connection:
        write_old_job(connection, job)
        write_old_job(connection, waiting)
        document = encode(attempt)
        insert(
            connection,
            "attempts",
            id="j1-1",
            job_id="j1",
            project="p",
            number=1,
            gang=attempt.gang,
            phase="running",
            document=document,
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
        for charge in charges:
            since, until = (
                int((time - NOW).total_seconds() * 1e6) for time in (charge.since, charge.until)
            )
            base = to_micros(NOW)
            insert(
                connection,
                "charges",
                attempt_id="j1-1",
                rank=0,
                kind="node",
                since=base + since,
                project="p",
                job_id="j1",
                until=base + until,
                rate=charge.rate.micros_per_hour,
                amount=charge.amount.micros,
            )
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
            updated_at=to_micros(NOW),
        )
    store = SqlStore(url)
    await store.open()
    try:
        assert await store.installation() == "install-1"
        assert await store.job("j1") == job
        assert await store.waiting(NOW, 5) == [waiting]
        assert await store.unfinished() == ["j1", "j2"]
        assert await store.open_attempts() == [attempt]
        assert await store.attempt_of_gang(attempt.gang) == attempt
        assert await store.nodes("j1-1") == [node]
        assert await store.charges("j1") == charges
        assert [event.text for event in await store.events("j1")] == ["hello"]
        assert await store.allocations() == [make_allocation(attempt.gang, "GPU-0")]
        assert await store.hosts() == [make_host()]
        assert await store.secrets("p") == [secret]
        summaries = {summary.id: summary for summary in (await store.list_jobs("p")).jobs}
        assert (summaries["j1"].spent, summaries["j2"].spent) == (Money(42), Money(0))
        assert set(await store.snapshots()) == {FULL_ORIGIN.snapshot}
        done = replace(job, phase=JobPhase.DONE, exit_code=0)
        ended = replace(attempt, phase=AttemptPhase.ENDED)
        more = [make_charge(attempt, 50, until=90)]
        await store.commit(
            AtomicWrite(
                jobs=[done],
                attempts=[ended],
                charges=more,
                events=[make_event(job)],
                release=[attempt.gang],
            )
        )
        assert (await store.list_jobs("p", {JobPhase.DONE})).jobs[0].spent == Money(52)
        assert (await submit(store, "j3", name="waiting")).name == "waiting-2"
    finally:
        await store.close()
    if url.startswith("sqlite"):
        check_backup(tmp_path / "cavvy.db.backup-0001")


def check_backup(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    with connected(f"sqlite:///{path}") as connection:
        assert (
            connection.exec_driver_sql(f"SELECT version_num FROM {migrate.VERSION_TABLE}").scalar()
            == OLD
        )
        assert (
            connection.exec_driver_sql("SELECT phase FROM jobs WHERE id = 'j1'").scalar()
            == "running"
        )
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


async def test_a_database_of_a_newer_program_is_left_alone(url: str) -> None:
    store = SqlStore(url)
    await store.open()
    await begin(store, await submit(store, "j1"))
    await store.close()
    with connected(url) as connection:
        connection.exec_driver_sql(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '0999'")
        before = shape(connection)
    with pytest.raises(StoreUnusable, match=rf"revision 0999.*up to {migrate.HEAD}.*[Ii]nstall"):
        await SqlStore(url).open()
    with connected(url) as connection:
        assert shape(connection) == before
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM jobs").scalar() == 1


_KILLED = """
import asyncio, os, signal, sys
from alembic import op
from cavvy.store.sql import SqlStore
op.create_index = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(SqlStore(sys.argv[1]).open())
"""


async def test_a_migration_killed_half_way_can_be_made_again(url: str) -> None:
    make_old(url)
    job = make_job("j1", origin=FULL_ORIGIN, version=1)
    with connected(url) as connection:
        write_old_job(connection, job)
        before = shape(connection)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, url], capture_output=True, timeout=60, text=True
    )
    assert killed.returncode == -9, killed.stderr
    with connected(url) as connection:
        assert shape(connection) == before
    store = SqlStore(url)
    await store.open()
    assert await store.job("j1") == job
    await store.close()


_OPEN = """
import asyncio, sys
from tests.contract.store_suite import submit
from cavvy.store.sql import SqlStore

async def main(url, number):
    store = SqlStore(url)
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
    told = [await asyncio.to_thread(opener.communicate, timeout=60) for opener in openers]
    assert [opener.returncode for opener in openers] == [0] * 4, told
    assert len({out for out, _ in told}) == 1
    with connected(url) as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM jobs").scalar() == 4
        assert connection.exec_driver_sql(
            f"SELECT version_num FROM {migrate.VERSION_TABLE}"
        ).fetchall() == [(migrate.HEAD,)]
