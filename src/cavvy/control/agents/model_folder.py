"""Builds the working folder of a service from files of a job: folders that were uploaded, and the
job's newest checkpoint below one of its paths.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256

from msgspec import MsgspecError
from msgspec.json import Decoder

from cavvy.control.agents.checkpoints import Checkpoints
from cavvy.domain.checkpoints import CheckpointFile
from cavvy.domain.jobs import JobRecord
from cavvy.domain.values import Struct
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import RowNotFound
from cavvy.store.blobs import BlobStore, NotManifest

_decode = Decoder(dict[str, list[FolderEntry]]).decode


class ModelFolder(Struct, frozen=True, kw_only=True):
    """The snapshot of a service's working folder, and the folder's files that come from a job. The
    files' paths are relative to the folder of the model.
    """

    snapshot: str
    files: Sequence[CheckpointFile]


async def make_model_folder(
    checkpoints: Checkpoints,
    job: JobRecord,
    blobs: BlobStore,
    snapshots: Sequence[str],
    below: str | None,
) -> ModelFolder:
    """Merge the files of these snapshots. Unless `below` is None, also merge the files of the job's
    newest checkpoint below the path `below`. If several files have the same path, the last file is
    used; the checkpoint comes after the snapshots. Raises RowNotFound, NotManifest, HashMismatch,
    StoreFull.
    """
    files = [] if below is None else await checkpoints.copy_newest(job, blobs)
    if below is not None and not files:
        raise RowNotFound(f"job {job.name} has no checkpoint")
    entries: dict[str, FolderEntry] = {}
    for snapshot in snapshots:
        found = await asyncio.to_thread(read_entries, blobs, snapshot)
        entries.update({each.path: each for each in found})
    entries.update({each.path: each for each in (_place(file, below or "") for file in files)})
    manifest = encode_manifest([entries[path] for path in sorted(entries)])
    return ModelFolder(snapshot=await asyncio.to_thread(_keep, blobs, manifest), files=files)


def read_entries(blobs: BlobStore, snapshot: str) -> list[FolderEntry]:
    """Return the entries of a snapshot. Raises RowNotFound, NotManifest."""
    with blobs.open(snapshot) as file:
        try:
            return _decode(file.read())["files"]
        except (MsgspecError, KeyError) as error:
            raise NotManifest(f"{snapshot} lists no files: {error}") from error


def _place(file: CheckpointFile, below: str) -> FolderEntry:
    mode = 0o755 if file.mode & 0o100 else 0o644
    path = f"{below}/{file.path}"
    return FolderEntry(path=path, size=file.size, mode=mode, sha256=file.sha256, link=file.link)


def _keep(blobs: BlobStore, manifest: bytes) -> str:
    name = sha256(manifest).hexdigest()
    blobs.put(name, [manifest])
    return name
