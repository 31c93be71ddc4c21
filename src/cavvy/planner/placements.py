"""The inputs and results of a plan. A placement is one gang on one offer, with its expected time,
price and risk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money


class Objective(StrEnum):
    """The criterion by which placements are ordered."""

    COST = "cost"  # order by expected total cost, or by price per hour if the total is unknown
    TIME = "time"  # order by expected finish


class PlanLimit(StrEnum):
    """The limits of a task, in the order in which they are checked."""

    DURATION = "duration"
    DEADLINE = "deadline"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotLoss:
    """The expected cost of preemptions. `preemptions`, `time` and `cost` are None if the running
    time is unknown or the work is not expected to finish.
    """

    per_hour: float  # preemptions of the whole gang per hour, according to the prior
    # None means no checkpoints: each preemption restarts the work from the beginning.
    checkpoint_every: timedelta | None
    preemptions: float | None = None
    # The additional time for repeated work, new starts and writing checkpoints
    time: timedelta | None = None
    cost: Money | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A gang for the task on one offer. All estimates are expected values, not guarantees; `notes`
    state their basis.
    """

    offer: Offer
    nodes: int
    rate: HourlyRate  # the rate of the whole gang
    run_time: timedelta | None = None  # duration of the remaining work without preemptions
    spread: float = 1.0  # the spread of `run_time`; see `work.TimeEstimate`
    wall_time: timedelta | None = None  # from the launch to the end of the work, with preemptions
    finish: datetime | None = None
    cost: Money | None = None  # cost of nodes, egress and transfers
    spot_loss: SpotLoss | None = None
    # The egress cost of the stated output; None if the output's size or the price is unknown
    egress: Money | None = None
    # The cost of copying the inputs and outputs of known size, and the time of the copies for one
    # start; None if no size is known
    transfer: Money | None = None
    transfer_time: timedelta | None = None
    available: bool = True  # False if the provider reports too few free nodes now
    avoided: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """The facts that a plan depends on in addition to the task. The defaults apply to a job that is
    not yet submitted.
    """

    submitted_at: datetime | None = None  # None if the job is submitted now
    avoid: Collection[str] = ()  # keys of offers that failed recently
    ran: timedelta = timedelta(0)  # the running time so far, which counts against limits.duration
    done: float = 0.0  # share of the work that was done before, from 0 to 1
    spent: Money = field(default_factory=Money)  # the cost so far; counts against limits.budget
    output_mib: int | None = None  # the size of the output that is copied to another location
    # The egress price per GB; the keys are "provider/region" or the provider
    egress: Mapping[str, Money] = field(default_factory=dict)
    # The length of the preemption notice of each provider
    notices: Mapping[str, timedelta] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingView:
    """The part of a ranking to return: the best `limit` placements, or all placements
    if it is None. `distinct`
    keeps only the best of each provider, instance type, accelerator count and purchase.
    """

    limit: int | None = None
    distinct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitMiss:
    """The offer that came nearest to meeting a limit, and what would have to change."""

    offer: Offer
    limit: PlanLimit
    text: str  # e.g. "would cost $19.40, but your budget leaves $15.00"
    change: str  # e.g. "raise limits.budget to $20.00"
    excess: float  # the estimate divided by the first broken limit; above 1
    doubtful: bool = False  # whether the work is not expected to finish on this offer
    broken: int = 1  # number of broken limits; `text` and `change` name all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The ranked placements, and the counts of the offers that fit but break a limit.

    `considered` == `kept` + sum(rejected.values()). `placements` contains the placements that break
    no limit, or the part of these that the `RankingView` asked for.
    """

    placements: tuple[Placement, ...]
    considered: int
    kept: int
    rejected: Mapping[PlanLimit, int] = field(default_factory=dict)
    misses: tuple[LimitMiss, ...] = ()
