"""Chooses the bucket that `server.files` names, binds it to the database, and gives all servers the
same keys. With a bucket, servers on several machines need no shared folder.
"""

import os
import secrets
import shutil
from asyncio import to_thread
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, cast

from cavvy.api.tokens import load_tokens
from cavvy.client.state import write_private
from cavvy.server.node_listener.certificate import load_certificate
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.server.stored_files import FilesPlace, open_file_keys
from cavvy.settings import Settings
from cavvy.store.base import StoreUnusable
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.objects.base import ObjectBucket, ObjectError
from cavvy.store.objects.locations import open_place, overlaps
from cavvy.store.open import open_store

SCHEMES = ("s3://", "gs://", "az://")
IN_BUCKET = ("folders", "logs", "storage")  # folders of the bucket that belong to the database
_ID = "files.id"  # the object with the ID of the files
_OWNER = "files.database"  # the object with the ID of the database that has the files
# Each server has a copy of these files in its state folder. The originals are in the database,
# encrypted with the key of secrets.
_SHARED = ("agents.key", "tls.pem", "token")


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
        await bind_bucket(cast(BindsFiles, store), bucket)
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
