"""Keeps one job's rows in memory during a pass. The rows are changed in memory and written
together. The write fails if another writer has changed the version of a row.
"""

from collections.abc import Iterable, Sequence

from cavvy.control.decide.rows import JobRows, RowChanges
from cavvy.domain.jobs import ATTEMPT_MOVES, JOB_MOVES, Attempt, JobRecord, Node
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite

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
