"""Handles users' requests about jobs (submit, stop, retry, drill) by writing rows. The reconcilers
act on the written rows.

Errors, which are subclasses of JobServiceError:

* TooLate: the job has ended or has not started, so the request does not apply
* StillAwaited: another job waits for the job, which can therefore not be removed
* UnsupportedTask: the task needs a feature that this server does not support yet
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TypeVar

from cavvy.control.clock import ControlClock
from cavvy.control.decide.groups import (
    advise_retry,
    find_missed,
    is_founding,
    object_to_lone_retry,
    say_missed,
)
from cavvy.control.decide.requests import (
    drill_attempt,
    drill_node,
    find_live,
    hold_job,
    is_stopping,
    is_timed,
    object_to_retry,
    release_kept,
    resize_job,
    retry_job,
    stop_job,
)
from cavvy.control.decide.rows import RowChanges
from cavvy.control.decide.schedule import EPOCH, spell_id
from cavvy.control.decide.standby import HANDOVER
from cavvy.control.deferred import Deferred
from cavvy.control.unit_of_work import make_write
from cavvy.domain.arrays import StoredArray, describe_counts, is_array, list_indices
from cavvy.domain.checkpoints import RemovedCheckpoints, SavedCheckpoint
from cavvy.domain.events import Event
from cavvy.domain.jobs import (
    JOB_ENDS,
    Attempt,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    RunOrigin,
)
from cavvy.domain.tasks import Delivery, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace, view
from cavvy.store.arrays import NewJob
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion, StoreFull

_RANDOM_BITS = 30
_AT_ONCE = 200  # jobs that are changed in one write
_AT_WORK = (JobPhase.STARTING, JobPhase.RUNNING)
_TRIES = 10  # tries of a write that fails because the row was changed meanwhile
T = TypeVar("T")
# deletes the logs and checkpoints of an ended job
RemoveFiles = Callable[[JobRecord], Awaitable[RemovedCheckpoints]]


class JobServiceError(Exception):
    """Base class of this service's errors. `code` identifies the kind of error and never changes;
    `hint` tells the user what to do."""

    code = "refused"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TooLate(JobServiceError):
    """Raised if the job is in a phase that does not allow the request."""

    code = "too-late"


class StillAwaited(JobServiceError):
    """Raised if a job cannot be removed, because another job waits for its end."""

    code = "conflict"


class UnsupportedTask(JobServiceError):
    """Raised if the task needs a feature that this server does not support yet."""

    code = "not-honoured"


class JobIds:
    """Creates IDs of 16 characters. The IDs sort in the order in which they were created, even
    within one millisecond.
    """

    def __init__(
        self, clock: ControlClock, random_bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._last = 0

    def make(self) -> str:
        """Return the next ID. The ID contains 50 bits of the time in milliseconds and 30 random
        bits."""
        millis = (self._clock.now() - EPOCH) // timedelta(milliseconds=1)
        value = (millis << _RANDOM_BITS) | self._random_bits(_RANDOM_BITS)
        self._last = value if value > self._last else self._last + 1
        return spell_id(self._last)


def gang_name(installation: str, attempt: str) -> str:
    """Return the name of an attempt's gang at the provider. The name is unique and shows to which
    installation the gang belongs.
    """
    return f"rm-{hashlib.sha256(installation.encode()).hexdigest()[:8]}-{attempt}"


_Change = Callable[[JobRecord], RowChanges | None]
_Write = Callable[[AtomicWrite], Awaitable[None]]


class TaskSubmission(Struct, frozen=True, kw_only=True):
    """A task to queue; see `JobService.submit`."""

    task: TaskSpec
    origin: RunOrigin
    id: str
    user: str = ""
    account: str = ""
    consented: bool = False
    ceiling: Money | None = None
    group: str | None = None  # the ID of the group that the job joins


def skip_newer(job: JobRecord, saved: Sequence[SavedCheckpoint], number: int) -> JobRecord:
    """Let the job resume from the stored checkpoint with this number. Raises TooLate."""
    stored = [each.number for each in saved]
    if number not in stored:
        text = f"job {job.name} has no stored checkpoint {number}"
        kept = (
            ", ".join(map(str, sorted(stored))) or "none; files in a shared folder have no number"
        )
        raise TooLate(text, f"stored checkpoints: {kept}")
    newer = tuple(other for other in stored if other > number)
    return replace(job, skipped_checkpoints=newer)


class JobService:
    """Handles users' requests about jobs. `hint` adds a job to the worklist, `arrived` announces a
    newly queued job, and `notify` starts the delivery of a webhook. `defers` states whether stops
    are accepted while the disk is full.
    """

    def __init__(
        self,
        store: Deferred,
        clock: ControlClock,
        ids: JobIds,
        *,
        hint: Callable[[str], None],
        arrived: Callable[[], None],
        notify: Callable[[str, Delivery], None],
        remove_files: RemoveFiles,
        defers: bool = True,
    ) -> None:
        self._store = store.as_store()
        # A stop that only this server remembers would be invisible to the server that acts on it.
        self._put = store.put if defers else store.commit
        self._clock = clock
        self._ids = ids
        self._hint = hint
        self._arrived = arrived
        self._notify = notify
        self._remove_files = remove_files
        self._removing: set[str] = set()  # IDs of jobs whose removal is in progress

    def make_id(self) -> str:
        """Return an ID for `submit`."""
        return self._ids.make()

    async def submit(
        self,
        task: TaskSpec,
        origin: RunOrigin,
        project: str,
        *,
        user: str = "",
        account: str = "",
        consented: bool = False,
        ceiling: Money | None = None,
        job_id: str | None = None,
    ) -> JobRecord:
        """Queue a job for the task. The job gets the task's name or, if that name is in use, the
        first free name of NAME-2, NAME-3 and so on. Raises UnsupportedTask.

        The caller can choose the `job_id` to detect a repeated submission: StaleVersion is raised
        if a job with this ID exists already.
        """
        ask = TaskSubmission(
            task=task,
            origin=origin,
            user=user,
            account=account,
            consented=consented,
            ceiling=ceiling,
            id=job_id or self.make_id(),
        )
        new = self._make(ask, project)
        stored = await self._store.submit(new.job, new.event)
        self._announce(new)
        return stored

    async def enqueue(self, ask: TaskSubmission, project: str) -> JobRecord | StoredArray:
        """Queue a job for the task or, if it is an array, a job for each member, in one write.
        Otherwise like `submit`."""
        new = self._make(ask, project)
        if is_array(ask.task):
            arrays = self._store.arrays
            array = await arrays.submit(new.job, new.event, new.members, new.parallel)
            self._announce(new)
            return array
        job = await self._store.submit(new.job, new.event)
        self._announce(new)
        return job

    async def submit_all(self, asks: Sequence[TaskSubmission], project: str) -> Sequence[NewJob]:
        """Queue jobs and arrays for several tasks, in one write, and return them with the names
        under which they are stored. Otherwise like `submit`. A task that waits for others of them,
        by their IDs, comes after these.
        """
        new_groups = (each.task.group for each in asks if each.group is None)
        groups = {group.name: self.make_id() for group in new_groups if group}
        new, jobs = set(groups), list[NewJob]()
        for ask in asks:
            group = ask.task.group.name if ask.task.group else ""
            made = self._make(replace(ask, group=ask.group or groups.get(group)), project)
            jobs.append(replace(made, group=group if group in new and not ask.group else ""))
            new.discard(group)
        names = await self._store.submit_all(jobs)
        for each in jobs:
            self._announce(each)
        return [
            replace(each, job=replace(each.job, name=name))
            for each, name in zip(jobs, names, strict=True)
        ]

    def _make(self, ask: TaskSubmission, project: str) -> NewJob:
        now, task = self._clock.now(), ask.task
        array_id = ask.id if is_array(task) else ask.group
        job = view(
            JobRecord,
            ask,
            project=project,
            name=task.name,
            array_id=array_id,
            submitted_at=now,
            since=now,
        )
        held, event = _hold(job, now)
        members = {self.make_id(): index for index in list_indices(task)} if is_array(task) else {}
        return NewJob(job=held, event=event, members=members, parallel=task.parallel)

    def _announce(self, new: NewJob) -> None:
        """Let the reconcilers check new jobs."""
        for job_id in new.members or (new.job.id,) if is_timed(new.job) else ():
            self._hint(job_id)
        self._arrived()

    async def stop_array(
        self, project: str, name: str, reason: str = "stopped by the user"
    ) -> StoredArray:
        """Stop all members that have not ended, those that wait first, so that none of them starts
        meanwhile. Raises RowNotFound.
        """
        array = await self._store.arrays.find(project, name)
        members = [each.job for each in await self._store.arrays.members(array.id)]
        waiting = [each.id for each in members if each.phase is JobPhase.QUEUED]
        others = [each.id for each in members if each.phase in _AT_WORK]
        now = self._clock.now()
        await self._change_all(
            waiting[::-1] + others,
            lambda job: None if is_stopping(job) else stop_job(job, reason, now),
            self._put,
        )
        return await self._store.arrays.get(array.id)

    async def stop_waiting(self, job_ids: Sequence[str], reason: str) -> None:
        """Stop those of the jobs that have never started, the newest first, many in one write. Jobs
        that have a node, or had one, are left for `stop`."""
        now = self._clock.now()

        def stop(job: JobRecord) -> RowChanges | None:
            waits = job.phase is JobPhase.QUEUED and not job.attempt and not is_stopping(job)
            return stop_job(replace(job, released=True), reason, now) if waits else None

        await self._change_all(job_ids[::-1], stop, self._put)

    async def retry_array(self, project: str, name: str, account: str = "") -> StoredArray:
        """Queue all failed and stopped members again. If all jobs of a group have ended, its
        founding jobs that are queued again start together. Raises RowNotFound.
        """
        array = await self._store.arrays.find(project, name)
        ended = (JobPhase.FAILED, JobPhase.STOPPED)
        members = await self._store.arrays.members(array.id)
        wanted = [each.job.id for each in members if each.job.phase in ended]
        all_ended = JOB_ENDS.issuperset(each.job.phase for each in members)
        again = await self._store.find_jobs(wanted) if array.started and wanted else ()
        if all_ended and any(map(is_founding, again)):
            await self._store.arrays.restart(array.id)
        now = self._clock.now()

        def retry(job: JobRecord) -> RowChanges | None:
            removing = job.removing or job.id in self._removing
            refused = object_to_retry(replace(job, removing=removing), now)
            return None if refused else retry_job(job, now, account)

        await self._change_all(wanted, retry, self._store.commit)
        self._arrived()
        return await self._store.arrays.get(array.id)

    async def remove_array(self, project: str, name: str) -> RemovedCheckpoints:
        """Do the same as `remove` for all members, of which each must have ended. A repeated
        request completes a removal that a crash has interrupted. Raises RowNotFound, TooLate.
        """
        array = await self._store.arrays.find(project, name)
        members = [each.job for each in await self._store.arrays.members(array.id)]
        standing = ""
        if not JOB_ENDS.issuperset(each.phase for each in members):
            standing = describe_counts(array.counts)
        elif await self._store.arrays.holds_nodes(array.id):
            standing = "its nodes are not released yet"
        if standing:
            raise TooLate(f"array {array.name} cannot be removed: {standing}", "stop it first")
        waiting = await self._store.dependencies.waiting_for_array(array.id)
        await self._check_free(f"array {array.name}", waiting)
        ids = [each.id for each in members]
        self._removing.update(ids)
        try:
            removed = [
                await self._remove_some(ids[start : start + _AT_ONCE])
                for start in range(0, len(ids), _AT_ONCE)
            ]
        finally:
            self._removing.difference_update(ids)
        return RemovedCheckpoints(
            bytes=sum(each.bytes for each in removed),
            kept="; ".join(each.kept for each in removed if each.kept),
        )

    async def _check_free(self, what: str, waiting: Sequence[str]) -> None:
        """Raise StillAwaited if a job waits for what is to be removed."""
        for job_id in waiting:
            name = (await self._store.job(job_id)).name
            text = f"{what} cannot be removed: job {name} waits for it"
            raise StillAwaited(text, f"wait, or stop {name} first")

    async def _remove_some(self, job_ids: Sequence[str]) -> RemovedCheckpoints:
        """Mark ended jobs as being removed, delete their files, and then their rows."""

        def mark(job: JobRecord) -> RowChanges | None:
            wanted = job.phase in JOB_ENDS and not job.removing
            return RowChanges(job=replace(job, removing=True)) if wanted else None

        with suppress(StoreFull):  # deleting the files makes space for the record
            await self._change_some(job_ids, mark, self._store.commit)
        jobs = await self._store.find_jobs(job_ids)
        for job in jobs:
            if job.phase not in JOB_ENDS:
                raise TooLate(f"job {job.name} cannot be removed: {job.phase}", "stop it first")
        # a job that never had a node has no files
        removed = [await self._remove_files(job) for job in jobs if job.attempt]
        await self._store.remove_jobs(jobs)
        return RemovedCheckpoints(
            bytes=sum(each.bytes for each in removed),
            kept="; ".join(each.kept for each in removed if each.kept),
        )

    async def _change_all(self, job_ids: Sequence[str], change: _Change, write: _Write) -> None:
        """Write what `change` returns for each of the jobs, many in one write. A repeated request
        continues after a crash, because a job that has changed is left out."""
        for start in range(0, len(job_ids), _AT_ONCE):
            await self._change_some(job_ids[start : start + _AT_ONCE], change, write)

    async def _change_some(self, job_ids: Sequence[str], change: _Change, write: _Write) -> None:
        for _ in range(_TRIES):
            jobs = await self._store.find_jobs(job_ids)
            found = [(job, changes) for job in jobs if (changes := change(job)) is not None]
            written = [changes.job for _, changes in found if changes.job is not None]
            events = [event for _, changes in found for event in changes.events]
            with suppress(StaleVersion):
                if found:
                    await write(AtomicWrite(jobs=written, events=events))
                for job, changes in found:
                    self._hint(job.id)
                    for what in changes.notices if job.task.webhooks else ():
                        self._notify(job.id, what)
                return
        raise StaleVersion("the jobs kept changing during the request; try again")

    def check_times(self, task: TaskSpec) -> None:
        """Raise UnsupportedTask if the task's schedule never starts the task."""
        now = self._clock.now()
        job = JobRecord(
            id="", project=task.project, name=task.name, task=task, submitted_at=now, since=now
        )
        _hold(job, now)

    async def find_session(self, project: str, name: str) -> JobRecord:
        """Return the job with this name or ID. `name` may also be the name of a machine: if no job
        has the name, or if the job with the name is an ended session, the result is the machine's
        newest unfinished session. If there is none, return the ended session. The name of the
        returned session may differ from `name`, so callers must use the ID of the session. Raises
        RowNotFound.
        """
        try:
            job: JobRecord | None = await self._store.find_job(project, name)
        except RowNotFound:
            job = None
        if job is None or (job.phase in JOB_ENDS and job.task.session):
            for job_id in reversed(await self._store.jobs_of_machine(project, name)):
                if (newer := await self._store.job(job_id)).task.session:
                    return newer
        return job or await self._store.find_job(project, name)

    async def stop(
        self,
        project: str,
        name: str,
        reason: str = "stopped by the user",
        *,
        release: bool = False,
    ) -> JobRecord:
        """Stop a job: immediately if it is queued, otherwise with its grace period. Raises
        RowNotFound.

        If the job has ended, release the nodes that were kept warm after the job. The nodes of a
        machine or a pool, and nodes that the provider itself keeps, are released only if `release`
        is set. If `release` is set, all kept nodes are released even if the job is waiting for a
        retry.
        """

        async def stop(job: JobRecord) -> JobRecord:
            now, kept_on = self._clock.now(), job.task.on_kept_nodes
            if release and not job.released:
                released = RowChanges(job=replace(job, released=True))
                job = await self._write(self._put, job, released)
            if release or (job.phase in JOB_ENDS and not kept_on):
                kept = release_kept(job, await self._store.attempts(job.id), now)
                if kept is not None:
                    await self._write(self._put, job, kept)
            if is_stopping(job):
                return job
            return await self._write(self._put, job, stop_job(job, reason, now))

        return await self._on_job(project, name, stop)

    async def retry(
        self,
        project: str,
        name: str,
        account: str = "",
        moved: JobRecord | None = None,
        checkpoint: int | None = None,
    ) -> JobRecord:
        """Queue a failed or stopped job again, with its retry counts reset, as a job of the account
        that requests this. If `moved` is given, the job gets its resources and its consent. The job
        resumes from the stored checkpoint with the number `checkpoint`, or from its newest. Raises
        RowNotFound, TooLate.
        """

        async def retry(job: JobRecord) -> JobRecord:
            removing = job.removing or job.id in self._removing
            if objection := object_to_retry(replace(job, removing=removing), self._clock.now()):
                raise TooLate(*objection)
            if job.after:
                phases = await self._store.dependencies.phases(job.after)
                if missed := find_missed(job.after, phases):
                    text = f"job {job.name} cannot be retried: {say_missed(missed, phases)}"
                    raise TooLate(text, advise_retry(missed, phases))
            now = self._clock.now()
            await self._check_group(job, now)
            job = replace(job, skipped_checkpoints=())
            if checkpoint is not None:
                job = skip_newer(job, await self._store.checkpoints(job.id), checkpoint)
            changes = retry_job(job, now, account, moved=moved)
            written = await self._write(self._store.commit, job, changes)
            self._arrived()
            return written

        return await self._on_job(project, name, retry)

    async def _check_group(self, job: JobRecord, now: datetime) -> None:
        """Raise TooLate if the job can only be retried together with others of its group."""
        if job.task.group is None or job.array_id is None:
            return
        group = await self._store.find_jobs(await self._store.arrays.jobs(job.array_id))
        if why := object_to_lone_retry(job, group, now):
            name = (await self._store.arrays.get(job.array_id)).name
            text = f"job {job.name} cannot be retried alone: {why}"
            raise TooLate(text, f"`cavvy retry {name}` retries all jobs of its group")

    async def remove(
        self, project: str, name: str, remove_files: RemoveFiles | None = None
    ) -> tuple[JobRecord, RemovedCheckpoints]:
        """Delete an ended job, its logs and its checkpoints, but keep its bill. `remove_files`
        replaces the function that deletes the files of all jobs that users remove. If a crash
        interrupts the removal, a repeated request completes the removal; the job cannot be retried
        before the removal is complete. Raises RowNotFound, TooLate.
        """

        async def remove(job: JobRecord) -> tuple[JobRecord, RemovedCheckpoints]:
            attempts = await self._store.attempts(job.id)
            if job.phase not in JOB_ENDS or any(
                each.phase is not AttemptPhase.ENDED for each in attempts
            ):
                standing = "its nodes are not released yet" if job.phase in JOB_ENDS else job.phase
                raise TooLate(f"job {job.name} cannot be removed: {standing}", "stop it first")
            await self._check_free(f"job {job.name}", await self._store.dependencies.waiting(job))
            # prevents a retry during the removal, because a retry needs the checkpoints
            self._removing.add(job.id)
            try:
                if not job.removing:
                    marked = replace(job, removing=True)
                    with suppress(StoreFull):  # deleting the files makes space for the record
                        await self._store.commit(make_write(RowChanges(job=marked)))
                        job = replace(marked, version=job.version + 1)
                removed = await (remove_files or self._remove_files)(job)
                await self._store.remove_job(job)
            finally:
                self._removing.discard(job.id)
            return job, removed

        return await self._on_job(project, name, remove)

    async def drill_preempt(
        self, project: str, name: str, notice: timedelta, rank: int | None = None
    ) -> Attempt:
        """Reclaim the job's nodes, or only the node of `rank`, as a spot market would, after
        `notice`. Raises RowNotFound, TooLate.
        """

        async def drill(job: JobRecord) -> Attempt:
            live = find_live(job, await self._store.attempts(job.id))
            if live is None:
                text = f"job {job.name} is {job.phase}; it has no node to reclaim"
                raise TooLate(text, "wait until the job is running")
            now = self._clock.now()
            if rank is not None:
                node = await self._find_working(job, live, rank)
                await self._store.commit(make_write(drill_node(job, live, node, notice, now)))
                self._hint(job.id)
                return live
            changes = drill_attempt(job, live, notice, now)
            await self._store.commit(make_write(changes))
            self._hint(job.id)
            return replace(changes.attempts[0], version=live.version + 1)

        return await self._on_job(project, name, drill)

    async def _find_working(self, job: JobRecord, live: Attempt, rank: int) -> Node:
        """Return a rank whose work runs. Raises TooLate."""
        nodes = await self._store.nodes(live.id)
        node = next((each for each in nodes if each.rank == rank), None)
        if node is None:
            ranks = f"0 to {len(nodes) - 1}" if len(nodes) > 1 else "only 0"
            raise TooLate(f"job {job.name} has no rank {rank}, {ranks}", "choose another rank")
        if node.phase is not NodePhase.RUNNING:
            text = f"rank {rank} of job {job.name} is {node.phase}; its work does not run"
            raise TooLate(text, "wait until the job is running")
        return node

    async def resize(self, project: str, name: str, nodes: int) -> JobRecord:
        """Let an elastic job have at most this many nodes, see `resize_job`. Raises RowNotFound,
        TooLate, UnsupportedTask.
        """

        async def resize(job: JobRecord) -> JobRecord:
            sizes = job.task.elastic
            if sizes is None:
                text = f"job {job.name} has a fixed number of nodes, {job.task.nodes}"
                hint = f"run it with a range, such as `nodes: 1..{max(nodes, 2)}`"
                raise UnsupportedTask(text, hint)
            if nodes not in sizes:
                text = f"job {job.name} can have {sizes} nodes, not {nodes}"
                raise UnsupportedTask(text, f"choose a number from {sizes.least} to {sizes.most}")
            if job.phase in JOB_ENDS:
                raise TooLate(f"job {job.name} is {job.phase}", "retry it first")
            live = find_live(job, await self._store.attempts(job.id))
            now, notice = self._clock.now(), max(HANDOVER, job.task.grace)
            return await self._write(
                self._store.commit, job, resize_job(job, live, nodes, notice, now)
            )

        return await self._on_job(project, name, resize)

    async def _on_job(self, project: str, name: str, act: Callable[[JobRecord], Awaitable[T]]) -> T:
        """Apply `act` to the current state of the job. If another writer has changed the job, try
        again with the job's new state."""
        for _ in range(_TRIES):
            with suppress(StaleVersion):
                return await act(await self._store.find_job(project, name))
        raise StaleVersion(f"job {name} kept changing during the request; try again")

    async def _write(
        self, write: Callable[[AtomicWrite], Awaitable[None]], job: JobRecord, changes: RowChanges
    ) -> JobRecord:
        """Write the changes. `write` is the function that writes. A stop frees nodes, so it must be
        possible even if the disk is full; for a stop, `write` is `put`.
        """
        await write(make_write(changes))
        self._hint(job.id)
        for what in changes.notices if job.task.webhooks else ():
            self._notify(job.id, what)
        written = changes.job or job
        return replace(written, version=written.version + 1)


def _hold(job: JobRecord, now: datetime) -> tuple[JobRecord, Event]:
    """See `hold_job`. Raises UnsupportedTask."""
    try:
        return hold_job(job, now)
    except ValueError as error:
        raise UnsupportedTask(f"schedule.cron: {error}", "use a time in the future") from error
