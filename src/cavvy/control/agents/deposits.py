"""Results that nodes stored in a bucket while the server was away: signs the uploads beforehand,
and applies what it finds as if the agent had sent it.

Below the bucket's folder, PROJECT/JOB/results/ATTEMPT/RANK/0 is a rank's manifest: its messages,
and a description of the bytes in the objects 1, 2 and so on.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener, BucketCheckpoints
from cavvy.control.agents.checkpoints import Checkpoints, FilesMissing, InvalidManifest
from cavvy.control.agents.claims import find_objection
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.agents.transfers import Transfers
from cavvy.control.clock import ControlClock
from cavvy.domain.checkpoints import CheckpointFile
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, Job, Node
from cavvy.domain.messages import AgentMessage, ClaimLost
from cavvy.store.base import (
    AtomicWrite,
    StaleVersion,
    Store,
    StoreError,
    StoreFull,
)
from cavvy.store.blobs import BlobStore
from cavvy.store.logs import LogStore
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectError,
    ObjectInfo,
    ObjectTryAgain,
    SignedRequest,
)
from cavvy.store.objects.threads import in_thread, in_thread_to_its_end

PARTS = 128  # uploads signed for the bytes of one rank
MOST_BYTES = 256 << 20  # largest part, which the agent holds in memory
_MANIFEST_BYTES = 16 << 20
_AT_ONCE = 4 << 20  # bytes read from the bucket in one request
_AGAIN = timedelta(hours=1)  # agents ask for new signatures this often
_MARGIN = timedelta(hours=2)  # signatures outlive the lease by this, less up to `_AGAIN`
_LONGEST = timedelta(days=7)  # limit of S3 and Google Cloud Storage
_PATIENCE = timedelta(minutes=10)  # how long to try to read a bucket that does not answer
_SHA256 = re.compile("[0-9a-f]{64}")
_Position = Annotated[int, Meta(ge=0, lt=1 << 62)]


class DepositPiece(Struct, frozen=True, kw_only=True):
    """Some of the bytes: undelivered output, a file of the checkpoint, or a file of an output."""

    kind: Literal["log", "blob", "output"]
    bytes: Annotated[int, Meta(ge=0, le=PARTS * MOST_BYTES)]
    offset: _Position = 0  # log: the position in the whole output
    lost: _Position = 0  # log: bytes lost just before it
    index: Annotated[int, Meta(ge=0, le=100_000)] = 0  # output: its number
    name: Annotated[str, Meta(max_length=4096)] = ""  # blob: its SHA-256; output: its path


class DepositedCheckpoint(Struct, frozen=True, kw_only=True):
    """The unsent checkpoint, in the form of a commit."""

    made_at: Annotated[datetime, Meta(tz=True)]
    files: list[CheckpointFile]


class DepositManifest(Struct, frozen=True, kw_only=True):
    """A rank's undelivered messages and the description of its bytes."""

    nonce: str
    messages: list[dict[str, Any]]
    part_bytes: Annotated[int, Meta(ge=1, le=MOST_BYTES)]
    pieces: list[DepositPiece]
    checkpoint: DepositedCheckpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedDeposit:
    """Signed uploads for one rank: for the manifest, and then for the parts."""

    uploads: Sequence[SignedRequest]
    valid: timedelta
    again: timedelta = _AGAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class DepositDependencies:
    """`url` is the bucket's folder for tasks without `checkpoint.storage`, or "". `read` decodes a
    manifest and its messages as they are decoded from requests; it raises ValueError or
    RecursionError.
    """

    url: str
    logs: LogStore
    read: Callable[[bytes, datetime], tuple[DepositManifest, Sequence[AgentMessage]]]


class InvalidDeposit(Exception):
    """The stored results do not fit together: the node lied, or the objects were changed."""


class Deposits:
    """Signs deposits and collects them. Without dependencies, as in the simulator, no job has a
    bucket.
    """

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        opener: BucketCheckpointOpener,
        services: tuple[AgentSessions, Transfers, Checkpoints],
        hint: Callable[[str], None],
        dependencies: DepositDependencies | None,
    ) -> None:
        self._store, self._clock, self._opener = store, clock, opener
        self._agents, self._transfers, self._checkpoints = services
        self._hint = hint
        self._dependencies = dependencies
        self._settled: defaultdict[str, set[int]] = defaultdict(set)  # ranks, by gang
        self._since: dict[str, datetime] = {}  # the first failed try, by gang
        self._told: set[str] = set()  # gangs with a reported failure to sign
        self._refused: set[str] = set()  # gangs with results that cannot be used
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def find_url(self, job: Job) -> str:
        """The URL of the folder for the job's deposits, or "" if it has none."""
        if self._dependencies is None:
            return ""
        storage = job.task.checkpoint.storage if job.task.checkpoint is not None else None
        return storage or self._dependencies.url

    async def sign(self, gang: str, rank: int) -> SignedDeposit:
        """Sign the uploads of a rank; none if its job has no bucket or the bucket cannot be used.
        They outlive the lease. Raises RowNotFound.
        """
        attempt = await self._store.attempt_of_gang(gang)
        job = await self._store.job(attempt.job_id)
        uploads: Sequence[SignedRequest] = ()
        valid = min(_LONGEST, job.task.limits.unattended + job.task.grace + _MARGIN)
        try:
            if self.find_url(job):
                bucket, prefix = await self._open(job, attempt)
                uploads = await in_thread(
                    lambda: [
                        bucket.sign_put(f"{prefix}{rank}/{each}", int(valid.total_seconds()))
                        for each in range(PARTS + 1)
                    ]
                )
        except ObjectError as error:
            if gang not in self._told:
                self._told.add(gang)
                await self._tell(attempt, None, f"results cannot be stored in a bucket: {error}")
        return SignedDeposit(uploads=uploads, valid=valid)

    def collect(self, job: Job, attempt: Attempt, ranks: Sequence[int]) -> bool:
        """Apply in the background what these ranks, whose nodes have ended, left in the bucket.
        Returns whether that is over; until then, the ranks do not count as lost.
        """
        gang = attempt.gang
        left = [rank for rank in ranks if rank not in self._settled[gang]]
        if not left or not self.find_url(job):
            return True
        if gang not in self._tasks:
            self._begin(gang, self._collect(job, attempt, left))
        return False

    def forget(self, job: Job, attempt: Attempt) -> None:
        """Remove the objects of an attempt that has ended, in the background."""
        gang = attempt.gang
        self._settled.pop(gang, None)
        self._since.pop(gang, None)
        self._told.discard(gang)
        if self.find_url(job) and gang not in self._tasks and gang not in self._refused:
            self._begin(gang, self._remove(job, attempt))
        self._refused.discard(gang)

    async def close(self) -> None:
        """Cancel what runs; the next server starts it again."""
        self._closed = True
        tasks, self._tasks = list(self._tasks.values()), {}
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, gang: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[gang] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._ended(gang, done))

    def _ended(self, gang: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(gang) is task:
            del self._tasks[gang]

    async def _open(self, job: Job, attempt: Attempt) -> tuple[ObjectBucket, str]:
        """The bucket, and the prefix of the attempt's objects. Raises ObjectError."""
        folder = f"results/{attempt.number}/"
        return await self._opener.open_folder(job, self.find_url(job), folder)

    async def _collect(self, job: Job, attempt: Attempt, ranks: Sequence[int]) -> None:
        for rank in ranks:
            try:
                await self._collect_rank(job, attempt, await self._store.node(attempt.id, rank))
            except (ObjectTryAgain, StoreFull, StaleVersion, OSError) as error:
                since = self._since.setdefault(attempt.gang, self._clock.now())
                if self._clock.now() - since < _PATIENCE:
                    return  # the reconciler asks again
                await self._refuse(attempt, rank, error)
            except (InvalidDeposit, ObjectError, StoreError) as error:
                await self._refuse(attempt, rank, error)
            self._settled[attempt.gang].add(rank)
        self._tasks.pop(attempt.gang, None)
        self._hint(job.id)

    async def _collect_rank(self, job: Job, attempt: Attempt, node: Node) -> None:
        bucket, prefix = await self._open(job, attempt)
        reader = DepositReader(bucket, f"{prefix}{node.rank}/", lambda: self._closed)
        body = await in_thread(reader.read_manifest)
        if body is None:
            return  # the node was lost, or its agent could not store its results
        try:
            manifest, messages = self._deps.read(body, self._clock.now())
        except (ValueError, RecursionError) as error:
            raise InvalidDeposit(f"the manifest cannot be read: {error}") from error
        if objection := find_objection(attempt, node, manifest.nonce):
            raise InvalidDeposit(objection.reason)
        reader.check(manifest)
        await self._keep_files(attempt, node, manifest, reader)
        # The bucket's clock shows that the node was still alive; the node's own clock may lie.
        seen = [each for each in (reader.stored_at, node.heard_at) if each is not None]
        heard = min(self._clock.now(), max(seen, default=attempt.created_at))
        await self._agents.messages(
            attempt.gang, node.rank, manifest.nonce, messages, heard_at=heard
        )
        text = "the results came from the bucket: the node ended while the server was away"
        await self._tell(attempt, node.rank, text)

    async def _keep_files(
        self, attempt: Attempt, node: Node, manifest: DepositManifest, reader: "DepositReader"
    ) -> None:
        """Store log, checkpoint and outputs, in this order of the pieces."""
        checkpoint = manifest.checkpoint
        files = checkpoint.files if checkpoint is not None else []
        names = [each.sha256 for each in files if each.link is None]
        if not all(map(_SHA256.fullmatch, names)):
            raise InvalidDeposit("a file of its checkpoint has no valid hash")
        missing = set(await self._checkpoints.missing(attempt.gang, names)) if names else set()
        at = 0
        for piece in manifest.pieces:
            read = reader.from_offset(at)
            at += piece.bytes
            match piece.kind:
                case "log":
                    await in_thread_to_its_end(self._keep_log, attempt, node.rank, piece, read)
                case "output":
                    output = await self._transfers.output(attempt.gang, piece.index)
                    await in_thread_to_its_end(output.store, piece.name, piece.bytes, read)
                case "blob":
                    if piece.name in missing:
                        await self._keep_blob(attempt, piece, read)
        if checkpoint is not None:
            await self._commit(attempt, node, manifest.nonce, checkpoint)

    def _keep_log(self, attempt: Attempt, rank: int, piece: DepositPiece, read: "Read") -> None:
        for at in range(0, max(1, piece.bytes), _AT_ONCE):
            data, lost = read(at, min(_AT_ONCE, piece.bytes - at)), 0 if at else piece.lost
            where = attempt.project, attempt.job_id, attempt.number, rank
            now_s = self._clock.now().timestamp()
            self._deps.logs.append(*where, piece.offset + at, data, lost, now_s)

    async def _keep_blob(self, attempt: Attempt, piece: DepositPiece, read: "Read") -> None:
        bucket = await self._checkpoints.bucket_checkpoints(attempt.gang)
        if bucket is not None:
            await in_thread_to_its_end(bucket.file(piece.name).store, "", piece.bytes, read)
        else:
            blobs = await self._checkpoints.blobs(attempt.gang)
            await in_thread_to_its_end(_append, blobs, piece, read)

    async def _commit(
        self, attempt: Attempt, node: Node, nonce: str, checkpoint: DepositedCheckpoint
    ) -> None:
        try:
            saved = await self._checkpoints.commit(
                attempt.gang, node.rank, nonce, checkpoint.files, checkpoint.made_at
            )
        except InvalidManifest as error:
            raise InvalidDeposit(str(error)) from error
        match saved:
            case FilesMissing():
                raise InvalidDeposit("files of its checkpoint are missing")
            case ClaimLost(reason=reason):
                raise InvalidDeposit(reason)

    async def _refuse(self, attempt: Attempt, rank: int, error: Exception) -> None:
        self._refused.add(attempt.gang)
        text = f"the results in the bucket cannot be used and stay there: {error}"
        await self._tell(attempt, rank, text)

    async def _remove(self, job: Job, attempt: Attempt) -> None:
        with suppress(ObjectError):  # objects that stay only cost storage
            bucket, prefix = await self._open(job, attempt)
            await in_thread(BucketCheckpoints(bucket, prefix).sweep, ())

    async def _tell(self, attempt: Attempt, rank: int | None, text: str) -> None:
        event = Event(
            project=attempt.project,
            job_id=attempt.job_id,
            attempt=attempt.number,
            rank=rank,
            at=self._clock.now(),
            kind="results",
            text=text,
        )
        await self._store.commit(AtomicWrite(events=[event]))

    @property
    def _deps(self) -> DepositDependencies:
        assert self._dependencies is not None
        return self._dependencies


Read = Callable[[int, int], bytes]  # offset, length


class DepositReader:
    """Reads one rank's objects. Methods block on the network and raise ObjectError."""

    def __init__(self, bucket: ObjectBucket, prefix: str, stopped: Callable[[], bool]) -> None:
        self._bucket, self._prefix, self._stopped = bucket, prefix, stopped
        self._objects: dict[str, ObjectInfo] = {}
        self._part_bytes = 1

    def read_manifest(self) -> bytes | None:
        """The manifest, or None if there is none. Raises InvalidDeposit if it is too large."""
        objects, _ = self._bucket.list(self._prefix)
        self._objects = {each.key[len(self._prefix) :]: each for each in objects}
        if "0" not in self._objects:
            return None
        if (self._objects["0"].size or 0) > _MANIFEST_BYTES:
            raise InvalidDeposit("the manifest is too large")
        return self._bucket.get(f"{self._prefix}0", 0, _MANIFEST_BYTES)

    @property
    def stored_at(self) -> datetime | None:
        """When the manifest was stored, by the bucket's clock."""
        return self._objects["0"].changed_at

    def check(self, manifest: DepositManifest) -> None:
        """Raise InvalidDeposit if the parts do not have the sizes that the manifest implies."""
        self._part_bytes = manifest.part_bytes
        size = sum(each.bytes for each in manifest.pieces)
        for number, at in enumerate(range(0, size, manifest.part_bytes), 1):
            part = self._objects.get(str(number))
            if part is None or part.size != min(manifest.part_bytes, size - at):
                raise InvalidDeposit(f"part {number} is missing or has another size")

    def from_offset(self, start: int) -> Read:
        """A function that reads bytes of the sequence, relative to `start`."""
        return lambda offset, length: self._read(start + offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            if self._stopped():
                raise ObjectTryAgain("the server stops")
            part, at = divmod(offset + len(found), self._part_bytes)
            wanted = min(length - len(found), self._part_bytes - at, _AT_ONCE)
            data = self._bucket.get(f"{self._prefix}{part + 1}", at, wanted)
            if len(data) != wanted:
                raise InvalidDeposit(f"part {part + 1} has changed")
            found += data
        return bytes(found)


def _append(blobs: BlobStore, piece: DepositPiece, read: Read) -> None:
    for at in range(0, max(1, piece.bytes), _AT_ONCE):
        data = read(at, min(_AT_ONCE, piece.bytes - at))
        blobs.append(piece.name, at, data, piece.bytes)
