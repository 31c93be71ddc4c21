"""The PostgreSQL database of a server: which one it uses, the lease on it, and the folder whose
files belong to it.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from cavvy.api.state_dir import StateDir, StateDirBusy, StateDirError
from cavvy.client.state import host_name, write_private
from cavvy.settings import Settings
from cavvy.store.base import StoreError, StoreUnusable
from cavvy.store.leases import RENEW_S, DatabaseLease, Replica, find_holder

SCHEMES = ("postgresql://", "postgresql+psycopg://")
_REMEMBERED = "database"  # the file with the URL that a server of the folder used last
_FOLDER_ID = "files.id"
# A killed server counts as running until PostgreSQL notices that its connections have ended.
_TAKE_TRIES = 15
_TAKE_PAUSE_S = 0.2
_TURN_PAUSE_S = 1.0  # interval at which a waiting server looks again
_log = logging.getLogger(__name__)


class DatabaseInUse(StateDirError):
    """Another server works with the database."""


class BindsFolder(Protocol):
    """A store in a database, to which files on a disk belong."""

    async def bind(self, key: str, value: str) -> str:
        """Store a fact of the installation unless it is known, and return what is stored."""


def choose_database(home: StateDir, settings: Settings) -> str | None:
    """The URL of the PostgreSQL database: the setting `server.database`, or else the one that the
    last server of this folder used. None means the file `cavvy.db`. Raises StateDirError.
    """
    given = settings.text("server.database")
    url = given or _read(home.file(_REMEMBERED))
    if not url:
        return None
    if not url.startswith(SCHEMES):
        raise StateDirError(
            "settings-invalid",
            f"server.database starts with {url.partition(':')[0]!r}; expected {SCHEMES[0]}",
            f"write {SCHEMES[0]}USER@HOST/NAME, or leave it empty to use SQLite",
        )
    if os.path.exists(home.file("cavvy.db")):
        raise StateDirError(
            "settings-invalid",
            f"server.database names a PostgreSQL database, but the jobs of {home.path} are in its "
            "file cavvy.db",
            "set CAVVY_HOME to a new folder for this database, or leave server.database empty",
        )
    return url


def wait_for_turn(home: StateDir, settings: Settings) -> None:
    """Lock the folder as soon as no other server works with it or with its database. Blocks. Raises
    StateDirError."""
    shown = ""
    while True:
        reason = _claim(home, choose_database(home, settings))
        if not reason:
            return
        if reason != shown:
            _log.info("waiting to take over: %s", reason)
            shown = reason
        time.sleep(_TURN_PAUSE_S)


def _claim(home: StateDir, url: str | None) -> str:
    """Lock the folder. Returns why this is not possible now, or ""."""
    try:
        holder = find_holder(url) if url else None
        if holder is not None:
            return f"process {holder.pid} on {holder.host} works with the database"
        home.claim(wait_s=0.0, alone=url is not None)
    except StoreUnusable as error:
        return str(error)
    except StateDirBusy:
        return f"another server on this machine uses {home.path}"
    except StateDirError as error:
        if error.code not in ("server-stuck", "server-elsewhere"):
            raise
        return error.message
    return ""


@asynccontextmanager
async def hold_database(
    url: str, home: StateDir, address: str, lost: Callable[[], None]
) -> AsyncIterator[DatabaseLease]:
    """Hold the lease on the database. `lost` is called if another server takes over, or if a
    renewal fails for a reason that may not pass. Raises StateDirError if another server works with
    the database, StoreError.
    """
    me = Replica(
        id=secrets.token_hex(16),
        host=host_name(),
        pid=os.getpid(),
        folder=home.path,
        address=address,
    )
    lease = DatabaseLease(url, me)
    try:
        await _take(lease)
        keeping = asyncio.create_task(_keep(lease), name="lease")
        keeping.add_done_callback(lambda task: _tell_end(task, lost))
        try:
            yield lease
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
    finally:
        await lease.release()


async def bind_folder(store: BindsFolder, home: StateDir, url: str) -> None:
    """Check that the keys, logs and uploaded files of this database are in this folder, and
    remember the database for later starts. A new database is bound to the folder. Raises
    StateDirError.
    """
    path = home.file(_FOLDER_ID)
    mine = _read(path)
    if not mine:
        mine = secrets.token_hex(16)
        write_private(path, mine.encode())
    if await store.bind("files", mine) != mine:
        where = await store.bind("files_at", "another folder")
        raise StateDirError(
            "settings-invalid",
            f"the keys, logs and uploaded files of this database are in {where}, not in "
            f"{home.path}",
            "start the server there, or copy that folder to this machine and set CAVVY_HOME to "
            "the copy; a new folder needs a new database",
        )
    await store.bind("files_at", f"{home.path} on {host_name()}")
    if _read(home.file(_REMEMBERED)) != url:
        write_private(home.file(_REMEMBERED), url.encode())


async def _take(lease: DatabaseLease) -> None:
    for _ in range(_TAKE_TRIES):
        holder = await lease.take()
        if holder is None:
            return
        await asyncio.sleep(_TAKE_PAUSE_S)
    assert holder is not None
    raise DatabaseInUse(
        "database-in-use",
        f"process {holder.pid} on {holder.host} works with this database, with the state folder "
        f"{holder.folder}; two servers must not share it",
        f"use cavvy on {holder.host}, or stop that server first: cavvy server stop",
    )


async def _keep(lease: DatabaseLease) -> None:
    """Renew the lease until another server has it. While the database cannot be reached, continue:
    writes are not possible then either."""
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(StoreError):
            if not await lease.renew():
                _log.error("another server has taken over the database; this server starts anew")
                return


def _tell_end(keeping: asyncio.Task[None], lost: Callable[[], None]) -> None:
    """Call `lost` if the renewals ended by themselves: without them, the server starts no pass."""
    if keeping.cancelled():
        return
    if error := keeping.exception():
        _log.error("the lease cannot be renewed; this server starts anew", exc_info=error)
    lost()


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""
