"""Updates a database to the schema of this program (migration). `Store.open` calls this module,
so the first process that opens an old database migrates it.

If the database is at the newest revision (HEAD), only a few SELECTs are needed. In a new database,
the statements of `schema.sql` are run. In an older database, the migrations in `migrations/` that
follow the database's revision are run. Then follow those of the capabilities; see `own_tables`.
"""

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from cavvy.domain.values import Struct, replace
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession
from cavvy.store.own_tables import (
    OwnMigrations,
    list_own_migrations,
    list_tables,
    read_stated,
    state,
)

SCHEMA = Path(__file__).with_name("schema.sql")
# A file of one migration has its name; in a file of several, this line begins each of them.
_HEADING = re.compile(r"^-- migration (\w+)\n", re.MULTILINE)


class Migration(Struct, frozen=True):
    """The statements of one migration. `name` begins with its number, such as 0001_initial."""

    name: str
    sql: str


def _read_migrations() -> Iterator[Migration]:
    for path in sorted(SCHEMA.with_name("migrations").glob("[0-9]*.sql")):
        first, *several = _HEADING.split(path.read_text())
        yield from map(Migration, several[::2] or [path.stem], several[1::2] or [first])


MIGRATIONS: Mapping[str, Migration] = {each.name[:4]: each for each in _read_migrations()}
HEAD = max(MIGRATIONS)
VERSION_TABLE = "cavvy_revision"
running = threading.Event()  # set while this process migrates a database
# number of the lock that the migrating process holds; the bytes of "cavvy" in ASCII
_ADVISORY_LOCK = 0x6361767679
_JOURNAL_TRIES = 20
# Milliseconds to wait for another process that is migrating the database. This time is shorter than
# the time that commands wait for a server to start, so that commands show why the start failed.
_WAIT_MS = 20_000
_APPEND_ONLY = "the audit log is append-only"
_CUT = "SELECT COALESCE(MAX(number), 0) FROM audit_cuts"  # old records can be removed up to here
# Tables, besides the audit log, whose rows are never changed or deleted. For each of them, the
# schema contains the placeholders TABLE_function, TABLE_no_change and TABLE_no_removal.
_ONLY_ADDED = ("ledger", "ledger_subjects", "audit_cuts")
# fields of an attempt's offer that the migration to the ledger reads
_OF_OFFER = ("provider", "credential", "region", "zone", "instance_type", "accelerator", "purchase")
# SQL that differs between the two databases. IDs are compared byte by byte, so that PostgreSQL
# sorts them like Python and SQLite in every locale. SQLite takes an index of waiting jobs only for
# a value of its first column, `phase`; PostgreSQL does not search for that value.
_SQLITE = {
    "id": "TEXT",
    "serial": "INTEGER",
    "bytes": "BLOB",
    "phase": "phase, ",
    "origin_snapshot": "json_extract(origin, '$.snapshot')",
    "task_tags": "json_extract(task, '$.tags')",
    "gang_bought": "substr(gang, 1, instr(gang || '@', '@') - 1)",
    "append_only": "SELECT 1",
    "no_change": "CREATE TRIGGER audit_log_no_change BEFORE UPDATE ON audit_log BEGIN SELECT "
    f"RAISE(ABORT, '{_APPEND_ONLY}'); END",
    "no_removal": "CREATE TRIGGER audit_log_no_removal BEFORE DELETE ON audit_log "
    f"WHEN OLD.number > ({_CUT}) BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END",
    "lift_audit_rule": "DROP TRIGGER audit_log_no_removal",
}
_POSTGRESQL = {
    "id": 'TEXT COLLATE "C"',
    "serial": "BIGSERIAL",
    "bytes": "BYTEA",
    "phase": "",
    "origin_snapshot": "CAST(origin AS JSON) ->> 'snapshot'",
    "task_tags": "CAST(task AS JSON) ->> 'tags'",
    "gang_bought": "split_part(gang, '@', 1)",
    "append_only": "CREATE OR REPLACE FUNCTION audit_log_append_only() RETURNS trigger LANGUAGE "
    f"plpgsql AS 'BEGIN IF TG_OP = ''DELETE'' THEN IF OLD.number <= ({_CUT}) THEN RETURN OLD; END "
    f"IF; END IF; RAISE EXCEPTION ''{_APPEND_ONLY}''; END'",
    "lift_audit_rule": "SELECT 1",
    "no_change": "CREATE TRIGGER audit_log_no_change BEFORE UPDATE OR DELETE ON audit_log "
    "FOR EACH ROW EXECUTE FUNCTION audit_log_append_only()",
    "no_removal": "CREATE TRIGGER audit_log_no_removal BEFORE TRUNCATE ON audit_log "
    "FOR EACH STATEMENT EXECUTE FUNCTION audit_log_append_only()",
}

_SQLITE["audit_rule"] = _SQLITE["no_removal"]
_POSTGRESQL["audit_rule"] = _POSTGRESQL["append_only"]
for _table in _ONLY_ADDED:
    _raised = f"RAISE(ABORT, 'rows of {_table} are only added')"
    _function = f"{_table}_only_added()"
    for _word, _event in (("no_change", "UPDATE"), ("no_removal", "DELETE")):
        _SQLITE[f"{_table}_{_word}"] = (
            f"CREATE TRIGGER {_table}_{_word} BEFORE {_event} ON {_table} "
            f"BEGIN SELECT {_raised}; END"
        )
    _SQLITE[f"{_table}_function"] = "SELECT 1"
    _POSTGRESQL[f"{_table}_function"] = (
        f"CREATE FUNCTION {_function} RETURNS trigger LANGUAGE plpgsql AS "
        f"'BEGIN RAISE EXCEPTION ''rows of {_table} are only added''; END'"
    )
    _POSTGRESQL[f"{_table}_no_change"] = (
        f"CREATE TRIGGER {_table}_no_change BEFORE UPDATE OR DELETE ON {_table} "
        f"FOR EACH ROW EXECUTE FUNCTION {_function}"
    )
    _POSTGRESQL[f"{_table}_no_removal"] = (
        f"CREATE TRIGGER {_table}_no_removal BEFORE TRUNCATE ON {_table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {_function}"
    )
for _name in (*_OF_OFFER, "accelerator_count", "accelerator_part"):
    _SQLITE[f"offer_{_name}"] = f"json_extract(a.document, '$.offer.{_name}')"
    _POSTGRESQL[f"offer_{_name}"] = f"CAST(a.document AS JSON) #>> '{{offer,{_name}}}'"


def prepare(driver: DatabaseDriver, make_id: Callable[[], str]) -> DatabaseDriver:
    """Create or migrate the schema. Return the driver with the journal mode that the database file
    actually has.

    Raises StoreUnusable, StoreFull and the driver's own errors.
    """
    with closing(driver.connect()) as session:
        if driver.is_sqlite:
            session.run(f"PRAGMA busy_timeout={_WAIT_MS}")
            # only new databases change, so that `SqlRetention.shrink` can return their space
            session.run("PRAGMA auto_vacuum=INCREMENTAL")
            driver = replace(driver, journal=_set_journal(session, driver.journal))
        bring_to_head(session, make_id)
    return driver


def bring_to_head(session: DatabaseSession, make_id: Callable[[], str]) -> None:
    """Create or migrate the schema in one transaction, which excludes other processes. If the
    transaction fails, all changes to the schema are rolled back.
    """
    if _revision(session) == HEAD and not _list_behind(session):
        return
    # with SQLite, this waits for another process that creates or migrates the schema
    session.begin()
    try:
        if not session.driver.is_sqlite:
            session.run(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        revision = _revision(session)  # another process may have migrated meanwhile
        if revision is None:
            run_script(session, SCHEMA.read_text())
            session.run(f"INSERT INTO {VERSION_TABLE} (version_num) VALUES (?)", (HEAD,))
            session.run("INSERT INTO meta (key, value) VALUES ('installation', ?)", (make_id(),))
        elif revision < HEAD:
            running.set()
            _migrate(session, revision)
        else:
            refuse_newer(session)
        for own, since in _list_behind(session):
            if since and revision is not None:
                running.set()
                _back_up_file(session, f"{revision}-{own.capability}-{since}")
            run_own(session, own, since)
        session.commit()
    finally:
        running.clear()
        session.rollback()


def run_own(session: DatabaseSession, own: OwnMigrations, since: str = "") -> None:
    """Run the migrations of a capability that follow this one, and record the last one."""
    for number, sql in own.scripts.items():
        if number > since:
            run_script(session, sql)
    state(session, own.capability, own.newest)


def _list_behind(session: DatabaseSession) -> list[tuple[OwnMigrations, str]]:
    """Return the capabilities whose tables are missing or older, each with the last migration.
    Raises StoreUnusable if a newer version of a capability wrote its tables; as for the core, with
    PostgreSQL they may be one migration newer.
    """
    stated, behind = read_stated(session), []
    for own in list_own_migrations():
        last = stated.get(own.capability, "")
        if last < own.newest:
            behind.append((own, last))
        elif (session.driver.is_sqlite and last > own.newest) or not is_next(last, own.newest):
            raise StoreUnusable(
                f"the tables of {own.capability} are at {last}, but this program supports only up "
                f"to {own.newest}: a newer version of {own.capability} wrote them; install it"
            )
    return behind


def is_next(revision: str, known: str) -> bool:
    """Return whether `revision` is at most one newer than `known`: a program whose newest known
    revision is `known` can work with a database that is one revision newer. See
    docs/extend/write-a-migration.md.
    """
    return int(revision) <= int(known) + 1


def refuse_newer(session: DatabaseSession) -> None:
    """Raise StoreUnusable if a newer program wrote the database, or if the database belongs to
    another program. In PostgreSQL, a database that is one revision newer is accepted, because the
    servers of a database are updated one after another.
    """
    revision = _revision(session)
    if revision is None or revision in MIGRATIONS:
        return
    if session.driver.is_sqlite or not revision.isdigit() or not is_next(revision, HEAD):
        path = session.driver.path
        backup = path and path.with_name(f"{path.name}.backup-…")
        raise StoreUnusable(
            f"the database is at revision {revision}, but this program supports only up to {HEAD}: "
            "a newer program wrote the database. Install that version of cavvy or a newer "
            "version, or "
            f"restore the backup that was made before the migration ({backup or 'your dump'})"
        )


def run_script(session: DatabaseSession, sql: str) -> None:
    """Run each statement of a script, adapted to the SQL of the session's database."""
    words = _SQLITE if session.driver.is_sqlite else _POSTGRESQL
    for statement in sql.split(";\n"):
        if statement.strip():
            session.run(statement.format(**words))


def _migrate(session: DatabaseSession, revision: str) -> None:
    refuse_newer(session)
    _back_up_file(session, revision)
    for number, migration in MIGRATIONS.items():
        if number > revision:
            run_script(session, migration.sql)
    session.run(f"UPDATE {VERSION_TABLE} SET version_num = ?", (HEAD,))


def _back_up_file(session: DatabaseSession, name: str) -> None:
    if path := session.driver.path:
        _back_up(path, path.with_name(f"{path.name}.backup-{name}"))


def _set_journal(session: DatabaseSession, journal: str) -> str:
    """Set the journal mode and return the mode that applies. If WAL is not available, SQLite keeps
    its rollback journal.
    """
    for attempt in range(1, _JOURNAL_TRIES + 1):
        try:
            row = session.run(f"PRAGMA journal_mode={journal}").fetchone()
        except sqlite3.OperationalError as error:
            # BEGIN waits for the lock of another process, but this PRAGMA does not.
            if attempt == _JOURNAL_TRIES or error.sqlite_errorcode & 0xFF not in (5, 6):
                raise
            session.begin()
            session.rollback()
            continue
        return "wal" if row is not None and row[0] == "wal" else "delete"
    raise AssertionError("unreachable")


def _revision(session: DatabaseSession) -> str | None:
    """Return the database's revision, or None if the database is empty. Raises StoreUnusable if the
    database belongs to another program.
    """
    tables = list_tables(session) - {"cavvy_leases", "cavvy_replicas"}
    if VERSION_TABLE in tables:
        return str(session.run(f"SELECT version_num FROM {VERSION_TABLE}").fetchall()[0][0])
    if tables:
        found = ", ".join(sorted(tables)[:3])
        raise StoreUnusable(
            f"the database contains tables of another program ({found}); use an empty database"
        )
    return None


def _back_up(path: Path, backup: Path) -> None:
    """Copy the last committed state of the database file to `backup`. The caller holds the lock, so
    no other process can write meanwhile.
    """
    unfinished = backup.with_name(backup.name + ".part")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        with (
            closing(sqlite3.connect(str(path))) as source,
            closing(sqlite3.connect(unfinished)) as target,
        ):
            source.backup(target)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, backup)
    except OSError as error:
        raise StoreUnusable(
            f"cannot back up the database to {backup} before the migration: {error.strerror}; "
            "nothing was changed"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
