"""A store that can be used while the disk is full. Changes that release nodes are kept in memory
until the disk has space.

Nodes may be removed before their removal is recorded. A purchase must be recorded before it
happens, so the recording of a purchase is never deferred. While the disk is full, `put` keeps
changes to existing rows in memory, and `commit` raises StoreFull. Reads include the changes in
memory. All writes of rows pass through this class, and deferred changes are written before later
changes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol, cast

from cavvy.control.worklist import QUEUE
from cavvy.domain.allocations import Allocation
from cavvy.domain.events import Charge, replace_charges
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.values import copy_fields, replace
from cavvy.store.base import (
    PER_MACHINE,
    AtomicWrite,
    JobReading,
    StaleVersion,
    StoreError,
    StoreFull,
    StoreUnusable,
    SummaryPage,
)
from cavvy.store.sql import Store

_log = logging.getLogger(__name__)


class Notes(Protocol):
    """Records which jobs must be stopped, so that the next server can stop these jobs. Recording a
    stop needs no new disk space.
    """

    def read(self) -> dict[str, str]:
        """Return the reason why each job must stop, keyed by job ID."""

    def write(self, stops: dict[str, str]) -> None: ...


class Deferred:
    """A store that can keep changes in memory. Methods that this class does not define are passed
    to the wrapped store. The event `pending` is set while changes are in memory. `hint` adds a
    key to the worklist. `written` gets all changes that were written.
    """

    def __init__(
        self,
        store: Store,
        notes: Notes | None = None,
        hint: Callable[[str], None] = lambda key: None,
        written: Callable[[AtomicWrite], None] = lambda changes: None,
    ) -> None:
        self._written = written
        self._store = store
        self._notes = notes
        self._hint = hint
        self._kept: list[AtomicWrite] = []
        self._jobs: dict[str, JobRecord] = {}
        self._attempts: dict[str, Attempt] = {}
        self._nodes: dict[tuple[str, int], Node] = {}
        self._order = asyncio.Lock()
        self.pending = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def as_store(self) -> Store:
        return cast(Store, self)  # delegates all other methods by name

    # Writing

    async def commit(self, changes: AtomicWrite) -> None:
        """Do the same as `Store.commit`, but also raise StoreFull while changes in memory cannot be
        written because the disk is full.
        """
        if self._kept:
            await self.write_pending()
        if self._kept:
            raise StoreFull(
                "the disk is full: until there is space, only releases of nodes are accepted"
            )
        await self._store.commit(changes)
        self._written(changes)

    async def put(self, changes: AtomicWrite) -> None:
        """Do the same as `commit`, but keep the changes in memory if the disk is full. If the disk
        is full, changes that create jobs, attempts or allocations raise StoreFull.
        """
        try:
            await self.commit(changes)
        except StoreFull:
            if _takes_on(changes):
                raise
            async with self._order:
                self._keep(changes)

    async def write_pending(self) -> None:
        """Write the changes that are kept in memory; stop if the disk is full again, or if the
        database cannot be used now, for example because another process has locked it.
        """
        async with self._order:
            while self._kept:
                try:
                    await self._store.commit(self._kept[0])
                    self._written(self._kept[0])
                except (StoreFull, StoreUnusable):
                    return
                except (
                    StoreError
                    # another writer has changed the rows, so the reconciler must decide again
                ) as error:
                    _log.warning(
                        "changes that were kept in memory cannot be written", exc_info=error
                    )
                del self._kept[0]
            jobs = self._changed_jobs()
            self._jobs, self._attempts, self._nodes = {}, {}, {}
            if self.pending.is_set():
                self.pending.clear()
                self._note()
                # The queue left these jobs out. Changes that were not written are decided again.
                for key in (QUEUE, *jobs):
                    self._hint(key)

    def _keep(self, changes: AtomicWrite) -> None:
        for job in changes.jobs:
            _check(job.version, self._jobs.get(job.id))
        for attempt in changes.attempts:
            _check(attempt.version, self._attempts.get(attempt.id))
        for node in changes.nodes:
            _check(node.version, self._nodes.get((node.attempt_id, node.rank)))
        if not self._kept:
            _log.error("the disk is full: nodes are released now and recorded later")
        self._kept.append(changes)
        for job in changes.jobs:
            self._jobs[job.id] = replace(job, version=job.version + 1)
        for attempt in changes.attempts:
            self._attempts[attempt.id] = replace(attempt, version=attempt.version + 1)
        for node in changes.nodes:
            self._nodes[node.attempt_id, node.rank] = replace(node, version=node.version + 1)
        self.pending.set()
        if any(job.stop_reason is not None for job in changes.jobs):
            self._note()

    def _note(self) -> None:
        if self._notes is not None:
            stops = {each.id: each.stop_reason for each in self._jobs.values() if each.stop_reason}
            self._notes.write(stops)

    # Reading

    def _job(self, job: JobRecord) -> JobRecord:
        return self._jobs.get(job.id, job)

    def _attempt(self, attempt: Attempt) -> Attempt:
        return self._attempts.get(attempt.id, attempt)

    async def job(self, job_id: str) -> JobRecord:
        return self._job(await self._store.job(job_id))

    async def find_job(self, project: str, name_or_id: str) -> JobRecord:
        return self._job(await self._store.find_job(project, name_or_id))

    async def find_jobs(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        return [self._job(job) for job in await self._store.find_jobs(job_ids)]

    async def list_jobs(
        self,
        project: str | None,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
        *,
        arrays: bool = False,
    ) -> SummaryPage:
        page = await self._store.list_jobs(project, phases, cursor, limit, arrays=arrays)
        if not self._jobs:
            return page
        shown = [
            copy_fields(row, job, "phase", "reason", "since", "ended_at", "exit_code")
            if (job := self._jobs.get(row.id))
            else row
            for row in page.jobs
        ]
        return replace(page, jobs=[row for row in shown if not phases or row.phase in phases])

    async def waiting(
        self, now: datetime, chosen: Sequence[str] = (), per_machine: int = PER_MACHINE
    ) -> Sequence[JobRecord]:
        """Return the jobs that `Store.waiting` returns, without the jobs with unwritten changes,
        because these jobs must not start.
        """
        found = await self._store.waiting(now, chosen, per_machine)
        return [job for job in found if job.id not in self._jobs]

    async def unfinished(self) -> Sequence[str]:
        """Return the IDs that `Store.unfinished` returns, and every job with unwritten changes."""
        return sorted({*await self._store.unfinished(), *self._changed_jobs()})

    def _changed_jobs(self) -> set[str]:
        return {*self._jobs, *(each.job_id for each in self._attempts.values())}

    async def read_job(self, job_id: str) -> JobReading:
        return self._overlay(await self._store.read_job(job_id))

    async def read_gang(self, gang: str, ranks: Collection[int] | None = None) -> JobReading:
        return self._overlay(await self._store.read_gang(gang, ranks))

    def _overlay(self, found: JobReading) -> JobReading:
        if not self._kept:
            return found
        return JobReading(
            job=self._job(found.job),
            attempts=[*map(self._attempt, found.attempts)],
            nodes={
                attempt_id: [self._nodes.get((attempt_id, each.rank), each) for each in nodes]
                for attempt_id, nodes in found.nodes.items()
            },
        )

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        return [self._attempt(each) for each in await self._store.attempts(job_id)]

    async def attempt_of_gang(self, gang: str) -> Attempt:
        return self._attempt(await self._store.attempt_of_gang(gang))

    async def open_attempts(self, project: str | None = None) -> Sequence[Attempt]:
        found = [self._attempt(each) for each in await self._store.open_attempts(project)]
        return [each for each in found if each.phase is not AttemptPhase.ENDED]

    async def kept_attempts(self) -> Sequence[Attempt]:
        found = [self._attempt(each) for each in await self._store.kept_attempts()]
        return [each for each in found if each.phase is AttemptPhase.KEPT]

    async def node(self, attempt_id: str, rank: int) -> Node:
        found = await self._store.node(attempt_id, rank)
        return self._nodes.get((attempt_id, rank), found)

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        found = await self._store.nodes(attempt_id)
        return [self._nodes.get((attempt_id, each.rank), each) for each in found]

    async def charges(self, job_id: str) -> Sequence[Charge]:
        found = await self._store.charges(job_id)
        for changes in self._kept:
            mine = [each for each in changes.charges if each.job_id == job_id]
            found = replace_charges(found, mine)
        return found

    async def allocations(self, host: str | None = None) -> Sequence[Allocation]:
        found = await self._store.allocations(host)
        if not self._kept:
            return found
        released = {gang for changes in self._kept for gang in changes.release}
        return [each for each in found if each.gang not in released]


def _check(version: int, kept: JobRecord | Attempt | Node | None) -> None:
    if kept is not None and kept.version != version:
        raise StaleVersion("this row has changed meanwhile; read it again")


def _takes_on(changes: AtomicWrite) -> bool:
    """Return whether the changes create jobs, attempts or allocations, which cannot be deferred."""
    rows: list[JobRecord | Attempt] = [*changes.jobs, *changes.attempts]
    return bool(changes.allocations) or any(each.version == 0 for each in rows)
