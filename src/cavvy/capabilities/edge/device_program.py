"""The program of devices, which they get like a model: its versions, and what its files are."""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from datetime import datetime

from cavvy.capabilities.edge.nouns import PROGRAM
from cavvy.capabilities.edge.on_device.bundle import pack_device
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.capabilities.models.registry import ModelRefused, ModelRegistry
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.blobs import BlobStore
from cavvy.store.secrets import SecretSealer

_PACKAGE = re.compile(r"packages/[^/]+\.whl")  # see `on_device/packages.py`
_FILE = "program.zip"


async def publish_program(
    registry: ModelRegistry,
    now: datetime,
    project: str,
    packed: bytes,
    made_by: str,
    sealer: SecretSealer,
    blobs: BlobStore,
    packages: Sequence[ModelFile] = (),
) -> ModelVersion:
    """Return the version of the devices' program that has these bytes and Python packages, as a
    new one unless the newest has them already. Without `packages`, it has those of the newest.
    Raises ModelRefused, StoreFull."""
    known = [each for each in await registry.models(project) if each.model == PROGRAM]
    newest = max(known, key=lambda each: each.number, default=None)
    if newest is not None and not packages:
        packages = newest.files[1:]
    if wrong := [each.path for each in packages if not _PACKAGE.fullmatch(each.path)]:
        raise ModelRefused(f"{wrong[0]} is no package of the program; expected packages/NAME.whl")
    name = hashlib.sha256(packed).hexdigest()
    file = ModelFile(path=_FILE, sha256=name, size=len(packed))
    files = (file, *packages)
    if newest is not None and newest.files == files:
        return newest
    manifest = encode_manifest(
        [FolderEntry(path=each.path, size=each.size, sha256=each.sha256) for each in files]
    )
    snapshot = hashlib.sha256(manifest).hexdigest()
    for each, content in ((name, packed), (snapshot, manifest)):
        await asyncio.to_thread(blobs.put, each, [content])
    made = ModelVersion(
        project=project,
        name=f"{PROGRAM}@0",
        snapshot=snapshot,
        files=files,
        main=file.path,
        made_by=made_by,
        created_at=now,
    )
    return await registry.add(made, sealer)


def list_files(model: str) -> dict[str, str] | None:
    """Return the SHA-256 of the files, by path, that a version of the program of this installation
    has beside Python packages, or None for another model."""
    if model != PROGRAM:
        return None
    return {_FILE: hashlib.sha256(pack_device()).hexdigest()}
