"""The gangs that are kept now, and how a waiting job takes one over: in one write, or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from remuda.control.clock import Clock
from remuda.control.markets.reliefs import make_attempt
from remuda.control.warm.keep import closing_charges, fits
from remuda.costs.metering import total
from remuda.domain.events import Charge, Event
from remuda.domain.jobs import Attempt, AttemptPhase, Job, JobPhase
from remuda.domain.offers import Offer
from remuda.domain.units import format_usd
from remuda.store.base import Changes, NotFound, Store

Allows = Callable[[Offer], bool]  # whether a job may run on an offer, now


class Waiting(Protocol):
    """Who knows whether the agents of a kept gang wait for work."""

    def waits(self, attempt: Attempt) -> bool: ...
    def forget(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A gang that a job may take over, and what its former job pays for the last stretch."""

    attempt: Attempt
    former: Job
    charges: list[Charge]


class WarmGangs:
    """Knows which gangs are kept; losing this costs a read of the open attempts."""

    def __init__(self, store: Store, clock: Clock, agents: Waiting) -> None:
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

    async def find(self, job: Job, allows: Allows) -> Kept | None:
        """The kept gang that fits the job and was kept for longest, if its agents wait for work."""
        for known in await self._of(job.project):
            if not self._agents.waits(known) or not allows(known.offer):
                continue
            try:
                former = await self._store.job(known.job_id)
                attempt = next(each for each in await self._store.attempts(known.job_id) if each.id == known.id)
            except (NotFound, StopIteration):
                continue
            now = self._clock.now()
            if attempt.phase is not AttemptPhase.KEPT or attempt.kept_until is None or attempt.kept_until <= now:
                continue
            if not fits(attempt, former, job):
                continue
            charges = closing_charges(attempt, await self._store.charges(former.id), now)
            if charges is not None:
                return Kept(attempt=attempt, former=former, charges=charges)
        return None

    async def hand_over(self, kept: Kept, job: Job, now: datetime) -> Job:
        """Give the gang to a new attempt of the job. Raises Stale where the gang or the job changed since."""
        old, former = kept.attempt, kept.former
        fresh, nodes = make_attempt(job, old.offer, lambda _: old.gang, now, f"took over the gang of {former.name}")
        adopted = replace(fresh, phase=AttemptPhase.BOOTING, launched_at=now, adopted_at=now)
        handed = replace(
            old, phase=AttemptPhase.ENDED, since=now, ended_at=now, gang=f"{old.gang}@{old.id}", kept_until=now
        )
        reason = f"starts on {old.offer.key}: on the gang that job {former.name} kept"
        started = replace(
            job,
            phase=JobPhase.STARTING,
            since=now,
            reason=reason,
            attempt=adopted.number,
            numbered=adopted.number if job.numbered else 0,
            not_before=None,
        )
        text = f"job {job.name} took the gang over; the last stretch cost {format_usd(total(kept.charges))}"
        events = [
            Event(project=job.project, job_id=job.id, attempt=adopted.number, at=now, kind="placed", text=reason),
            Event(project=job.project, job_id=former.id, attempt=old.number, at=now, kind="kept", text=text),
        ]
        changes = Changes(jobs=[started], attempts=[handed, adopted], nodes=nodes, events=events, charges=kept.charges)
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
