"""Copies all rows of a database into another database, between SQLite and PostgreSQL, and verifies
the copy, for `cavvy server adopt`, backups and restores. Both databases must be at the schema
revision HEAD.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from hashlib import sha256
from pathlib import Path

from cavvy.domain.values import Struct
from cavvy.store.base import HashMismatch, StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession
from cavvy.store.migrate import HEAD, SCHEMA, VERSION_TABLE, run_own, run_script
from cavvy.store.own_tables import list_own_migrations, refuse_left_out
from cavvy.store.prepared import Row

_MEMORY = DatabaseDriver(url="sqlite:///:memory:", path=Path(":memory:"), journal="delete")
_META = "meta"
# Facts that hold only for one database: its ID, the folder with its files, and their address.
_OF_ONE_DATABASE = ("database", "files", "files_at")
_MODULUS = 1 << 256


class TableDigest(Struct, frozen=True, kw_only=True):
    """The content of a table: the number of its rows, and the sum of the rows' SHA-256, which does
    not depend on the order of the rows.
    """

    table: str
    rows: int
    hash: str


class _CopiedTable(Struct, frozen=True, kw_only=True):
    name: str
    columns: tuple[str, ...]
    serial: str | None  # the column that the database numbers by itself

    @property
    def select(self) -> str:
        sql = f"SELECT {_quoted(self.columns)} FROM {self.name}"
        if self.name == _META:
            left_out = ", ".join(f"'{key}'" for key in _OF_ONE_DATABASE)
            sql += f' WHERE "key" NOT IN ({left_out})'
        return sql


def refuse_rows(session: DatabaseSession) -> None:
    """Raise StoreUnusable unless the database is at HEAD and contains no rows."""
    if read_revision(session) != HEAD:
        raise StoreUnusable(f"the database is not at revision {HEAD}")
    filled = [
        table.name
        for table in _tables()
        if table.name != _META and session.run(f"SELECT 1 FROM {table.name} LIMIT 1").fetchone()
    ]
    if filled:
        raise StoreUnusable(
            f"the database {session.driver.shown} has rows already ({', '.join(filled[:3])}); "
            "use an empty database"
        )


def copy_rows(source: DatabaseSession, target: DatabaseSession) -> Sequence[TableDigest]:
    """Copy all rows of `source` into the empty `target`, in the open transactions of both
    databases, and verify the copied rows. Returns the digests. Raises HashMismatch, StoreUnusable
    if a capability that is not installed has tables, and the drivers' errors.
    """
    refuse_left_out(source)
    # each transaction pauses while the other database is read and compared
    for each in (source, target):
        each.allow_pauses()
    target.run(f"DELETE FROM {_META}")
    for table in _tables():
        target.insert_all(table.name, _quoted(table.columns), source.stream(table.select))
        if table.serial is not None and not target.driver.is_sqlite:
            target.run(
                f"SELECT setval(pg_get_serial_sequence('{table.name}', '{table.serial}'), "
                f"COALESCE(MAX({table.serial}), 0) + 1, false) FROM {table.name}"
            )
    sent, arrived = digest_rows(source), digest_rows(target)
    for before, after in zip(sent, arrived, strict=True):
        if before != after:
            raise HashMismatch(
                f"the copy of the table {before.table} in {target.driver.shown} differs from the "
                f"original (original: {before.rows} rows, copy: {after.rows} rows); nothing was "
                "written"
            )
    return sent


def digest_rows(session: DatabaseSession) -> Sequence[TableDigest]:
    """Return the content of each table, parents before children."""
    return [_digest(table.name, session.stream(table.select)) for table in _tables()]


def read_revision(session: DatabaseSession) -> str:
    """Return the revision of the database's schema."""
    row = session.run(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
    return "" if row is None else str(row[0])


def _digest(table: str, rows: Iterable[Row]) -> TableDigest:
    count = total = 0
    for row in rows:
        text = json.dumps(row, default=_as_text, ensure_ascii=True).encode()
        count, total = count + 1, total + int.from_bytes(sha256(text).digest())
    return TableDigest(table=table, rows=count, hash=f"{total % _MODULUS:064x}")


def _as_text(value: object) -> str:
    return bytes(value).hex() if isinstance(value, bytes | memoryview) else str(value)


def _quoted(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@cache
def _tables() -> Sequence[_CopiedTable]:
    """Return all tables of the schema, each after the tables that its rows refer to."""
    with closing(_MEMORY.connect()) as session:
        run_script(session, SCHEMA.read_text())
        for own in list_own_migrations():
            run_own(session, own)
        names = [
            name
            for (name,) in session.run(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
            if name != VERSION_TABLE and not name.startswith("sqlite_")
        ]
        parents = {
            name: {row[2] for row in session.run(f"PRAGMA foreign_key_list({name})").fetchall()}
            for name in names
        }
        return [_describe(session, name) for name in _sorted(names, parents)]


def _sorted(names: Sequence[str], parents: dict[str, set[str]]) -> Iterator[str]:
    left = list(names)
    while left:
        ready = [name for name in left if not (parents[name] - {name}) & set(left)]
        yield from ready
        left = [name for name in left if name not in ready]


def _describe(session: DatabaseSession, name: str) -> _CopiedTable:
    columns = session.run(f"PRAGMA table_info({name})").fetchall()
    keys = [row[1] for row in columns if row[5]]
    serial = [row[1] for row in columns if row[5] and row[2] == "INTEGER"]
    return _CopiedTable(
        name=name,
        columns=tuple(row[1] for row in columns),
        serial=serial[0] if len(keys) == len(serial) == 1 else None,
    )
