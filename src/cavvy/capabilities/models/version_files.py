"""The files of a version of a model that is to be published: from a file or folder here, a job's
checkpoint, or a version in another registry.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.spec.workdir import FolderSnapshot
    from cavvy.store.objects.hub import HubRepository

_REGISTRIES = ("hf://", "models:/")
_MOST_FILES = 10_000  # of a version in another registry
_PIECE = 32 << 20  # bytes of a request to the Hugging Face Hub
_PAUSES_S = (1.0, 5.0, 30.0)  # between the tries of a request that the Hub does not answer
_BELOW = "model"  # the folder into which a job's checkpoint is copied


class VersionFiles(NamedTuple):
    """The files of a version that is to be published: a file or folder here, or what a snapshot
    has in the folder `below`, such as the checkpoint of a job."""

    folder: Path | None
    snapshot: str = ""
    below: str = ""
    job: str = ""  # whose checkpoint it is or was
    main: str = ""  # the file to serve, if it was chosen


def find_source(client: "ApiClient", project: str, source: str, pulled: Path) -> VersionFiles:
    """Return what SOURCE names. What comes from another registry is written to `pulled`. Raises
    CommandFailure, ApiError."""
    folder = find_files(source, pulled)
    if folder is not None:
        return VersionFiles(folder)
    snapshot, job, below = _copy_checkpoint(client, project, source)
    return VersionFiles(None, snapshot, below, job)


def copy_source(client: "ApiClient", project: str, files: VersionFiles, model: Path) -> Path:
    """Write the files to the new folder `model`, where they can be changed, and return it."""
    if files.folder is None:
        _download(client, project, files.snapshot, files.below, model)
    else:
        _copy(files.folder, model)
    return model


def find_files(source: str, pulled: Path) -> Path | None:
    """Return the file or folder of the model, which comes to `pulled` from another registry, or
    None if `source` is a job. Raises CommandFailure.
    """
    if source.startswith(_REGISTRIES):
        return pull_from(source, pulled)
    if Path(source).exists():
        from cavvy.cli.view.links import agree_to_exit

        hint = f"if you want to publish that, name it: {Path(source).resolve()}"
        agree_to_exit(Path(source), "publish what is there?", "nothing was sent", hint)
        return Path(source)
    if "/" in source or Path(source).suffix:
        raise CommandFailure(f"{source}: the file does not exist", exit_code=2)
    return None


def pull_from(source: str, folder: Path) -> Path:
    """Write the files of a version in another registry to a new folder, and return it."""
    from cavvy.client.landing import LandingRefused
    from cavvy.client.mlflow import MlflowRegistry, RegistryRefused

    try:
        if source.startswith("hf://"):
            return _pull_hub(source, folder)
        MlflowRegistry().pull(source, folder)
    except RegistryRefused as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except LandingRefused as error:
        told = f"the files of {source} cannot be written: {error.message}"
        raise CommandFailure(told, error.hint, exit_code=2) from error
    except OSError as error:  # such as a full disk, or a file where another one needs a folder
        told = f"the files of {source} cannot be written: {error.strerror}"
        raise CommandFailure(told, exit_code=2) from error
    return folder


def _pull_hub(source: str, folder: Path) -> Path:
    from hashlib import sha256

    from cavvy.client.landing import Landing
    from cavvy.store.objects.base import ObjectDenied, ObjectMissing, ObjectTryAgain
    from cavvy.store.objects.hub import ENDPOINT, HubRepository

    token, endpoint = os.environ.get("HF_TOKEN", ""), os.environ.get("HF_ENDPOINT", ENDPOINT)
    try:
        hub = HubRepository(source, token=token, endpoint=endpoint)
        found, more = hub.list(hub.key, limit=_MOST_FILES)
        if more:
            raise ObjectDenied(f"{source} has more than {_MOST_FILES} files; name a folder of it")
        inside = hub.key.rstrip("/")
        chosen = [each for each in found if not inside or f"{each.key}/".startswith(f"{inside}/")]
        if not chosen:
            raise ObjectMissing(f"{source} has no files")
        folder.mkdir()
        with Landing(folder) as landing:
            for each in chosen:
                path = each.key[len(inside) :].strip("/") or each.key.rpartition("/")[2]
                digest, size, count = sha256(), each.size or 0, 0
                with landing.create(path) as file:
                    for offset in range(0, size, _PIECE):
                        piece = _read_piece(hub, each.key, offset, min(_PIECE, size - offset))
                        digest.update(piece)
                        count += file.write(piece)
                if count != size or each.sha256 not in ("", digest.hexdigest()):
                    raise ObjectDenied(f"{path} of {source} has other bytes than the Hub lists")
    except ObjectDenied as error:
        hint = "" if token else "here, HF_TOKEN is an environment variable; it is not set"
        raise CommandFailure(str(error), hint, exit_code=2) from error
    except (ObjectMissing, ObjectTryAgain) as error:
        raise CommandFailure(str(error), exit_code=2) from error
    return folder


def _read_piece(hub: "HubRepository", key: str, offset: int, length: int) -> bytes:
    """Read a part of a file. A large model has hundreds, some of which the Hub may not answer at
    once. Raises ObjectDenied, ObjectMissing, ObjectTryAgain."""
    from time import sleep

    from cavvy.store.objects.base import ObjectTryAgain

    for pause_s in _PAUSES_S:
        try:
            return hub.get(key, offset, length)
        except ObjectTryAgain:
            sleep(pause_s)
    return hub.get(key, offset, length)


def _copy_checkpoint(client: "ApiClient", project: str, name: str) -> tuple[str, str, str]:
    """Return a snapshot with a job's newest checkpoint, the job's name, and the checkpoint's
    folder."""
    from cavvy.cli.reach.names import find_job
    from cavvy.client.model_folder import make_model_folder

    job = find_job(client, project, name)
    made = make_model_folder(client, job.project, job.name, [], _BELOW)
    return made.snapshot, job.name, _BELOW


def _copy(source: Path, folder: Path) -> None:
    """Copy what would be published. A link stays a link, which is checked with all the others: its
    target could be any file of the user."""
    if source.is_dir():
        shutil.copytree(source, folder, symlinks=True)
        for each in folder.rglob("*"):
            if each.is_symlink() and not each.resolve().is_relative_to(folder.resolve()):
                raise CommandFailure(
                    f"{source / each.relative_to(folder)} is a link that leads out of the folder",
                    "copy the file that is meant to its place, or remove the link",
                    exit_code=2,
                )
        return
    folder.mkdir()
    shutil.copy(source, folder)


def _download(client: "ApiClient", project: str, snapshot: str, below: str, folder: Path) -> None:
    """Write the files of a snapshot's folder `below` to a new folder."""
    from cavvy.client.blobs import download_snapshot

    folder.mkdir()
    download_snapshot(client, project, snapshot, below, folder)


def upload_folder(client: "ApiClient", project: str, source: Path) -> str:
    """Upload a file or folder as a snapshot, and return the snapshot's hash."""
    from cavvy.client.blobs import upload

    snapshot = _freeze(source)
    upload(client, project, snapshot.blobs())
    return snapshot.hash


def hash_files(source: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a model, by path."""
    found = _freeze(source).entries
    return {each.path: each.sha256 for each in found if each.sha256 is not None}


def _freeze(source: Path) -> "FolderSnapshot":
    from cavvy.spec.workdir import FreezeError, freeze

    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    try:
        snapshot = freeze(folder, only=only)
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    if not snapshot.entries:
        raise CommandFailure(f"the folder {source} has no files", "publish a folder with a model")
    return snapshot
