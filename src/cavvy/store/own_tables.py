"""The tables of capabilities: their migrations, and which of them a database has.

All migrations have one order: those of the core by number, then those of each capability by number,
the capabilities in the order of their names, each after those that it needs. So a migration of a
capability changes only its own tables. The database states the last one of each capability, also of
those that were taken out: their tables stay as they are. Tables that the core made before they were
a capability's are not stated until this capability adopts them; they count as well.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from cavvy.domain.values import Struct
from cavvy.frame.capability import Capability, OwnTables
from cavvy.frame.discover import find_capabilities, load, say_left_out
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseSession, RunTransaction

_KEY = "capability:"  # the start of the keys of `meta` that state the last migrations
_MADE = re.compile(r"^CREATE TABLE (?:IF NOT EXISTS )?(\w+)", re.MULTILINE)
_STATED = 'SELECT "key", value FROM meta WHERE "key" LIKE ?'
_STATE = (
    'INSERT INTO meta ("key", value) VALUES (?, ?) '
    'ON CONFLICT ("key") DO UPDATE SET value = excluded.value'
)


class OwnRows(Protocol):
    """What the core asks of a capability's rows, made from the functions of `Store.database`."""

    async def snapshots(self) -> Collection[str]:
        """Return the names of files of working folders to keep, besides those in the columns."""
        ...

    async def count_keys(self, now: datetime) -> int:
        """Return the number of valid keys with which programs may call something."""
        ...

    async def end_keys(self) -> None:
        """Remove all these keys. Can be repeated."""
        ...


class OwnMigrations(Struct, frozen=True, kw_only=True):
    """The migrations of a capability: the SQL of each by its number of four digits."""

    capability: str
    tables: OwnTables
    scripts: Mapping[str, str]

    @property
    def newest(self) -> str:
        return max(self.scripts)


@cache
def list_own_migrations() -> Sequence[OwnMigrations]:
    """Return the migrations of the installed capabilities, in their order."""
    found = []
    for each in _order(find_capabilities().capabilities):
        if each.tables is None:
            continue
        try:
            scripts = dict(_read(each.tables.package))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of others raises anything
            say_left_out(each, "its tables", error)
            continue
        if scripts:
            found.append(OwnMigrations(capability=each.name, tables=each.tables, scripts=scripts))
    return found


def list_tables_of_projects() -> Sequence[str]:
    """Return the capabilities' tables whose rows show that a project is in use."""
    return [name for each in list_own_migrations() for name in each.tables.of_projects]


def list_tables_of_attempts() -> Sequence[str]:
    """Return the capabilities' tables whose rows are removed with their attempt."""
    return [name for each in list_own_migrations() for name in each.tables.of_attempts]


def list_tables_of_jobs() -> Sequence[str]:
    """Return the capabilities' tables whose rows are removed with their job."""
    return [name for each in list_own_migrations() for name in each.tables.of_jobs]


def list_tables_with_snapshots() -> Sequence[str]:
    """Return the capabilities' tables whose column `snapshot` names files to keep."""
    return [name for each in list_own_migrations() for name in each.tables.snapshots]


def list_named_tables() -> Sequence[tuple[str, str]]:
    """Return the word for a row, and the table, of the capabilities' tables whose rows have a name
    among those of jobs, and last until users end them.
    """
    return [each for one in list_own_migrations() for each in one.tables.named]


def list_own_rows(database: tuple[RunTransaction, RunTransaction]) -> list[OwnRows]:
    """Return what capabilities have stored in a database."""
    tables = [each.tables for each in list_own_migrations() if each.tables.rows]
    return [load(each.rows)(*database) for each in tables]


def list_sealed_tables() -> Sequence[str]:
    """Return the capabilities' tables with values that the key of secrets encrypts."""
    return [name for each in list_own_migrations() for name in each.tables.sealed]


def read_stated(session: DatabaseSession) -> Mapping[str, str]:
    """Return the number of the last migration of each capability that has tables here."""
    rows = session.run(_STATED, (f"{_KEY}%",)).fetchall()
    return {str(key).removeprefix(_KEY): str(value) for key, value in rows}


def state(session: DatabaseSession, capability: str, number: str) -> None:
    """Record the last migration of a capability."""
    session.run(_STATE, (f"{_KEY}{capability}", number))


def list_left_out(session: DatabaseSession) -> Sequence[str]:
    """Return the capabilities that have tables in this database, but are not installed. If there is
    none, return the tables with rows that the core made once and no installed capability adopts.
    """
    own = list_own_migrations()
    if stated := read_stated(session).keys() - {each.capability for each in own}:
        return sorted(stated)
    scripts = [sql for each in own for sql in each.scripts.values()]
    tables = _list_former() - _list_made(scripts)
    found = sorted(tables & list_tables(session)) if tables else []
    return [each for each in found if session.run(f"SELECT 1 FROM {each} LIMIT 1").fetchone()]


def list_tables(session: DatabaseSession) -> Set[str]:
    """Return the names of all tables in the database, also of those that are not the store's."""
    sql = (
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        if session.driver.is_sqlite
        else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    )
    return {str(name) for (name,) in session.run(sql).fetchall()}


def refuse_left_out(session: DatabaseSession) -> None:
    """Raise StoreUnusable if a copy of all known tables would lack those of a capability that is
    not installed.
    """
    if names := list_left_out(session):
        raise StoreUnusable(
            f"the database has tables of {' and '.join(names)}, which is not installed, so a copy "
            "would lack them; install what brings this capability, and try again"
        )


@cache
def _list_former() -> Set[str]:
    """Return the tables that the core made once, but makes no longer."""
    here = Path(__file__)
    migrations = here.with_name("migrations").glob("[0-9]*.sql")
    made = _list_made(path.read_text("utf-8") for path in migrations)
    return made - _list_made([here.with_name("schema.sql").read_text("utf-8")])


def _list_made(scripts: Iterable[str]) -> Set[str]:
    return {name for sql in scripts for name in _MADE.findall(sql)}


def _order(capabilities: Sequence[Capability]) -> Iterator[Capability]:
    left = list(capabilities)
    while left:
        waiting = {each.name for each in left}
        ready = [each for each in left if not waiting & set(each.needs)] or left
        yield from ready
        left = [each for each in left if each not in ready]


def _read(package: str) -> Iterator[tuple[str, str]]:
    folder = Path(str(import_module(package).__file__)).with_name("migrations")
    for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.sql")):
        yield path.name[:4], path.read_text("utf-8")
