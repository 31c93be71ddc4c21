"""Checkpoints kept in a bucket: the server signs, nodes move the bytes, and rows say which one
counts.

Below the URL of the task, PROJECT/JOB/blobs/SHA256 holds files and lists of files, each by its
content.
"""

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

import msgspec

from cavvy.domain.checkpoints import CheckpointFile
from cavvy.domain.jobs import Job
from cavvy.store.base import HashMismatch
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
    part_bytes,
)
from cavvy.store.objects.locations import KEYS, merge_keys, open_place
from cavvy.store.objects.threads import in_thread

SIGNED_S = 900
_decode = msgspec.json.Decoder(dict[str, list[CheckpointFile]]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUpload:
    """How to send one file: in parts of `part_bytes`, each by its own signed request."""

    upload: str  # "" where the whole file goes in one request
    part_bytes: int


class BucketCheckpoints:
    """One job's files in its bucket. Methods block on the network and raise ObjectError."""

    def __init__(self, bucket: ObjectBucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def held(self) -> dict[str, int]:
        """What is there, by hash, with sizes."""
        found: dict[str, int] = {}
        after = ""
        while True:
            objects, after = self._bucket.list(self._prefix, after)
            found.update({each.key[len(self._prefix) :]: each.size or 0 for each in objects})
            if not after:
                return found

    def begin(self, name: str, size: int) -> BucketUpload:
        part = part_bytes(size)
        return BucketUpload(
            upload=self._bucket.begin(self._key(name)) if size > part else "", part_bytes=part
        )

    def sign_part(self, name: str, upload: str, part: int) -> SignedRequest:
        return self._bucket.sign_put(self._key(name), SIGNED_S, upload, part)

    def complete(self, name: str, upload: str, tags: Sequence[str], size: int) -> None:
        """The file counts now, and is as large as it was."""
        if upload:
            self._bucket.complete(self._key(name), upload, tags)
        made = self._bucket.head(self._key(name))
        if made is None or made.size != size:
            there = "nothing" if made is None else f"{made.size} bytes"
            raise ObjectTryAgain(f"{name}: {size} bytes were sent and {there} arrived")

    def abort(self, name: str, upload: str) -> None:
        """The parts of an upload are dropped."""
        if upload:
            self._bucket.abort(self._key(name), upload)

    def sign_get(self, name: str) -> SignedRequest:
        return self._bucket.sign_get(self._key(name), SIGNED_S)

    def keep(self, files: Sequence[CheckpointFile]) -> str:
        """Store the list of these files and return its hash."""
        content = msgspec.json.encode({"files": sorted(files, key=lambda each: each.path)})
        name = hashlib.sha256(content).hexdigest()
        self._bucket.put(self._key(name), content)
        return name

    def read(self, manifest: str) -> list[CheckpointFile]:
        """The files of a checkpoint. Raises HashMismatch."""
        try:
            content = self._bucket.get(self._key(manifest))
        except ObjectMissing as error:
            raise HashMismatch(
                f"the list of files {manifest} is gone from the bucket; put it back, or retry"
            ) from error
        if hashlib.sha256(content).hexdigest() != manifest:
            raise HashMismatch(f"the list of files {manifest} was changed in the bucket")
        return _decode(content)["files"]

    def sweep(self, wanted: Collection[str]) -> None:
        """Remove what no checkpoint needs."""
        for name in self.held():
            if name not in wanted:
                self._bucket.delete(self._key(name))

    def _key(self, name: str) -> str:
        return self._prefix + name


class BucketCheckpointOpener:
    """Opens them, with the project's keys or the server's."""

    def __init__(
        self,
        open_secrets: Callable[[str, Sequence[str]], Awaitable[dict[str, str]]],
        environment: Mapping[str, str],
        now: Callable[[], datetime],
    ) -> None:
        self._open_secrets = open_secrets
        self._environment = environment
        self._now = now

    async def open(self, job: Job) -> BucketCheckpoints | None:
        """None where the job keeps its checkpoints at the server. Raises ObjectDenied."""
        url = job.task.checkpoint.storage if job.task.checkpoint is not None else None
        if url is None:
            return None
        secrets = await self._open_secrets(job.project, KEYS)
        keys = merge_keys(self._environment, secrets)
        found = await in_thread(open_place, url, keys, self._now)
        if not isinstance(found.place, ObjectBucket):
            raise ObjectDenied(f"checkpoints cannot be kept at {urlsplit(url).scheme}://")
        folder = f"{found.key.strip('/')}/" if found.key.strip("/") else ""
        return BucketCheckpoints(found.place, f"{folder}{job.project}/{job.id}/blobs/")
