"""The gangs that are kept now, and how a waiting job takes one over: in one write, or not at
all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from cavvy.control.clock import ControlClock
from cavvy.control.starts import make_attempt, start_job
from cavvy.control.warm.keep_policy import closing_charges, fits
from cavvy.costs.metering import total
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, AttemptPhase, Job
from cavvy.domain.offers import Offer
from cavvy.domain.units import format_usd
from cavvy.store.base import AtomicWrite, RowNotFound, Store

Allows = Callable[[Offer], bool]  # whether a job may run on an offer, now
_SOON = timedelta(
    seconds=10
)  # agents ask for other work within one; a kubelet tells a start two late, a busy one more


class AgentWaits(Protocol):
    """Who knows whether the agents of a kept gang wait for work."""

    def waits(self, attempt: Attempt) -> bool: ...
    def forget(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmGang:
    """A gang that a job may take over, and what its former job pays for the last stretch."""

    attempt: Attempt
    former: Job
    charges: list[Charge]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmGangNotReady:
    """A gang fits the job, but was kept a moment ago: its agents or its bill are not ready for
    the next one.
    """

    attempt: Attempt


class WarmPool:
    """Knows which gangs are kept; losing this costs a read of the open attempts."""

    def __init__(self, store: Store, clock: ControlClock, agents: AgentWaits) -> None:
        self._store = store
        self._clock = clock
        self._agents = agents
        self._kept: dict[str, Attempt] | None = None  # by id

    def note(self, attempt: Attempt) -> None:
        """The attempt was written."""
        if self._kept is not None:
            if attempt.phase is AttemptPhase.KEPT:
                self._kept[attempt.id] = attempt
            else:
                self._kept.pop(attempt.id, None)

    async def any_for(self, job: Job) -> bool:
        """Whether the job's project keeps anything."""
        return len(await self._of(job.project)) > 0

    async def find(self, job: Job, allows: Allows) -> WarmGang | WarmGangNotReady | None:
        """The kept gang that fits the job and was kept for longest, if its agents wait for work."""
        soon: WarmGangNotReady | None = None
        for known in await self._of(job.project):
            now = self._clock.now()
            waits, fresh = (
                self._agents.waits(known),
                now - (known.kept_since or known.since) < _SOON,
            )
            if not (waits or fresh) or not allows(known.offer):
                continue
            try:
                former = await self._store.job(known.job_id)
                attempt = next(
                    each for each in await self._store.attempts(known.job_id) if each.id == known.id
                )
            except (RowNotFound, StopIteration):
                continue
            if (
                attempt.phase is not AttemptPhase.KEPT
                or attempt.kept_until is None
                or attempt.kept_until <= now
            ):
                continue
            if not fits(attempt, former, job):
                continue
            charges = closing_charges(attempt, await self._store.charges(former.id), now)
            if waits and charges is not None:
                return WarmGang(attempt=attempt, former=former, charges=charges)
            if fresh:
                soon = soon or WarmGangNotReady(attempt=attempt)
        return soon

    async def hand_over(self, kept: WarmGang, job: Job, now: datetime) -> Job:
        """Give the gang to a new attempt of the job. Raises StaleVersion where the gang or the job
        changed since.
        """
        old, former = kept.attempt, kept.former
        fresh, nodes = make_attempt(
            job, old.offer, lambda _: old.gang, now, f"took over the gang of {former.name}"
        )
        adopted = replace(fresh, phase=AttemptPhase.BOOTING, launched_at=now, adopted_at=now)
        handed = replace(
            old,
            phase=AttemptPhase.ENDED,
            since=now,
            ended_at=now,
            gang=f"{old.gang}@{old.id}",
            kept_until=now,
        )
        reason = f"starts on {old.offer.key}: on the gang that job {former.name} kept"
        started = start_job(job, adopted, reason, now)
        text = (
            f"job {job.name} took the gang over; the last stretch cost "
            f"{format_usd(total(kept.charges))}"
        )
        events = [
            Event(
                project=job.project,
                job_id=job.id,
                attempt=adopted.number,
                at=now,
                kind="placed",
                text=reason,
            ),
            Event(
                project=job.project,
                job_id=former.id,
                attempt=old.number,
                at=now,
                kind="kept",
                text=text,
            ),
        ]
        changes = AtomicWrite(
            jobs=[started],
            attempts=[handed, adopted],
            nodes=nodes,
            events=events,
            charges=kept.charges,
        )
        await self._store.commit(changes)
        self.note(handed)
        self._agents.forget(old)
        return started

    async def _of(self, project: str) -> list[Attempt]:
        if self._kept is None:
            opened = await self._store.open_attempts()
            self._kept = {each.id: each for each in opened if each.phase is AttemptPhase.KEPT}
        mine = [each for each in self._kept.values() if each.project == project]
        return sorted(mine, key=lambda each: (each.kept_since or each.since, each.id))
