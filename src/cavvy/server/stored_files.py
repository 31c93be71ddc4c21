"""Opens the files that a server stores. The settings determine whether the files are encrypted."""

from pathlib import Path

from cavvy.api.reported import read_batch
from cavvy.control.agents.deposit_objects import DepositManifest
from cavvy.control.agents.deposits import DepositDependencies
from cavvy.domain.values import Struct
from cavvy.settings import Settings, SettingsError
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.checkpoints.folders import CheckpointFolders
from cavvy.store.database_locks import DatabaseLocks
from cavvy.store.encrypted_files.data_keys import FileKeyPlaces, FileKeys, parse_project_places
from cavvy.store.encrypted_files.key_files import KeyRows
from cavvy.store.keys import KEY_PLACES, KeyPlaceInvalid
from cavvy.store.logs import LogStore

_MIB = 1 << 20


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
