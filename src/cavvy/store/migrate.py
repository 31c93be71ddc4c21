"""Brings a database to the schema of this program; the first process that opens it does so.
Called by `SqlStore.open`.

A database at HEAD costs one SELECT, a fresh one the statements of `migrations/head.DIALECT.sql`.
SQLAlchemy and Alembic are imported only where there is something to migrate.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, Row

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

_FILES = Path(__file__).with_name("migrations")
REVISIONS = tuple(sorted(path.name[:4] for path in (_FILES / "versions").glob("[0-9]*.py")))
HEAD = REVISIONS[-1]
VERSION_TABLE = "cavvy_revision"
_ADVISORY_LOCK = 0x72656D756461  # "cavvy": the lock of the process that migrates
_JOURNAL_TRIES = 20
_WAIT_MS = 60_000  # for another process that migrates


def prepare(driver: DatabaseDriver, make_id: Callable[[], str]) -> DatabaseDriver:
    """Create or migrate the schema; return the driver with the journal that the file has got.

    Raises StoreUnusable, StoreFull and the driver's own errors.
    """
    with closing(driver.connect()) as session:
        if driver.is_sqlite:
            session.run(f"PRAGMA busy_timeout={_WAIT_MS}")
            driver = replace(driver, journal=_set_journal(session, driver.journal))
        if _session_revision(session) == HEAD:
            return driver
        session.begin()
        try:
            _lock(session.run, driver)
            revision = _session_revision(session)  # another process may have migrated it
            if revision is None:
                _create(session, make_id)
            session.commit()
        finally:
            session.rollback()
    if revision not in (None, HEAD):
        _migrate(driver)
    return driver


def make_engine(driver: DatabaseDriver) -> "Engine":
    """SQLAlchemy on this database. Transactions are begun and ended by statements, as everywhere
    in this module.
    """
    import sqlalchemy as sa

    url = sa.make_url(driver.url)
    if not driver.is_sqlite:
        url = url.set(drivername="postgresql+psycopg")
    return sa.create_engine(url, poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT")


def _set_journal(session: DatabaseSession, journal: str) -> str:
    """Set the journal and return the one in force: where a WAL cannot be had, SQLite keeps its
    rollback journal.
    """
    for attempt in range(1, _JOURNAL_TRIES + 1):
        try:
            row = session.run(f"PRAGMA journal_mode={journal}").fetchone()
        except sqlite3.OperationalError as error:
            # This PRAGMA does not wait for another process's lock, BEGIN does.
            if attempt == _JOURNAL_TRIES or error.sqlite_errorcode & 0xFF not in (5, 6):
                raise
            session.begin()
            session.rollback()
            continue
        return "wal" if row is not None and row[0] == "wal" else "delete"
    raise AssertionError("unreachable")


def _lock(run: Callable[[str], object], driver: DatabaseDriver) -> None:
    """Wait for another process that creates or migrates; SQLite has waited at BEGIN IMMEDIATE."""
    if not driver.is_sqlite:
        run(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")


def _create(session: DatabaseSession, make_id: Callable[[], str]) -> None:
    dialect = "sqlite" if session.driver.is_sqlite else "postgresql"
    for statement in (_FILES / f"head.{dialect}.sql").read_text().split(";\n"):
        if statement.strip():
            session.run(statement)
    session.run(f"INSERT INTO {VERSION_TABLE} (version_num) VALUES (?)", (HEAD,))
    session.run("INSERT INTO meta (key, value) VALUES ('installation', ?)", (make_id(),))


def _migrate(driver: DatabaseDriver) -> None:
    from sqlalchemy.exc import DBAPIError

    try:
        with closing(make_engine(driver).connect()) as connection:
            if driver.is_sqlite:
                connection.exec_driver_sql(f"PRAGMA busy_timeout={_WAIT_MS}")
            connection.exec_driver_sql("BEGIN IMMEDIATE" if driver.is_sqlite else "BEGIN")
            try:
                _bring_to_head(connection, driver)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
    except DBAPIError as error:
        raise (error.orig or error) from None


def _bring_to_head(connection: "Connection", driver: DatabaseDriver) -> None:
    """In a transaction that no other process shares; both databases undo DDL with their
    transaction.
    """
    _lock(connection.exec_driver_sql, driver)
    revision = _revision(
        lambda sql: [tuple(row) for row in connection.exec_driver_sql(sql)], driver
    )
    if revision == HEAD:
        return
    if revision not in REVISIONS:
        raise StoreUnusable(
            f"the database is at revision {revision}, this program knows revisions up to {HEAD}: "
            "it is older than the"
            " program that wrote the database. Install that version of cavvy or a newer one, or "
            "put back the backup"
            f" that was made before its migration ({_backup_path(driver, '…') or 'your dump'})"
        )
    if (path := _backup_path(driver, revision)) is not None:
        _back_up(driver, path)
    upgrade(connection)


def _session_revision(session: DatabaseSession) -> str | None:
    return _revision(lambda sql: session.run(sql).fetchall(), session.driver)


def _revision(rows: Callable[[str], Sequence[Row]], driver: DatabaseDriver) -> str | None:
    """The database's revision, None where it is empty. Raises StoreUnusable where it is another
    program's.
    """
    tables = {
        row[0]
        for row in rows(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            if driver.is_sqlite
            else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
    }
    if VERSION_TABLE in tables:
        return str(rows(f"SELECT version_num FROM {VERSION_TABLE}")[0][0])
    if tables:
        found = ", ".join(sorted(tables)[:3])
        raise StoreUnusable(
            f"the database holds tables of another program ({found}); give Cavvy an empty database"
        )
    return None


def upgrade(connection: "Connection", target: str = HEAD) -> None:
    """Run the migrations up to `target` in the connection's open transaction."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_FILES))
    script = ScriptDirectory.from_config(config)
    with EnvironmentContext(
        config, script, fn=lambda revision, _: script._upgrade_revs(target, revision)
    ) as environment:
        # The transaction is ours: a migration killed half-way is undone whole, on SQLite too.
        environment.configure(
            connection=connection, version_table=VERSION_TABLE, transactional_ddl=False
        )
        environment.run_migrations()


def _backup_path(driver: DatabaseDriver, revision: str) -> Path | None:
    return driver.path and driver.path.with_name(f"{driver.path.name}.backup-{revision}")


def _back_up(driver: DatabaseDriver, path: Path) -> None:
    """Copy the file as it was last committed; our own lock keeps every writer away meanwhile."""
    unfinished = path.with_name(path.name + ".part")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        with (
            closing(sqlite3.connect(str(driver.path))) as source,
            closing(sqlite3.connect(unfinished)) as target,
        ):
            source.backup(target)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise StoreUnusable(
            f"cannot back up the database to {path} before its migration: {error.strerror}; "
            "nothing was changed"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
