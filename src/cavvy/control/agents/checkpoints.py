"""Manages the checkpoints of jobs: selects the checkpoint from which an attempt starts, and
receives checkpoints from nodes that cannot write to the job's folder.

A checkpoint is complete once its row is written, which happens after all of its files are stored.
Work on the server's own machine writes to the job's folder and uploads nothing, unless the files of
the job's project are encrypted. When a job moves between the server's machine and other nodes, the
server copies the job's newest checkpoint once, before it grants the claim.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from weakref import WeakValueDictionary

from cavvy.agent.documents import CheckpointConfig, say_files
from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener, BucketCheckpoints
from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import make_attempt_event
from cavvy.domain.checkpoints import CheckpointFile, RemovedCheckpoints, SavedCheckpoint
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord, Node
from cavvy.domain.markets import LIVES, MarketTally, ObservationKind
from cavvy.domain.messages import ClaimLost
from cavvy.domain.offers import Purchase
from cavvy.domain.values import Struct
from cavvy.planner.risk import CheckpointInterval, NodeLosses, loss_rate, make_save_interval
from cavvy.store.base import (
    AtomicWrite,
    HashMismatch,
    RowNotFound,
    StaleVersion,
    StoreError,
    StoreFull,
)
from cavvy.store.blobs import BlobStore
from cavvy.store.checkpoint_folders import FOREVER, NO_ATTEMPT, CheckpointFolders, find_fault
from cavvy.store.objects.base import ObjectError
from cavvy.store.objects.threads import in_thread, in_thread_to_its_end
from cavvy.store.sql import Store

KEPT = 2  # checkpoints kept for each job
_COMING = 1000  # maximum number of jobs for which the files of a running upload are remembered


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOSSES_SINCE = timedelta(days=30)
_LOCK_PAUSE = timedelta(milliseconds=100)
_LOSSES_KEPT = timedelta(minutes=1)


class InvalidManifest(Exception):
    """Raised if an agent sends an invalid list of a checkpoint's files. Only an agent with a bug,
    or a sender that is not an agent, sends such a list.
    """


class FilesMissing(Struct, frozen=True, kw_only=True):
    """The list of the checkpoint's files that are not yet stored. The agent must send the missing
    files and commit again.
    """

    blobs: Sequence[str]


class Checkpoints:
    """Stores and restores the checkpoints of jobs. `folders` is None in the simulator, where every
    provider has access to `storage`."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        folders: CheckpointFolders | None,
        *,
        storage: Callable[[JobRecord], str],
        shares_files: Callable[[str], bool],
        bucket_opener: BucketCheckpointOpener | None = None,
    ) -> None:
        self._store, self._clock, self._folders, self._storage = store, clock, folders, storage
        self._shares_files, self._bucket_opener = shares_files, bucket_opener
        self._opened: dict[str, BucketCheckpoints | None] = {}
        self._losses: tuple[datetime, Mapping[str, NodeLosses]] | None = None
        self._coming: dict[str, frozenset[str]] = {}
        self._untidy: set[str] = set()  # gangs for which a failed cleanup was already reported
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ready(self, job: JobRecord, attempt: Attempt) -> CheckpointConfig | None:
        """Make the job's newest checkpoint available to this attempt's nodes, and return how the
        nodes access the checkpoint. The method may take long, because it may have to copy the files
        of the checkpoint first. Raises StoreFull.
        """
        wanted = job.task.checkpoint
        if wanted is None:
            return None
        stored = wanted.storage is not None
        save_interval = await self.save_interval(job, attempt)
        every = save_interval.every if save_interval is not None else wanted.every
        every_s = every.total_seconds() if every else None
        shared = not stored and (
            self._folders is None
            or (self._shares_files(attempt.offer.provider) and self._folders.lends(job.project))
        )
        if self._folders is not None and not stored:
            async with self._alone(job.id):
                await (self._to_folder if shared else self._from_folder)(
                    self._folders, job, attempt
                )
        if shared:
            return CheckpointConfig(
                path=wanted.path, storage=f"{self._storage(job)}/checkpoint", every_s=every_s
            )
        return CheckpointConfig(path=wanted.path, sync=True, every_s=every_s)

    async def save_interval(self, job: JobRecord, attempt: Attempt) -> CheckpointInterval | None:
        """Return the current checkpoint interval. Returns None if the task sets the interval itself
        or saves no checkpoints."""
        wanted = job.task.checkpoint
        if wanted is None or not wanted.auto:
            return None
        cost = attempt.checkpoint_cost
        if cost is None and attempt.number > 1:
            before = await self._store.attempts(job.id)
            cost = next(
                (
                    each.checkpoint_cost
                    for each in reversed(before)
                    if each.checkpoint_cost is not None
                ),
                None,
            )
        return make_save_interval(
            cost, await self._lost(attempt), spot=_is_spot(attempt), nodes=attempt.nodes
        )

    async def losses_per_hour(self, attempt: Attempt) -> float:
        """Return how many nodes per hour a gang of this size loses in its market, as observed so
        far."""
        return loss_rate(await self._lost(attempt), spot=_is_spot(attempt)) * attempt.nodes

    async def _lost(self, attempt: Attempt) -> NodeLosses:
        return (await self._seen_losses()).get(attempt.offer.key, NodeLosses())

    async def _seen_losses(self) -> Mapping[str, NodeLosses]:
        """Return the recent losses of nodes in each market. The losses are read from the store at
        most once a minute.
        """
        now = self._clock.now()
        if self._losses is None or now - self._losses[0] > _LOSSES_KEPT:
            self._losses = now, count_losses(await self._store.tallies(now - _LOSSES_SINCE))
        return self._losses[1]

    async def latest(self, gang: str) -> tuple[SavedCheckpoint, Sequence[CheckpointFile]] | None:
        """Return the checkpoint that this gang starts from. The result is the newest checkpoint of
        the earlier attempts. Checkpoints of this attempt are not used, so that all ranks get the
        same checkpoint. Raises RowNotFound.
        """
        attempt = await self._store.attempt_of_gang(gang)
        saved = await self._store.checkpoints(attempt.job_id)
        bucket_checkpoints = await self.bucket_checkpoints(gang)
        if not saved or (self._folders is None and bucket_checkpoints is None):
            return None
        job = await self._store.job(attempt.job_id)
        chosen = next(iter(find_sources(saved, job, attempt.number)), saved[0])
        if bucket_checkpoints is not None:
            return chosen, await in_thread(bucket_checkpoints.read, chosen.manifest)
        assert self._folders is not None
        return chosen, await asyncio.to_thread(
            self._folders.read, chosen.project, chosen.job_id, chosen.manifest
        )

    async def bucket_checkpoints(self, gang: str) -> BucketCheckpoints | None:
        """Return the bucket of the job's checkpoints, or None if the job uses no bucket. Raises
        RowNotFound, ObjectDenied.
        """
        if self._bucket_opener is None:
            return None
        if gang not in self._opened:
            attempt = await self._store.attempt_of_gang(gang)
            bucket_checkpoints = await self._bucket_opener.open(
                await self._store.job(attempt.job_id)
            )
            if len(self._opened) >= _COMING:
                del self._opened[next(iter(self._opened))]
            self._opened[gang] = bucket_checkpoints
        return self._opened[gang]

    async def blobs(self, gang: str) -> BlobStore:
        """Return the store of files that this server keeps for the gang's job. Raises
        RowNotFound."""
        attempt = await self._store.attempt_of_gang(gang)
        if self._folders is None:
            raise RowNotFound("this server stores no checkpoints")
        return self._folders.blobs(attempt.project, attempt.job_id)

    async def missing(self, gang: str, names: Sequence[str]) -> Sequence[str]:
        """Return the names of the files that the agent must send for its next checkpoint. Files
        that the server already has are reused for the checkpoint. Raises RowNotFound.
        """
        attempt = await self._store.attempt_of_gang(gang)
        bucket_checkpoints = await self.bucket_checkpoints(gang)
        blobs = None if bucket_checkpoints is not None else await self.blobs(gang)
        self._coming.pop(attempt.job_id, None)
        if (
            len(self._coming) >= _COMING
        ):  # a job whose entry is dropped may send some files again; nothing else is affected
            del self._coming[next(iter(self._coming))]
        self._coming[attempt.job_id] = frozenset(names)
        if bucket_checkpoints is not None:
            held = await in_thread(bucket_checkpoints.held)
            return [name for name in names if name not in held]
        assert blobs is not None
        return await asyncio.to_thread(blobs.missing, names)

    async def commit(
        self, gang: str, rank: int, nonce: str, files: Sequence[CheckpointFile], made_at: datetime
    ) -> SavedCheckpoint | FilesMissing | ClaimLost:
        """Make these files the job's newest checkpoint. Returns FilesMissing if some of the files
        are not stored. Raises RowNotFound, InvalidManifest, StoreFull.
        """
        attempt = await self._store.attempt_of_gang(gang)
        node = await self._store.node(attempt.id, rank)
        if objection := find_objection(attempt, node, nonce):
            return objection
        if fault := find_fault(files):
            raise InvalidManifest(fault)
        if (bucket_checkpoints := await self.bucket_checkpoints(gang)) is not None:
            async with self._alone(attempt.job_id):
                return await self._commit_to(bucket_checkpoints, attempt, files, made_at)
        if self._folders is None:
            raise RowNotFound("this server stores no checkpoints")
        async with self._alone(attempt.job_id):
            blobs = self._folders.blobs(attempt.project, attempt.job_id)
            names = [each.sha256 for each in files if each.link is None]
            if missing := await asyncio.to_thread(blobs.missing, names):
                return FilesMissing(blobs=missing)
            try:
                return await self._save(self._folders, attempt, files, made_at, by=attempt.number)
            except StaleVersion as error:
                return ClaimLost(reason=str(error))

    async def copy_newest(self, job: JobRecord, blobs: BlobStore) -> Sequence[CheckpointFile]:
        """Copy the files of the job's newest checkpoint into `blobs`, and return a list of these
        files. If the job last ran on this machine, the newest files are copied from the job's
        folder. Raises RowNotFound, HashMismatch, StoreFull.
        """
        if self._folders is None or (job.task.checkpoint and job.task.checkpoint.storage):
            raise RowNotFound("the job's checkpoints are not stored on the server")
        async with self._alone(job.id):
            user = await asyncio.to_thread(self._folders.last_user, job.project, job.id)
            saved = await self._store.checkpoints(job.id)
            if user > (saved[0].attempt if saved else NO_ATTEMPT):
                files = await asyncio.to_thread(self._folders.take_in, job.project, job.id)
            elif saved:
                manifest = saved[0].manifest
                files = await asyncio.to_thread(self._folders.read, job.project, job.id, manifest)
            else:
                files = []
            return await asyncio.to_thread(self._folders.copy, job.project, job.id, files, blobs)

    async def remove(self, job: JobRecord, *, from_bucket: bool = True) -> RemovedCheckpoints:
        """Delete the checkpoints of a job that has ended, also from its bucket if `from_bucket` is
        set. Rows are deleted before files, so that no
        row refers to missing files after a crash; the next call deletes the remaining files. If the
        disk is full, files are deleted first to make space.
        """
        policy = job.task.checkpoint
        found: dict[str, RemovedCheckpoints] = {}
        async with self._alone(job.id):
            self._coming.pop(job.id, None)
            try:
                await self._store.forget_checkpoints(job.id)
                forgotten = True
            except StoreFull:
                forgotten = False
            if self._folders is not None:
                removed = await asyncio.to_thread(self._folders.remove, job.project, job.id)
                found[self._storage(job)] = removed
            if from_bucket and policy is not None and policy.storage is not None:
                found[policy.storage] = await self._empty_bucket(job)
            if not forgotten:
                await self._store.forget_checkpoints(job.id)
        return RemovedCheckpoints(
            bytes=sum(each.bytes for each in found.values()),
            kept="; ".join(f"{where}: {each.kept}" for where, each in found.items() if each.kept),
        )

    async def _empty_bucket(self, job: JobRecord) -> RemovedCheckpoints:
        """Delete the job's files in its bucket. The deletion has no time limit, because the files
        must be deleted before the job is removed.
        """
        try:
            bucket = await self._bucket_opener.open(job) if self._bucket_opener else None
            if bucket is not None:
                return await in_thread_to_its_end(bucket.sweep, ())
        except (ObjectError, StoreError) as error:
            return RemovedCheckpoints(kept=str(error))
        return RemovedCheckpoints()

    async def _commit_to(
        self,
        bucket_checkpoints: BucketCheckpoints,
        attempt: Attempt,
        files: Sequence[CheckpointFile],
        made_at: datetime,
    ) -> SavedCheckpoint | FilesMissing | ClaimLost:
        """Do the same as `commit` if the job's checkpoint files are in a bucket. At commit, only
        the sizes of the files are checked; the contents are checked when the files are downloaded.
        """
        held = await in_thread(bucket_checkpoints.held)
        wanted = [each for each in files if each.link is None]
        if missing := sorted(
            {each.sha256 for each in wanted if held.get(each.sha256) != each.stored_size}
        ):
            return FilesMissing(blobs=missing)
        saved = self._row(
            attempt,
            files,
            await in_thread(bucket_checkpoints.keep, files),
            made_at,
            by=attempt.number,
        )
        try:
            saved = await self._store.save_checkpoint(saved, on_behalf=attempt.number, keep=KEPT)
        except StaleVersion as error:
            return ClaimLost(reason=str(error))
        try:
            fault = await self._sweep_bucket(bucket_checkpoints, attempt)
        # the checkpoint is complete; only the cleanup of older files failed
        except (ObjectError, HashMismatch) as error:
            fault = str(error)
        if fault:
            await self._tell_untidy(attempt, fault)
        else:
            self._untidy.discard(attempt.gang)
        return saved

    async def _sweep_bucket(self, bucket_checkpoints: BucketCheckpoints, attempt: Attempt) -> str:
        """Remove the files that are not part of a kept checkpoint or of the checkpoint being
        uploaded. Return the reason why some files could not be removed, or "". Raises ObjectError,
        HashMismatch.
        """
        needed = set(self._coming.pop(attempt.job_id, frozenset()))
        for each in await self._store.checkpoints(attempt.job_id):
            needed.add(each.manifest)
            needed |= {
                file.sha256 for file in await in_thread(bucket_checkpoints.read, each.manifest)
            }
        # the caller holds the lock, because the next upload may need a file that is removed here
        return (await in_thread_to_its_end(bucket_checkpoints.sweep, needed)).kept

    async def _tell_untidy(self, attempt: Attempt, reason: str) -> None:
        """Report to the user that files could not be removed and continue to cost money. Failures
        in a row are reported only once for each gang; after a successful cleanup, a failure is
        reported again.
        """
        if attempt.gang in self._untidy:
            return
        self._untidy.add(attempt.gang)
        text = f"files of older checkpoints stay in the bucket until they can be removed: {reason}"
        await self._store.commit(AtomicWrite(events=[self._event(attempt, "checkpoint", text)]))

    def _row(
        self,
        attempt: Attempt,
        files: Sequence[CheckpointFile],
        manifest: str,
        made_at: datetime,
        *,
        by: int,
    ) -> SavedCheckpoint:
        now = self._clock.now()
        return SavedCheckpoint(
            job_id=attempt.job_id,
            project=attempt.project,
            attempt=by,
            manifest=manifest,
            files=len(files),
            bytes=sum(each.size for each in files),
            made_at=min(max(made_at, _EPOCH), now).astimezone(UTC),
            saved_at=now,
        )

    @asynccontextmanager
    async def _alone(self, job_id: str) -> AsyncIterator[None]:
        """Lock the job's files against other tasks of this process and against other servers."""
        async with self._lock(job_id):
            locks = None if self._folders is None else self._folders.locks
            if locks is None:
                yield
                return
            while (held := await asyncio.to_thread(locks.try_hold, job_id)) is None:
                await self._clock.sleep_until(self._clock.now() + _LOCK_PAUSE)
            try:
                yield
            finally:
                held.close()

    def _lock(self, job_id: str) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())

    async def _save(
        self,
        folders: CheckpointFolders,
        attempt: Attempt,
        files: Sequence[CheckpointFile],
        made_at: datetime,
        *,
        by: int,
    ) -> SavedCheckpoint:
        """Write the checkpoint's row, then remove unneeded files. If the server crashes before the
        removal, only unneeded files are left behind.
        """
        project, job_id, now = attempt.project, attempt.job_id, self._clock.now()
        manifest = await asyncio.to_thread(folders.keep, project, job_id, files)
        saved = self._row(attempt, files, manifest, made_at, by=by)
        saved = await self._store.save_checkpoint(saved, on_behalf=attempt.number, keep=KEPT)
        kept = await self._store.checkpoints(job_id)
        coming = self._coming.pop(job_id, frozenset())
        await asyncio.to_thread(
            _sweep, folders, kept, coming - {each.sha256 for each in files}, now
        )
        return saved

    async def _from_folder(
        self, folders: CheckpointFolders, job: JobRecord, attempt: Attempt
    ) -> None:
        """Create a checkpoint from the job's folder, before the next attempt runs on other nodes.
        The job's work on this machine left its files there.
        """
        user = await asyncio.to_thread(folders.last_user, job.project, job.id)
        saved = await self._store.checkpoints(job.id)
        if user <= (saved[0].attempt if saved else -1):
            return
        files = await asyncio.to_thread(folders.take_in, job.project, job.id)
        if not files:
            return
        made_at = datetime.fromtimestamp(
            max(each.mtime_ns for each in files) / 1e9, self._clock.now().tzinfo
        )
        taken = await self._save(folders, attempt, files, made_at, by=user)
        await self._tell(attempt, taken, f"the files that attempt {user} left on this machine")

    async def _to_folder(
        self, folders: CheckpointFolders, job: JobRecord, attempt: Attempt
    ) -> None:
        """Fill the job's folder with the newest uploaded checkpoint, because the attempt runs on
        this machine."""
        user = await asyncio.to_thread(folders.last_user, job.project, job.id)
        if user >= attempt.number:
            return
        saved = await self._store.checkpoints(job.id)
        if sources := [each for each in find_sources(saved, job) if each.attempt > user]:
            newest = sources[0]
            files = await asyncio.to_thread(folders.read, job.project, job.id, newest.manifest)
            await asyncio.to_thread(folders.lay_out, job.project, job.id, files)
            await self._tell(attempt, newest, f"the upload of attempt {newest.attempt}")
        await asyncio.to_thread(folders.lend, job.project, job.id, attempt.number)

    async def _tell(self, attempt: Attempt, saved: SavedCheckpoint, what: str) -> None:
        text = f"restored {what}: {say_files(saved.files, saved.bytes)}"
        await self._store.commit(AtomicWrite(events=[self._event(attempt, "restored", text)]))

    def _event(self, attempt: Attempt, kind: str, text: str) -> Event:
        return make_attempt_event(attempt, self._clock.now(), kind, text)


def find_sources(
    saved: Sequence[SavedCheckpoint], job: JobRecord, attempt: int | None = None
) -> list[SavedCheckpoint]:
    """Return the checkpoints from which the attempt may start, the newest first: those of earlier
    attempts that no work has failed to read."""
    return [
        each
        for each in saved
        if each.number not in job.skipped_checkpoints
        and (attempt is None or each.attempt < attempt)
    ]


def _is_spot(attempt: Attempt) -> bool:
    return attempt.offer.purchase is Purchase.SPOT


def count_losses(tallies: Sequence[MarketTally]) -> dict[str, NodeLosses]:
    """Return two numbers for each market: the number of lost nodes, and the total running time of
    all ended nodes in hours.
    """
    found: dict[str, NodeLosses] = {}
    for each in tallies:
        if each.kind in LIVES:
            old = found.get(each.market, NodeLosses())
            lost = each.count if each.kind is not ObservationKind.ENDED else 0
            hours = each.node_seconds / 3600
            found[each.market] = NodeLosses(lost=old.lost + lost, node_hours=old.node_hours + hours)
    return found


def _sweep(
    folders: CheckpointFolders,
    kept: Sequence[SavedCheckpoint],
    coming: frozenset[str],
    now: datetime,
) -> None:
    """Remove the job's files, except the files of kept checkpoints and of the checkpoint being
    uploaded.
    """
    wanted = set(coming)
    for each in kept:
        wanted.add(each.manifest)
        wanted |= {file.sha256 for file in folders.read(each.project, each.job_id, each.manifest)}
    if kept:
        folders.blobs(kept[0].project, kept[0].job_id).sweep(wanted, older_than=now + FOREVER)


def find_objection(attempt: Attempt, node: Node, nonce: str) -> ClaimLost | None:
    """Return the reason why the agent with this nonce does not hold the claim, or None if the agent
    holds it."""
    if node.claim != nonce:
        return ClaimLost(reason=f"rank {node.rank} is claimed by another agent")
    if attempt.phase is AttemptPhase.ENDED:
        return ClaimLost(reason=f"attempt {attempt.number} is over: {attempt.reason}")
    return None
