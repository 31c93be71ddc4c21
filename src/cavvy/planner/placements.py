"""The inputs and results of a plan. A placement is one gang on one offer, with its expected time,
price and risk. Finds the limits of a task that an offer would probably break, and by how much."""

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money, format_duration, format_usd
from cavvy.domain.values import Struct, field


class Objective(StrEnum):
    """The order of placements."""

    COST = "cost"  # order by expected total cost, or by price per hour if the total is unknown
    TIME = "time"  # order by expected finish


class PlanLimit(StrEnum):
    """The limits of a task, in the order in which they are checked."""

    DURATION = "duration"
    DEADLINE = "deadline"
    BUDGET = "budget"


class SpotLoss(Struct, frozen=True, kw_only=True):
    """The expected cost of preemptions. `preemptions`, `time` and `cost` are None if the running
    time is unknown or the work is not expected to finish.
    """

    per_hour: float  # preemptions of the whole gang per hour, according to the prior
    # None means that there are no checkpoints, so each preemption restarts the work from the
    # beginning.
    checkpoint_every: timedelta | None
    preemptions: float | None = None
    # The additional time for repeating work, starting again and writing checkpoints
    time: timedelta | None = None
    cost: Money | None = None


class Placement(Struct, frozen=True, kw_only=True):
    """A plan that runs the task as one gang on one offer. All estimates are expected values, not
    guarantees; `notes` explain the estimates.
    """

    offer: Offer
    nodes: int
    rate: HourlyRate  # the rate of the whole gang
    run_time: timedelta | None = None  # duration of the remaining work if there are no preemptions
    spread: float = 1.0  # the uncertainty of `run_time`; see `work.TimeEstimate`
    # time from the launch to the end of the work, including preemptions
    wall_time: timedelta | None = None
    finish: datetime | None = None
    cost: Money | None = None  # the cost of nodes, egress and transfers
    spot_loss: SpotLoss | None = None
    # The cost of egress for the stated output. None if the size of the output or the price is
    # unknown.
    egress: Money | None = None
    # The cost of copying the inputs and outputs whose size is known, and the time of these copies
    # for one start. None if no size is known.
    transfer: Money | None = None
    transfer_time: timedelta | None = None
    available: bool = True  # false if the provider reports that too few nodes are free now
    avoided: bool = False
    notes: tuple[str, ...] = ()


class PlanningContext(Struct, frozen=True, kw_only=True):
    """The inputs of a plan in addition to the task. The defaults are for a job that was not
    submitted yet.
    """

    submitted_at: datetime | None = None  # None if the job is going to be submitted now
    avoid: Collection[str] = ()  # keys of offers that failed recently
    ran: timedelta = timedelta(0)  # the running time so far, which counts against limits.duration
    done: float = 0.0  # share of the work that is already done, from 0 to 1
    # the cost so far, which counts against limits.budget
    spent: Money = field(default_factory=Money)
    output_mib: int | None = None  # the size of the output that is to be copied to another location
    # The egress price per GB; the keys are "provider/region" or the provider
    egress: Mapping[str, Money] = field(default_factory=dict)
    # The length of the preemption notice of each provider
    notices: Mapping[str, timedelta] = field(default_factory=dict)


class RankingView(Struct, frozen=True, kw_only=True):
    """The part of a ranking to return. `limit` is the number of placements, best first; None means
    all. With `distinct`, only the best placement is kept for each combination of provider, instance
    type, accelerator count and purchase option.
    """

    limit: int | None = None
    distinct: bool = False


class LimitMiss(Struct, frozen=True, kw_only=True):
    """The offer that came nearest to the task's limits, and the changes to the task with which the
    offer would meet the limits.
    """

    offer: Offer
    limit: PlanLimit
    text: str  # e.g. "would cost $19.40, but your budget leaves $15.00"
    change: str  # e.g. "raise limits.budget to $20.00"
    excess: float  # the estimate divided by the first limit that is broken; greater than 1
    doubtful: bool = False  # true if the work is not expected to finish on this offer
    broken: int = 1  # number of limits that are broken; `text` and `change` name all of them


class PlacementPlan(Struct, frozen=True, kw_only=True):
    """The ranked placements, and the numbers of offers that fit the task but break a limit.

    `considered` equals `kept` plus sum(rejected.values()). `placements` contains the placements
    within all limits, or only the placements that the `RankingView` selects.
    """

    placements: tuple[Placement, ...]
    considered: int
    kept: int
    rejected: Mapping[PlanLimit, int] = field(default_factory=dict)
    misses: tuple[LimitMiss, ...] = ()


class PlanCounts(Struct, frozen=True, kw_only=True):
    """The numbers of offers that were not read, because other offers are better: `kept` are within
    the task's limits, and `rejected` break a limit.
    """

    kept: int = 0
    rejected: Mapping[PlanLimit, int] = field(default_factory=dict)


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
        self.has_limits = self._budget is not None or any(
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
        if not self.has_limits:
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
