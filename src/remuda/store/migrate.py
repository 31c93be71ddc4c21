"""Brings a database to the schema of this program, once, whoever opens it first; called by `SqlStore.open`.

A database at HEAD costs one SELECT. Alembic is imported only where there is something to migrate.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from remuda.store.base import Unusable
from remuda.store.drivers import Driver

REVISIONS = ("0001", "0002")  # files of migrations/versions; a test compares them
HEAD = REVISIONS[-1]
VERSION_TABLE = "remuda_revision"
_ADVISORY_LOCK = 0x72656D756461  # "remuda": the lock of whoever migrates
_JOURNAL_TRIES = 20
_WAIT_MS = 60_000  # for another process that migrates


def prepare(driver: Driver, make_id: Callable[[], str]) -> Driver:
    """Create or migrate the schema; return the driver with the journal that the file has got.

    Raises Unusable, Full and the driver's own errors.
    """
    try:
        with closing(driver.engine.connect()) as connection:
            if driver.is_sqlite:
                connection.exec_driver_sql(f"PRAGMA busy_timeout={_WAIT_MS}")
                driver = replace(driver, journal=_set_journal(connection, driver.journal))
            if _revision(connection, driver) == HEAD:
                return driver
            connection.exec_driver_sql("BEGIN IMMEDIATE" if driver.is_sqlite else "BEGIN")
            try:
                _bring_to_head(connection, driver, make_id)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
    except sa.exc.DBAPIError as error:
        raise (error.orig or error) from None
    return driver


def _set_journal(connection: sa.Connection, journal: str) -> str:
    """Set the journal and return the one in force: where a WAL cannot be had, SQLite keeps its rollback journal."""
    for attempt in range(1, _JOURNAL_TRIES + 1):
        try:
            row = connection.exec_driver_sql(f"PRAGMA journal_mode={journal}").fetchone()
        except sa.exc.OperationalError as error:
            # This PRAGMA does not wait for another process's lock, BEGIN does.
            if attempt == _JOURNAL_TRIES or getattr(error.orig, "sqlite_errorcode", 0) & 0xFF not in (5, 6):
                raise
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
            continue
        return "wal" if row is not None and row[0] == "wal" else "delete"
    raise AssertionError("unreachable")


def _bring_to_head(connection: sa.Connection, driver: Driver, make_id: Callable[[], str]) -> None:
    """In a transaction that no other process shares; both databases undo DDL with their transaction."""
    if not driver.is_sqlite:
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
    revision = _revision(connection, driver)
    if revision == HEAD:
        return  # another process was faster
    if revision is None:
        _create(connection, make_id)
        return
    if revision not in REVISIONS:
        raise Unusable(
            f"the database is at revision {revision}, this program knows revisions up to {HEAD}: it is older than the"
            f" program that wrote the database. Install that version of remuda or a newer one, or put back the backup"
            f" that was made before its migration ({_backup_path(driver, '…') or 'your dump'})"
        )
    if (path := _backup_path(driver, revision)) is not None:
        _back_up(driver, path)
    upgrade(connection)


def _revision(connection: sa.Connection, driver: Driver) -> str | None:
    """The database's revision, None where it is empty. Raises Unusable where it is another program's."""
    tables = {
        str(row[0])
        for row in connection.exec_driver_sql(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            if driver.is_sqlite
            else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
    }
    if VERSION_TABLE in tables:
        row = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
        return str(row[0]) if row else None
    if tables:
        found = ", ".join(sorted(tables)[:3])
        raise Unusable(f"the database holds tables of another program ({found}); give Remuda an empty database")
    return None


def _create(connection: sa.Connection, make_id: Callable[[], str]) -> None:
    from remuda.store.schema import make_metadata

    make_metadata(connection.dialect.name).create_all(connection, checkfirst=False)
    connection.exec_driver_sql(
        f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL,"
        f" CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))"
    )
    connection.exec_driver_sql(f"INSERT INTO {VERSION_TABLE} (version_num) VALUES ('{HEAD}')")
    connection.execute(sa.text("INSERT INTO meta (key, value) VALUES ('installation', :id)"), {"id": make_id()})


def upgrade(connection: sa.Connection, target: str = HEAD) -> None:
    """Run the migrations up to `target` in the connection's open transaction."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    script = ScriptDirectory.from_config(config)
    with EnvironmentContext(
        config, script, fn=lambda revision, _: script._upgrade_revs(target, revision)
    ) as environment:
        # The transaction is ours: a migration killed half-way is undone whole, on SQLite too.
        environment.configure(connection=connection, version_table=VERSION_TABLE, transactional_ddl=False)
        environment.run_migrations()


def _backup_path(driver: Driver, revision: str) -> Path | None:
    return driver.path and driver.path.with_name(f"{driver.path.name}.backup-{revision}")


def _back_up(driver: Driver, path: Path) -> None:
    """Copy the file as it was last committed; our own lock keeps every writer away meanwhile."""
    unfinished = path.with_name(path.name + ".part")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(str(driver.path))) as source, closing(sqlite3.connect(unfinished)) as target:
            source.backup(target)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise Unusable(
            f"cannot back up the database to {path} before its migration: {error.strerror}; nothing was changed"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
