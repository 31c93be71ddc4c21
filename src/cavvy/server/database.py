"""Chooses a server's PostgreSQL database, registers the server with the database's other servers,
and binds a folder of files to the database.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cavvy.client.state import host_name, write_private
from cavvy.server.state_dir import StateDir, StateDirBusy, StateDirError
from cavvy.server.stored_files import BindsFiles, bind_bucket, check_bucket, is_bucket, open_bucket
from cavvy.settings import Settings
from cavvy.store.base import StoreUnusable
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.leases import RENEW_S, SWEEP_LEASE, Fence, Replica, ReplicaLeases, list_replicas

SCHEMES = ("postgresql://", "postgresql+psycopg://")
_REMEMBERED = "database"  # the file with the URL of the database that the folder's server used last
_FILES_REMEMBERED = "files"  # the file with the value of `server.files` that this server used last
_FOLDER_ID = "files.id"
_SERVERS = "servers"  # a folder with a file for each server, so that servers detect a shared folder
_LOCAL = "local"  # name of the provider of this machine
_TURN_PAUSE_S = 1.0  # seconds after which a waiting server checks again
_log = logging.getLogger(__name__)


def choose_database(home: StateDir, settings: Settings) -> str | None:
    """Return the URL of the PostgreSQL database: the setting `server.database` or, if it is empty,
    the URL that the last server of this folder used. Returns None if the database is the file
    `cavvy.db`. Raises StateDirError.
    """
    given = settings.text("server.database")
    url = given or _read(home.file(_REMEMBERED))
    if not url:
        return None
    if not url.startswith(SCHEMES):
        raise StateDirError(
            "settings-invalid",
            f"server.database starts with {url.partition(':')[0]!r}; expected {SCHEMES[0]}",
            f"write {SCHEMES[0]}USER@HOST/NAME, or leave server.database empty to use SQLite",
        )
    if os.path.exists(home.file("cavvy.db")):
        raise StateDirError(
            "settings-invalid",
            f"server.database names a PostgreSQL database, but the jobs of {home.path} are in its "
            "file cavvy.db",
            "set CAVVY_HOME to a new folder for this database, or leave server.database empty",
        )
    return url


def choose_files(home: StateDir, settings: Settings, url: str | None) -> StateDir:
    """Return the folder with the keys, logs, uploads and checkpoints: the setting `server.files`,
    or else the state folder. If the setting names a bucket, the state folder has only copies of
    the bucket's files. Raises StateDirError.
    """
    given = _files_setting(home, settings)
    if not given or os.path.realpath(given) == os.path.realpath(home.path):
        return home
    if url is None:
        raise StateDirError(
            "settings-invalid",
            "server.files is set, but server.database is empty, so the database is an SQLite "
            "file, which only one server can use",
            "set server.database to a PostgreSQL database, which several servers can share, or "
            "remove server.files",
        )
    if is_bucket(given):
        check_bucket(given, settings, uses_machine=_uses_machine(settings))
        return home
    files = StateDir(os.path.abspath(given))
    files.prepare()
    if _uses_machine(settings) and Path(files.path) not in Path(home.path).parents:
        raise StateDirError(
            "settings-invalid",
            f"jobs on this machine could read the state folder {home.path}, because it is not in "
            f"server.files ({files.path})",
            f"use a state folder in {files.path}, or set enabled = false in [providers.local]",
        )
    return files


def choose_bucket(home: StateDir, settings: Settings, url: str | None) -> BucketFolder | None:
    """Return the bucket that `server.files` names, or None if it names a folder. Raises
    StateDirError.
    """
    given = _files_setting(home, settings)
    return open_bucket(given, home.path) if url is not None and is_bucket(given) else None


def _files_setting(home: StateDir, settings: Settings) -> str:
    return settings.text("server.files") or _read(home.file(_FILES_REMEMBERED))


def refuse_used(files: StateDir) -> None:
    """Raise StateDirError if a server has already used this folder for its files, because a second
    server would replace the first server's keys and logs.
    """
    for name in ("cavvy.db", _SERVERS):
        if os.path.exists(files.file(name)):
            raise StateDirError(
                "not-empty",
                f"server.files ({files.path}) belongs to a server with jobs: it contains {name}",
                "set server.files to a new folder, or move this folder away",
            )


def wait_for_turn(home: StateDir, settings: Settings) -> None:
    """Wait until no other server uses the folder, and lock it. Blocks. Raises StateDirError."""
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
    """Lock the folder. Returns the reason why the folder cannot be locked now, or "" on success."""
    try:
        for each in list_replicas(url) if url else ():
            if each.folder == home.path:
                return f"process {each.pid} on {each.host} uses {home.path}"
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
async def join_servers(
    url: str, home: StateDir, files: StateDir, settings: Settings, address: str
) -> AsyncIterator[ReplicaLeases]:
    """Register with the servers that use the database. Raises StoreError, or StateDirError if this
    server cannot share the database with the registered servers.
    """
    me = Replica(
        id=secrets.token_hex(16),
        host=host_name(),
        pid=os.getpid(),
        folder=home.path,
        address=address,
    )
    leases = ReplicaLeases(url, me)
    mark = files.file(_SERVERS, me.id)
    try:
        os.makedirs(os.path.dirname(mark), mode=0o700, exist_ok=True)
        write_private(mark, f"{home.path} on {me.host}".encode())
        in_bucket = is_bucket(_files_setting(home, settings))
        check_others(await leases.join(), files, settings, me.host, in_bucket=in_bucket)
        yield leases
    finally:
        await leases.leave()
        Path(mark).unlink(missing_ok=True)


@asynccontextmanager
async def hold_alone(url: str, home: StateDir) -> AsyncIterator[Fence]:
    """Exclude all servers from the database, for a command that changes the whole database. A write
    through the fence succeeds only while this command certainly has the database to itself. Raises
    StoreError, or StateDirError if a server uses the database.
    """
    me = Replica(
        id=secrets.token_hex(16),
        host=host_name(),
        pid=os.getpid(),
        folder=home.path,
        address="",  # of no server
        revision=None,  # no server can share the database with this command
    )
    leases = ReplicaLeases(url, me)
    try:
        for each in await leases.join():
            raise StateDirError(
                "server-running",
                f"process {each.pid} on {each.host} uses the database",
                f"stop this server first: CAVVY_HOME={each.folder} cavvy server stop; "
                "jobs keep running",
            )
        await leases.turn()
        if SWEEP_LEASE not in leases.held:
            raise StateDirError(
                "server-running",
                "another process has just started to use the database",
                "try again when that process has ended",
            )
        staying = asyncio.create_task(_stay(leases), name="stay")
        try:
            yield leases.held[SWEEP_LEASE]
        finally:
            staying.cancel()
            await asyncio.wait([staying])
    finally:
        await leases.leave()


async def _stay(leases: ReplicaLeases) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(StoreUnusable):  # the fence refuses to write if this lasts too long
            await leases.turn()


def check_others(
    others: Sequence[Replica],
    files: StateDir,
    settings: Settings,
    host: str,
    *,
    in_bucket: bool = False,
) -> None:
    """Check that this server can share the work with the other servers. If the files are in a
    bucket, `bind_folder` checks that all servers use the same bucket. Raises StateDirError.
    """
    for each in others:
        if not in_bucket and not os.path.exists(files.file(_SERVERS, each.id)):
            raise StateDirError(
                "settings-invalid",
                f"process {each.pid} on {each.host} uses this database, but keeps keys, logs "
                f"and uploads in another folder than {files.path}, perhaps in a copied folder",
                "set server.files to the same folder for all servers, on a shared file system if "
                "the servers are on several machines; or stop the other server first",
            )
        if each.host != host and _uses_machine(settings):
            raise StateDirError(
                "settings-invalid",
                f"process {each.pid} on {each.host} uses this database, but cannot manage jobs on "
                "this machine (provider `local`)",
                "set enabled = false in [providers.local] for all servers",
            )


def _uses_machine(settings: Settings) -> bool:
    return settings.providers.get(_LOCAL, {}).get("enabled", True) is not False


async def bind_folder(
    store: BindsFiles,
    home: StateDir,
    files: StateDir,
    url: str,
    bucket: BucketFolder | None = None,
) -> None:
    """Check that the keys, logs and uploaded files of this database are in the folder `files` or in
    the bucket. Store the URL of the database for later starts. A new database is bound to the
    folder or bucket. Raises StateDirError.
    """
    if bucket is not None:
        await bind_bucket(store, bucket)
        write_private(home.file(_FILES_REMEMBERED), bucket.url.encode())
        if _read(home.file(_REMEMBERED)) != url:
            write_private(home.file(_REMEMBERED), url.encode())
        return
    path = files.file(_FOLDER_ID)
    mine = _read(path)
    if not mine:
        mine = secrets.token_hex(16)
        write_private(path, mine.encode())
    if await store.bind("files", mine) != mine:
        where = await store.bind("files_at", "another folder")
        raise StateDirError(
            "settings-invalid",
            f"the keys, logs and uploaded files of this database are in {where}, but this server "
            f"uses the folder {files.path}",
            "set server.files to the database's folder to share the work with the other servers; "
            "or stop these servers, copy the folder, and set CAVVY_HOME to the copy. A new folder "
            "needs a new database",
        )
    await store.bind("files_at", f"{files.path} on {host_name()}")
    if _read(home.file(_REMEMBERED)) != url:
        write_private(home.file(_REMEMBERED), url.encode())
    if files is not home:
        write_private(home.file(_FILES_REMEMBERED), files.path.encode())


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""
