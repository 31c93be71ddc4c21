"""Opens the files that a server stores. The settings determine whether the files are encrypted, and
whether they are in a folder or in a bucket.

The bucket that `server.files` names is bound to the database, and gives all servers the same keys.
With a bucket, servers on several machines need no shared folder.
"""

import os
import secrets
import shutil
from asyncio import to_thread
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cavvy.api.reported import read_batch
from cavvy.api.tokens import load_tokens
from cavvy.client.state import write_private
from cavvy.control.agents.deposit_records import DepositManifest
from cavvy.control.agents.deposits import DepositDependencies
from cavvy.domain.values import Struct
from cavvy.server.node_tls import load_certificate
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.settings import Settings, SettingsError
from cavvy.store.base import StoreUnusable
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.store.encrypted_files.data_keys import (
    FileKeyPlaces,
    FileKeys,
    KeyRows,
    parse_project_places,
)
from cavvy.store.keys import KEY_PLACES, KeyPlaceInvalid
from cavvy.store.locks import DatabaseLocks
from cavvy.store.logs import LogStore
from cavvy.store.objects.base import ObjectBucket, ObjectError
from cavvy.store.objects.locations import open_place, overlaps
from cavvy.store.open import open_store

_MIB = 1 << 20
SCHEMES = ("s3://", "gs://", "az://")
IN_BUCKET = ("folders", "logs", "storage")  # folders of the bucket that belong to the database
_ID = "files.id"  # the object with the ID of the files
_OWNER = "files.database"  # the object with the ID of the database that has the files
# Each server has a copy of these files in its state folder. The originals are in the database,
# encrypted with the key of secrets.
_SHARED = ("agents.key", "tls.pem", "token")


class StoredFiles(Struct, frozen=True, kw_only=True):
    """The working folders, logs and checkpoints of a server, and the keys that encrypt them.
    `bucket_url` is "" if the files are not in a bucket. The control plane uses `deposits` to apply
    results that nodes have stored in a bucket, among them logs.
    """

    keys: FileKeys
    blobs: ProjectBlobs
    folders: CheckpointFolders
    deposits: DepositDependencies
    bucket_url: str = ""


class FilesPlace(Struct, frozen=True, kw_only=True):
    """The location of the stored files: the folder `root` or a `bucket`. If `shared` is set, other
    servers use the folder too. Servers with a bucket share only the database `url`.
    """

    root: Path
    shared: bool = False
    bucket: BucketFolder | None = None
    url: str = ""


def open_stored_files(settings: Settings, place: FilesPlace) -> StoredFiles:
    """Open the stored files. Raises SettingsError."""
    root, bucket = place.root, place.bucket
    keys, limit = open_file_keys(settings, place), settings.whole("logs.job_mib") * _MIB
    logs: LogStore | BucketLogs
    if bucket is None:
        logs = LogStore(root / "logs", limit=limit, shared=place.shared, keys=keys)
    else:
        logs = BucketLogs(bucket.below("logs"), limit=limit, keys=keys)
    return StoredFiles(
        keys=keys,
        bucket_url="" if bucket is None else bucket.url,
        blobs=ProjectBlobs(root / "folders", keys, bucket and bucket.below("folders")),
        folders=CheckpointFolders(
            root / "storage",
            shared=place.shared,
            keys=keys,
            bucket=bucket and bucket.below("storage"),
            locks=None if bucket is None else DatabaseLocks(place.url),
        ),
        deposits=DepositDependencies(
            url=settings.text("server.results_url"),
            logs=logs,
            read=lambda body, now: read_batch(body, now, DepositManifest),
        ),
    )


def open_file_keys(settings: Settings, place: FilesPlace) -> FileKeys:
    """Return the object that encrypts stored files. Raises SettingsError if the settings name no
    valid location of a key.
    """
    former = [settings.text(name) for name in ("files.former_keys", "secrets.former_keys")]
    try:
        places = FileKeyPlaces(
            common=settings.text("files.key"),
            projects=parse_project_places(settings.text("files.project_keys")),
            former=" ".join(former).replace(",", " ").split(),
            server=settings.text("secrets.key"),
        )
        rows = KeyRows(place.url) if place.bucket is not None else None
        return FileKeys(place.root / "file-keys", place.root / "key", places, rows)
    except KeyPlaceInvalid as error:
        hint = f"{KEY_PLACES}; or server, for the key that encrypts secrets"
        raise SettingsError(f"the settings [files]: {error}", hint) from error


class BindsFiles(Protocol):
    """A store whose database refers to files."""

    async def bind(self, key: str, value: str) -> str:
        """Store the value of `key` if the database has none for this key, and return the stored
        value.
        """


def is_bucket(place: str) -> bool:
    """Return whether `server.files` names a bucket."""
    return place.startswith(SCHEMES)


def check_bucket(url: str, settings: Settings, *, uses_machine: bool) -> None:
    """Check that servers with these settings can keep their files in the bucket. Raises
    StateDirError.
    """
    if not settings.text("secrets.key"):
        raise StateDirError(
            "settings-invalid",
            f"server.files is {url}, but the key of secrets would be in the state folder, which "
            "other servers do not have",
            "set secrets.key to the same key for all servers: file:PATH, env:NAME or aws-kms:KEY",
        )
    if uses_machine:
        raise StateDirError(
            "settings-invalid",
            f"server.files is {url}, but jobs on the server's own machine need a folder",
            "set enabled = false in [providers.local], or set server.files to a folder",
        )
    results = settings.text("server.results_url")
    if results and overlaps(results, url):
        raise StateDirError(
            "settings-invalid",
            f"server.results_url ({results}), where nodes of all projects write, overlaps with "
            f"server.files ({url})",
            "set server.results_url to a folder outside of server.files",
        )


def open_bucket(url: str, root: str, environment: Mapping[str, str] = os.environ) -> BucketFolder:
    """Open the bucket. Copies of the bucket's files are kept below `root`. Raises StateDirError."""

    def now() -> datetime:
        return datetime.now(UTC)

    try:
        location = open_place(url, environment, now)
    except ObjectError as error:
        raise StateDirError(
            "settings-invalid",
            f"server.files ({url}): {error}",
            "pass the bucket's access keys to the server as environment variables",
        ) from error
    assert isinstance(location.place, ObjectBucket)
    prefix = location.key.strip("/")
    return BucketFolder(location.place, url, f"{prefix}/" if prefix else "", Path(root), now)


async def bind_bucket(store: BindsFiles, bucket: BucketFolder) -> None:
    """Check that the files of this database are in this bucket. A new database is bound to the
    bucket. A bucket with files of another database is rejected, because the garbage collection
    would delete these files. Raises StateDirError, StoreUnusable.
    """
    url, mine = bucket.url, await store.bind("database", secrets.token_hex(16))
    owner = (await to_thread(bucket.get, _OWNER) or b"").decode()
    if owner not in ("", mine):
        raise StateDirError(
            "settings-invalid",
            f"{url} has the logs and uploaded files of another database",
            "set server.files to another bucket or to another folder of the bucket",
        )
    there = (await to_thread(bucket.get, _ID) or b"").decode()
    bound = await store.bind("files", there or secrets.token_hex(16))
    where = await store.bind("files_at", url)
    same = where.rstrip("/") == url.rstrip("/")
    if not there and same:
        await to_thread(bucket.put, _ID, bound.encode())
    elif bound != there or not same:
        raise StateDirError(
            "settings-invalid",
            f"the logs and uploaded files of this database are in {where}, not in {url}",
            "set server.files to that location; a new bucket needs a new database",
        )
    if not owner:
        await to_thread(bucket.put, _OWNER, mine.encode())


def refuse_other_form(folder: str, bucket: BucketFolder | None) -> None:
    """Raise StateDirError if an archive of a folder would be restored into a bucket, or an archive
    of a bucket into a folder, because buckets and folders store logs in different formats.
    """
    if is_bucket(folder) != (bucket is not None):
        raise StateDirError(
            "settings-invalid",
            f"the archive was created from files in {folder}, but server.files names "
            f"{'a folder' if bucket is None else bucket.url}",
            "set server.files to a bucket if the archive was created from a bucket, and to a "
            "folder if the archive was created from a folder",
        )


def send_files(bucket: BucketFolder, folder: Path) -> None:
    """Upload the restored files that belong in the bucket, and delete them from `folder`. Blocks.
    Raises StoreError, OSError.
    """
    if bucket.get(_ID) is not None:
        raise StateDirError(
            "not-empty",
            f"{bucket.url} belongs to a server with jobs: it contains {_ID}",
            "set server.files to a new bucket or folder of a bucket",
        )
    for name in IN_BUCKET:
        for path in sorted((folder / name).rglob("*")):
            if path.is_file():
                bucket.send(path.relative_to(folder).as_posix(), path)
        shutil.rmtree(folder / name, ignore_errors=True)


async def join_bucket(bucket: BucketFolder, url: str, home: StateDir, settings: Settings) -> None:
    """Bind the database to the bucket, and share the servers' common values (see `share_values`).
    Raises StateDirError, StoreError, OSError.
    """
    store = open_store(url)
    await store.open()  # which creates the tables
    try:
        await bind_bucket(store, bucket)
    finally:
        await store.close()
    place = FilesPlace(root=Path(home.path), bucket=bucket, url=url)
    keys = open_file_keys(settings, place)
    try:
        await to_thread(share_values, home, keys)
    finally:
        keys.close()


def share_values(home: StateDir, keys: FileKeys) -> None:
    """Share three files of the first server with all servers: the key for agents' tokens, the
    certificate for nodes, and the user token. Blocks. Raises StateDirError, StoreError, OSError.
    """
    load_tokens(home.file("agents.key"))
    load_certificate(home.file("tls.pem"))
    home.token()
    for name in _SHARED:
        path = Path(home.file(name))
        own = path.read_bytes()
        try:
            shared = keys.share(name, own)
        except StoreUnusable as error:
            raise StateDirError(
                "settings-invalid",
                f"{name}, which all servers of the database share, cannot be read: {error}",
                "set secrets.key to the same key for all servers",
            ) from error
        if shared != own:
            write_private(str(path), shared)
