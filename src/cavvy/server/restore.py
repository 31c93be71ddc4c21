"""`cavvy server restore`: restores a server from an archive, or checks a server whose database
other software has restored.

The archive is unpacked next to its final location and checked there. The database is compared with
the providers and marked as restored before it is moved to its final location. A server uses only a
database that was compared with the providers. The database is written last: the file `cavvy.db`, or
the rows in PostgreSQL. The command can be repeated if it fails before the database is written.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from cavvy.control.clock import WallClock
from cavvy.control.decide.restored import RestoreComparison
from cavvy.control.job_service import gang_name
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.restored import (
    StoredAccess,
    compare_with_providers,
    count_access,
    end_access,
    mark_restored,
    record_restore,
)
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.values import Struct
from cavvy.providers.abilities import CLOSEABLE, ability
from cavvy.providers.base import Provider
from cavvy.providers.hosts.supervisor.processes import find_agents
from cavvy.server.backup import (
    DATABASE,
    LEFT_OUT,
    ArchiveManifest,
    make_private,
    unpack,
    work_folder,
)
from cavvy.server.database import (
    bind_folder,
    choose_bucket,
    choose_database,
    choose_files,
    hold_alone,
    refuse_used,
)
from cavvy.server.open_state import load_providers, make_context, make_credentials, open_sealer
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.server.stored_files import refuse_other_form, send_files
from cavvy.settings import Settings
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.drivers import make_driver, translating
from cavvy.store.leases import Fence, check_fence
from cavvy.store.migrate import prepare
from cavvy.store.open import open_store
from cavvy.store.table_copy import copy_rows, refuse_rows
from cavvy.trees import remove_tree

_UNPACKED = "restore.part"


class RestoreReport(Struct, frozen=True, kw_only=True):
    """The restored data (in a dry run, the data to restore), the differences between the data and
    the nodes that the providers report, and the providers that did not answer. `made_at` is None if
    the database was not restored from an archive. `access` is what the database contained, and
    `access_ended` states whether its tokens and keys were ended.
    """

    made_at: datetime | None
    comparison: RestoreComparison
    silent: Sequence[SilentPlace]
    # lost gangs that still run on this machine for another state folder, with their agents' PIDs
    elsewhere: Mapping[str, Sequence[int]]
    access: StoredAccess
    access_ended: bool


def restore(
    home: StateDir,
    settings: Settings,
    archive: BinaryIO,
    url: str | None,
    *,
    dry_run: bool,
    end_access: bool = False,
) -> RestoreReport:
    """Restore an archive into a new state folder and, with `url`, into an empty PostgreSQL
    database. The files are written to `server.files` if this setting is set. With `end_access`, the
    restored tokens and keys are ended. Raises StateDirError, StoreError, ProviderError, OSError.
    """
    if dry_run:
        return _try(home, settings, archive)
    home.claim_idle()
    # SQLite would apply the journal of another database to the restored database
    for name in (DATABASE, *(f"{DATABASE}-{each}" for each in ("wal", "journal")), "database"):
        if os.path.exists(home.file(name)):
            raise StateDirError(
                "not-empty",
                f"the state folder {home.path} belongs to a server with jobs: it contains {name}",
                "set CAVVY_HOME to a new folder, or move this folder away; to restore only its "
                f"database, move all its files whose names begin with {DATABASE} away",
            )
    files = choose_files(home, settings, url)
    if files is not home:
        refuse_used(files)
    bucket = choose_bucket(home, settings, url)
    unpacked = Path(files.file(_UNPACKED))
    remove_tree(unpacked, ignore_errors=True)
    unpacked.mkdir(mode=0o700)
    try:
        manifest = unpack(archive, unpacked, whole=True)
        refuse_other_form(manifest.folder, bucket)
        _join_local(files, unpacked)
        report = asyncio.run(_compare_copy(unpacked, settings, manifest, False, end_access))
        if bucket is not None:
            send_files(bucket, unpacked)
        _put_in_place(home, files, unpacked, url, bucket)
    finally:
        remove_tree(unpacked, ignore_errors=True)
    return report


def _try(home: StateDir, settings: Settings, archive: BinaryIO) -> RestoreReport:
    """Check an archive in a temporary folder. A server may use the state folder meanwhile."""
    Path(home.path).mkdir(mode=0o700, parents=True, exist_ok=True)
    with work_folder(Path(home.path), _UNPACKED) as unpacked:
        manifest = unpack(archive, unpacked, whole=False)
        return asyncio.run(_compare_copy(unpacked, settings, manifest, True, False))


def check_restored(
    home: StateDir, settings: Settings, *, dry_run: bool, end_access: bool = False
) -> RestoreReport:
    """Check a database that other software has restored: compare the database with the providers,
    and mark the database as restored. With `end_access`, its tokens and keys are ended. Raises
    StateDirError, StoreError, ProviderError.
    """
    home.claim_idle()
    url = choose_database(home, settings)
    if url is None and not os.path.exists(home.file(DATABASE)):
        raise StateDirError(
            "nothing-to-check",
            f"no server has used the state folder {home.path}",
            "name an archive, or set CAVVY_HOME to the state folder of the server",
        )
    files = choose_files(home, settings, url)
    return asyncio.run(_check_in_place(home, files, settings, url, dry_run, end_access))


def end_restored_access(home: StateDir, settings: Settings) -> None:
    """End the tokens and keys in a database that this process has restored or checked, and whose
    folder it has locked. Raises StateDirError, StoreError.
    """
    asyncio.run(_end_in_place(home, choose_database(home, settings)))


async def _end_in_place(home: StateDir, url: str | None) -> None:
    if url is None:
        await _end(f"sqlite:///{home.file(DATABASE)}")
        return
    async with hold_alone(url, home):
        await _end(url)


async def _end(url: str) -> None:
    now = WallClock().now()
    async with AsyncExitStack() as stack:
        store = open_store(url, journal="delete")
        await store.open()
        stack.push_async_callback(store.close)
        access = await count_access(store, now)
        await end_access(store, now)
        await record_restore(store, access, None, now, ended=True)


async def _compare_copy(
    unpacked: Path, settings: Settings, manifest: ArchiveManifest, dry_run: bool, ends: bool
) -> RestoreReport:
    url = f"sqlite:///{unpacked / DATABASE}"
    return await _compare(url, unpacked, settings, manifest.made_at, dry_run=dry_run, ends=ends)


async def _check_in_place(
    home: StateDir, files: StateDir, settings: Settings, url: str | None, dry_run: bool, ends: bool
) -> RestoreReport:
    root = Path(files.path)
    if url is None:
        local = f"sqlite:///{home.file(DATABASE)}"
        return await _compare(local, root, settings, None, dry_run=dry_run, ends=ends)
    async with hold_alone(url, home):
        return await _compare(url, root, settings, None, dry_run=dry_run, ends=ends)


async def _compare(
    url: str,
    root: Path,
    settings: Settings,
    made_at: datetime | None,
    *,
    dry_run: bool,
    ends: bool,
) -> RestoreReport:
    clock = WallClock()
    async with AsyncExitStack() as stack:
        store = open_store(url, journal="delete")
        await store.open()
        stack.push_async_callback(store.close)
        installation = await store.installation()
        context = make_context(installation, root, "", None, clock.now)
        accounts = _Accounts(load_providers(settings, context, store), clock)
        stack.push_async_callback(accounts.close)
        credentials = make_credentials(store, open_sealer(settings, root), accounts, context)
        stack.callback(credentials.forget)
        await credentials.open_changed()
        comparison, silent = await compare_with_providers(
            store, accounts.pool, partial(gang_name, installation)
        )
        elsewhere = await asyncio.to_thread(find_agents, [each.gang for each in comparison.lost])
        access = await count_access(store, clock.now())
        if not dry_run:
            _refuse_double_runs(comparison, elsewhere)
            await mark_restored(store, comparison, clock.now())
            if ends:
                await end_access(store, clock.now())
            await record_restore(store, access, made_at, clock.now(), ended=ends)
    return RestoreReport(
        made_at=made_at,
        comparison=comparison,
        silent=silent,
        elsewhere=elsewhere,
        access=access,
        access_ended=ends and not dry_run,
    )


def _refuse_double_runs(
    comparison: RestoreComparison, elsewhere: Mapping[str, Sequence[int]]
) -> None:
    """Raise StateDirError if the server would run jobs again that still run on this machine."""
    if not elsewhere:
        return
    told = [
        f"{each.attempt.job} (project {each.attempt.project}, attempt {each.attempt.number})"
        for each in comparison.lost
        if each.gang in elsewhere
    ]
    agents = " ".join(str(pid) for pids in elsewhere.values() for pid in pids)
    more = f" and {len(told) - 3} more" if len(told) > 3 else ""
    raise StateDirError(
        "jobs-still-run",
        "these jobs still run on this machine for the old state folder, so a restored server would "
        f"run them twice: {', '.join(told[:3])}{more}",
        f"end them with `kill {agents}`, or let them continue: restore at the path of the old "
        "state folder, as docs/guides/backup.md describes",
    )


class _Accounts:
    """The accounts to compare: the accounts in the settings and in the projects' credentials."""

    def __init__(self, providers: dict[str, Provider], clock: WallClock) -> None:
        self.pool = ProviderPool(providers, clock)

    async def put_account(self, account: str, provider: Provider) -> None:
        self.pool.providers[account] = provider

    async def drop_account(self, account: str) -> None:
        self.pool.providers.pop(account, None)

    async def close(self) -> None:
        for provider in self.pool.providers.values():
            if closeable := ability(provider, CLOSEABLE):
                await closeable.close()


def _join_local(files: StateDir, unpacked: Path) -> None:
    """Let the comparison see the jobs of this machine whose records a person has moved to the new
    state folder.
    """
    for name in LEFT_OUT:
        records = Path(files.file(name))
        if records.is_dir():
            link = unpacked / name
            make_private(unpacked, link.parent)
            link.symlink_to(records)


def _put_in_place(
    home: StateDir,
    files: StateDir,
    unpacked: Path,
    url: str | None,
    bucket: BucketFolder | None,
) -> None:
    """Move the files to their final location, and afterwards move the database."""
    for each in sorted(unpacked.iterdir()):
        if each.name.startswith(DATABASE):
            continue
        target = Path(files.file(each.name))
        inner = [each] if each.name != "providers" else sorted(each.iterdir())
        for path in inner:
            _replace(path, target if path is each else target / path.name)
    if url is None:
        os.replace(unpacked / DATABASE, home.file(DATABASE))
    else:
        asyncio.run(_fill_database(home, files, unpacked / DATABASE, url, bucket))


def _replace(path: Path, target: Path) -> None:
    """Move a file or folder to `target`, in place of what is there. Links stay where they are:
    they lead to records that are already in place.
    """
    if path.is_symlink():
        return
    target.parent.mkdir(mode=0o700, exist_ok=True)
    if target.is_dir():
        remove_tree(target)
    os.replace(path, target)


async def _fill_database(
    home: StateDir, files: StateDir, copy: Path, url: str, bucket: BucketFolder | None
) -> None:
    async with hold_alone(url, home) as fence:
        await asyncio.to_thread(_copy, copy, url, fence)
        store = open_store(url)
        await store.open()
        try:
            await bind_folder(store, home, files, url, bucket)
        finally:
            await store.close()


def _copy(copy: Path, url: str, fence: Fence) -> None:
    source = make_driver(f"sqlite:///{copy}", journal="delete")
    target = make_driver(url, journal="auto")
    with translating(target):
        prepare(target, lambda: "")
        with closing(source.connect()) as one, closing(target.connect()) as two:
            two.begin()
            try:
                check_fence(two, fence)
                refuse_rows(two)
                copy_rows(one, two)
                two.commit()
            finally:
                two.rollback()
