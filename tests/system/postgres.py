"""A PostgreSQL of the tests' own: made in a temporary folder, on a Unix socket, gone with this
process.

`new_database()` gives the URL of an empty database and starts the server on first use;
`opened_database()` gives one that a store has been in, copied from a first one in a third of the
time that a store takes to make its tables. `crash_postgres()` kills the server and starts it again.
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

from tests.shared import when_group_ends
from tests.system.packages import install_packages
from tests.system.tied import start_tied
from tests.waits import START_S

from cavvy.store.open import open_store

_OPTIONS = {
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
_numbers = count(1)
_servers: "dict[Path, subprocess.Popen[bytes]]" = {}  # by the folders of their sockets


class PostgresMissing(Exception):
    """There is none to be had here; the text is the command that changes it."""


def new_database() -> str:
    """The URL of a new, empty database. Raises PostgresMissing."""
    return _url(_create_for_group())


def opened_database() -> str:
    """The URL of a new database with the tables of a store, and nothing in them. Raises
    PostgresMissing.
    """
    return _url(_create_for_group(_model()))


def _url(name: str) -> str:
    return f"postgresql+psycopg://cavvy@/{name}?host={_start()}"


def _create_for_group(model: str = "template1") -> str:
    """A database that is removed after the last test of the group. There are hundreds in a run, of
    8 MB each and more."""
    name = _create(model)
    when_group_ends(partial(_drop, name))
    return name


def _drop(name: str) -> None:
    import psycopg

    # Where a test has stopped the server, its folder goes with this process.
    with (
        suppress(psycopg.OperationalError),
        psycopg.connect(
            host=str(_start()), user="cavvy", dbname="postgres", autocommit=True
        ) as connection,
    ):
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[call-overload]  # a literal, of our own making


def _create(model: str = "template1") -> str:
    import psycopg

    name = f"cavvy_{next(_numbers)}"
    with psycopg.connect(
        host=str(_start()), user="cavvy", dbname="postgres", autocommit=True
    ) as connection:
        how = " STRATEGY FILE_COPY" if connection.info.server_version >= 15_00_00 else ""
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {model}{how}")  # type: ignore[call-overload]  # a literal, of our own making
    return name


@cache
def _model() -> str:
    """The name of a database that a store was opened on once, which others are copies of."""
    name = _create()

    async def open_once() -> None:
        store = open_store(_url(name))
        await store.open()
        await store.close()

    # in a thread of its own, because callers may be in an event loop
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, open_once()).result()
    return name


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
    options = [part for name, value in _OPTIONS.items() for part in ("-c", f"{name}={value}")]
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
