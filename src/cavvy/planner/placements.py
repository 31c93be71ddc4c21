"""The inputs and results of a plan. A placement is one gang on one offer, with its expected time,
price and risk.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money
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
