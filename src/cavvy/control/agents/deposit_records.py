"""Reads the results that nodes store in a bucket while the server is unreachable, and records the
attempts whose agents have received signed uploads for them. From these records, the server
determines which results to remove from the bucket after an attempt has ended, even if an earlier
server was killed before the removal.

The object RANK/0 in the attempt's folder is a rank's manifest. The manifest contains the rank's
messages, and describes the bytes in the objects RANK/1, RANK/2 and so on.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener, BucketCheckpoints
from cavvy.control.agents.uploads import RECORDS_OWNER
from cavvy.domain.checkpoints import CheckpointFile
from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord, NodePhase
from cavvy.store.base import RowNotFound, StoreError, StoreFull
from cavvy.store.objects.base import ObjectBucket, ObjectError, ObjectInfo, ObjectTryAgain
from cavvy.store.objects.threads import in_thread, in_thread_to_its_end
from cavvy.store.sql import Store

FOLDER = "results/"  # the folder of the job's results in the bucket
_COLLECTION = "results"
# The document that contains the time since which the results of all new jobs have records. Earlier
# versions of the server made no records.
_SINCE = "results since"


class DepositRecord(Struct, frozen=True, kw_only=True):
    """An attempt that may have results in the bucket's folder `url`. `kept` means that the attempt
    has ended but its results could not be applied. Results that could not be applied stay in the
    bucket until the job is removed. `project` is "" in records that earlier versions of Cavvy
    wrote.
    """

    project: str = ""
    job_id: str
    attempt: int
    url: str
    kept: bool = False


class DepositedResults:
    """Records which attempts may have results in a bucket, and removes the results of attempts that
    have ended. `began` is the time at which this process started to write records.
    """

    def __init__(self, store: Store, opener: BucketCheckpointOpener, began: datetime) -> None:
        self._store, self._opener, self._began = store, opener, began
        self._since: datetime | None = None
        self._recorded: set[str] = set()  # IDs of attempts that this process recorded

    async def record(self, attempt: Attempt, url: str) -> None:
        """Record that the attempt may store results in this folder. Raises StoreError."""
        if attempt.id not in self._recorded:
            record = DepositRecord(
                project=attempt.project, job_id=attempt.job_id, attempt=attempt.number, url=url
            )
            await self._swap(attempt.id, record, 1)
            self._recorded.add(attempt.id)

    async def remove_attempt(self, job: JobRecord, attempt: Attempt, url: str = "") -> None:
        """Remove the results of an ended attempt. If a rank has a manifest but has reported no
        exit, its results were not applied and are kept. Set `url` to the folder of the results if
        an earlier version of Cavvy stored them without a record. Raises ObjectError, StoreError.
        """
        if url and not await self._is_recorded(job):
            await self.record(attempt, url)
        self._recorded.discard(attempt.id)
        found = await self._store.provider_documents(RECORDS_OWNER, _COLLECTION, attempt.id)
        for document in found:
            record = _decode(document)
            if record is None or record.kept:
                continue
            nodes = await self._store.nodes(attempt.id)
            open_ranks = {f"{each.rank}" for each in nodes if each.phase is not NodePhase.EXITED}
            folder = f"{FOLDER}{attempt.number}/"
            place = await self._opener.open_folder(job.project, job.id, record.url, folder)
            files = BucketCheckpoints(*place)
            held = await in_thread(files.held)
            unread = {rank for rank in open_ranks if held.get(f"{rank}/0")}
            wanted = {name for name in held if name.partition("/")[0] in unread}
            if len(wanted) < len(held):
                _, fault = await in_thread(files.remove_others, wanted)
                if fault is not None:
                    raise fault
            if wanted:
                kept = msgspec.structs.replace(record, kept=True)
                await self._swap(attempt.id, kept, document.version + 1)
            else:
                await self._forget(document)

    async def remove_job(self, job: JobRecord, url: str = "") -> str:
        """Remove all results of a job that has ended. Do not access the bucket if no attempt can
        have results. Set `url` to the folder of the results if an earlier version of Cavvy stored
        them without a record. If some results cannot be removed, return their URL and the reason,
        otherwise ""; `sweep` tries again later.
        """
        problems: list[str] = []
        by_url: dict[str, list[ProviderDocument]] = {}
        for document, record in await self._records():
            if record.job_id == job.id:
                by_url.setdefault(record.url, []).append(document)
        if url and not await self._is_recorded(job):
            by_url.setdefault(url, [])
        for where, documents in by_url.items():
            try:
                await self._remove_all(job.project, job.id, where)
                for each in documents:
                    await self._forget(each)
            except (ObjectError, StoreError) as error:
                problems.append(f"{where}: {error}")
        return "; ".join(problems)

    async def sweep(self) -> None:
        """Remove the results of all removed jobs and of all ended attempts, including attempts that
        ended while no server was running. The next call repeats failed removals. If a storage does
        not respond, the project's other results in this storage are skipped until the next call.
        The server still tries to remove other projects' results in this storage, because those
        projects may have different storage keys.
        """
        await self._read_since()
        silent: set[tuple[str, str, str]] = set()
        for document, record in await self._records():
            where = urlsplit(record.url)
            storage = (record.project, where.scheme, where.netloc)
            if storage in silent:
                continue
            try:
                await self._sweep(document, record)
            except ObjectTryAgain:
                silent.add(storage)
            except (ObjectError, StoreError):
                continue

    async def _sweep(self, document: ProviderDocument, record: DepositRecord) -> None:
        """Remove the results of an attempt that has ended or whose job was removed. Raises
        ObjectError, StoreError.
        """
        try:
            job = await self._store.job(record.job_id)
        except RowNotFound:
            if record.project:  # earlier versions did not record the project
                await self._remove_all(record.project, record.job_id, record.url)
            await self._forget(document)
            return
        if record.kept:
            return
        attempts = await self._store.attempts(record.job_id)
        found = [each for each in attempts if each.number == record.attempt]
        if not found:
            await self._forget(document)
        elif found[0].phase is AttemptPhase.ENDED:
            await self.remove_attempt(job, found[0])

    async def _remove_all(self, project: str, job_id: str, url: str) -> None:
        """Remove all results of a job from a bucket. Raises ObjectError, StoreError."""
        place = await self._opener.open_folder(project, job_id, url, FOLDER)
        _, fault = await in_thread_to_its_end(BucketCheckpoints(*place).remove_others, ())
        if fault is not None:
            raise fault

    async def _is_recorded(self, job: JobRecord) -> bool:
        """Return whether all results of the job have records."""
        return job.submitted_at >= await self._read_since()

    async def _read_since(self) -> datetime:
        """Return when a server that writes records of deposits first started. The first call of
        this method stores the start of the current process.
        """
        if self._since is not None:
            return self._since
        with suppress(StoreFull):
            body = msgspec.json.encode(self._began).decode()
            document = ProviderDocument(collection=_SINCE, name=_SINCE, body=body)
            await self._store.swap_provider_document(RECORDS_OWNER, document)
        for found in await self._store.provider_documents(RECORDS_OWNER, _SINCE):
            self._since = msgspec.json.decode(found.body, type=datetime)
        return self._since or self._began

    async def _records(self) -> Sequence[tuple[ProviderDocument, DepositRecord]]:
        """Return all readable records."""
        documents = await self._store.provider_documents(RECORDS_OWNER, _COLLECTION)
        found = [(each, _decode(each)) for each in documents]
        return [(document, record) for document, record in found if record is not None]

    async def _swap(self, name: str, record: DepositRecord, version: int) -> None:
        body = msgspec.json.encode(record).decode()
        document = ProviderDocument(collection=_COLLECTION, name=name, body=body, version=version)
        await self._store.swap_provider_document(RECORDS_OWNER, document)

    async def _forget(self, document: ProviderDocument) -> None:
        """Delete a record, unless the record has changed in the meantime."""
        last = ProviderDocument(
            collection=_COLLECTION, name=document.name, body="", version=document.version + 1
        )
        await self._store.swap_provider_document(RECORDS_OWNER, last, delete=True)


def _decode(document: ProviderDocument) -> DepositRecord | None:
    try:
        return msgspec.json.decode(document.body, type=DepositRecord)
    except msgspec.MsgspecError:
        return None


PARTS = 128  # maximum number of objects for the bytes of one rank
MOST_BYTES = 256 << 20  # maximum bytes of a part; the agent holds a part in memory
AT_ONCE = 4 << 20  # bytes read from the bucket in one request
_MANIFEST_BYTES = 16 << 20
_Position = Annotated[int, Meta(ge=0, lt=1 << 62)]
Read = Callable[[int, int], bytes]  # offset, length


class DepositPiece(Struct, frozen=True, kw_only=True):
    """A range of the stored bytes: undelivered log output, a checkpoint file, or an output file."""

    kind: Literal["log", "blob", "output"]
    bytes: Annotated[int, Meta(ge=0, le=PARTS * MOST_BYTES)]
    offset: _Position = 0  # for a log: the position in the whole log
    lost: _Position = 0  # for a log: the number of bytes lost just before `offset`
    index: Annotated[int, Meta(ge=0, le=100_000)] = 0  # for an output: its index in the task
    # SHA-256 of a checkpoint file, or path of an output file
    name: Annotated[str, Meta(max_length=4096)] = ""


class DepositedCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint that the node could not deliver. The fields are the same as in an agent's commit
    request.
    """

    made_at: Annotated[datetime, Meta(tz=True)]
    files: list[CheckpointFile]


class DepositManifest(Struct, frozen=True, kw_only=True):
    """A rank's undelivered messages, and a description of the rank's stored bytes."""

    nonce: str
    messages: list[dict[str, Any]]
    part_bytes: Annotated[int, Meta(ge=1, le=MOST_BYTES)]
    pieces: list[DepositPiece]
    checkpoint: DepositedCheckpoint | None = None


class InvalidDeposit(Exception):
    """Raised if the stored results contradict each other, because the node sent wrong data or the
    objects were changed."""


class DepositReader:
    """Reads one rank's objects. After each response of the bucket, `read` is called with the number
    of bytes that have been read. `read` can raise ObjectTryAgain to stop the reader. Methods block
    on the network and raise ObjectError.
    """

    def __init__(self, bucket: ObjectBucket, prefix: str, read: Callable[[int], None]) -> None:
        self._bucket, self._prefix, self._was_read = bucket, prefix, read
        self._objects: dict[str, ObjectInfo] = {}
        self._part_bytes = 1

    def read_manifest(self) -> bytes | None:
        """Return the manifest, or None if it is missing or empty. Raises InvalidDeposit if the
        manifest is too large.
        """
        objects, _ = self._bucket.list(self._prefix)
        self._objects = {each.key[len(self._prefix) :]: each for each in objects}
        if "0" not in self._objects or self._objects["0"].size == 0:
            return None
        if (self._objects["0"].size or 0) > _MANIFEST_BYTES:
            raise InvalidDeposit("the manifest is too large")
        content = self._bucket.get(f"{self._prefix}0", 0, _MANIFEST_BYTES)
        self._was_read(0)
        return content or None

    @property
    def stored_at(self) -> datetime | None:
        """The time at which the manifest was stored, according to the bucket's clock."""
        return self._objects["0"].changed_at

    def check(self, manifest: DepositManifest) -> None:
        """Raise InvalidDeposit if the parts do not have the sizes that the manifest implies."""
        self._part_bytes = manifest.part_bytes
        size = sum(each.bytes for each in manifest.pieces)
        for number, at in enumerate(range(0, size, manifest.part_bytes), 1):
            part = self._objects.get(str(number))
            if part is None or part.size != min(manifest.part_bytes, size - at):
                raise InvalidDeposit(f"part {number} is missing or has the wrong size")

    def from_offset(self, start: int) -> Read:
        """Return a function that reads stored bytes at an offset, relative to `start`."""
        return lambda offset, length: self._read(start + offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            part, at = divmod(offset + len(found), self._part_bytes)
            wanted = min(length - len(found), self._part_bytes - at, AT_ONCE)
            data = self._bucket.get(f"{self._prefix}{part + 1}", at, wanted)
            if len(data) != wanted:
                raise InvalidDeposit(f"part {part + 1} has changed")
            found += data
            self._was_read(offset + len(found))
        return bytes(found)
