"""Keeps one job's rows in memory during a pass. The rows are changed in memory and written
together. The write fails if another writer has changed the version of a row.

Joins the reads and the writes of a gang's agents, which often report at the same moment: what is
asked for at once is read at once, and while one write is under way, the next ones of its gang
gather, and are then written together.
"""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial

from cavvy.control.decide.rows import JobRows, RowChanges
from cavvy.domain.jobs import ATTEMPT_MOVES, JOB_MOVES, Attempt, JobRecord, Node
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, JobReading, RowNotFound, StoreError
from cavvy.store.sql import Store

_NOTHING = RowChanges()


class IllegalMove(AssertionError):
    """Raised if a decision requested a phase change that the tables in `domain.jobs` do not allow.
    The error indicates a bug."""


class UnitOfWork:
    """The rows of a job with all changes so far, and the changes that are not written yet."""

    def __init__(
        self, job: JobRecord, attempts: Sequence[Attempt], nodes: Iterable[Sequence[Node]]
    ) -> None:
        self.rows = JobRows(
            job=job,
            attempts={attempt.number: attempt for attempt in attempts},
            nodes={group[0].attempt_id: group for group in nodes if group},
        )
        self._changes = _NOTHING
        # for how long nothing is to be decided while reports and polls say the same
        self.holds = timedelta.max

    @property
    def job(self) -> JobRecord:
        return self.rows.job

    @property
    def dirty(self) -> bool:
        return self._changes != _NOTHING

    def read_nodes(self, attempt: Attempt, nodes: Sequence[Node]) -> None:
        """Replace the rows of the attempt's nodes with newly read rows."""
        self.rows = replace(self.rows, nodes={**self.rows.nodes, attempt.id: nodes})

    def set_spent(self, spent: Money) -> None:
        """Set the amount that the job has spent until now, as computed in this pass."""
        self.rows = replace(self.rows, spent=spent)

    def apply(self, changes: RowChanges) -> None:
        """Apply these changes to the rows. A job without changes is not written."""
        if changes == _NOTHING:
            return
        job, before_job = None if changes.job == self.job else changes.job, self.job.phase
        if job is not None and job.phase not in {before_job, *JOB_MOVES[before_job]}:
            raise IllegalMove(f"job {job.id}: {before_job} -> {job.phase}")
        for attempt in changes.attempts:
            before = self.rows.attempts.get(attempt.number, attempt).phase
            if attempt.phase not in {before, *ATTEMPT_MOVES[before]}:
                raise IllegalMove(f"attempt {attempt.id}: {before} -> {attempt.phase}")
        changes = replace(changes, job=job)
        self.rows = self.rows.after(changes)
        self._changes = self._changes.then(changes)

    def take_changes(self) -> RowChanges:
        """Return the changes to write now, and set the rows to the versions that they will have
        after the write.
        """
        changes, self._changes = self._changes, _NOTHING
        numbers = {attempt.number for attempt in changes.attempts}
        ranks = {(node.attempt_id, node.rank) for node in changes.nodes}
        rows = self.rows
        last = RowChanges(
            job=None if changes.job is None else rows.job,
            attempts=tuple(rows.attempts[number] for number in sorted(numbers)),
            nodes=tuple(rows.nodes[attempt][rank] for attempt, rank in sorted(ranks)),
        )
        self.rows = rows.after(
            RowChanges(
                job=last.job and replace(last.job, version=last.job.version + 1),
                attempts=tuple(replace(x, version=x.version + 1) for x in last.attempts),
                nodes=tuple(replace(x, version=x.version + 1) for x in last.nodes),
            )
        )
        return replace(changes, job=last.job, attempts=last.attempts, nodes=last.nodes)


def join_writes(changes: Iterable[RowChanges]) -> AtomicWrite:
    """Convert the changes of several jobs to one write of the store."""
    return join_rows([make_write(each) for each in changes])


def join_rows(writes: Sequence[AtomicWrite]) -> AtomicWrite:
    """Return one write of the rows of all these."""
    names = AtomicWrite.__struct_fields__
    return AtomicWrite(
        **{name: [row for each in writes for row in getattr(each, name)] for name in names}
    )


def make_write(changes: RowChanges) -> AtomicWrite:
    """Convert the changes to one write of the store."""
    return AtomicWrite(
        jobs=[] if changes.job is None else [changes.job],
        attempts=changes.attempts,
        nodes=changes.nodes,
        events=changes.events,
        charges=changes.charges,
        allocations=changes.allocations,
        release=changes.release,
        observations=changes.observations,
        machines=[] if changes.machine is None else [changes.machine],
    )


class GangReads:
    """Reads gangs. Requests of one turn of the event loop share a read, which begins after them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # the ranks that are asked for, None for all, and the read of them, by gang
        self._asked: dict[str, tuple[set[int | None], asyncio.Task[JobReading]]] = {}

    async def read(self, gang: str, rank: int | None) -> tuple[Attempt, JobRecord, list[Node]]:
        """Return the gang's attempt, its job, and all nodes or the node with this rank. Raises
        RowNotFound."""
        if gang not in self._asked:
            ranks: set[int | None] = set()
            self._asked[gang] = ranks, asyncio.create_task(self._read(gang, ranks))
        ranks, task = self._asked[gang]
        ranks.add(rank)
        found = await asyncio.shield(task)
        [attempt] = found.attempts
        nodes = found.nodes[attempt.id]
        if rank is not None:
            nodes = [each for each in nodes if each.rank == rank]
            if not nodes:
                raise RowNotFound(f"attempt {attempt.id} has no rank {rank}")
        return attempt, found.job, [*nodes]

    async def _read(self, gang: str, ranks: set[int | None]) -> JobReading:
        del self._asked[gang]
        if None in ranks:
            return await self._store.read_gang(gang)
        return await self._store.read_gang(gang, [each for each in ranks if each is not None])


_Waiting = list[tuple[AtomicWrite, asyncio.Future[None]]]


class GangWrites:
    """Commits changes of one rank each, each of them or none of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # the writes of each gang that writes: those that are under way, and then those that gather
        self._waiting: dict[str, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, gang: str, changes: AtomicWrite) -> None:
        """Do the same as `Store.commit`, perhaps together with changes of other ranks."""
        done = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(gang)
        if waiting is None:
            waiting = self._waiting[gang] = [(changes, done)]
            task = asyncio.create_task(self._write_all(gang, waiting))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, gang, waiting))
        else:
            waiting.append((changes, done))
        await done

    async def close(self) -> None:
        """Wait for no more writes. Their callers get no answer, as if the server had crashed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_all(self, gang: str, waiting: _Waiting) -> None:
        while batch := waiting[:]:
            await self._write(batch)
            del waiting[: len(batch)]
        del self._waiting[gang]

    def _ended(self, gang: str, waiting: _Waiting, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for _, done in waiting:  # it was cancelled
            self._waiting.pop(gang, None)
            done.cancel()

    async def _write(self, batch: _Waiting) -> None:
        try:
            await self._store.commit(join_rows([changes for changes, _ in batch]))
        except StoreError as error:
            if len(batch) > 1:  # one of them may be stale, or have values that cannot be stored
                for each in batch:
                    await self._write([each])
                return
            _settle(batch, error)
        except Exception as error:  # noqa: BLE001  the callers get the error
            _settle(batch, error)
        else:
            _settle(batch, None)


def _settle(
    batch: Sequence[tuple[AtomicWrite, asyncio.Future[None]]], error: Exception | None
) -> None:
    for _, done in batch:
        if done.done():  # the caller was cancelled meanwhile
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
