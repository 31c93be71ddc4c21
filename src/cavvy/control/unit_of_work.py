"""One job's rows during a pass: changed in memory, written together, each guarded by the version
it was read at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import (
    ATTEMPT_MOVES,
    COMING,
    JOB_ENDS,
    JOB_MOVES,
    Attempt,
    AttemptPhase,
    Job,
    JobPhase,
    Node,
)
from cavvy.domain.markets import Observation
from cavvy.domain.tasks import Delivery
from cavvy.domain.units import Money
from cavvy.store.base import AtomicWrite


class IllegalMove(AssertionError):
    """A decision asked for a move that the tables of `domain.jobs` do not have: a bug."""


class UnitOfWork:
    """The job, its attempts by number, and the nodes of those that are open."""

    def __init__(
        self, job: Job, attempts: Sequence[Attempt], nodes: Iterable[Sequence[Node]]
    ) -> None:
        self.job = job
        self.attempts = {attempt.number: attempt for attempt in attempts}
        self.nodes = {group[0].attempt_id: list(group) for group in nodes if group}
        self.spent: Money | None = None  # as of this pass, where the job may not spend without end
        self.notices: list[Delivery] = []  # what to tell the outside once the changes are written
        self._jobs = False
        self._attempts: set[int] = set()
        self._nodes: set[tuple[str, int]] = set()
        self._events: list[Event] = []
        self._charges: list[Charge] = []
        self._release: list[str] = []
        self._observations: list[Observation] = []

    @property
    def latest(self) -> Attempt | None:
        return self.attempts.get(self.job.attempt)

    @property
    def open(self) -> list[Attempt]:
        return [
            attempt for attempt in self.attempts.values() if attempt.phase is not AttemptPhase.ENDED
        ]

    @property
    def dirty(self) -> bool:
        rows = self._jobs or self._attempts or self._nodes
        return bool(rows or self._events or self._charges or self._release or self._observations)

    @property
    def standbys(self) -> list[Attempt]:
        """The gangs beside the job's own that may still take over, oldest first."""
        found = [self.attempts[number] for number in self.job.standbys if number in self.attempts]
        return [attempt for attempt in found if attempt.phase in COMING]

    def ran(self, now: datetime) -> timedelta:
        """How long the work ran, over all attempts."""
        spans = [
            (attempt.finished_at or now) - attempt.running_at
            for attempt in self.attempts.values()
            if attempt.running_at is not None
        ]
        return sum(spans, timedelta(0))

    def put_job(self, job: Job) -> None:
        if job.phase is not self.job.phase and job.phase not in JOB_MOVES[self.job.phase]:
            raise IllegalMove(f"job {job.id}: {self.job.phase} -> {job.phase}")
        self.job = job
        self._jobs = True

    def turn_job(
        self, phase: JobPhase, reason: str, now: datetime, exit_code: int | None = None
    ) -> None:
        ended = now if phase in JOB_ENDS else None
        job = replace(self.job, phase=phase, reason=reason, since=now, ended_at=ended)
        self.put_job(replace(job, exit_code=exit_code) if ended else job)

    def put_attempt(self, attempt: Attempt) -> None:
        before = self.attempts[attempt.number]
        if attempt.phase is not before.phase and attempt.phase not in ATTEMPT_MOVES[before.phase]:
            raise IllegalMove(f"attempt {attempt.id}: {before.phase} -> {attempt.phase}")
        self.attempts[attempt.number] = attempt
        self._attempts.add(attempt.number)

    def add_attempt(self, attempt: Attempt, nodes: Sequence[Node]) -> None:
        """A new one, to be inserted."""
        self.attempts[attempt.number] = attempt
        self._attempts.add(attempt.number)
        self.nodes[attempt.id] = list(nodes)
        self._nodes |= {(node.attempt_id, node.rank) for node in nodes}

    def see(self, observation: Observation) -> None:
        """Something was learned about a market."""
        self._observations.append(observation)

    def put_node(self, node: Node) -> None:
        self.nodes[node.attempt_id][node.rank] = node
        self._nodes.add((node.attempt_id, node.rank))

    def tell(
        self,
        now: datetime,
        kind: str,
        text: str,
        attempt: int | None = None,
        fact: str | None = None,
    ) -> None:
        """Tell the user, in the job's story."""
        number = self.job.attempt if attempt is None else attempt
        event = Event(
            project=self.job.project,
            job_id=self.job.id,
            attempt=number,
            at=now,
            kind=kind,
            fact=fact,
            text=text,
        )
        self._events.append(event)

    def charge(self, charges: Iterable[Charge]) -> None:
        self._charges += charges

    def release(self, gang: str) -> None:
        self._release.append(gang)

    def take_notices(self) -> list[Delivery]:
        notices, self.notices = self.notices, []
        return notices

    def take_changes(self) -> AtomicWrite:
        """What to write now; the rows in memory become those that the write will leave."""
        nodes = [self.nodes[attempt_id][rank] for attempt_id, rank in sorted(self._nodes)]
        changes = AtomicWrite(
            jobs=[self.job] if self._jobs else [],
            attempts=[self.attempts[number] for number in sorted(self._attempts)],
            nodes=nodes,
            events=self._events,
            charges=self._charges,
            release=self._release,
            observations=self._observations,
        )
        for attempt in changes.attempts:
            self.attempts[attempt.number] = replace(attempt, version=attempt.version + 1)
        for node in nodes:
            self.nodes[node.attempt_id][node.rank] = replace(node, version=node.version + 1)
        if self._jobs:
            self.job = replace(self.job, version=self.job.version + 1)
        self._jobs, self._attempts, self._nodes = False, set(), set()
        self._events, self._charges, self._release, self._observations = [], [], [], []
        return changes
