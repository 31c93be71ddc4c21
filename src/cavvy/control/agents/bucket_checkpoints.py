"""Stores checkpoints in a bucket. The server signs the requests, and nodes transfer the bytes.
Database rows record which checkpoints are complete.

In the folder that the task's URL names, files and lists of files are stored as objects with keys of
the form PROJECT/JOB/blobs/SHA256. SHA256 is the hash of the object's content.
"""

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from urllib.parse import urlsplit

import msgspec

from cavvy.control.agents.transfers import ReadTargets, SignedObjects, read_every
from cavvy.domain.checkpoints import CheckpointFile, RemovedCheckpoints
from cavvy.domain.jobs import JobRecord
from cavvy.store.base import HashMismatch
from cavvy.store.objects.base import ObjectBucket, ObjectDenied, ObjectError, ObjectMissing
from cavvy.store.objects.locations import KEYS, merge_keys, open_place
from cavvy.store.objects.threads import in_thread

_DELETES = 16  # maximum number of objects that are deleted at the same time
_decode = msgspec.json.Decoder(dict[str, list[CheckpointFile]]).decode


class BucketCheckpoints:
    """The checkpoint files of one job in its bucket. Methods block on the network and raise
    ObjectError.
    """

    def __init__(self, bucket: ObjectBucket, prefix: str, url: str = "") -> None:
        self._bucket, self._prefix, self._url = bucket, prefix, url

    def held(self) -> dict[str, int]:
        """Return the size in bytes of each stored file, keyed by the file's hash."""
        found: dict[str, int] = {}
        after = ""
        while True:
            objects, after = self._bucket.list(self._prefix, after)
            found.update({each.key[len(self._prefix) :]: each.size or 0 for each in objects})
            if not after:
                return found

    def file(self, name: str) -> SignedObjects:
        """Return the objects of one stored file. The server signs requests for the file, and nodes
        send these requests."""
        return SignedObjects(self._bucket, self._key(name), self._url)

    def keep(self, files: Sequence[CheckpointFile]) -> str:
        """Store a list of files and return the hash of the list."""
        content = msgspec.json.encode({"files": sorted(files, key=lambda each: each.path)})
        name = hashlib.sha256(content).hexdigest()
        self._bucket.put(self._key(name), content)
        return name

    def read(self, manifest: str) -> list[CheckpointFile]:
        """Return the files of the checkpoint whose list has the hash `manifest`. Raises
        HashMismatch."""
        try:
            content = self._bucket.get(self._key(manifest))
        except ObjectMissing as error:
            raise HashMismatch(
                f"the list of files {manifest} is no longer in the bucket; restore it, or retry"
            ) from error
        if hashlib.sha256(content).hexdigest() != manifest:
            raise HashMismatch(f"the list of files {manifest} has changed in the bucket")
        return _decode(content)["files"]

    def sweep(self, wanted: Collection[str]) -> RemovedCheckpoints:
        """Remove the files that are not in `wanted`, and stop at the first failure. If files are
        kept because of a failure, the field `kept` of the result is the reason; otherwise it is "".
        """
        freed, fault = self.remove_others(wanted)
        return RemovedCheckpoints(bytes=freed, kept="" if fault is None else str(fault))

    def remove_others(self, wanted: Collection[str]) -> tuple[int, ObjectError | None]:
        """Remove the files that are not in `wanted`. Stop at the first failed deletion. Return
        the number of removed bytes, and the failure or None.
        """
        fault: ObjectError | None = None

        def remove(file: tuple[str, int]) -> int:
            nonlocal fault
            name, size = file
            if fault is not None or name in wanted:
                return 0
            try:
                self._bucket.delete(self._key(name))
            except ObjectError as error:
                fault, size = error, 0
            return size

        with ThreadPoolExecutor(_DELETES) as threads:
            freed = sum(threads.map(remove, self.held().items()))
        return freed, fault

    def _key(self, name: str) -> str:
        return self._prefix + name


class BucketCheckpointOpener:
    """Opens the buckets of jobs with the project's storage keys or, if the project has no keys,
    with the server's keys.
    """

    def __init__(
        self,
        open_secrets: Callable[[str, Sequence[str]], Awaitable[dict[str, str]]],
        environment: Mapping[str, str],
        now: Callable[[], datetime],
        read_targets: ReadTargets = read_every,
    ) -> None:
        self._open_secrets, self._environment = open_secrets, environment
        self._read_targets, self._now = read_targets, now

    async def open(self, job: JobRecord) -> BucketCheckpoints | None:
        """Open the job's bucket, or return None if the job keeps its checkpoints on the server.
        Raises ObjectDenied."""
        url = job.task.checkpoint.storage if job.task.checkpoint is not None else None
        if url is None:
            return None
        return BucketCheckpoints(*await self.open_folder(job.project, job.id, url, "blobs/"), url)

    async def open_folder(
        self, project: str, job_id: str, url: str, folder: str
    ) -> tuple[ObjectBucket, str]:
        """Open the bucket that a URL names, with the project's keys. Returns the bucket, and the
        prefix of the keys in the job's folder `folder`. Raises ObjectDenied.
        """
        secrets = await self._open_secrets(project, KEYS)
        keys = merge_keys(self._environment, secrets, await self._read_targets())
        found = await in_thread(open_place, url, keys, self._now)
        if not isinstance(found.place, ObjectBucket):
            scheme = urlsplit(url).scheme
            raise ObjectDenied(f"checkpoints and results cannot be stored at {scheme}:// URLs")
        above = f"{found.key.strip('/')}/" if found.key.strip("/") else ""
        return found.place, f"{above}{project}/{job_id}/{folder}"
