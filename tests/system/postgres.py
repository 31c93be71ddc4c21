"""A PostgreSQL of the tests' own: made in a temporary folder, on a Unix socket, gone with this
process.

`new_database()` gives the URL of an empty database and starts the server on first use;
`opened_database()` gives one that a store has been in: one that an earlier test had, emptied in a
twentieth of the CPU time that PostgreSQL takes to make one. `crash_postgres()` kills the server and starts it again.
PostgresMissing says how to get PostgreSQL.
"""

import asyncio
import atexit
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.shared import when_group_ends, when_test_ends
from tests.system.packages import install_packages
from tests.system.tied import start_tied
from tests.waits import START_S

from cavvy.store.open import open_store

if TYPE_CHECKING:
    import psycopg

OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "deadlock_timeout": "50ms",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "log_min_messages": "fatal",
    # The server outlives its tests, and its hundreds of databases would keep these busy.
    "autovacuum": "off",
    "bgwriter_lru_maxpages": "0",
    "bgwriter_delay": "10s",
    "wal_writer_delay": "10s",
}
MOST_USES = 25  # of a database: nothing removes its dead rows
NEWEST = 3  # databases that are tried before another is made
_numbers = count(1)
_used: dict[str, int] = {}  # how often each database was used that no present test has
_servers: "dict[Path, subprocess.Popen[bytes]]" = {}  # by the folders of their sockets


class PostgresMissing(Exception):
    """There is none to be had here; the text is the command that changes it."""


def new_database() -> str:
    """The URL of a new, empty database. Raises PostgresMissing."""
    return _url(_create_for_group())


def opened_database() -> str:
    """The URL of a database with the tables of a store, and nothing in them. Raises
    PostgresMissing.
    """
    model = _model()
    # Connections that a test has forgotten may keep others in use.
    for name in list(_used)[-NEWEST:]:
        if _used[name] < MOST_USES and model.restore(name):
            uses = _used.pop(name)
            break
    else:
        name, uses = _create(model.name), 0
    when_test_ends(partial(_used.__setitem__, name, uses + 1))
    return _url(name)


def _url(name: str) -> str:
    return f"postgresql+psycopg://cavvy@/{name}?host={_start()}"


def _create_for_group() -> str:
    """A database that is removed after the last test of the group. There are hundreds in a run, of
    8 MB each and more."""
    name = _create()
    when_group_ends(partial(_drop, name))
    return name


def _connect(database: str = "postgres") -> "psycopg.Connection[Any]":
    import psycopg

    return psycopg.connect(host=str(_start()), user="cavvy", dbname=database, autocommit=True)


def _drop(name: str) -> None:
    import psycopg

    # Where a test has stopped the server, its folder goes with this process.
    with suppress(psycopg.OperationalError), _connect() as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[call-overload]  # a literal, of our own making


def _create(model: str = "template1") -> str:
    name = f"cavvy_{next(_numbers)}"
    with _connect() as connection:
        how = " STRATEGY FILE_COPY" if connection.info.server_version >= 15_00_00 else ""
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {model}{how}")  # type: ignore[call-overload]  # a literal, of our own making
    return name


# Columns, indexes and triggers, which a test may not have put back; nothing while a store is open.
_SHAPE = """
SELECT md5(string_agg(line, ';' ORDER BY line)) FROM (
    SELECT concat_ws(' ', relname, attnum, attname, atttypid, attnotnull, atthasdef) AS line
    FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid
    WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(' ', tgname, tgrelid::regclass, tgenabled) FROM pg_trigger
) AS shape WHERE NOT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
)
"""


class _Model:
    """A database that a store was opened on once, and what is in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        with _connect(name) as connection:
            self._shape = connection.execute(_SHAPE).fetchone()
            tables = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            ).fetchall()
            rows = {table: self._read(connection, table) for (table,) in tables}
            self._rows = {table: text for table, text in rows.items() if text}
            counters = connection.execute(
                "SELECT sequencename, start_value, last_value FROM pg_sequences"
            ).fetchall()
        parts = ["SET session_replication_role = replica"]  # without triggers that forbid changes
        parts += [f"DELETE FROM {table}" for table in rows]
        parts += [
            f"SELECT setval('{counter}', {last or start}, {last is not None})"
            for counter, start, last in counters
        ]
        self._clear = "; ".join(parts)

    @staticmethod
    def _read(connection: "psycopg.Connection[Any]", table: str) -> bytes:
        with connection.cursor().copy(f"COPY {table} TO STDOUT") as copy:  # type: ignore[call-overload]  # a name from the catalog
            return b"".join(bytes(part) for part in copy)

    def restore(self, name: str) -> bool:
        """Give another database the same rows and counters, unless its tables differ or a store is
        open on it: those of a module's fixtures stay open between its tests.
        """
        with _connect(name) as connection:
            if connection.execute(_SHAPE).fetchone() != self._shape:
                return False
            connection.execute(self._clear)  # type: ignore[call-overload]  # names from the catalog
            for table, text in self._rows.items():
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:  # type: ignore[call-overload]  # as above
                    copy.write(text)
        return True


@cache
def _model() -> _Model:
    name = _create()

    async def open_once() -> None:
        store = open_store(_url(name))
        await store.open()
        await store.close()

    # in a thread of its own, because callers may be in an event loop
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, open_once()).result()
    return _Model(name)


@cache
def _start() -> Path:
    """Start the server once in this process; return the folder of its socket."""
    programs = find()
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="cavvy-pg-"))
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    data = folder / "data"
    initdb = [
        programs / "initdb",
        "-D",
        data,
        "-U",
        "cavvy",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-locale",
        "--no-sync",
    ]
    subprocess.run(
        initdb, user=user, cwd=folder, check=True, timeout=START_S, stdout=subprocess.DEVNULL
    )
    _servers[folder] = _run(programs, folder)
    atexit.register(_stop, folder)
    _wait(_servers[folder], folder)
    return folder


def _run(programs: Path, folder: Path) -> "subprocess.Popen[bytes]":
    options = [part for name, value in OPTIONS.items() for part in ("-c", f"{name}={value}")]
    with open(folder / "log", "ab") as log:
        return start_tied(
            [programs / "postgres", "-D", folder / "data", "-k", folder, *options],
            signal.SIGINT,  # the server's fast shutdown
            user="postgres" if os.geteuid() == 0 else None,
            cwd=folder,
            stdout=log,
            stderr=log,
        )


def socket_folder(url: str) -> Path:
    """The folder of the socket of the server that has this database."""
    return Path(url.rpartition("host=")[2])


def crash_postgres(url: str) -> None:
    """Kill the server's first process, and start the server again. It recovers from its log."""
    folder = socket_folder(url)
    _servers[folder].kill()
    _servers[folder].wait()
    give_up = time.monotonic() + START_S
    while True:
        server = _servers[folder] = _run(find(), folder)
        try:
            return _wait(server, folder)
        except RuntimeError:  # processes of the former server have not ended yet
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def find() -> Path:
    """The folder of the programs, installed by apt where that needs no question."""
    found = _installed()
    if found is None:
        print("installing PostgreSQL for the tests", file=sys.stderr)
        why = install_packages(["postgresql"])
        found = _installed()
        if found is None:
            raise PostgresMissing(f"PostgreSQL is not installed; {why}")
    return found


def _installed() -> Path | None:
    newest = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3])
    )
    program = str(newest[-1]) if newest else shutil.which("initdb")
    return Path(program).parent if program else None


def _wait(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    import psycopg

    give_up = time.monotonic() + START_S
    while True:
        try:
            psycopg.connect(host=str(folder), user="cavvy", dbname="postgres").close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > give_up:
                break
            time.sleep(0.05)
    raise RuntimeError(
        f"PostgreSQL did not start: {(folder / 'log').read_text(errors='replace')[-2000:]}"
    )


def _stop(folder: Path) -> None:
    server = _servers[folder]
    server.send_signal(signal.SIGINT)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)
