"""What only a server can do: go away, come back, sort by its own rules, and serve several of us
at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.contract.store_suite import NOW, make_event, make_host, store_url, submit
from tests.waits import wait_until

from cavvy.domain.values import replace
from cavvy.store.base import (
    AtomicWrite,
    HashMismatch,
    RowNotFound,
    StaleVersion,
    StoreFull,
    StoreUnusable,
)
from cavvy.store.drivers import DatabaseSession, make_driver, translate
from cavvy.store.sql import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return store_url("postgres", tmp_path)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = Store(url)
    await opened.open()
    yield opened
    await opened.close()


def connect(url: str) -> "psycopg.Connection[Any]":
    """A connection beside the store's own."""
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


async def test_the_store_outlives_its_connections(store: Store, url: str) -> None:
    job = await submit(store, "j1")
    await asyncio.gather(*(store.list_jobs(None) for _ in range(20)))
    with closing(connect(url)) as other:
        ended = other.execute(
            "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    assert ended is not None
    assert ended[0] >= 2
    jobs = await asyncio.gather(*(store.job("j1") for _ in range(8)))
    assert jobs == [job] * 8
    await asyncio.gather(*(submit(store, f"k{i}") for i in range(8)))
    assert len((await store.list_jobs(None)).jobs) == 9


async def test_a_server_that_is_away_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="check that the database runs") as told:
        await Store(f"postgresql+psycopg://u:secret@/x?host={tmp_path}").open()
    assert "secret" not in str(told.value)


async def test_ids_are_sorted_by_byte(store: Store) -> None:
    for job_id in ("a-1", "B-1", "a_1", "Ab", "aa"):
        await submit(store, job_id)
    assert [job.id for job in (await store.list_jobs(None)).jobs] == sorted(
        ("a-1", "B-1", "a_1", "Ab", "aa")
    )[::-1]


async def test_the_first_jobs_are_found_without_a_look_at_the_others(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submit(store, "j1")
    with closing(connect(url)) as other:
        other.execute(
            "INSERT INTO jobs SELECT (jsonb_populate_record(j, jsonb_build_object('id', j.id || n,"
            " 'name', j.name || n, 'project', 'p' || n % 200))).*"
            " FROM jobs j, generate_series(1, 20000) n"
        )
        other.execute("ANALYZE jobs")
        asked: list[tuple[str, Sequence[object]]] = []
        run = DatabaseSession.run

        def ask(session: DatabaseSession, sql: str, values: Sequence[object] = ()) -> Any:
            asked.append((sql, values))
            return run(session, sql, values)

        monkeypatch.setattr(DatabaseSession, "run", ask)
        firsts = await store.queue.firsts(NOW)
        assert len(firsts) == 201
        blocks = 0
        for sql, values in asked:
            plan = other.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql.replace('?', '%s')}", values
            ).fetchone()
            assert plan is not None
            top = plan[0][0]["Plan"]
            blocks += top["Shared Hit Blocks"] + top["Shared Read Blocks"]
    # two searches and one row for each line, and three to four blocks for each of them
    assert 201 <= blocks <= 201 * 20


async def test_writers_in_opposite_order_do_not_lock_each_other_out(store: Store) -> None:
    first, second = await submit(store, "j1"), await submit(store, "j2")
    for version in range(1, 20):
        jobs = [replace(first, version=version), replace(second, version=version)]
        results = await asyncio.gather(
            store.commit(AtomicWrite(jobs=jobs)),
            store.commit(AtomicWrite(jobs=jobs[::-1])),
            return_exceptions=True,
        )
        assert sorted(type(result).__name__ for result in results) == ["NoneType", "StaleVersion"]


async def test_a_transaction_that_lost_a_deadlock_is_tried_again(store: Store) -> None:
    tries: list[DatabaseSession] = []

    def lose(times: int) -> Callable[[DatabaseSession], str]:
        def work(session: DatabaseSession) -> str:
            tries.append(session)
            session.run("INSERT INTO meta (key, value) VALUES (?, 'x')", (f"tried-{times}",))
            if len(tries) <= times:
                raise psycopg.errors.DeadlockDetected("told")
            return "done"

        return work

    assert await store._write(lose(2)) == "done"
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(StaleVersion):
        await store._write(lose(99))


async def test_events_of_a_job_are_seen_in_their_order(store: Store, url: str) -> None:
    """A writer waits for another one that took an earlier id and has not committed yet."""
    job = await submit(store, "j1")
    with closing(connect(url)) as other, closing(connect(url)) as watch:
        other.execute("BEGIN")
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('j1', 0))")
        other.execute(
            "INSERT INTO events (project, job_id, attempt, at, kind, text) VALUES ('p', 'j1', 0, "
            "0, 'x', 'first')"
        )
        late = asyncio.ensure_future(store.commit(AtomicWrite(events=[make_event(job, "second")])))
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not late.done() and watch.execute(waits).fetchone() is None:
            await asyncio.sleep(0.01)
        assert not late.done()
        other.execute("COMMIT")
        await late
    assert [event.text for event in await store.events("j1")] == ["submitted", "first", "second"]


async def test_two_stores_share_the_work(store: Store, url: str) -> None:
    other = Store(url)
    await other.open()
    await store.put_host(make_host())
    jobs = await asyncio.gather(*(submit((store, other)[i % 2], f"j{i:02}") for i in range(40)))
    assert {job.name for job in jobs} == {"train", *(f"train-{i}" for i in range(2, 41))}
    changed = replace(jobs[0], origin=replace(jobs[0].origin, commit="new"))
    await other.commit(AtomicWrite(jobs=[changed]))
    assert (await store.job("j00")).origin.commit == "new"
    await other.close()


def test_errors_say_what_to_do_next(tmp_path: Path) -> None:
    driver = make_driver("postgresql+psycopg://u@/x", journal="auto")
    errors = psycopg.errors
    wanted = {
        errors.DiskFull: StoreFull,
        errors.ForeignKeyViolation: RowNotFound,
        errors.DeadlockDetected: StaleVersion,
        errors.SerializationFailure: StaleVersion,
        errors.ReadOnlySqlTransaction: StoreUnusable,
        errors.InsufficientPrivilege: StoreUnusable,
        errors.AdminShutdown: StoreUnusable,
        errors.TooManyConnections: StoreUnusable,
        errors.InvalidCatalogName: StoreUnusable,
        errors.NumericValueOutOfRange: HashMismatch,
        psycopg.OperationalError: StoreUnusable,
        psycopg.DataError: HashMismatch,  # a text with a NUL character
    }
    assert {kind: type(translate(kind("told"), driver)) for kind in wanted} == wanted
    assert isinstance(translate(errors.SyntaxError("a bug"), driver), errors.SyntaxError)


def test_a_transaction_that_postgres_ended_is_one_of_an_unreachable_database(url: str) -> None:
    """As after a machine that was suspended in a transaction: the renewals go on."""
    driver = make_driver(url, journal="auto")
    with closing(driver.connect()) as session, closing(connect(url)) as watch:
        session.run("SET idle_in_transaction_session_timeout = '100ms'")
        backend = session.run("SELECT pg_backend_pid()").fetchone()
        session.begin()
        session.run("SELECT 1")
        alive = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: watch.execute(alive, backend).fetchone() is None)
        with pytest.raises(psycopg.Error) as told:
            session.run("SELECT 1")
    assert isinstance(translate(told.value, driver), StoreUnusable)


def test_repeated_statements_are_prepared_and_answer_as_before(url: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run("CREATE TEMPORARY TABLE t (a TEXT, b BIGINT, c DOUBLE PRECISION, d BOOLEAN)")
        rows = [
            ("ä ' \\ %s $1", 1, 0.1, True),
            ("", -(2**63), 1e300, False),
            (None, None, None, None),
            ("x", 2**63 - 1, 4, True),
        ]
        for row in rows * 7:
            assert session.run("INSERT INTO t VALUES (?, ?, ?, ?)", row).rowcount == 1
        for row in rows * 7:
            sql = "SELECT a, b, c, d FROM t WHERE a = ? OR (a IS NULL AND CAST(? AS TEXT) IS NULL)"
            found = session.run(sql, (row[0], row[0]))
            assert (found.fetchone(), found.rowcount) == (row, 7)
            assert found.fetchall() == [row] * 6
            assert found.fetchone() is None
        prepared = session.run("SELECT COUNT(*) FROM pg_prepared_statements").fetchone()
        assert prepared is not None
        assert prepared[0] >= 4
        for name, error in (("a\0b", psycopg.DataError), ("\ud800", UnicodeEncodeError)):
            with pytest.raises(error) as told:
                session.run(sql, (name, "x"))
            assert isinstance(translate(told.value, session.driver), HashMismatch)


def test_a_prepared_statement_raises_the_errors_of_the_driver(url: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run("CREATE TEMPORARY TABLE t (a TEXT PRIMARY KEY, b INTEGER)")
        for number in range(10):
            session.run("INSERT INTO t VALUES (?, ?)", (f"a{number}", number))
        for _ in range(10):
            with pytest.raises(psycopg.errors.UniqueViolation):
                session.run("INSERT INTO t VALUES (?, ?)", ("a1", 1))
            with pytest.raises(psycopg.errors.NumericValueOutOfRange):
                session.run("INSERT INTO t VALUES (?, ?)", ("b", 2**40))
            with pytest.raises(psycopg.errors.NumericValueOutOfRange):
                session.run("INSERT INTO t VALUES (?, ?)", ("b", 2**70))
        with pytest.raises(psycopg.DataError):
            session.run("INSERT INTO t VALUES (?, ?)", ("a\0b", 1))
        session.begin()
        with pytest.raises(psycopg.errors.UniqueViolation):
            session.run("INSERT INTO t VALUES (?, ?)", ("a1", 1))
        assert session.in_transaction
        session.rollback()
        assert not session.in_transaction
        assert session.run("SELECT COUNT(*) FROM t").fetchone() == (10,)


def test_statements_that_were_put_off_fail_in_their_order(url: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run("CREATE TEMPORARY TABLE t (a TEXT PRIMARY KEY, b BIGINT)")
        insert, update = "INSERT INTO t VALUES (?, ?)", "UPDATE t SET b = ? WHERE a = ?"
        for number in range(8):  # before and after the statements are prepared
            name = f"a{number}"
            session.begin()
            session.run_later(insert, (name, 1))
            session.run_later(update, (2, name), StaleVersion("told"))
            first, second = session.run_all([("SELECT b FROM t WHERE a = ?", (name,))] * 2)
            assert first.fetchall() == second.fetchall() == [(2,)]
            session.commit()
            session.begin()
            session.run_later(update, (3, name))
            session.run_later(update, (3, "none"), StaleVersion("told"))
            session.run_later(insert, (name, 1))  # would violate the key
            with pytest.raises(StaleVersion, match="told"):
                session.commit()
            session.rollback()
            session.begin()
            session.run_later(insert, (name, 1))
            session.run_later(update, (3, "none"), StaleVersion("told"))
            with pytest.raises(psycopg.errors.UniqueViolation):
                session.run("SELECT 1", ())
            session.rollback()
            session.begin()
            session.run_later(update, (3, name))
            session.rollback()  # before anything was sent
            assert session.run("SELECT MAX(b) FROM t", ()).fetchone() == (2,)
            assert not session.in_transaction


def test_large_values_that_travel_together_do_not_block_both_sides(url: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        text, ask = "x" * 1_000_000, "SELECT CAST(? AS TEXT)"
        session.begin()
        found = session.run_all([(ask, (text,))] * 60)
        assert [cursor.fetchone() == (text,) for cursor in found] == [True] * 60
        session.commit()


@pytest.mark.parametrize("late", [False, True])
async def test_work_whose_connection_broke_before_the_commit_is_repeated_once(
    store: Store, url: str, late: bool
) -> None:
    tries = []

    def work(session: DatabaseSession) -> str:
        tries.append(session.run("SELECT pg_backend_pid()").fetchone() if late else None)
        with closing(connect(url)) as other:
            if len(tries) == 1:
                others = "usename = current_user AND pid <> pg_backend_pid()"
                others += " AND datname = current_database()"
                other.execute(
                    f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}"
                )
        session.run_later("INSERT INTO meta (key, value) VALUES ('once', ?)", (str(len(tries)),))
        return "done"

    await store.put_fact("before", "x")
    assert await store._write(work) == "done"
    assert (len(tries), await store.fact("once")) == (2, "2")

    def break_always(session: DatabaseSession) -> None:
        session.run("INSERT INTO meta (key, value) VALUES ('never', 'x')")
        with closing(connect(url)) as other:
            pid = session.run("SELECT pg_backend_pid()").fetchone()
            assert pid is not None
            other.execute("SELECT pg_terminate_backend(%s, 5000)", pid)

    with pytest.raises(StoreUnusable):
        await store._write(break_always)
    assert await store.fact("never") is None
