"""Finds the limits of a task that an offer would probably break, and computes by how much."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money, format_duration, format_usd
from cavvy.planner.placements import LimitMiss, PlanLimit, PlanningContext

_NO_TIME = timedelta(0)


class TaskLimiter:
    """Compares estimates with the unused part of a task's limits. An unknown estimate breaks no
    limit; the limits are checked again while the job runs.
    """

    def __init__(self, task: TaskSpec, situation: PlanningContext, now: datetime) -> None:
        limits = task.limits
        self._limits, self._to_do = limits, max(0.0, 1 - situation.done)
        self._goes_on = task.checkpoint is not None
        deadline = deadline_of(task, situation.submitted_at or now)
        self._nodes = task.nodes
        self._left: Mapping[PlanLimit, timedelta | None] = {
            PlanLimit.DURATION: None
            if limits.duration is None
            else max(_NO_TIME, limits.duration - situation.ran),
            PlanLimit.DEADLINE: None if deadline is None else max(_NO_TIME, deadline - now),
        }
        self._budget = (
            None if limits.budget is None else max(Money(0), limits.budget - situation.spent)
        )
        self._past = deadline is not None and deadline <= now
        self._any = self._budget is not None or any(
            left is not None for left in self._left.values()
        )

    def broken(
        self,
        offer: Offer,
        run_time: timedelta | None,
        wall_time: timedelta | None,
        cost: Money | None,
    ) -> Iterator[tuple[PlanLimit, float]]:
        """Yield each limit that the offer would break, and the ratio of the estimate to the limit,
        in the order of `PlanLimit`.
        """
        if not self._any:
            return
        for limit, length in (
            (PlanLimit.DURATION, run_time),
            (PlanLimit.DEADLINE, wall_time or run_time),
        ):
            left = self._left[limit]
            if (
                limit is PlanLimit.DURATION
                and left
                and length is not None
                and self._fits_whole(length, None)
            ):
                continue
            if left is not None and length is not None and length > left:
                yield limit, length / left if left else float("inf")
            elif limit is PlanLimit.DEADLINE and self._past:
                yield limit, float("inf")
        floor, left_usd = self._at_least(offer, cost), self._budget
        if (
            left_usd is not None
            and floor > left_usd
            and not (left_usd.micros and self._fits_whole(None, cost))
        ):
            yield (
                PlanLimit.BUDGET,
                floor.micros / left_usd.micros if left_usd.micros else float("inf"),
            )

    def explain(
        self,
        offer: Offer,
        run_time: timedelta | None,
        wall_time: timedelta | None,
        cost: Money | None,
    ) -> LimitMiss:
        """Describe the limits that the offer breaks, and the changes to the task that would make
        the offer fit. Call this function only if `broken` yields at least one limit.
        """
        said, broken = [], tuple(self.broken(offer, run_time, wall_time, cost))
        for limit, _ in broken:
            match limit:
                case PlanLimit.BUDGET:
                    said.append(self._dear(self._at_least(offer, cost)))
                case PlanLimit.DURATION:
                    said.append(self._slow("run", run_time, limit))
                case PlanLimit.DEADLINE:
                    said.append(self._slow("take", wall_time or run_time, limit))
        return LimitMiss(
            offer=offer,
            limit=broken[0][0],
            text=" and ".join(text for text, _ in said),
            change=" and ".join(change for _, change in said),
            excess=broken[0][1],
            doubtful=run_time is not None and wall_time is None,
            broken=len(broken),
        )

    def _fits_whole(self, run_time: timedelta | None, cost: Money | None) -> bool:
        """Return whether the estimated time or cost of the whole work is within the task's limit
        for the whole work. If the result is true, the remaining work exceeds the remaining limit
        only because the job lost some of its work.

        Cavvy does not end a job early if this method returns true, because the job may still finish
        within the limit. Cavvy stops the job when the job reaches the limit.
        """
        limits = self._limits
        if not self._goes_on:
            return False
        if run_time is not None and limits.duration is not None:
            return run_time <= limits.duration * self._to_do
        return (
            cost is not None
            and limits.budget is not None
            and cost.micros <= limits.budget.micros * self._to_do
        )

    def _dear(self, cost: Money) -> tuple[str, str]:
        left = self._budget or Money(0)
        # The cost is rounded up and the remaining budget is rounded down, because they may differ
        # by less than a cent.
        rest = format_usd(Money(left.micros // 10_000 * 10_000))
        text = f"would cost {format_usd(ceil_cent(cost))}, but your budget leaves {rest}"
        return text, f"raise limits.budget by {format_usd(ceil_cent(cost - left))}"

    def _slow(self, verb: str, length: timedelta | None, limit: PlanLimit) -> tuple[str, str]:
        if length is None or self._past:
            return "your deadline has passed", "move limits.deadline"
        left = self._left[limit] or _NO_TIME
        text = (
            f"would {verb} {format_duration(length)}, but your {limit} leaves "
            f"{format_duration(left)}"
        )
        more = format_duration(ceil_minute(length - left))
        return (
            text,
            f"{'raise' if limit is PlanLimit.DURATION else 'move'} limits.{limit} by {more}",
        )

    def _at_least(self, offer: Offer, cost: Money | None) -> Money:
        """Return the estimated cost, or the provider's minimum charge if the cost is unknown."""
        return (
            cost if cost is not None else offer.rate.times(self._nodes).over(offer.minimum_charge)
        )


def deadline_of(task: TaskSpec, submitted_at: datetime) -> datetime | None:
    """Return the earlier of the task's two deadlines (absolute, and relative to `submitted_at`).
    Returns None if the task has no deadline.
    """
    after = task.limits.deadline_after
    stated = [task.limits.deadline, None if after is None else submitted_at + after]
    return min((moment for moment in stated if moment is not None), default=None)


def ceil_cent(amount: Money) -> Money:
    """Round up to a whole cent, so that a suggested limit is large enough."""
    return Money(-(-amount.micros // 10_000) * 10_000)


def ceil_minute(length: timedelta) -> timedelta:
    """Round up to a whole minute, so that a suggested limit is large enough."""
    minute = timedelta(minutes=1)
    return -(-length // minute) * minute
