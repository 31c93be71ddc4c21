"""Handles deposits: results that nodes store in a bucket while the server is unreachable. The
server signs the uploads of deposits in advance. Later the server reads the results from the bucket
and applies them as if the agents had sent them. The objects of an attempt are below
PROJECT/JOB/results/ATTEMPT/ in the bucket's folder.
"""

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import datetime, timedelta
from functools import partial

from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener, BucketCheckpoints
from cavvy.control.agents.checkpoints import (
    Checkpoints,
    FilesMissing,
    InvalidManifest,
    find_objection,
)
from cavvy.control.agents.deposit_records import (
    AT_ONCE,
    FOLDER,
    PARTS,
    DepositedCheckpoint,
    DepositedResults,
    DepositManifest,
    DepositPiece,
    DepositReader,
    InvalidDeposit,
    Read,
)
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.agents.transfers import Transfers
from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import make_attempt_event
from cavvy.domain.jobs import COMING, Attempt, AttemptPhase, JobRecord, Node, NodePhase
from cavvy.domain.messages import AgentMessage, ClaimLost
from cavvy.domain.values import Struct
from cavvy.store.base import AtomicWrite, HashMismatch, StaleVersion, StoreError, StoreFull
from cavvy.store.blobs import BlobStore
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.logs import LogStore
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
)
from cavvy.store.objects.threads import in_thread, in_thread_to_its_end
from cavvy.store.sql import Store

_AGAIN = timedelta(hours=1)  # interval at which agents ask for new signatures
_MARGIN = timedelta(hours=2)  # signatures are valid for the lease plus this time
_LONGEST = timedelta(days=7)  # longest validity in S3 and Google Cloud Storage
# time without progress after which the server gives up reading from a bucket
_PATIENCE = timedelta(minutes=10)
# The same time limit if the bucket refuses access, or while other nodes of the gang are billed.
_SHORT_PATIENCE = timedelta(minutes=2)
# Maximum number of gangs whose results are read at the same time. Reading uses the threads that
# also serve the transfers of running work.
_GANGS = 8
_TRIES = 3  # consecutive failures at the same position after which the server gives up reading
_BATCH = 200  # maximum messages per write; agents send the same number at once
_SHA256 = re.compile("[0-9a-f]{64}")

Ranks = Mapping[int, datetime | None]  # rank -> time of its agent's last message


class SignedDeposit(Struct, frozen=True, kw_only=True):
    """Signed uploads for one rank: the first upload is for the manifest, the other uploads are for
    the parts.
    """

    uploads: Sequence[SignedRequest]
    valid: timedelta
    again: timedelta = _AGAIN


class DepositDependencies(Struct, frozen=True, kw_only=True):
    """`url` is the bucket's folder that tasks without `checkpoint.storage` use, or "". `read`
    decodes a manifest and its messages with the same checks as requests. `read` raises ValueError
    or RecursionError.
    """

    url: str
    logs: LogStore | BucketLogs
    read: Callable[[bytes, datetime], tuple[DepositManifest, Sequence[AgentMessage]]]


class Deposits:
    """Signs the uploads of deposits, and collects deposits. If `dependencies` is None, as in the
    simulator, no job has a bucket.
    """

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        opener: BucketCheckpointOpener,
        services: tuple[AgentSessions, Transfers, Checkpoints, UnfinishedUploads],
        hint: Callable[[str], None],
        dependencies: DepositDependencies | None,
    ) -> None:
        self._store, self._clock, self._opener = store, clock, opener
        self._agents, self._transfers, self._checkpoints, self._uploads = services
        self._hint = hint
        self._dependencies = dependencies
        self._results = DepositedResults(store, opener, clock.now())
        self._collections: dict[str, DepositCollection] = {}  # by gang
        self._told: set[str] = set()  # gangs for which a failure to sign was already reported
        self._tasks: set[asyncio.Task[None]] = set()
        # Billed gangs have their own slots, so that they do not wait for gangs that cost nothing.
        self._slots, self._billed_slots = asyncio.Semaphore(_GANGS), asyncio.Semaphore(_GANGS)

    def find_url(self, job: JobRecord) -> str:
        """Return the URL of the folder for the job's deposits, or "" if the job has no bucket.
        Nodes do not encrypt results, so no bucket is used if the project's files must be encrypted.
        """
        if self._dependencies is None or self._dependencies.logs.encrypts(job.project):
            return ""
        storage = job.task.checkpoint.storage if job.task.checkpoint is not None else None
        return storage or self._dependencies.url

    async def sign(self, gang: str, rank: int) -> SignedDeposit:
        """Sign the uploads of a rank. Returns no uploads if the job has no bucket or the bucket
        cannot be used. The signed uploads stay valid longer than the agent's lease. Raises
        RowNotFound, StoreError.
        """
        attempt = await self._store.attempt_of_gang(gang)
        job = await self._store.job(attempt.job_id)
        uploads: Sequence[SignedRequest] = ()
        valid = min(_LONGEST, job.task.limits.unattended + job.task.grace + _MARGIN)
        try:
            if url := self.find_url(job):
                bucket, prefix = await self._open(job, attempt)
                await self._results.record(attempt, url)
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

    def collect(
        self, job: JobRecord, attempt: Attempt, ranks: Ranks, *, billed: bool
    ) -> frozenset[int] | None:
        """Read the results of these ranks from the bucket, and apply the results. The nodes of
        these ranks have ended. The results are read in the background. Returns the ranks whose
        results are still being read, or None if there is nothing to read. If a rank's agent has
        sent a message since its results were read, the results are read again.

        Reading stops after some time without progress; this time is shorter if other nodes of the
        gang are `billed`. Only a few gangs' results are read at the same time; others wait. A gang
        whose nodes are billed waits only for other billed gangs, and an unbilled gang only for
        other unbilled gangs.
        """
        gang = attempt.gang
        if not ranks or not self.find_url(job):
            # do not stop reading that has begun: one poll of the provider may have failed
            return None
        now, found = self._clock.now(), self._collections.get(gang)
        if found is None:
            found = self._collections[gang] = DepositCollection(self._clock.now)
        left = found.list_left(ranks)
        if left and found.is_stuck(now, _SHORT_PATIENCE if billed else _PATIENCE):
            self._stop(gang)
            self._collections[gang] = done = DepositCollection(self._clock.now)
            done.settled.update(ranks)
            self._begin(self._give_up(attempt, left, found.fault))
            return frozenset()
        if left and found.task is None:
            found.wait()
            slot = self._billed_slots if billed else self._slots
            asked = {rank: ranks[rank] for rank in left}
            found.task = self._begin(self._collect(slot, found, job, attempt, asked))
            found.task.add_done_callback(found.ended)
        return left

    def note(self, job: JobRecord, attempt: Attempt) -> None:
        """React to a change of the attempt's row. The method is called after each write of the
        attempt's row. Once the outcome of the attempt's work is decided, the server stops reading
        the attempt's results. Once the attempt has ended, its objects are removed from the bucket.
        """
        if attempt.phase in COMING or attempt.phase is AttemptPhase.RUNNING:
            return
        self._stop(attempt.gang)
        if attempt.phase is AttemptPhase.ENDED:
            self._told.discard(attempt.gang)
            if self.find_url(job):
                self._begin(self._remove(job, attempt))

    async def remove(self, job: JobRecord) -> str:
        """Remove all results of a job that has ended. If some results cannot be removed, return
        their URL and the reason, otherwise "".
        """
        return await self._results.remove_job(job, self.find_url(job))

    async def sweep(self) -> None:
        """Remove the remaining results of all attempts that have ended."""
        await self._results.sweep()

    async def close(self) -> None:
        """Cancel running reads and removals; the next server starts them again."""
        for gang in list(self._collections):
            self._stop(gang)
        tasks, self._tasks = list(self._tasks), set()
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop(self, gang: str) -> None:
        found = self._collections.pop(gang, None)
        if found is not None:
            found.stop()

    async def _open(self, job: JobRecord, attempt: Attempt) -> tuple[ObjectBucket, str]:
        """Return the bucket, and the prefix of the attempt's objects. Raises ObjectError."""
        folder = f"{FOLDER}{attempt.number}/"
        return await self._opener.open_folder(job.project, job.id, self.find_url(job), folder)

    async def _collect(
        self,
        slot: AbstractAsyncContextManager[None],
        found: "DepositCollection",
        job: JobRecord,
        attempt: Attempt,
        ranks: Ranks,
    ) -> None:
        async with slot:
            found.begin()
            bucket, prefix = await self._open(job, attempt)
            held = await in_thread(BucketCheckpoints(bucket, prefix).held)
            # The ranks that have a manifest. The nodes of other ranks were lost, or could not store
            # results.
            left = [rank for rank in sorted(ranks) if held.get(f"{rank}/0")]
            found.settle({rank: heard for rank, heard in ranks.items() if rank not in left})
            readers = {
                rank: DepositReader(bucket, f"{prefix}{rank}/", partial(found.read, rank))
                for rank in left
            }
            await self._collect_ranks(found, attempt, ranks, readers)
        self._hint(job.id)

    async def _collect_ranks(
        self,
        found: "DepositCollection",
        attempt: Attempt,
        ranks: Ranks,
        readers: Mapping[int, DepositReader],
    ) -> None:
        fault: Exception | None = None
        for rank, reader in readers.items():
            try:
                await self._collect_rank(found, attempt, rank, reader)
            except (ObjectError, StoreFull, StaleVersion, OSError) as error:
                fault = error  # the reconciler starts another try later
                continue
            except (InvalidDeposit, StoreError) as error:
                await self._refuse(attempt, rank, error)
            found.settle({rank: ranks[rank]})
            self._hint(attempt.job_id)
        if fault is not None:
            raise fault
        found.complete = True

    async def _collect_rank(
        self, found: "DepositCollection", attempt: Attempt, rank: int, reader: DepositReader
    ) -> None:
        node = await self._store.node(attempt.id, rank)
        if node.phase is NodePhase.EXITED:
            return  # the agent has already sent its results to the server
        body = await in_thread(reader.read_manifest)
        if body is None:
            return  # the manifest was removed meanwhile
        try:
            manifest, messages = await in_thread(self._deps.read, body, self._clock.now())
        except (ValueError, RecursionError) as error:
            raise InvalidDeposit(f"the manifest cannot be read: {error}") from error
        if objection := find_objection(attempt, node, manifest.nonce):
            raise InvalidDeposit(objection.reason)
        reader.check(manifest)
        stored = (rank, hashlib.sha256(body).digest())
        await self._keep_files(attempt, node, manifest, reader, found.pieces, stored)
        # Use the bucket's clock, which shows when the node was still alive; the node's own clock
        # may be wrong.
        seen = [each for each in (reader.stored_at, node.heard_at) if each is not None]
        heard = min(self._clock.now(), max(seen, default=attempt.created_at))
        await self._apply(attempt, rank, manifest.nonce, messages, heard)
        text = (
            "the results were read from the bucket: the node ended while the server was unreachable"
        )
        await self._tell(attempt, rank, text)

    async def _apply(
        self,
        attempt: Attempt,
        rank: int,
        nonce: str,
        messages: Sequence[AgentMessage],
        heard: datetime,
    ) -> None:
        """Apply the messages, which must include the exit of the rank."""
        for at in range(0, len(messages), _BATCH):
            batch = messages[at : at + _BATCH]
            await self._agents.messages(attempt.gang, rank, nonce, batch, heard_at=heard)
        if (await self._store.node(attempt.id, rank)).phase is not NodePhase.EXITED:
            raise InvalidDeposit("the messages do not contain the exit of the work")

    async def _keep_files(
        self,
        attempt: Attempt,
        node: Node,
        manifest: DepositManifest,
        reader: DepositReader,
        pieces: defaultdict[tuple[int, bytes], int],
        stored: tuple[int, bytes],
    ) -> None:
        """Store the results' pieces in their order: log, checkpoint and outputs. The pieces that
        were stored before an interruption are not read again.
        """
        checkpoint = manifest.checkpoint
        files = checkpoint.files if checkpoint is not None else []
        names = [each.sha256 for each in files if each.link is None]
        if not all(map(_SHA256.fullmatch, names)):
            raise InvalidDeposit("a file of the checkpoint has no valid hash")
        missing = set(await self._checkpoints.missing(attempt.gang, names)) if names else set()
        at = 0
        for number, piece in enumerate(manifest.pieces):
            read = reader.from_offset(at)
            at += piece.bytes
            if number < pieces[stored]:
                continue
            match piece.kind:
                case "log":
                    await in_thread_to_its_end(self._keep_log, attempt, node.rank, piece, read)
                case "output":
                    await self._keep_output(attempt, piece, read)
                case "blob":
                    if piece.name in missing:
                        await self._keep_blob(attempt, piece, read)
            pieces[stored] = number + 1
        if checkpoint is not None:
            await self._commit(attempt, node, manifest.nonce, checkpoint)

    def _keep_log(self, attempt: Attempt, rank: int, piece: DepositPiece, read: Read) -> None:
        """Append output to the log. If bytes before this output are missing, these bytes are lost:
        either the node dropped them, or the server lost them in a crash of its machine.
        """
        where, logs = (attempt.project, attempt.job_id, attempt.number, rank), self._deps.logs
        for at in range(0, max(1, piece.bytes), AT_ONCE):
            offset, data = piece.offset + at, read(at, min(AT_ONCE, piece.bytes - at))
            lost = max(0, offset - logs.size(*where))
            logs.append(*where, offset, data, lost, self._clock.now().timestamp())

    async def _keep_output(self, attempt: Attempt, piece: DepositPiece, read: Read) -> None:
        output = await self._transfers.output(attempt.gang, piece.index)
        try:
            output.key(piece.name)
        except ObjectDenied as error:
            raise InvalidDeposit(str(error)) from error
        await self._uploads.store(attempt.gang, output, piece.name, piece.bytes, read)

    async def _keep_blob(self, attempt: Attempt, piece: DepositPiece, read: Read) -> None:
        bucket = await self._checkpoints.bucket_checkpoints(attempt.gang)
        if bucket is not None:
            file = bucket.file(piece.name)
            await self._uploads.store(attempt.gang, file, "", piece.bytes, read)
        else:
            blobs = await self._checkpoints.blobs(attempt.gang)
            await in_thread_to_its_end(_store_blob, blobs, piece, read)

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
                raise InvalidDeposit("files of the checkpoint are missing")
            case ClaimLost(reason=reason):
                raise InvalidDeposit(reason)

    async def _refuse(self, attempt: Attempt, rank: int, error: Exception) -> None:
        text = f"the results cannot be used and stay in the bucket: {error}"
        await self._tell(attempt, rank, text)

    async def _give_up(
        self, attempt: Attempt, ranks: Collection[int], fault: BaseException | None
    ) -> None:
        which = ", ".join(str(rank) for rank in sorted(ranks))
        why = fault or "the bucket does not answer"
        text = f"the results of rank {which} could not be read and stay in the bucket: {why}"
        with suppress(StoreFull):
            await self._tell(attempt, None, text)

    async def _remove(self, job: JobRecord, attempt: Attempt) -> None:
        with suppress(ObjectError, StoreError):  # the next sweep tries again
            await self._results.remove_attempt(job, attempt, self.find_url(job))

    async def _tell(self, attempt: Attempt, rank: int | None, text: str) -> None:
        event = make_attempt_event(attempt, self._clock.now(), "results", text, rank)
        await self._store.commit(AtomicWrite(events=[event]))

    @property
    def _deps(self) -> DepositDependencies:
        assert self._dependencies is not None
        return self._dependencies


class DepositCollection:
    """The progress of reading one gang's results. `read` is called from other threads."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        # The ranks whose results were applied or given up, with the time of their agents' last
        # message.
        self.settled: dict[int, datetime | None] = {}
        # The number of pieces already stored, keyed by rank and by the SHA-256 of the manifest that
        # describes them.
        self.pieces: defaultdict[tuple[int, bytes], int] = defaultdict(int)
        self.task: asyncio.Task[None] | None = None
        self.complete = True  # whether all ranks of the last try are settled (applied or given up)
        self.fault: BaseException | None = None  # the last failure
        self._stopped = False
        self._waits_since: datetime | None = None
        self._furthest: dict[int, int] = {}  # the furthest position that was read, keyed by rank
        self._read_at = self._failing_since = now()
        self._failures = 0  # failures since the last progress

    def wait(self) -> None:
        """Record that the next try waits for the server to finish reading other gangs' results."""
        if self.complete:
            self._read_at, self._failures = self._now(), 0
        self.complete = False
        self._waits_since = self._now()

    def begin(self) -> None:
        """Record that the next try to read results begins. The time that the try has waited does
        not count toward time limits.
        """
        if self._waits_since is not None:
            waited = self._now() - self._waits_since
            self._read_at += waited
            self._failing_since += waited
            self._waits_since = None

    def read(self, rank: int, position: int) -> None:
        """Record that the bucket has answered. Raises ObjectTryAgain if the reader must stop."""
        if self._stopped:
            raise ObjectTryAgain("the server no longer reads these results")
        self._read_at = self._now()
        if position > self._furthest.get(rank, -1):
            self._furthest[rank] = position
            self._failures = 0

    def list_left(self, ranks: Ranks) -> frozenset[int]:
        """Return the ranks whose results have not been read completely, or whose agents have sent
        another message since the results were read.
        """
        return frozenset(
            rank
            for rank, heard in ranks.items()
            if rank not in self.settled or self.settled[rank] != heard
        )

    def settle(self, ranks: Ranks) -> None:
        self.settled.update(ranks)
        self._read_at = self._now()
        self._failures = 0

    def ended(self, task: "asyncio.Task[None]") -> None:
        """Record that a try to read the results has ended. A failed read of the results will be
        repeated.
        """
        self.task = None
        self.fault = None if task.cancelled() else task.exception()
        if self.fault is not None:
            self._failures += 1
            if self._failures == 1:
                self._failing_since = self._now()

    def is_stuck(self, now: datetime, patience: timedelta) -> bool:
        """Return whether reading has made no progress for the time `patience`: either the bucket
        has not responded, or every try has failed at the same position.
        """
        if self.complete or self._waits_since is not None:
            return False
        if isinstance(self.fault, ObjectDenied | ObjectMissing):
            patience = _SHORT_PATIENCE
        failing = self._failures >= _TRIES and now - self._failing_since >= patience
        return failing or now - self._read_at >= patience

    def stop(self) -> None:
        self._stopped = True
        if self.task is not None:
            self.task.cancel()


def _store_blob(blobs: BlobStore, piece: DepositPiece, read: Read) -> None:
    """Store a file of the checkpoint. An interrupted upload may have left a damaged part of the
    file. In this case, the hash of the stored file is wrong, and the first try deletes the part.
    Therefore the file is then stored a second time.
    """
    try:
        _append(blobs, piece, read)
    except HashMismatch:
        _append(blobs, piece, read)


def _append(blobs: BlobStore, piece: DepositPiece, read: Read) -> None:
    for at in range(0, max(1, piece.bytes), AT_ONCE):
        data = read(at, min(AT_ONCE, piece.bytes - at))
        blobs.append(piece.name, at, data, piece.bytes)
