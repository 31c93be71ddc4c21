"""Opens the files that a server stores, plain or encrypted depending on the settings."""

from pathlib import Path

from cavvy.api.reported import read_batch
from cavvy.control.agents.deposit_objects import DepositManifest
from cavvy.control.agents.deposits import DepositDependencies
from cavvy.domain.values import Struct
from cavvy.settings import Settings, SettingsError
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.checkpoints.folders import CheckpointFolders
from cavvy.store.encrypted_files.data_keys import FileKeyPlaces, FileKeys, parse_project_places
from cavvy.store.keys import KEY_PLACES, KeyPlaceInvalid
from cavvy.store.logs import LogStore

_MIB = 1 << 20


class StoredFiles(Struct, frozen=True, kw_only=True):
    """The working folders, logs and checkpoints of a server, and the keys that encrypt them.
    `deposits` includes the logs; the control plane uses it to apply results that nodes have stored
    in a bucket.
    """

    keys: FileKeys
    blobs: ProjectBlobs
    folders: CheckpointFolders
    deposits: DepositDependencies


def open_stored_files(settings: Settings, root: Path, shared: bool) -> StoredFiles:
    """Open the stored files. `shared` is true if other servers write to these files too. Raises
    SettingsError.
    """
    keys, logs_mib = _open_keys(settings, root), settings.whole("logs.job_mib")
    logs = LogStore(root / "logs", limit=logs_mib * _MIB, shared=shared, keys=keys)
    return StoredFiles(
        keys=keys,
        blobs=ProjectBlobs(root / "folders", keys),
        folders=CheckpointFolders(root / "storage", shared=shared, keys=keys),
        deposits=DepositDependencies(
            url=settings.text("server.results_url"),
            logs=logs,
            read=lambda body, now: read_batch(body, now, DepositManifest),
        ),
    )


def _open_keys(settings: Settings, root: Path) -> FileKeys:
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
        return FileKeys(root / "file-keys", root / "key", places)
    except KeyPlaceInvalid as error:
        hint = f"{KEY_PLACES}; or server, for the key that encrypts secrets"
        raise SettingsError(f"the settings [files]: {error}", hint) from error
