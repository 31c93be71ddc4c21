"""Carries out the decisions of `decide.standby`. Queries the deadline advisor if a decision needs
its answer, and checks budgets and limits before a second gang starts.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import JobRows, Step
from cavvy.control.decide.standby import (
    NO_STANDBY,
    REVIEW,
    AskAdvisor,
    StandbyQuestion,
    answer_standby,
    decide_standby,
    list_started,
)
from cavvy.control.markets.deadline_advisor import DeadlineAdvisor
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.planner.deadline.recommendation import Recommendation

# Returns why a job may not start these further gangs, or "".
FindBlock = Callable[[JobRecord, Sequence[Attempt]], Awaitable[str]]


class StandbyGangs:
    """Carries out the decisions about standby gangs."""

    def __init__(
        self,
        clock: ControlClock,
        advisor: DeadlineAdvisor,
        name_gang: Callable[[str], str],
        find_block: FindBlock,
    ) -> None:
        self._clock = clock
        self._advisor = advisor
        self._name_gang = name_gang
        self._find_block = find_block
        # job -> key -> when to query the advisor again
        self._reviews: dict[str, dict[str, datetime]] = {}

    async def step(self, uow: UnitOfWork, *, awaits_end: bool = False) -> timedelta | None:
        """Execute the decision of `decide_standby`, before the job's own next step. Returns None if
        the next check should follow immediately, otherwise the time until the next check.
        """
        now, job_id = self._clock.now(), uow.job.id
        reviews = self._reviews.setdefault(job_id, {})
        step = decide_standby(uow.rows, reviews, now, awaits_end=awaits_end)
        if step.changes is not None:
            uow.apply(step.changes)
        if isinstance(step, AskAdvisor):
            asked, reviews[step.key] = step, now + REVIEW
            answer = await self._ask(uow.rows, asked)
            step = answer_standby(uow.rows, asked, answer, self._name_gang, now)
            started = list_started(step, uow.job)
            if started and await self._find_block(uow.job, started):
                step = Step(after=min(REVIEW, asked.within))
            reviews[asked.key] = step.review_at or reviews[asked.key]
            if step.changes is not None:
                uow.apply(step.changes)
        if step is NO_STANDBY:
            del self._reviews[job_id]
        return step.after

    async def _ask(self, rows: JobRows, asked: AskAdvisor) -> Recommendation | None:
        job, own, attempts = rows.job, rows.own, list(rows.attempts.values())
        assert own is not None
        match asked.question:
            case StandbyQuestion.SUCCESSOR:
                return await self._advisor.successor(job, attempts, own)
            case StandbyQuestion.AHEAD:
                return await self._advisor.ahead(job, attempts, own, asked.nodes)
            case StandbyQuestion.REVIEW:
                return await self._advisor.review(job, attempts, asked.nodes)
