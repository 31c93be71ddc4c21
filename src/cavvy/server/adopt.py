"""Moves the jobs of an embedded server from SQLite to PostgreSQL: `cavvy server adopt`.

All rows are written in one transaction, which compares them with the source before it commits. If
the move is interrupted, the database stays empty and the move can be repeated. The move does not
change the contents of `cavvy.db`, but renames the file at the end.

Keys, logs, uploaded files, checkpoints and the sockets of agents are in the state folder. If
`--from` or `server.files` names a different folder, the files of the state folder are copied. The
command refuses to copy files while a job is running, because agents on this machine connect to
their server through the old folder. If the folder does not change, the files stay where they are.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cavvy.client.state import write_private
from cavvy.domain.values import Struct
from cavvy.server.backup import copy_files
from cavvy.server.database import (
    SCHEMES,
    bind_folder,
    choose_bucket,
    choose_files,
    hold_alone,
    refuse_used,
)
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.settings import Settings
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseSession, make_driver, translating
from cavvy.store.leases import Fence, check_fence
from cavvy.store.migrate import prepare
from cavvy.store.open import open_store
from cavvy.store.table_copy import TableDigest, copy_rows, digest_rows, refuse_rows

DATABASE = "cavvy.db"
MOVED = "cavvy.db.moved"


class AdoptedServer(Struct, frozen=True, kw_only=True):
    """The rows that were copied to the database, and the number of files that were copied to the
    new folder. `again` is true if an earlier run had already copied the rows.
    """

    tables: Sequence[TableDigest]
    files: int = 0
    again: bool = False


def adopt(
    home: StateDir, settings: Settings, url: str, source: StateDir | None = None
) -> AdoptedServer:
    """Move the jobs in the state folder `source`, or in `home` if `source` is None, to the
    PostgreSQL database at `url`. After the move, servers with the state folder `home` use this
    database. Raises StateDirError, StoreError.
    """
    if not url.startswith(SCHEMES):
        raise StateDirError(
            "settings-invalid",
            f"--database starts with {url.partition(':')[0]!r}; expected {SCHEMES[0]}",
            f"write {SCHEMES[0]}USER@HOST/NAME",
        )
    for folder in (home,) if source is None else (source, home):
        folder.claim_idle()
    origin = source or home
    if not os.path.exists(origin.file(DATABASE)):
        raise StateDirError(
            "nothing-to-adopt",
            f"{origin.file(DATABASE)} does not exist"
            + (
                f"; the jobs of that folder were already moved ({MOVED} exists)"
                if os.path.exists(origin.file(MOVED))
                else ""
            ),
            "CAVVY_HOME or --from names the state folder of a server that used SQLite",
        )
    if source is not None and os.path.exists(home.file(DATABASE)):
        raise StateDirError(
            "settings-invalid",
            f"the state folder {home.path} has jobs of its own in {DATABASE}",
            "set CAVVY_HOME to a new folder",
        )
    files = choose_files(home, settings, url)
    if (bucket := choose_bucket(home, settings, url)) is not None:
        raise StateDirError(
            "settings-invalid",
            f"the files of {origin.path} cannot be moved to {bucket.url}",
            "set server.files to a folder, or use a new database with the bucket",
        )
    if os.path.realpath(files.path) == os.path.realpath(origin.path):
        files = origin
    elif files is not home:
        refuse_used(files)
    return asyncio.run(_Move(home, files, url, origin).run())


class _Move:
    """One run of `cavvy server adopt`."""

    def __init__(self, home: StateDir, files: StateDir, url: str, origin: StateDir) -> None:
        self._home = home
        self._files = files
        self._url = url
        self._origin = origin

    async def run(self) -> AdoptedServer:
        async with hold_alone(self._url, self._home) as fence:
            done = await asyncio.to_thread(self._copy, fence)
            store = open_store(self._url)
            await store.open()
            try:
                await bind_folder(store, self._home, self._files, self._url)
            finally:
                await store.close()
            self._mark()
        return done

    def _copy(self, fence: Fence) -> AdoptedServer:
        source = make_driver(f"sqlite:///{self._origin.file(DATABASE)}", journal="auto")
        target = make_driver(self._url, journal="auto")
        with translating(target):
            source = prepare(source, lambda: secrets.token_hex(16))
            target = prepare(target, lambda: secrets.token_hex(16))
            with closing(source.connect()) as one, closing(target.connect()) as two:
                one.begin()  # no other process can write meanwhile
                self._refuse_running(one)
                files = 0
                if self._origin is not self._files:
                    files = copy_files(Path(self._origin.path), Path(self._files.path))
                return self._copy_rows(one, two, fence, files)

    def _copy_rows(
        self, one: DatabaseSession, two: DatabaseSession, fence: Fence, files: int
    ) -> AdoptedServer:
        two.begin()
        try:
            check_fence(two, fence)
            two.allow_pauses()  # the connection is idle while the source is read
            try:
                refuse_rows(two)
            except StoreUnusable:
                if (there := digest_rows(two)) != digest_rows(one):
                    raise
                return AdoptedServer(tables=there, files=files, again=True)
            tables = copy_rows(one, two)
            two.commit()
            return AdoptedServer(tables=tables, files=files)
        finally:
            two.rollback()
            one.rollback()

    def _refuse_running(self, session: DatabaseSession) -> None:
        """Raise StateDirError if gangs are running and the move would change the state folder of
        the gangs' server.
        """
        if self._origin is self._home is self._files:
            return
        rows = session.run(
            "SELECT DISTINCT j.name FROM attempts a JOIN jobs j ON j.id = a.job_id "
            "WHERE a.phase <> 'ended' ORDER BY j.name"
        ).fetchall()
        if rows:
            names = ", ".join(name for (name,) in rows[:5])
            raise StateDirError(
                "jobs-running",
                f"jobs of {self._origin.path} are running ({names}), and their agents "
                "connect to the server through that folder",
                "wait for these jobs or stop them. To keep the server in its old folder instead, "
                f"empty the setting server.files and run CAVVY_HOME={self._origin.path} cavvy "
                "server adopt, without --from",
            )

    def _mark(self) -> None:
        """Rename the database file, so that no server uses the file any more. A server that is
        started later in the old folder refuses to start and names the new location of the jobs.
        """
        if self._origin is not self._home:
            write_private(self._origin.file("database"), self._url.encode())
        os.replace(self._origin.file(DATABASE), self._origin.file(MOVED))
        for tail in ("-wal", "-shm"):
            if os.path.exists(self._origin.file(DATABASE + tail)):
                os.replace(self._origin.file(DATABASE + tail), self._origin.file(MOVED + tail))
