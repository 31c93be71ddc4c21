"""The rows of one job that decisions read, and the changes to rows that decisions return."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.allocations import Allocation
from cavvy.domain.events import Charge, Event, replace_charges
from cavvy.domain.jobs import COMING, Attempt, AttemptPhase, JobRecord, Node
from cavvy.domain.machines import NamedMachine
from cavvy.domain.markets import Observation
from cavvy.domain.tasks import Delivery, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace

NEVER = timedelta.max
SOON = timedelta(seconds=1)


def shrink(task: TaskSpec) -> TaskSpec:
    """Return the task of a job that waits again: limits count the least that an elastic one needs
    while it waits."""
    return task if task.elastic is None else replace(task, nodes=task.elastic.least)


def make_event(
    job: JobRecord,
    now: datetime,
    kind: str,
    text: str,
    attempt: int | None = None,
    fact: str | None = None,
) -> Event:
    """Create an event of one of the job's attempts: the attempt with the number `attempt`, by
    default the current attempt.
    """
    number = job.attempt if attempt is None else attempt
    return Event(
        project=job.project,
        job_id=job.id,
        attempt=number,
        at=now,
        kind=kind,
        fact=fact,
        text=text,
    )


def make_attempt_event(
    attempt: Attempt, now: datetime, kind: str, text: str, rank: int | None = None
) -> Event:
    """Create an event of an attempt, or of one rank of it."""
    return Event(
        project=attempt.project,
        job_id=attempt.job_id,
        attempt=attempt.number,
        rank=rank,
        at=now,
        kind=kind,
        text=text,
    )


class RowChanges(Struct, frozen=True, kw_only=True):
    """The changes of one decision, which are written together. If a row appears twice, the row's
    later value is written.

    A row with version 0 is new. `notices` are webhooks to send after the write.
    """

    job: JobRecord | None = None
    attempts: tuple[Attempt, ...] = ()
    nodes: tuple[Node, ...] = ()
    events: tuple[Event, ...] = ()
    charges: tuple[Charge, ...] = ()
    observations: tuple[Observation, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    release: tuple[str, ...] = ()  # gangs whose allocations are released
    notices: tuple[Delivery, ...] = ()
    machine: NamedMachine | None = None
    # whether cached offers may be outdated, so that offers must be read again
    stale_market: bool = False

    def then(self, later: "RowChanges") -> "RowChanges":
        """Combine these changes with the changes in `later`, so that they are written together. The
        later charges of a rank replace the earlier charges of the same rank.
        """
        return RowChanges(
            job=later.job or self.job,
            attempts=self.attempts + later.attempts,
            nodes=self.nodes + later.nodes,
            events=self.events + later.events,
            charges=tuple(replace_charges(self.charges, later.charges)),
            observations=self.observations + later.observations,
            allocations=self.allocations + later.allocations,
            release=self.release + later.release,
            notices=self.notices + later.notices,
            machine=later.machine or self.machine,
            stale_market=self.stale_market or later.stale_market,
        )


class Step(Struct, frozen=True, kw_only=True):
    """The changes to write now, and the time until the next decision. `after` is the time to wait
    after the write, or None to continue immediately.
    """

    changes: RowChanges | None = None
    after: timedelta | None = None
    review_at: datetime | None = None  # when the deadline advisor may be queried again


class JobRows(Struct, frozen=True, kw_only=True):
    """The rows of one job: the job, its attempts by number, and the nodes of its open attempts by
    attempt ID."""

    job: JobRecord
    attempts: Mapping[int, Attempt]
    nodes: Mapping[str, Sequence[Node]]
    spent: Money | None = None  # the amount spent until now, if the job has a budget

    @property
    def own(self) -> Attempt | None:
        """Return the attempt that runs the job's work."""
        return self.attempts.get(self.job.attempt)

    @property
    def open(self) -> list[Attempt]:
        return [each for each in self.attempts.values() if each.phase is not AttemptPhase.ENDED]

    @property
    def standbys(self) -> list[Attempt]:
        """The standby gangs that may still take over the job, oldest first."""
        found = [self.attempts[number] for number in self.job.standbys if number in self.attempts]
        return [attempt for attempt in found if attempt.phase in COMING]

    def nodes_of(self, attempt: Attempt) -> Sequence[Node]:
        return self.nodes.get(attempt.id, ())

    def ran(self, now: datetime) -> timedelta:
        """Return the total running time of all attempts."""
        return ran(self.attempts.values(), now)

    def after(self, changes: RowChanges) -> "JobRows":
        """Return these rows with the changes applied."""
        nodes = dict(self.nodes)
        for node in changes.nodes:
            group = {each.rank: each for each in nodes.get(node.attempt_id, ())}
            nodes[node.attempt_id] = list({**group, node.rank: node}.values())
        attempts = {**self.attempts, **{each.number: each for each in changes.attempts}}
        return replace(self, job=changes.job or self.job, attempts=attempts, nodes=nodes)


def ran(attempts: Iterable[Attempt], now: datetime) -> timedelta:
    """Return the total running time in these attempts."""
    spans = [(x.finished_at or now) - x.running_at for x in attempts if x.running_at is not None]
    return sum(spans, timedelta(0))


def taken_at(attempt: Attempt, nodes: Sequence[Node]) -> datetime | None:
    """Return when the gang will be reclaimed, or None if the time is not known."""
    times = [node.notice_until for node in nodes if node.notice_until]
    return min([*times, attempt.drill_until] if attempt.drill_until else times, default=None)
